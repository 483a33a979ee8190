// y += x.
//
// Roofline (bandwidth; H100: 3.35 TB/s), n = 16,384 * 768: 12 n bytes = 151 MB: 45 µs.
#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) add_kernel(const float* x, int64_t n, float* y) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) y[i] += x[i];
}

__global__ void __launch_bounds__(kThreads) add_vector_kernel(const float* x, int64_t n, float* y) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * 4;
  if (i >= n) return;
  const float4 a = load4(x + i), b = load4(y + i);
  store4(y + i, make_float4(b.x + a.x, b.y + a.y, b.z + a.z, b.w + a.w));
}

}  // namespace

cudaError_t add(const ops::AddArgs& args, cudaStream_t stream) {
  if (args.n == 0) return cudaSuccess;
  if (vectorizable(args.n, {args.x, args.y}))
    return DUOKV_LAUNCH(add_vector_kernel, grid_of(args.n / 4, kThreads), kThreads, 0, stream, args.x, args.n,
                        args.y);
  return DUOKV_LAUNCH(add_kernel, grid_of(args.n, kThreads), kThreads, 0, stream, args.x, args.n, args.y);
}

}  // namespace duokv::cuda
