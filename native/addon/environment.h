// What belongs to one JavaScript environment (the main thread or a worker): class constructors and counts.
#pragma once

#include <cstdint>

#include "addon/napi_setup.h"

namespace duokv::addon {

struct Environment {
  Napi::FunctionReference device, model, trainer, session, group, cancellation;
  Napi::FunctionReference float32_array, bigint64_array;
  int64_t live_resources = 0;  // not yet disposed or collected

  static Environment& of(Napi::Env env) { return *env.GetInstanceData<Environment>(); }
};

}  // namespace duokv::addon
