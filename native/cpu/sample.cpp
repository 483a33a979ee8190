#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "ops/rounding.h"
#include "ops/sampling.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/sample.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#ifndef DUOKV_CPU_SAMPLE_ONCE
#define DUOKV_CPU_SAMPLE_ONCE
namespace duokv::cpu {
namespace {

// Rows are padded to whole blocks by logits of -infinity, which weigh nothing and rank last.
constexpr int64_t kBlock = 64;
// As many tokens are ordered one by one.
constexpr uint64_t kFew = 128;

// A row's tokens and their weights at a temperature.
struct Tokens {
  float* logits;      // [padded]
  uint64_t* weights;  // [padded]
  int64_t padded;

  Tokens(int64_t vocab, uint64_t* memory)
      : logits(reinterpret_cast<float*>(memory + round_up(vocab, kBlock))),
        weights(memory),
        padded(round_up(vocab, kBlock)) {}
  static int64_t words(int64_t vocab) { return round_up(vocab, kBlock) / 2 * 3; }
};

// Some of the tokens: how many they are and what they weigh together.
struct Share {
  uint64_t count, weight;
};

// What is kept: a token and all that rank above it, by logit and then the lowest id first.
struct Kept {
  float logit;
  int64_t token;
  Share share;
};

// Of a row's logits.
struct Range {
  float peak, least;
  int64_t nan;  // the first, or -1
};

uint64_t rank_of(uint32_t order, int64_t token) {
  return uint64_t{order} << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}

// Between `low` and `high`, neither of them. Halving logits is quick where they are spread evenly; halving
// their orders ends soon wherever they are.
uint32_t middle_of(uint32_t low, uint32_t high, bool of_logits) {
  using ops::sampling::logit_of, ops::sampling::order_of;
  const uint32_t middle =
      of_logits ? order_of(logit_of(low) / 2 + logit_of(high) / 2) : low + (high - low) / 2;
  return std::clamp(middle, low + 1, high - 1);
}

}  // namespace
}  // namespace duokv::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DW = hn::ScalableTag<uint64_t>;
// As many logits as a vector has weights.
using DHalf = hn::Rebind<float, DW>;
using DWide = hn::RebindToFloat<DW>;

template <class D>
int64_t lanes(D d) {
  return static_cast<int64_t>(hn::Lanes(d));
}

// Copies logits [vocab] and pads them.
Range copy_logits(const float* logits, int64_t vocab, const Tokens& tokens) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const DF d;
  const int64_t whole = vocab / lanes(d) * lanes(d);
  auto peaks = hn::Set(d, -kInfinity), leasts = hn::Set(d, kInfinity);
  auto nans = hn::FirstN(d, 0);
  for (int64_t i = 0; i < whole; i += lanes(d)) {
    const auto x = hn::LoadU(d, logits + i);
    hn::Store(x, d, tokens.logits + i);
    peaks = hn::Max(peaks, x), leasts = hn::Min(leasts, x);
    nans = hn::Or(nans, hn::IsNaN(x));
  }
  float peak = hn::GetLane(hn::MaxOfLanes(d, peaks)), least = hn::GetLane(hn::MinOfLanes(d, leasts));
  bool has_nan = !hn::AllFalse(d, nans);
  for (int64_t i = whole; i < vocab; ++i) {
    tokens.logits[i] = logits[i];
    peak = std::max(peak, logits[i]), least = std::min(least, logits[i]);
    has_nan = has_nan || std::isnan(logits[i]);
  }
  std::fill(tokens.logits + vocab, tokens.logits + tokens.padded, -kInfinity);
  const auto is_nan = [](float x) { return std::isnan(x); };
  return {peak, least, has_nan ? std::find_if(logits, logits + vocab, is_nan) - logits : -1};
}

// The first token with a logit.
int64_t find(const Tokens& tokens, float logit) {
  const DF d;
  const auto wanted = hn::Set(d, logit);
  for (int64_t i = 0;; i += lanes(d)) {
    const auto equal = hn::Eq(hn::Load(d, tokens.logits + i), wanted);
    if (!hn::AllFalse(d, equal)) return i + static_cast<int64_t>(hn::FindFirstTrue(d, equal));
  }
}

