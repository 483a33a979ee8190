// cuBLASLt, opened at run time: a machine that lacks it can still load this library. Under g++ its calls are
// the emulator's (emulator/cublaslt.h).
#pragma once

#include <string>

#ifdef __CUDACC__
#include <cublasLt.h>
#else
#include "cuda/emulator/cublaslt.h"
#endif

namespace duokv::cuda {

// The calls in use, with the types that the header declares.
class CublasLt {
 public:
  // Opened on the first call. Throws Unavailable with the places that were tried.
  static const CublasLt& get();
  // Throws where `status` is an error; `what` says what was being done.
  void check(cublasStatus_t status, const char* what) const;
  // "cuBLASLt 13.1.1 (/usr/lib/libcublasLt.so.13)"
  const std::string& description() const { return description_; }

#define DUOKV_CUBLASLT_CALLS(X)           \
  X(cublasLtCreate)                       \
  X(cublasLtDestroy)                      \
  X(cublasLtGetVersion)                   \
  X(cublasLtGetStatusString)              \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)          \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulAlgoConfigGetAttribute) \
  X(cublasLtMatmulAlgoCheck)              \
  X(cublasLtMatmul)
#define DUOKV_DECLARE(function) decltype(&::function) function = nullptr;
  DUOKV_CUBLASLT_CALLS(DUOKV_DECLARE)
#undef DUOKV_DECLARE

 private:
  CublasLt();
  bool open(const char* path);  // false with the reason in `description_`
  std::string description_;
};

}  // namespace duokv::cuda
