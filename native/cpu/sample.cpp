#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "ops/sampling.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/sample.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

// The masses of one row's tokens at a temperature.
struct Masses {
  float peak, inverse;
  int bits;

  uint64_t of(float logit) const { return ops::sampling::weight_of(logit, peak, inverse, bits); }
  uint64_t sum(const float* logits, int64_t vocab) const {
    uint64_t total = 0;
    for (int64_t i = 0; i < vocab; ++i) total += of(logits[i]);
    return total;
  }
};

// A token that is to be compared: by logit, then the lowest id first.
uint64_t rank_of(float logit, int64_t token) {
  return uint64_t{ops::sampling::order_of(logit)} << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}
float logit_of(uint64_t rank) { return ops::sampling::logit_of(static_cast<uint32_t>(rank >> 32)); }

// Orders ranks [count], which hold `total`, from the largest down as far as the first that reach `target`
// together. Those are `count` from then on, and `total` is what they hold.
void keep_fewest(uint64_t target, const Masses& masses, uint64_t* ranks, int64_t& count, uint64_t& total) {
  // What is lighter than this holds less than total - target together, so few are left to sort.
  const uint64_t negligible = (total - target) / static_cast<uint64_t>(count);
  const uint64_t* end = std::partition(
      ranks, ranks + count, [&](uint64_t rank) { return masses.of(logit_of(rank)) >= negligible; });
  std::sort(ranks, ranks + (end - ranks), std::greater<>());
  count = 0;
  for (total = 0; total < target; ++count) total += masses.of(logit_of(ranks[count]));
}

// ranks: [vocab].
void sample_row(const float* logits, int64_t vocab, const ops::SampleRow& row, uint64_t* ranks,
                int32_t* token, float* logprob) {
  const int bits = ops::sampling::weight_bits(vocab);
  int64_t first = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (std::isnan(logits[i])) {
      *token = static_cast<int32_t>(-1 - i), *logprob = NAN;
      return;
    }
    if (logits[i] > logits[first]) first = i;
  }
  const float peak = logits[first];
  if (!std::isfinite(peak)) {
    *token = static_cast<int32_t>(-1 - first), *logprob = NAN;
    return;
  }
  int64_t drawn = first;
  if (row.temperature > 0) {
    const Masses masses = {peak, ops::sampling::inverse_of(row.temperature), bits};
    // Tokens of this rank and above are kept.
    uint64_t last = 0, total = 0;
    if (row.top_k < vocab || row.top_p < 1) {
      for (int64_t i = 0; i < vocab; ++i) ranks[i] = rank_of(logits[i], i);
      int64_t count = std::min<int64_t>(row.top_k, vocab);
      std::nth_element(ranks, ranks + count - 1, ranks + vocab, std::greater<>());
      last = ranks[count - 1];
      for (int64_t i = 0; i < count; ++i) total += masses.of(logit_of(ranks[i]));
      if (row.top_p < 1) {
        keep_fewest(ops::sampling::target_of(row.top_p, total), masses, ranks, count, total);
        last = ranks[count - 1];
      }
    } else {
      total = masses.sum(logits, vocab);
    }
    uint64_t rest = ops::sampling::drawn_of(row.draw, total);
    for (int64_t i = 0; i < vocab; ++i) {
      if (rank_of(logits[i], i) < last) continue;
      const uint64_t weight = masses.of(logits[i]);
      if (rest < weight) {
        drawn = i;
        break;
      }
      rest -= weight;
    }
  }
  *token = static_cast<int32_t>(drawn);
  *logprob =
      ops::sampling::log_probability(logits[drawn], peak, Masses{peak, 1, bits}.sum(logits, vocab), bits);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(sample_row);

Status sample(Device* device, const ops::SampleArgs* args) {
  return guarded([&] {
    require(args->rows >= 0, "sample: rows is negative");
    require(args->vocab >= 1 && args->vocab <= ops::kMostSampled, "sample: vocab is not in [1, 2^24]");
    device->reserve_workers<uint64_t>(args->vocab);
    device->pool.run(args->rows, [&](int64_t row, int32_t worker) {
      uint64_t* ranks = device->worker_scratch[static_cast<size_t>(worker)].take<uint64_t>(args->vocab);
      HWY_DYNAMIC_DISPATCH(sample_row)
      (args->logits + row * args->vocab, args->vocab, args->options[row], ranks, args->tokens + row,
       args->logprobs + row);
    });
  });
}

}  // namespace duokv::cpu
#endif
