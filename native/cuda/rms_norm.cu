// RMSNorm, forward and backward.
//
// Forward: a warp per row, which it reads twice, the second time from L1: y = x * rstd * w.
// Backward, with g = dy * w:  dx = rstd * g - x * rstd³ * mean(g * x);  dw = sum over rows of dy * x * rstd.
// A block owns kRowsPerBlock rows, whatever m is; its warps take them in turn and keep dw in their own shared
// row, so that the order of every sum is fixed. A second kernel adds the blocks' partial dw in order.
//
// Roofline (bandwidth; H100: 3.35 TB/s), m = 16,384, d = 768:
//   forward   8 m d bytes = 101 MB: 30 µs, to BF16 6 m d = 75 MB: 23 µs;  4 m d FLOPs
//   backward  12 m d bytes (16 m d when dx accumulates) plus 8 m d / kRowsPerBlock of partial sums = 154 MB:
//   46 µs (61 µs); 11 m d FLOPs
#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

constexpr int kForwardWarps = 8, kBackwardWarps = 4, kRowsPerBlock = 32;
constexpr int kSumColumns = 32, kSumGroups = 8;

// Elements of a row that a lane handles at once, consecutive lanes next to each other.
template <bool Vector>
struct Slice;

template <>
struct Slice<true> {
  static constexpr int kWidth = 4;
  float v[4];
  DUOKV_DEVICE static Slice load(const float* p) {
    const float4 x = load4(p);
    return {{x.x, x.y, x.z, x.w}};
  }
  DUOKV_DEVICE void store(float* p) const { store4(p, make_float4(v[0], v[1], v[2], v[3])); }
  DUOKV_DEVICE void store(bf16* p) const {
    store2(reinterpret_cast<float*>(p),
           make_float2(__uint_as_float(pack_bf16(v[0], v[1])), __uint_as_float(pack_bf16(v[2], v[3]))));
  }
};

template <>
struct Slice<false> {
  static constexpr int kWidth = 1;
  float v[1];
  DUOKV_DEVICE static Slice load(const float* p) { return {{*p}}; }
  DUOKV_DEVICE void store(float* p) const { *p = v[0]; }
  DUOKV_DEVICE void store(bf16* p) const { *p = __float2bfloat16_rn(v[0]); }
};

// y may alias x: an element is read for the last time before it is written.
template <bool Vector, class Y>
__global__ void __launch_bounds__(kForwardWarps* kWarpSize)
    rms_norm_forward_kernel(const float* x, const float* w, int64_t m, int d, float eps, Y* y, float* rstd) {
  using S = Slice<Vector>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t row = int64_t{blockIdx.x} * kForwardWarps + threadIdx.x / kWarpSize;
  if (row >= m) return;
  x += row * d;
  y += row * d;

  float squares = 0;
  for (int c = lane * S::kWidth; c < d; c += kWarpSize * S::kWidth) {
    const S a = S::load(x + c);
    for (int i = 0; i < S::kWidth; ++i) squares = fmaf(a.v[i], a.v[i], squares);
  }
  const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(d) + eps);
  for (int c = lane * S::kWidth; c < d; c += kWarpSize * S::kWidth) {
    S a = S::load(x + c);
    const S weight = S::load(w + c);
    for (int i = 0; i < S::kWidth; ++i) a.v[i] = a.v[i] * scale * weight.v[i];
    a.store(y + c);
  }
  if (rstd && lane == 0) rstd[row] = scale;
}

