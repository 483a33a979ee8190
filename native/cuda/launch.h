// Small helpers of launchers.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "cuda/primitives.cuh"
#include "ops/rounding.h"

namespace duokv::cuda {

// Blocks of `block` threads for `threads` of them.
inline dim3 grid_of(int64_t threads, int64_t block) {
  return dim3(static_cast<unsigned>(ceil_div(threads, block)));
}

// Whether rows of `width` floats can be read 16 bytes at a time from all of these (null: not used).
inline bool vectorizable(int64_t width, std::initializer_list<const void*> pointers) {
  if (width % 4 != 0) return false;
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

// Device memory to device memory, and zeros to device memory, in the stream's order.
inline cudaError_t copy_on_device(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  if (only_plans(stream)) return cudaSuccess;
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
inline cudaError_t fill_zero(void* memory, size_t bytes, cudaStream_t stream) {
  return only_plans(stream) ? cudaSuccess : cudaMemsetAsync(memory, 0, bytes, stream);
}

}  // namespace duokv::cuda

// Leaves the launcher with the error of a call that failed.
#define DUOKV_CUDA_TRY(call)                                                  \
  do {                                                                        \
    if (const cudaError_t error = (call); error != cudaSuccess) return error; \
  } while (0)
