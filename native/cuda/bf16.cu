// Casts between FP32 and BF16, around products of BF16 operands.
//
// Eight elements a thread where the addresses allow it.
//
// Roofline (bandwidth; H100: 3.35 TB/s), n = 16,384 * 768:
//   to BF16    6 n bytes = 75 MB: 23 µs
//   to FP32    6 n bytes = 75 MB: 23 µs; 10 n = 126 MB: 38 µs where a residual is added
#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

constexpr int kThreads = 256, kWidth = 8;

DUOKV_DEVICE int64_t global_thread() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

__global__ void __launch_bounds__(kThreads) to_bf16_kernel(const float* x, int64_t n, bf16* y) {
  const int64_t i = global_thread();
  if (i < n) y[i] = __float2bfloat16_rn(x[i]);
}

__global__ void __launch_bounds__(kThreads) to_bf16_vector_kernel(const float* x, int64_t n, bf16* y) {
  const int64_t i = global_thread() * kWidth;
  if (i >= n) return;
  const float4 a = load4(x + i), b = load4(x + i + 4);
  store4(reinterpret_cast<float*>(y + i),
         make_float4(__uint_as_float(pack_bf16(a.x, a.y)), __uint_as_float(pack_bf16(a.z, a.w)),
                     __uint_as_float(pack_bf16(b.x, b.y)), __uint_as_float(pack_bf16(b.z, b.w))));
}

// residual may be y.
__global__ void __launch_bounds__(kThreads)
    from_bf16_kernel(const bf16* x, int64_t n, const float* residual, float* y) {
  const int64_t i = global_thread();
  if (i >= n) return;
  const float value = __bfloat162float(x[i]);
  y[i] = residual ? residual[i] + value : value;
}

__global__ void __launch_bounds__(kThreads)
    from_bf16_vector_kernel(const bf16* x, int64_t n, const float* residual, float* y) {
  const int64_t i = global_thread() * kWidth;
  if (i >= n) return;
  const float4 pairs = load4(reinterpret_cast<const float*>(x + i));
  float4 a = unpack_bf16x4(make_float2(pairs.x, pairs.y)), b = unpack_bf16x4(make_float2(pairs.z, pairs.w));
  if (residual) {
    const float4 c = load4(residual + i), d = load4(residual + i + 4);
    a = make_float4(c.x + a.x, c.y + a.y, c.z + a.z, c.w + a.w);
    b = make_float4(d.x + b.x, d.y + b.y, d.z + b.z, d.w + b.w);
  }
  store4(y + i, a);
  store4(y + i + 4, b);
}

}  // namespace

cudaError_t to_bf16(const float* x, int64_t n, bf16* y, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  if (n % kWidth == 0 && vectorizable(n, {x, y}))
    return DUOKV_LAUNCH(to_bf16_vector_kernel, grid_of(n / kWidth, kThreads), kThreads, 0, stream, x, n, y);
  return DUOKV_LAUNCH(to_bf16_kernel, grid_of(n, kThreads), kThreads, 0, stream, x, n, y);
}

cudaError_t from_bf16(const bf16* x, int64_t n, const float* residual, float* y, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  if (n % kWidth == 0 && vectorizable(n, {x, residual, y}))
    return DUOKV_LAUNCH(from_bf16_vector_kernel, grid_of(n / kWidth, kThreads), kThreads, 0, stream, x, n,
                        residual, y);
  return DUOKV_LAUNCH(from_bf16_kernel, grid_of(n, kThreads), kThreads, 0, stream, x, n, residual, y);
}

}  // namespace duokv::cuda
