// Cross-entropy of rows of logits, and its gradient: nll = log Σ exp(logit) - logit[target],
// dlogits = scale * (softmax - onehot(target)). Where the target is nearly certain both are what the other
// logits leave of 1, so that their terms are summed apart from its own.
//
// A block per row, which it reads once for maximum and sum, and once more for the gradient. A thread keeps
// its own maximum and a sum relative to it: FP32 within 16 values, FP64 beyond. Which values a thread takes
// depends on the row's width only.
//
// Roofline (bandwidth; H100: 3.35 TB/s), rows * V = 16,384 * 32,000: 4 bytes an element, 2.1 GB: 630 µs; with
// gradients 6 more (8 in FP32), of which 4 hit in L2 as long as the running blocks' rows fit in: 3.1 GB:
// 940 µs (4.2 GB: 1.25 ms). Two exponentials an element are about 25 instructions, two thirds of what the
// card issues meanwhile.
#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarpSize;
constexpr int kLoads = 4,
              kStride = kThreads * 4;  // groups of four a thread has in flight, and their distance

// Values i … i+3 of a row, -inf past its end.
template <bool Vector>
DUOKV_DEVICE float4 load_logits(const float* row, int64_t i, int64_t vocab) {
  const float none = -INFINITY;
  if (Vector) return i < vocab ? load4(row + i) : make_float4(none, none, none, none);
  return make_float4(i < vocab ? row[i] : none, i + 1 < vocab ? row[i + 1] : none,
                     i + 2 < vocab ? row[i + 2] : none, i + 3 < vocab ? row[i + 3] : none);
}

// Four values without the one at `hit`.
DUOKV_DEVICE float4 leave_out(float4 v, int64_t hit) {
  return make_float4(hit == 0 ? -INFINITY : v.x, hit == 1 ? -INFINITY : v.y, hit == 2 ? -INFINITY : v.z,
                     hit == 3 ? -INFINITY : v.w);
}

// What exponents are relative to: a maximum of -inf would make them NaN.
DUOKV_DEVICE float base_of(float max) { return max == -INFINITY ? 0.0f : max; }

struct RowSum {
  float base;
  double others;  // Σ exp(logit - base) but for the target's
};

// Ends in a barrier: the row may be overwritten afterwards.
template <bool Vector>
DUOKV_DEVICE RowSum sum_row(const float* row, int64_t vocab, int64_t target, float target_logit) {
  DUOKV_SHARED(float, warp_maxima, [kWarps]);
  DUOKV_SHARED(double, warp_sums, [kWarps]);
  float max = -INFINITY;
  double sum = 0;
  for (int64_t first = int64_t{threadIdx.x} * 4; first < vocab; first += kLoads * kStride) {
    float4 v[kLoads];
    float top = max;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t i = first + j * kStride;
      v[j] = leave_out(load_logits<Vector>(row, i, vocab), target - i);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) top = fmaxf(top, fmaxf(fmaxf(v[j].x, v[j].y), fmaxf(v[j].z, v[j].w)));
    const float base = base_of(top);
    if (top > max) sum *= expf(max - base);
    max = top;
    float part = 0;
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      part += (expf(v[j].x - base) + expf(v[j].y - base)) + (expf(v[j].z - base) + expf(v[j].w - base));
    sum += part;
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const float warp_top = warp_max(max);
  sum = warp_sum(sum * expf(max - base_of(warp_top)));
  if (threadIdx.x % kWarpSize == 0) {
    warp_maxima[warp] = warp_top;
    warp_sums[warp] = sum;
  }
  __syncthreads();
  float top = target_logit;
  for (int i = 0; i < kWarps; ++i) top = fmaxf(top, warp_maxima[i]);
  const float base = base_of(top);
  double others = 0;
  for (int i = 0; i < kWarps; ++i) others += warp_sums[i] * expf(warp_maxima[i] - base);
  return {base, others};
}

template <bool Vector>
DUOKV_DEVICE void store_gradient(float* row, int64_t i, int64_t vocab, float4 d) {
  if (Vector) return store4(row + i, d);
  row[i] = d.x;
  if (i + 1 < vocab) row[i + 1] = d.y;
  if (i + 2 < vocab) row[i + 2] = d.z;
  if (i + 3 < vocab) row[i + 3] = d.w;
}

template <bool Vector>
DUOKV_DEVICE void store_gradient(bf16* row, int64_t i, int64_t vocab, float4 d) {
  if (Vector) {
    const uint32_t low = pack_bf16(d.x, d.y), high = pack_bf16(d.z, d.w);
    return store2(reinterpret_cast<float*>(row + i),
                  make_float2(__uint_as_float(low), __uint_as_float(high)));
  }
  row[i] = __float2bfloat16_rn(d.x);
  if (i + 1 < vocab) row[i + 1] = __float2bfloat16_rn(d.y);
  if (i + 2 < vocab) row[i + 2] = __float2bfloat16_rn(d.z);
  if (i + 3 < vocab) row[i + 3] = __float2bfloat16_rn(d.w);
}

// `gradient` may be the logits themselves: a thread overwrites what it alone has read since the barrier.
template <bool Vector, class Out>
__global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_kernel(const float* logits, int64_t vocab, const int32_t* targets, const float* token_scale,
                         float* nll, Out* gradient) {
  const int64_t token = blockIdx.x;
  const float* row = logits + token * vocab;
  const int64_t target = targets[token];
  const float target_logit = row[target];
  const RowSum sum = sum_row<Vector>(row, vocab, target, target_logit);
  const double total = sum.others + expf(target_logit - sum.base);
  if (threadIdx.x == 0) {
    const double below = static_cast<double>(target_logit) - sum.base;
    nll[token] = static_cast<float>(log1p(sum.others + expm1(below)) - below);
  }
  if (!token_scale) return;

  const float scale = token_scale[token];
  const float factor = static_cast<float>(scale / total),
              of_target = static_cast<float>(-scale * (sum.others / total));
  Out* row_gradient = gradient + token * vocab;
  for (int64_t first = int64_t{threadIdx.x} * 4; first < vocab; first += kLoads * kStride) {
    float4 v[kLoads] = {};
    if (scale != 0) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int64_t i = first + j * kStride, hit = target - i;
        v[j] = load_logits<Vector>(row, i, vocab);
        v[j].x = hit == 0 ? of_target : expf(v[j].x - sum.base) * factor;
        v[j].y = hit == 1 ? of_target : expf(v[j].y - sum.base) * factor;
        v[j].z = hit == 2 ? of_target : expf(v[j].z - sum.base) * factor;
        v[j].w = hit == 3 ? of_target : expf(v[j].w - sum.base) * factor;
      }
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t i = first + j * kStride;
      if (i < vocab) store_gradient<Vector>(row_gradient, i, vocab, v[j]);
    }
  }
}

}  // namespace

cudaError_t cross_entropy(const CrossEntropyArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const bool vector = vectorizable(args.vocab, {args.logits, args.dlogits});
  const dim3 grid(static_cast<unsigned>(args.rows));
  if (args.dlogits) {
    return DUOKV_LAUNCH((vector ? cross_entropy_kernel<true, bf16> : cross_entropy_kernel<false, bf16>), grid,
                        kThreads, 0, stream, args.logits, args.vocab, args.targets, args.token_scale,
                        args.nll, args.dlogits);
  }
  return DUOKV_LAUNCH((vector ? cross_entropy_kernel<true, float> : cross_entropy_kernel<false, float>), grid,
                      kThreads, 0, stream, args.logits, args.vocab, args.targets, args.token_scale, args.nll,
                      args.logits);
}

}  // namespace duokv::cuda