// What all tokens weigh at a temperature; kStore: each of them in tokens.weights. As weight_of of
// ops/sampling.h.
template <bool kStore>
uint64_t weigh(const Tokens& tokens, float peak, float inverse, int bits) {
#if HWY_TARGET == HWY_SCALAR || !HWY_NATIVE_FMA
  uint64_t total = 0;
  for (int64_t i = 0; i < tokens.padded; ++i) {
    const uint64_t weight = ops::sampling::weight_of(tokens.logits[i], peak, inverse, bits);
    if (kStore) tokens.weights[i] = weight;
    total += weight;
  }
  return total;
#else
  const DF d;
  const DW dw;
  const hn::RebindToSigned<DF> di;
  const hn::RebindToUnsigned<DF> du;
  const hn::Half<decltype(du)> half;
  const auto magic = hn::Set(d, 12582912.0f);
  auto total = hn::Zero(dw);
  for (int64_t i = 0; i < tokens.padded; i += lanes(d)) {
    auto x = hn::Mul(hn::Sub(hn::Load(d, tokens.logits + i), hn::Set(d, peak)), hn::Set(d, inverse));
    const auto weighs = hn::Gt(x, hn::Set(d, -87.0f));
    x = hn::IfThenElseZero(weighs, x);
    const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
    const auto n = hn::Sub(shifted, magic);
    const auto r = hn::MulAdd(n, hn::Set(d, 2.12194440e-4f), hn::MulAdd(n, hn::Set(d, -0.693359375f), x));
    auto q = hn::MulAdd(hn::Set(d, 1.3814466849e-3f), r, hn::Set(d, 8.3687804183e-3f));
    q = hn::MulAdd(q, r, hn::Set(d, 4.1668394215e-2f));
    q = hn::MulAdd(q, r, hn::Set(d, 1.6666520108e-1f));
    q = hn::MulAdd(q, r, hn::Set(d, 4.9999993412e-1f));
    q = hn::MulAdd(q, r, hn::Set(d, 1.0f));
    q = hn::MulAdd(q, r, hn::Set(d, 1.0f));
    // q · 2^(n + bits), of which q's mantissa is shifted to the integer part.
    const auto float_bits = hn::BitCast(di, q);
    const auto mantissa = hn::Or(hn::And(float_bits, hn::Set(di, 0x7fffff)), hn::Set(di, 0x800000));
    const auto exponent =
        hn::Add(hn::ShiftRight<23>(float_bits), hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic)));
    const auto shift = hn::Add(exponent, hn::Set(di, bits - 127 - 23));
    const auto zero = hn::Zero(di);
    const auto digits = hn::BitCast(du, hn::IfThenElseZero(hn::RebindMask(di, weighs), mantissa));
    const auto left = hn::BitCast(du, hn::Max(shift, zero));
    const auto right = hn::BitCast(du, hn::Min(hn::Max(hn::Neg(shift), zero), hn::Set(di, 63)));
    const auto add = [&](auto digits_half, auto left_half, auto right_half, int64_t at) HWY_ATTR {
      const auto weight = hn::Shr(hn::Shl(hn::PromoteTo(dw, digits_half), hn::PromoteTo(dw, left_half)),
                                  hn::PromoteTo(dw, right_half));
      if (kStore) hn::Store(weight, dw, tokens.weights + at);
      total = hn::Add(total, weight);
    };
    add(hn::LowerHalf(half, digits), hn::LowerHalf(half, left), hn::LowerHalf(half, right), i);
    add(hn::UpperHalf(half, digits), hn::UpperHalf(half, left), hn::UpperHalf(half, right), i + lanes(dw));
  }
  return hn::GetLane(hn::SumOfLanes(dw, total));
#endif
}

// Of tokens [begin, end), whole vectors, those whose logits are `least` and more.
Share share_of(const Tokens& tokens, int64_t begin, int64_t end, float least) {
  const DW d;
  const DHalf half;
  const DWide wide;
  const auto limit = hn::Set(wide, static_cast<double>(least));
  auto count = hn::Zero(d), weight = hn::Zero(d);
  for (int64_t i = begin; i < end; i += lanes(d)) {
    const auto logits = hn::PromoteTo(wide, hn::Load(half, tokens.logits + i));
    const auto counts = hn::RebindMask(d, hn::Ge(logits, limit));
    count = hn::Add(count, hn::IfThenElseZero(counts, hn::Set(d, uint64_t{1})));
    weight = hn::Add(weight, hn::IfThenElseZero(counts, hn::Load(d, tokens.weights + i)));
  }
  return {hn::GetLane(hn::SumOfLanes(d, count)), hn::GetLane(hn::SumOfLanes(d, weight))};
}

// Calls visit(token) for tokens whose logits are in [low, high), in the order of their ids, until it returns
// true.
template <class Visit>
HWY_INLINE void for_logits(const Tokens& tokens, float low, float high, Visit&& visit) {
  const DF d;
  for (int64_t i = 0; i < tokens.padded; i += lanes(d)) {
    const auto logits = hn::Load(d, tokens.logits + i);
    if (hn::AllFalse(d, hn::And(hn::Ge(logits, hn::Set(d, low)), hn::Lt(logits, hn::Set(d, high))))) continue;
    for (int64_t token = i; token < i + lanes(d); ++token) {
      if (tokens.logits[token] >= low && tokens.logits[token] < high && visit(token)) return;
    }
  }
}

