// Draws a token from each row of logits: sample of ops/ops.h.
//
// A block has a row, a thread a run of consecutive tokens, so that tokens come in order of their ids. What
// top-k and top-p keep is a threshold: the largest logit, down to which enough tokens, or enough mass, lie,
// and how many of those that equal it. It is found bit by bit, two at a time, by counting what lies at or
// above three candidates. All sums are of integers (ops/sampling.h), exact in any order.
//
// Roofline (bandwidth; H100: 3.35 TB/s): 4 bytes a logit, 128 KB of a row of 32,768, read from memory once
// and from the first-level cache again: 16 times for top-k, 16 for top-p, 5 times beside. A row has one SM,
// so its latency decides: 128 KB take the cache 1 µs, a weight about 20 instructions, 3 µs a pass over all of
// them; 20 µs for a plain draw, 60 µs with top-p, whatever the number of rows up to 132.
#include "cuda/launch.h"
#include "cuda/operations.h"
#include "ops/sampling.h"

namespace duokv::cuda {
namespace {

using ops::sampling::logit_of;
using ops::sampling::order_of;
using ops::sampling::weight_of;

constexpr int kThreads = 512, kWarps = kThreads / kWarpSize;
using Mass = unsigned long long;

// The tokens above a logit of order `order`, and the first `equals` of those that have it.
struct Threshold {
  uint32_t order;
  Mass equals;
};

// op over the block, told to every thread; op is associative and commutative. Safe to call again at once.
template <class Op>
DUOKV_DEVICE Mass block_reduce(Mass value, Op op) {
  DUOKV_SHARED(Mass, partial, [kWarps]);
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value = op(value, __shfl_xor_sync(kFullMask, value, offset));
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = partial[0];
  for (int i = 1; i < kWarps; ++i) value = op(value, partial[i]);
  __syncthreads();
  return value;
}

// The sum of the threads before this one. Safe to call again at once.
DUOKV_DEVICE Mass sum_before(Mass value) {
  DUOKV_SHARED(Mass, totals, [kWarps]);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize;
  Mass sum = value;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const Mass before = __shfl_up_sync(kFullMask, sum, static_cast<unsigned>(offset));
    if (lane >= offset) sum += before;
  }
  if (lane == kWarpSize - 1) totals[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp; ++i) sum += totals[i];
  __syncthreads();
  return sum - value;
}

// A row as its block sees it: this thread has tokens begin … end-1.
struct Row {
  const float* logits;
  int begin, end;

  template <class Measure>
  DUOKV_DEVICE Mass sum(Measure measure) const {
    Mass mine = 0;
    for (int i = begin; i < end; ++i) mine += measure(logits[i]);
    return block_sum<kThreads>(mine);
  }

