#include "addon/backends.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

#include "core/error.h"
#include "cpu/cpu.h"
#include "ops/load.h"

namespace duokv::addon {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string cuda_library() {
  if (const std::string path = environment("DUOKV_CUDA_LIBRARY"); !path.empty()) return path;
  const std::string kind = environment("DUOKV_CUDA");
  if (!kind.empty() && kind != "emulator")
    throw Error("ERR_DEVICE_UNAVAILABLE",
                "DUOKV_CUDA is '" + kind + "'; the only value it takes is emulator");
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&cuda_library), &self);
  const std::string addon(self.dli_fname);
  return addon.substr(0, addon.rfind('/') + 1) +
         (kind.empty() ? "libduokv_cuda.so" : "libduokv_cuda_emulator.so");
}

}  // namespace

const ops::OpTable& backend_table(const std::string& backend) {
  if (backend == "cpu") return cpu::op_table();
  if (backend != "cuda")
    throw Error("ERR_DEVICE_UNAVAILABLE", "backend '" + backend + "' is not part of this build");
  const std::string path = cuda_library();
  if (access(path.c_str(), R_OK) != 0)
    throw Error("ERR_DEVICE_UNAVAILABLE",
                "this installation has no CUDA library: " + path + " does not exist");
  return ops::load_backend(path);
}

}  // namespace duokv::addon