// The fewest of the likeliest tokens that reach `target` together, at least 1 and at most what all have, in
// number or in weight.
Kept keep_fewest(const Tokens& tokens, const Range& range, uint64_t Share::*part, uint64_t target) {
  using ops::sampling::logit_of, ops::sampling::order_of;
  // Tokens whose order is `low` or more reach the target; those of `high` or more, `kept`, do not.
  uint32_t low = order_of(range.least), high = order_of(range.peak) + 1;
  Share kept = {0, 0};
  uint64_t candidates = static_cast<uint64_t>(tokens.padded);
  for (int pass = 0; candidates > kFew && high - low > 1; ++pass) {
    const uint32_t middle = middle_of(low, high, pass % 4 != 3);
    const Share share = share_of(tokens, 0, tokens.padded, logit_of(middle));
    if (share.*part >= target) {
      low = middle;
      candidates = share.count - kept.count;
    } else {
      high = middle;
      candidates -= share.count - kept.count;
      kept = share;
    }
  }
  int64_t last = 0;
  const auto keep = [&](int64_t token) {
    last = token;
    ++kept.count, kept.weight += tokens.weights[token];
    return kept.*part >= target;
  };
  if (high - low == 1) {  // of one logit
    for_logits(tokens, logit_of(low), logit_of(high), keep);
  } else {
    std::array<uint64_t, kFew> ranks{};
    auto end = ranks.begin();
    for_logits(tokens, logit_of(low), logit_of(high), [&](int64_t token) {
      *end++ = rank_of(order_of(tokens.logits[token]), token);
      return false;
    });
    std::sort(ranks.begin(), end, std::greater<>());
    for (auto rank = ranks.begin(); !keep(0xffffffffu - static_cast<uint32_t>(*rank)); ++rank) {
    }
  }
  return {tokens.logits[last], last, kept};
}

// Which of the kept tokens, in the order of their ids, weight `drawn` of them falls to.
int64_t find_drawn(const Tokens& tokens, const Kept& kept, uint64_t drawn) {
  const float more = ops::sampling::logit_of(ops::sampling::order_of(kept.logit) + 1);
  for (int64_t block = 0;; block += kBlock) {
    const int64_t end = block + kBlock;
    const bool before = end <= kept.token + 1;
    if (before || block > kept.token) {
      const uint64_t weight = share_of(tokens, block, end, before ? kept.logit : more).weight;
      if (drawn >= weight) {
        drawn -= weight;
        continue;
      }
    }
    for (int64_t token = block; token < end; ++token) {
      if (tokens.logits[token] < (token <= kept.token ? kept.logit : more)) continue;
      if (drawn < tokens.weights[token]) return token;
      drawn -= tokens.weights[token];
    }
  }
}

// memory: [Tokens::words].
void sample_row(const float* logits, int64_t vocab, const ops::SampleRow& row, uint64_t* memory,
                int32_t* token, float* logprob) {
  const Tokens tokens(vocab, memory);
  const int bits = ops::sampling::weight_bits(vocab);
  const Range range = copy_logits(logits, vocab, tokens);
  if (range.nan >= 0 || !std::isfinite(range.peak)) {
    *token = static_cast<int32_t>(-1 - (range.nan >= 0 ? range.nan : find(tokens, range.peak)));
    *logprob = NAN;
    return;
  }
  const float inverse = ops::sampling::inverse_of(row.temperature);
  const bool draws = row.temperature > 0;
  const uint64_t all = draws ? weigh<true>(tokens, range.peak, inverse, bits) : 0;
  int64_t drawn;
  if (draws) {
    Kept kept = {range.least, tokens.padded, {0, all}};
    if (row.top_k < vocab) kept = keep_fewest(tokens, range, &Share::count, static_cast<uint64_t>(row.top_k));
    if (row.top_p < 1) {
      const uint64_t target = ops::sampling::target_of(row.top_p, kept.share.weight);
      kept = keep_fewest(tokens, range, &Share::weight, target);
    }
    drawn = find_drawn(tokens, kept, ops::sampling::drawn_of(row.draw, kept.share.weight));
  } else {
    drawn = find(tokens, range.peak);
  }
  const uint64_t sum = draws && inverse == 1 ? all : weigh<false>(tokens, range.peak, 1, bits);
  *token = static_cast<int32_t>(drawn);
  *logprob = ops::sampling::log_probability(logits[drawn], range.peak, sum, bits);
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
    const int64_t words = Tokens::words(args->vocab);
    device->reserve_workers<uint64_t>(words);
    device->pool.run(args->rows, [&](int64_t row, int32_t worker) {
      HWY_DYNAMIC_DISPATCH(sample_row)
      (args->logits + row * args->vocab, args->vocab, args->options[row],
       device->worker_scratch[static_cast<size_t>(worker)].take<uint64_t>(words), args->tokens + row,
       args->logprobs + row);
    });
  });
}

}  // namespace duokv::cpu
#endif