// partial_dw [gridDim.x, d]. dx may alias dy when it does not accumulate.
template <bool Vector>
__global__ void __launch_bounds__(kBackwardWarps* kWarpSize)
    rms_norm_backward_kernel(const float* x, const float* w, const float* rstd, const float* dy, int64_t m,
                             int d, float* dx, bool accumulate, float* partial_dw) {
  using S = Slice<Vector>;
  DUOKV_DYNAMIC_SHARED(float, shared_dw);  // [kBackwardWarps][d]
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
            lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float* own_dw = shared_dw + static_cast<size_t>(warp) * d;
  for (int c = lane * S::kWidth; c < d; c += kWarpSize * S::kWidth) S{}.store(own_dw + c);

  const int64_t first = int64_t{blockIdx.x} * kRowsPerBlock;
  const int64_t end = first + kRowsPerBlock < m ? first + kRowsPerBlock : m;
  for (int64_t row = first + warp; row < end; row += kBackwardWarps) {
    const float* row_x = x + row * d;
    const float* row_dy = dy + row * d;
    float* row_dx = dx + row * d;
    float dot = 0;
    for (int c = lane * S::kWidth; c < d; c += kWarpSize * S::kWidth) {
      const S a = S::load(row_x + c), g = S::load(row_dy + c), weight = S::load(w + c);
      for (int i = 0; i < S::kWidth; ++i) dot = fmaf(a.v[i] * weight.v[i], g.v[i], dot);
    }
    const float scale = rstd[row];
    const float projection = warp_sum(dot) / static_cast<float>(d) * scale * scale * scale;
    for (int c = lane * S::kWidth; c < d; c += kWarpSize * S::kWidth) {
      const S a = S::load(row_x + c), g = S::load(row_dy + c), weight = S::load(w + c);
      S sum = S::load(own_dw + c), out = {};
      if (accumulate) out = S::load(row_dx + c);
      for (int i = 0; i < S::kWidth; ++i) {
        sum.v[i] = fmaf(g.v[i] * scale, a.v[i], sum.v[i]);
        out.v[i] += g.v[i] * weight.v[i] * scale - a.v[i] * projection;
      }
      sum.store(own_dw + c);
      out.store(row_dx + c);
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < d; c += kBackwardWarps * kWarpSize) {
    float sum = 0;
    for (int i = 0; i < kBackwardWarps; ++i) sum += shared_dw[static_cast<size_t>(i) * d + c];
    partial_dw[int64_t{blockIdx.x} * d + c] = sum;
  }
}

// dw [d] += partial_dw [blocks, d]: kSumGroups contiguous runs of blocks, each in order, then the runs in
// order.
__global__ void __launch_bounds__(kSumColumns* kSumGroups)
    rms_norm_sum_dw_kernel(const float* partial_dw, int64_t blocks, int d, float* dw) {
  DUOKV_SHARED(float, group_sum, [kSumGroups][kSumColumns]);
  const int column = static_cast<int>(threadIdx.x) % kSumColumns,
            group = static_cast<int>(threadIdx.x) / kSumColumns;
  const int c = static_cast<int>(blockIdx.x) * kSumColumns + column;
  const int64_t run = (blocks + kSumGroups - 1) / kSumGroups, first = group * run;
  float sum = 0;
  if (c < d) {
    for (int64_t b = first; b < first + run && b < blocks; ++b) sum += partial_dw[b * d + c];
  }
  group_sum[group][column] = sum;
  __syncthreads();
  if (group != 0 || c >= d) return;
  for (int i = 1; i < kSumGroups; ++i) sum += group_sum[i][column];
  dw[c] += sum;
}

}  // namespace

template <class Y>
static cudaError_t launch_forward(const ops::RmsNormArgs& args, Y* y, cudaStream_t stream) {
  if (args.m == 0) return cudaSuccess;
  const auto kernel = vectorizable(args.d, {args.x, args.w, y}) ? rms_norm_forward_kernel<true, Y>
                                                                : rms_norm_forward_kernel<false, Y>;
  const dim3 grid(static_cast<unsigned>(ceil_div(args.m, kForwardWarps)));
  return DUOKV_LAUNCH(kernel, grid, kForwardWarps * kWarpSize, 0, stream, args.x, args.w, args.m,
                      static_cast<int>(args.d), args.eps, y, args.rstd);
}

cudaError_t rms_norm_forward(const ops::RmsNormArgs& args, cudaStream_t stream) {
  return launch_forward(args, args.y, stream);
}

cudaError_t rms_norm_forward_bf16(const ops::RmsNormArgs& args, bf16* y, cudaStream_t stream) {
  return launch_forward(args, y, stream);
}

size_t rms_norm_backward_workspace(int64_t m, int64_t d) {
  return static_cast<size_t>(ceil_div(m, kRowsPerBlock) * d) * sizeof(float);
}

cudaError_t rms_norm_backward(const ops::RmsNormBackwardArgs& args, void* workspace, cudaStream_t stream) {
  if (args.m == 0) return cudaSuccess;
  if (args.d > kMaxNormWidth) return cudaErrorInvalidValue;
  const int d = static_cast<int>(args.d);
  const int64_t blocks = ceil_div(args.m, kRowsPerBlock);
  auto* partial_dw = static_cast<float*>(workspace);
  const size_t shared_bytes = kBackwardWarps * static_cast<size_t>(d) * sizeof(float);
  const auto kernel = vectorizable(args.d, {args.x, args.w, args.dy, args.dx})
                          ? rms_norm_backward_kernel<true>
                          : rms_norm_backward_kernel<false>;
  DUOKV_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared_bytes)));
  DUOKV_CUDA_TRY(DUOKV_LAUNCH(kernel, dim3(static_cast<unsigned>(blocks)), kBackwardWarps * kWarpSize,
                              shared_bytes, stream, args.x, args.w, args.rstd, args.dy, args.m, d, args.dx,
                              args.accumulate, partial_dw));
  return DUOKV_LAUNCH(rms_norm_sum_dw_kernel, dim3(static_cast<unsigned>(ceil_div(d, kSumColumns))),
                      kSumColumns * kSumGroups, 0, stream, partial_dw, blocks, d, args.dw);
}

}  // namespace duokv::cuda
