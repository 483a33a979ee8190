#include <dlfcn.h>
#include <glob.h>

#include <climits>
#include <cstdlib>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/device.h"

namespace duokv::cuda {
namespace {

// Looks a function up by name in what was opened.
#ifdef __CUDACC__
void* symbol(void* library, const char* name) { return dlsym(library, name); }
#else
void* symbol(void*, const char* name) { return simt::cublaslt_symbol(name); }
#endif

void add_matches(const std::string& pattern, std::vector<std::string>& paths) {
  glob_t found;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    for (size_t i = 0; i < found.gl_pathc; ++i) paths.emplace_back(found.gl_pathv[i]);
  }
  globfree(&found);
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// In order: what DUOKV_CUBLASLT names, and nothing else then; the dynamic loader's own search; the toolkit;
// pip's packages in the active Python environment, the user's and the system's.
std::vector<std::string> candidates() {
  if (const std::string chosen = environment("DUOKV_CUBLASLT"); !chosen.empty()) return {chosen};
  std::vector<std::string> paths;
  for (const std::string library : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    paths.push_back(library);
    for (const std::string& root :
         {environment("CUDA_HOME"), environment("CUDA_PATH"), std::string("/usr/local/cuda")}) {
      if (!root.empty()) add_matches(root + "/lib64/" + library, paths);
    }
    for (const std::string& root :
         {environment("VIRTUAL_ENV"), environment("CONDA_PREFIX"), environment("HOME") + "/.local",
          std::string("/usr/local"), std::string("/usr")}) {
      if (root.empty()) continue;
      // CUDA 13 wheels share one folder, CUDA 12 wheels have one each.
      for (const char* folder : {"cu13", "cublas"})
        add_matches(root + "/lib/python3*/*-packages/nvidia/" + folder + "/lib/" + library, paths);
    }
  }
  return paths;
}

}  // namespace

const CublasLt& CublasLt::get() {
  static const CublasLt library;
  return library;
}

CublasLt::CublasLt() {
  if (kEmulated) {
    open("");
    description_ = "cuBLASLt (emulated)";
    return;
  }
  std::string reasons;
  for (const std::string& path : candidates()) {
    if (open(path.c_str())) return;
    reasons += "\n  " + description_;
  }
  throw Unavailable(
      "cuBLASLt cannot be used (install the CUDA toolkit or pip's nvidia-cublas, or set DUOKV_CUBLASLT to "
      "the path of libcublasLt.so):" +
      reasons);
}

bool CublasLt::open(const char* path) {
  void* library = kEmulated ? nullptr : dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!kEmulated && library == nullptr) {
    description_ = dlerror();
    return false;
  }
#define DUOKV_FIND(function)                                                   \
  function = reinterpret_cast<decltype(function)>(symbol(library, #function)); \
  if (function == nullptr) {                                                   \
    description_ = std::string(path) + " has no function " #function;          \
    return false;                                                              \
  }
  DUOKV_CUBLASLT_CALLS(DUOKV_FIND)
#undef DUOKV_FIND
  // A library for a newer driver opens, but cannot be used.
  cublasLtHandle_t handle = nullptr;
  if (const cublasStatus_t status = cublasLtCreate(&handle); status != CUBLAS_STATUS_SUCCESS) {
    description_ = std::string(path) + ": " + cublasLtGetStatusString(status);
    return false;
  }
  cublasLtDestroy(handle);
  const size_t version = cublasLtGetVersion();
  Dl_info info = {};
  dladdr(reinterpret_cast<void*>(cublasLtCreate), &info);
  description_ = "cuBLASLt " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
                 "." + std::to_string(version % 100) + " (" + (info.dli_fname ? info.dli_fname : path) + ")";
  return true;
}

void CublasLt::check(cublasStatus_t status, const char* what) const {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(what) + ": " + cublasLtGetStatusString(status));
}

}  // namespace duokv::cuda
