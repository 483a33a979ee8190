// Plain functions of a config, answered at once on the JavaScript thread: the plan, suffix lengths, cache
// bytes, FLOPs.
#pragma once

#include "addon/napi_setup.h"

namespace duokv::addon {

void define_plan_functions(Napi::Env env, Napi::Object exports);

}  // namespace duokv::addon
