#include <dlfcn.h>

#include <climits>

#include "cuda/cublaslt.h"
#include "cuda/device.h"
#include "cuda/library_paths.h"

namespace duokv::cuda {
namespace {

// Looks a function up by name in what was opened.
#ifdef __CUDACC__
void* symbol(void* library, const char* name) { return dlsym(library, name); }
#else
void* symbol(void*, const char* name) { return simt::cublaslt_symbol(name); }
#endif

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
  // CUDA 13 wheels share one folder, CUDA 12 wheels have one each.
  for (const std::string& path : library_paths("DUOKV_CUBLASLT", {"libcublasLt.so.13", "libcublasLt.so.12"},
                                               true, {"cu13", "cublas"})) {
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
