#include "ops/load.h"

#include <dlfcn.h>

#include "core/error.h"

namespace duokv::ops {

const OpTable& load_backend(const std::string& path) {
  const auto unavailable = [](const std::string& why) { return Error("ERR_DEVICE_UNAVAILABLE", why); };
  // Never closed: a CUDA runtime does not survive it.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw unavailable(dlerror());
  const auto table = reinterpret_cast<const OpTable* (*)()>(dlsym(library, "duokv_cuda_op_table"));
  if (table == nullptr) throw unavailable(path + " has no function duokv_cuda_op_table");
  const OpTable& backend = *table();
  if (backend.abi_version != kAbiVersion)
    throw unavailable(path + " has op list version " + std::to_string(backend.abi_version) +
                      ", this engine needs " + std::to_string(kAbiVersion));
  return backend;
}

}  // namespace duokv::ops
