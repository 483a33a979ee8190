// The last rows of every batch row, cut out or added back: suffix_rows of ops/ops.h.
//
// Roofline (bandwidth; H100: 3.35 TB/s): 8 bytes an element moved (12 when it adds); batch 8, 128 rows of
// 768: 6 MB, 2 µs, less than a launch.
#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

constexpr int kThreads = 256;

DUOKV_DEVICE float4 sum(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
DUOKV_DEVICE float sum(float a, float b) { return a + b; }

// Rows of `width` values of T, of which `count` (long) or `keep` (short) make a batch row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    suffix_rows_kernel(const T* src, int64_t elements, int64_t count, int64_t keep, int64_t width,
                       bool scatter_add, T* dst) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= elements) return;
  const int64_t block = keep * width;
  const int64_t other = i / block * count * width + (count - keep) * width + i % block;
  if (scatter_add) {
    dst[other] = sum(dst[other], src[i]);
  } else {
    dst[i] = src[other];
  }
}

template <class T>
cudaError_t launch_rows(const ops::SuffixRowsArgs& args, cudaStream_t stream) {
  const int64_t width = args.d * static_cast<int64_t>(sizeof(float)) / static_cast<int64_t>(sizeof(T));
  const int64_t elements = args.batch * args.keep * width;
  return DUOKV_LAUNCH((suffix_rows_kernel<T>), grid_of(elements, kThreads), kThreads, 0, stream,
                      reinterpret_cast<const T*>(args.src), elements, args.count, args.keep, width,
                      args.scatter_add, reinterpret_cast<T*>(args.dst));
}

}  // namespace

cudaError_t suffix_rows(const ops::SuffixRowsArgs& args, cudaStream_t stream) {
  if (args.batch == 0 || args.keep == 0) return cudaSuccess;
  return vectorizable(args.d, {args.src, args.dst}) ? launch_rows<float4>(args, stream)
                                                    : launch_rows<float>(args, stream);
}

}  // namespace duokv::cuda