  // The threshold that keeps the fewest tokens whose measures reach `target`, which all of them do.
  template <class Measure>
  DUOKV_DEVICE Threshold reach(Mass target, Measure measure) const {
    uint32_t order = 0;
#pragma unroll 1
    for (int shift = 30; shift >= 0; shift -= 2) {
      Mass mine[3] = {};
      for (int i = begin; i < end; ++i) {
        const uint32_t own = order_of(logits[i]);
        if (own < order + (1u << shift)) continue;
        const Mass measured = measure(logits[i]);
#pragma unroll
        for (uint32_t j = 0; j < 3; ++j) mine[j] += own >= order + ((j + 1) << shift) ? measured : 0;
      }
      uint32_t reached = 0;
#pragma unroll
      for (int j = 0; j < 3; ++j) reached += block_sum<kThreads>(mine[j]) >= target;
      order += reached << shift;
    }
    const Mass above = sum([&](float logit) { return order_of(logit) > order ? measure(logit) : 0; });
    const Mass each = measure(logit_of(order));
    return {order, (target - above + each - 1) / each};
  }
};

// Block: a row.
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ ops::SampleArgs args) {
  const int64_t index = blockIdx.x;
  const auto vocab = static_cast<int>(args.vocab);
  const int bits = ops::sampling::weight_bits(args.vocab), run = (vocab + kThreads - 1) / kThreads;
  const Row row = {args.logits + index * args.vocab, min(static_cast<int>(threadIdx.x) * run, vocab),
                   min(static_cast<int>(threadIdx.x + 1) * run, vocab)};

  // The largest logit and the first token that has it; the first token whose logit is not a number.
  Mass top = 0, not_a_number = static_cast<Mass>(vocab);
  for (int i = row.begin; i < row.end; ++i) {
    const float logit = row.logits[i];
    if (logit != logit) {
      not_a_number = min(not_a_number, static_cast<Mass>(i));
    } else {
      top = max(top, Mass{order_of(logit)} << 32 | (0xffffffffu - static_cast<uint32_t>(i)));
    }
  }
  top = block_reduce(top, [](Mass a, Mass b) { return max(a, b); });
  not_a_number = block_reduce(not_a_number, [](Mass a, Mass b) { return min(a, b); });
  const float peak = logit_of(static_cast<uint32_t>(top >> 32));
  int drawn = static_cast<int>(0xffffffffu - static_cast<uint32_t>(top));
  const bool usable = not_a_number == static_cast<Mass>(vocab) && fabsf(peak) < INFINITY;
  if (!usable) {
    if (threadIdx.x == 0) {
      args.tokens[index] =
          -1 - (not_a_number < static_cast<Mass>(vocab) ? static_cast<int>(not_a_number) : drawn);
      args.logprobs[index] = NAN;
    }
    return;
  }

  const ops::SampleRow options = args.options[index];
  if (options.temperature > 0) {
    const float inverse = ops::sampling::inverse_of(options.temperature);
    const auto weight = [&](float logit) -> Mass { return weight_of(logit, peak, inverse, bits); };
    const auto one = [](float) -> Mass { return 1; };
    Threshold kept = {0, static_cast<Mass>(vocab)};
    if (options.top_k < vocab) kept = row.reach(static_cast<Mass>(options.top_k), one);
    const auto kept_mass = [&] {
      return row.sum([&](float logit) { return order_of(logit) > kept.order ? weight(logit) : 0; }) +
             (kept.order > 0 ? kept.equals * weight(logit_of(kept.order)) : 0);
    };
    Mass total = kept_mass();
    if (options.top_p < 1) {
      kept = row.reach(ops::sampling::target_of(options.top_p, total), weight);
      total = kept_mass();
    }
    const Mass unit = ops::sampling::drawn_of(options.draw, total);

    Mass equals = 0;
    for (int i = row.begin; i < row.end; ++i) equals += order_of(row.logits[i]) == kept.order;
    const Mass equals_before = sum_before(equals);
    // Calls visit(token, weight) for this thread's kept tokens.
    const auto for_kept = [&](auto visit) {
      Mass seen = equals_before;
      for (int i = row.begin; i < row.end; ++i) {
        const uint32_t order = order_of(row.logits[i]);
        if (order > kept.order || (order == kept.order && seen++ < kept.equals))
          visit(i, weight(row.logits[i]));
      }
    };
    Mass mine = 0;
    for_kept([&](int, Mass w) { mine += w; });
    Mass before = sum_before(mine);
    DUOKV_SHARED(int, chosen, [1]);
    if (before <= unit && unit < before + mine) {
      for_kept([&](int token, Mass w) {
        if (before <= unit && unit < before + w) chosen[0] = token;
        before += w;
      });
    }
    __syncthreads();
    drawn = chosen[0];
  }
  const Mass sum = row.sum([&](float logit) -> Mass { return weight_of(logit, peak, 1, bits); });
  if (threadIdx.x == 0) {
    args.tokens[index] = drawn;
    args.logprobs[index] = ops::sampling::log_probability(row.logits[drawn], peak, sum, bits);
  }
}

}  // namespace

cudaError_t sample(const ops::SampleArgs& args, cudaStream_t stream) {
  if (args.vocab < 1 || args.vocab > ops::kMostSampled) return cudaErrorInvalidValue;
  if (args.rows == 0) return cudaSuccess;
  return DUOKV_LAUNCH(sample_kernel, dim3(static_cast<unsigned>(args.rows)), kThreads, 0, stream, args);
}

}  // namespace duokv::cuda
