// What Node's file system module lacks.
#pragma once

#include "addon/napi_setup.h"

namespace duokv::addon {

// exchangePaths(a, b): swaps two directory entries atomically. False where the file system cannot; throws
// otherwise.
void define_filesystem_functions(Napi::Env env, Napi::Object exports);

}  // namespace duokv::addon
