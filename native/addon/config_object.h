// ModelConfig and JavaScript objects.
#pragma once

#include "addon/napi_setup.h"
#include "core/config.h"

namespace duokv::addon {

// Reads a plain object with the keys of ModelConfig in camelCase. Throws Error{ERR_CONFIG}: an unknown key by
// name, a value of the wrong type with key and value, a missing key. Values are not judged here; make_plan
// does.
ModelConfig to_config(Napi::Value value);

// The same object with every key that applies to the design.
Napi::Object from_config(Napi::Env env, const ModelConfig& config);

}  // namespace duokv::addon
