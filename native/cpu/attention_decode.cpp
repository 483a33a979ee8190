#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/attention.h"
#include "cpu/device.h"
#include "cpu/operations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_decode.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/attention_tiles-inl.h"

#ifndef DUOKV_CPU_ATTENTION_DECODE_
#define DUOKV_CPU_ATTENTION_DECODE_
namespace duokv::cpu {
namespace {

// Piece i of a bank holds positions i · kPiece … Every piece has its own softmax and pieces are merged in
// order, so the size is part of the result.
constexpr int64_t kPiece = 256;

// Query heads that read an entry together, and keys that are multiplied together: 12 accumulators, which with
// the heads' queries and one entry fill the register file.
constexpr int64_t kHeadsAtOnce = 3;
constexpr int64_t kKeysAtOnce = 4;
// Keys whose values are added before moving to the next columns: they stay in the first-level cache.
constexpr int64_t kValuesAtOnce = 32;

// One piece of one row of a bank for one KV head.
struct StreamUnit {
  int64_t row;
  int32_t bank, head;
  Span span;       // positions of the piece that the row's queries see
  float* partial;  // Partials
};

// What a unit leaves: sums [queries, group, padded], then Running [queries, group].
struct Partials {
  const AttentionCall& call;

  int64_t rows() const { return call.args.queries * call.group; }
  int64_t floats() const { return round_up(rows() * (call.padded + 2), kPadding); }
  float* sums(float* partial, int64_t r) const { return partial + r * call.padded; }
  float* running(float* partial, int64_t r) const { return partial + rows() * call.padded + 2 * r; }
};

// Entries that will be read next, fetched one by one while others are multiplied: values during the scores,
// the next unit's keys during the values. The memory would be idle meanwhile. A stride of 0, in bytes,
// fetches nothing new.
struct Ahead {
  const char* data;
  int64_t stride;
};

// What a thread computes a unit with.
struct UnitScratch {
  UnitScratch(const AttentionCall& call, float* memory)
      : scores(memory),
        queries(scores + kHeadsAtOnce * kPiece),
        copies(queries + call.group * call.padded),
        zeros(reinterpret_cast<uint16_t*>(copies + 2 * kPiece * call.padded)) {}
  static int64_t floats(const AttentionCall& call) {
    return kHeadsAtOnce * kPiece + (call.group + 2 * kPiece) * call.padded + call.padded / 2;
  }

  float* scores;  // [kHeadsAtOnce, kPiece], then the weights made of them; pairs take the first half of a row
  float* queries;   // [group, padded]; likewise
  float* copies;    // keys and values [kPiece, padded]
  uint16_t* zeros;  // [padded] the values of a position that is not seen
};

struct StreamPlan {
  const AttentionCall& call;
  Partials partials;
  std::vector<StreamUnit> units;     // by row, KV head, bank, piece
  std::vector<int64_t> first_units;  // [batch · kv_heads + 1]

  int64_t unit_count() const { return static_cast<int64_t>(units.size()); }
  int64_t index_of(int64_t row, int64_t head) const { return row * call.args.kv_heads + head; }
  int64_t units_of(int64_t index) const {
    return first_units[static_cast<size_t>(index) + 1] - first_units[static_cast<size_t>(index)];
  }
};

}  // namespace
}  // namespace duokv::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

// The entries of one vector of a product's operand T: FP32 lanes, or pairs of BF16 values.
template <class T>
HWY_INLINE V load_entries(const float* p) {
  return hn::LoadU(F(), p);
}
template <class T>
HWY_INLINE hn::Vec<hn::ScalableTag<T>> load_entries(const uint16_t* p) {
  if constexpr (kStepValues<T> == 1) {
    return load_bf16(F(), p);
  } else {
    return hn::LoadU(hn::ScalableTag<T>(), reinterpret_cast<const T*>(p));
  }
}

// `bytes` of each of the next kEntries entries.
template <int kEntries>
HWY_INLINE void fetch(Ahead& ahead, int64_t bytes) {
  for (int i = 0; i < kEntries; ++i, ahead.data += ahead.stride) prefetch_to_l2(ahead.data, bytes);
}

#if HWY_TARGET != HWY_SCALAR
// The sum of a vector's blocks of four lanes.
template <class D, class VD>
HWY_INLINE auto sum_blocks(D d, VD v) {
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    return sum_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    return v;
  }
}
#endif

// sums[0 … 3] = the sum of each vector's lanes, in one fixed order.
HWY_INLINE void sum_lanes(V a, V b, V c, V d, float* sums) {
  const F f;
#if HWY_TARGET == HWY_SCALAR
  const V vectors[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) hn::Store(vectors[i], f, sums + i);
#else
  const hn::Repartition<double, F> pairs;
  const auto ab = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(f, a, b), hn::InterleaveUpper(f, a, b)));
  const auto cd = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(f, c, d), hn::InterleaveUpper(f, c, d)));
  const V even = hn::BitCast(f, hn::InterleaveLower(pairs, ab, cd));
  const V odd = hn::BitCast(f, hn::InterleaveUpper(pairs, ab, cd));
  hn::StoreU(sum_blocks(f, hn::Add(even, odd)), hn::FixedTag<float, 4>(), sums);
#endif
}

// scores [kHeads, kPiece] of kKeys keys, `stride` elements apart. queries [kHeads, padded].
template <int kHeads, int kKeys, class T, class Entry>
HWY_INLINE void score_keys(const T* HWY_RESTRICT queries, int64_t padded, const Entry* HWY_RESTRICT keys,
                           int64_t stride, float* HWY_RESTRICT scores) {
  const F f;
  V sums[kHeads][kKeys];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) sums[h][k] = hn::Zero(f);
  }
  const hn::ScalableTag<T> operands;
  for (int64_t i = 0; i < padded; i += kStepValues<T> * lane_count()) {
    hn::Vec<hn::ScalableTag<T>> q[kHeads];
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) q[h] = hn::LoadU(operands, queries + h * padded + i / kStepValues<T>);
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
      const auto x = load_entries<T>(keys + k * stride + i);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) sums[h][k] = multiply_add(sums[h][k], q[h], x);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    if constexpr (kKeys == kKeysAtOnce) {
      sum_lanes(sums[h][0], sums[h][1], sums[h][2], sums[h][3], scores + h * kPiece);
    } else {
      const V zero = hn::Zero(f);
      float lone[kKeysAtOnce];
      sum_lanes(sums[h][0], zero, zero, zero, lone);
      scores[h * kPiece] = lone[0];
    }
  }
}

template <int kHeads, class T, class Entry>
HWY_INLINE void score_run(const T* queries, int64_t padded, const Entry* keys, int64_t stride, int64_t count,
                          float* scores, Ahead ahead) {
  int64_t k = 0;
  for (; k + kKeysAtOnce <= count; k += kKeysAtOnce, keys += kKeysAtOnce * stride) {
    fetch<kKeysAtOnce>(ahead, padded * static_cast<int64_t>(sizeof(Entry)));
    score_keys<kHeads, kKeysAtOnce>(queries, padded, keys, stride, scores + k);
  }
  for (; k < count; ++k, keys += stride) score_keys<kHeads, 1>(queries, padded, keys, stride, scores + k);
}

// sums [kHeads, kVectors·lanes] += weights [kHeads, kPiece] · values.
template <int kHeads, int kVectors, class T>
HWY_INLINE void add_values(const float* HWY_RESTRICT weights, const T* HWY_RESTRICT values, int64_t stride,
                           int64_t count, float* HWY_RESTRICT sums, int64_t padded, Ahead ahead) {
  const F f;
  const int64_t lanes = lane_count();
  V acc[kHeads][kVectors];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) acc[h][v] = hn::LoadU(f, sums + h * padded + v * lanes);
  }
  for (int64_t k = 0; k < count; ++k, values += stride) {
    fetch<1>(ahead, kVectors * lanes * static_cast<int64_t>(sizeof(T)));
    V p[kHeads];
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) p[h] = hn::Set(f, weights[h * kPiece + k]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const V x = load_entries<float>(values + v * lanes);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) acc[h][v] = multiply_add(acc[h][v], p[h], x);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) hn::StoreU(acc[h][v], f, sums + h * padded + v * lanes);
  }
}

template <int kHeads, class T>
HWY_INLINE void add_run(const float* weights, const T* values, int64_t stride, int64_t count, float* sums,
                        int64_t padded, Ahead ahead) {
  const int64_t lanes = lane_count();
  for (int64_t k = 0; k < count; k += kValuesAtOnce) {
    const int64_t keys = std::min(kValuesAtOnce, count - k);
    const auto add = [&]<int kVectors>(int64_t i) HWY_ATTR {
      const Ahead columns{ahead.data + k * ahead.stride + i * static_cast<int64_t>(sizeof(T)), ahead.stride};
      add_values<kHeads, kVectors>(weights + k, values + k * stride + i, stride, keys, sums + i, padded,
                                   columns);
    };
    int64_t i = 0;
    for (; i + 4 * lanes <= padded; i += 4 * lanes) add.template operator()<4>(i);
    for (; i < padded; i += lanes) add.template operator()<1>(i);
  }
}

// A piece's entries: where they lie, or a copy of them that is padded, rounded and in order.
template <class T>
struct PieceSource {
  const Entries* entries;  // null: the copy
  const T* copy;
  int64_t copy_begin, stride;

  // Calls body(first position, count, pointer) for runs of evenly spaced entries.
  template <class Body>
  HWY_INLINE void for_runs(Span span, Body&& body) const {
    if (!entries) return body(span.begin, span.size(), copy + (span.begin - copy_begin) * stride);
    for (int64_t p = span.begin; p < span.end;) {
      const int64_t count = std::min<int64_t>(entries->consecutive(p), span.end - p);
      body(p, count, entries->at<T>(p));
      p += count;
    }
  }
};

// sums [kHeads, padded] += weights [kHeads, kPiece] · values over a span of the piece that begins at position
// `origin`. zeros: [padded] in place of what is not seen.
template <int kHeads, class Entry>
HWY_INLINE void add_span(const float* weights, const PieceSource<Entry>& values, Span span, int64_t origin,
                         const uint16_t*, float* sums, int64_t padded, Ahead ahead) {
  values.for_runs(span, [&](int64_t p, int64_t count, const Entry* run) HWY_ATTR {
    add_run<kHeads>(weights + p - origin, run, values.stride, count, sums, padded, ahead);
    ahead.data += count * ahead.stride;
  });
}

#ifdef DUOKV_BF16_DOT
// sums [kHeads, kBlocks · 32] += weights · values of `pairs` pairs of positions; `even` and `odd` are the
// first pair's values and `stride` leads to the next ones'. Of 32 columns the sums keep those first that the
// lower half of an interleave holds.
template <int kHeads, int kBlocks>
HWY_INLINE void add_pairs(const Bf16Pair* HWY_RESTRICT weights, const uint16_t* even, const uint16_t* odd,
                          int64_t stride, int64_t pairs, float* HWY_RESTRICT sums, int64_t padded,
                          Ahead ahead) {
  const F f;
  const hn::ScalableTag<uint16_t> d16;
  const hn::ScalableTag<Bf16Pair> d32;
  const int64_t lanes = lane_count();
  V acc[kHeads][2 * kBlocks];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kBlocks; ++v) acc[h][v] = hn::LoadU(f, sums + h * padded + v * lanes);
  }
  for (int64_t k = 0; k < pairs; ++k, even += stride, odd += stride) {
    fetch<2>(ahead, kBlocks * 64);
    Bf16Pairs p[kHeads];
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) p[h] = hn::Set(d32, weights[h * kPiece + k]);
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b) {
      const auto x = hn::LoadU(d16, even + b * 32), y = hn::LoadU(d16, odd + b * 32);
      const auto lower = hn::BitCast(d32, hn::InterleaveLower(d16, x, y));
      const auto upper = hn::BitCast(d32, hn::InterleaveUpper(d16, x, y));
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        acc[h][2 * b] = multiply_add(acc[h][2 * b], p[h], lower);
        acc[h][2 * b + 1] = multiply_add(acc[h][2 * b + 1], p[h], upper);
      }
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kBlocks; ++v) hn::StoreU(acc[h][v], f, sums + h * padded + v * lanes);
  }
}

template <int kHeads>
HWY_INLINE void add_pair_run(const Bf16Pair* weights, const uint16_t* even, const uint16_t* odd,
                             int64_t stride, int64_t pairs, float* sums, int64_t padded, Ahead ahead) {
  int64_t i = 0;
  for (; i + 64 <= padded; i += 64)
    add_pairs<kHeads, 2>(weights, even + i, odd + i, stride, pairs, sums + i, padded,
                         Ahead{ahead.data + 2 * i, ahead.stride});
  for (; i < padded; i += 32)
    add_pairs<kHeads, 1>(weights, even + i, odd + i, stride, pairs, sums + i, padded,
                         Ahead{ahead.data + 2 * i, ahead.stride});
}

// Positions 2i and 2i + 1 are a pair, wherever they lie and whether or not both are seen: what a query gets
// depends on neither.
template <int kHeads>
HWY_INLINE void add_span(const Bf16Pair* weights, const PieceSource<uint16_t>& values, Span span,
                         int64_t origin, const uint16_t* zeros, float* sums, int64_t padded, Ahead ahead) {
  const auto add = [&](int64_t p, const uint16_t* even, const uint16_t* odd, int64_t pairs) HWY_ATTR {
    add_pair_run<kHeads>(weights + (p - origin) / 2, even, odd, 2 * values.stride, pairs, sums, padded,
                         ahead);
    ahead.data += 2 * pairs * ahead.stride;
  };
  const uint16_t* even = zeros;  // of a pair whose other position is in the next run
  values.for_runs(span, [&](int64_t p, int64_t count, const uint16_t* run) HWY_ATTR {
    if (p % 2 != 0) {
      add(p - 1, even, run, 1);
      even = zeros;
      ++p, --count, run += values.stride;
    }
    if (count >= 2) add(p, run, run + values.stride, count / 2);
    if (count % 2 != 0) even = run + (count - 1) * values.stride;
  });
  if (span.end % 2 != 0) add(span.end - 1, even, zeros, 1);
  // The columns in their order.
  for (float* block = sums; block < sums + kHeads * padded; block += 32) {
    float halves[32];
    std::memcpy(halves, block, sizeof(halves));
    for (int64_t i = 0; i < 4; ++i) {
      std::memcpy(block + 8 * i, halves + 4 * i, 4 * sizeof(float));
      std::memcpy(block + 8 * i + 4, halves + 16 + 4 * i, 4 * sizeof(float));
    }
  }
}
#endif

// One query's kHeads heads over what it sees of a piece.
template <int kHeads, class T, class Entry>
void stream_heads(const AttentionCall& call, const StreamUnit& unit, Span span, float bias, const T* queries,
                  const PieceSource<Entry>& keys, const PieceSource<Entry>& values,
                  const UnitScratch& scratch, float* sums, float* running, Ahead while_scoring,
                  Ahead while_adding) {
  const int64_t origin = unit.span.begin / kPiece * kPiece;
  float* scores = scratch.scores;
  keys.for_runs(span, [&](int64_t p, int64_t count, const Entry* run) HWY_ATTR {
    score_run<kHeads>(queries, call.padded, run, keys.stride, count, scores + p - origin, while_scoring);
    while_scoring.data += count * while_scoring.stride;
  });
  const Span columns{static_cast<int32_t>(span.begin - origin), static_cast<int32_t>(span.end - origin)};
  Span own[kHeads];
  std::fill_n(own, kHeads, columns);
  float factors[kRowLanes] = {};
  Running products[kHeads];
  softmax_block<T>(call, kHeads, columns, own, scores, kPiece, products, factors);
  for (int h = 0; h < kHeads; ++h) {
    const Running state = call.scores(products[h], bias);
    running[2 * h] = state.max, running[2 * h + 1] = state.sum;
  }
  const auto* weights = reinterpret_cast<const T*>(scores);
  add_span<kHeads>(weights, values, span, origin, scratch.zeros, sums, call.padded, while_adding);
}

// A unit's keys or values, up to where its bank's ring wraps.
Ahead ahead_of(const AttentionCall& call, const StreamUnit& unit, bool values) {
  const ops::Bank& bank = call.args.banks[unit.bank];
  const Entries entries(bank, unit.row, unit.head, values);
  const bool narrow = bank.dtype == ops::DType::BF16;
  const void* data = narrow ? static_cast<const void*>(entries.at<uint16_t>(unit.span.begin))
                            : entries.at<float>(unit.span.begin);
  return {static_cast<const char*>(data), entries.stride * (narrow ? 2 : 4)};
}

template <class T, class Entry>
void stream_queries(const StreamPlan& plan, const StreamUnit& unit, const PieceSource<Entry>& keys,
                    const PieceSource<Entry>& values, Ahead unit_values, Ahead next_keys,
                    const UnitScratch& scratch) {
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  auto* queries = reinterpret_cast<T*>(scratch.queries);
  for (int64_t t = 0; t < args.queries; ++t) {
    const Span span = intersect(call.visible(unit.bank, unit.row, t), unit.span);
    const int64_t row = t * call.group;
    float* sums = plan.partials.sums(unit.partial, row);
    float* running = plan.partials.running(unit.partial, row);
    std::fill_n(sums, call.group * call.padded, 0.0f);
    if (span.empty()) {
      for (int64_t h = 0; h < call.group; ++h) running[2 * h] = kMinusInfinity, running[2 * h + 1] = 0;
      continue;
    }
    for (int64_t h = 0; h < call.group; ++h) {
      copy_padded(args.q + call.query_offset(unit.row, t, unit.head) + h * args.head_dim, args.head_dim,
                  call.padded, call.bf16, scratch.queries + h * call.padded);
    }
    pair_columns(scratch.queries, call.group, call.padded, call.padded, queries, call.padded);
    const float bias = call.bias(unit.bank, unit.row, t);
    const auto heads = [&]<int kHeads>(int64_t h) HWY_ATTR {
      const Ahead nothing{reinterpret_cast<const char*>(queries), 0};
      const bool first = t == 0 && h == 0, last = t + 1 == args.queries && h + kHeads == call.group;
      stream_heads<kHeads>(call, unit, span, bias, queries + h * call.padded, keys, values, scratch,
                           sums + h * call.padded, running + 2 * h, first ? unit_values : nothing,
                           last ? next_keys : nothing);
    };
    int64_t h = 0;
    for (; h + kHeadsAtOnce <= call.group; h += kHeadsAtOnce) heads.template operator()<kHeadsAtOnce>(h);
    if (call.group - h == 2) heads.template operator()<2>(h);
    if (call.group - h == 1) heads.template operator()<1>(h);
  }
}

// `next`: the unit that this thread probably streams next, or null. memory: UnitScratch::floats.
void stream_unit(const StreamPlan& plan, const StreamUnit& unit, const StreamUnit* next, float* memory) {
  const AttentionCall& call = plan.call;
  const ops::Bank& bank = call.args.banks[unit.bank];
  const Entries keys(bank, unit.row, unit.head, false), values(bank, unit.row, unit.head, true);
  const UnitScratch scratch(call, memory);
  const Ahead nothing{reinterpret_cast<const char*>(memory), 0};
  const bool stored_bf16 = bank.dtype == ops::DType::BF16;
  if (call.args.head_dim == call.padded && (stored_bf16 || !call.bf16)) {
    const auto stream = [&]<class T, class Entry>(T, Entry) HWY_ATTR {
      stream_queries<T>(plan, unit, PieceSource<Entry>{&keys, nullptr, 0, keys.stride},
                        PieceSource<Entry>{&values, nullptr, 0, values.stride}, ahead_of(call, unit, true),
                        next ? ahead_of(call, *next, false) : nothing, scratch);
    };
    if (!stored_bf16) return stream(float{}, float{});
    // Values are interleaved by whole vectors of 16 bits.
    const int64_t step = call.padded % (2 * lane_count()) == 0 ? step_values(call) : 1;
    std::fill_n(scratch.zeros, call.padded, uint16_t{0});
    return with_operands(step, [&]<class T>(T) HWY_ATTR { stream(T{}, uint16_t{}); });
  }
  float* key_copy = scratch.copies;
  float* value_copy = key_copy + kPiece * call.padded;
  copy_entries(keys, unit.span, call.args.head_dim, call.padded, call.bf16, key_copy);
  copy_entries(values, unit.span, call.args.head_dim, call.padded, call.bf16, value_copy);
  stream_queries<float, float>(plan, unit, {nullptr, key_copy, unit.span.begin, call.padded},
                               {nullptr, value_copy, unit.span.begin, call.padded}, nothing, nothing,
                               scratch);
}

// Merges the pieces of one row and KV head in their order. scratch: bank_count · padded floats.
void merge_pieces(const StreamPlan& plan, int64_t row, int64_t head, float* scratch) {
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  const F f;
  const auto index = static_cast<size_t>(plan.index_of(row, head));
  const int64_t lse_stride = args.batch * args.queries * args.query_heads;
  for (int64_t t = 0; t < args.queries; ++t) {
    for (int64_t h = 0; h < call.group; ++h) {
      const int64_t r = t * call.group + h;
      BankPart parts[2];
      for (int32_t bank = 0; bank < args.bank_count; ++bank) {
        float* sums = scratch + bank * call.padded;
        std::fill_n(sums, call.padded, 0.0f);
        Running total;
        for (int64_t u = plan.first_units[index]; u < plan.first_units[index + 1]; ++u) {
          const StreamUnit& unit = plan.units[static_cast<size_t>(u)];
          if (unit.bank != bank || intersect(call.visible(bank, row, t), unit.span).empty()) continue;
          const float* running = plan.partials.running(unit.partial, r);
          const float* piece = plan.partials.sums(unit.partial, r);
          const float max = std::max(total.max, running[0]);
          const float shift = max == kMinusInfinity ? 0.0f : max;
          const float old_weight = std::exp(total.max - shift), new_weight = std::exp(running[0] - shift);
          total.max = max;
          total.sum = total.sum * old_weight + running[1] * new_weight;
          const V old_weights = hn::Set(f, old_weight), new_weights = hn::Set(f, new_weight);
          for (int64_t i = 0; i < call.padded; i += lane_count()) {
            const V x = hn::Mul(hn::LoadU(f, piece + i), new_weights);
            hn::StoreU(hn::MulAdd(hn::LoadU(f, sums + i), old_weights, x), f, sums + i);
          }
        }
        parts[bank] = {!call.visible(bank, row, t).empty(), total, sums};
      }
      float* lse = args.lse ? args.lse + call.lse_offset(0, row, t, head) + h : nullptr;
      finish_query(parts, args.bank_count, args.head_dim,
                   args.out + call.query_offset(row, t, head) + h * args.head_dim, lse, lse_stride);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(stream_unit);
HWY_EXPORT(merge_pieces);

void streamed_attention(Device* device, const AttentionCall& call) {
  const ops::AttentionArgs& args = call.args;
  StreamPlan plan{call, {call}, {}, {}};
  for (int64_t row = 0; row < args.batch; ++row) {
    for (int32_t head = 0; head < args.kv_heads; ++head) {
      plan.first_units.push_back(static_cast<int64_t>(plan.units.size()));
      for (int32_t bank = 0; bank < args.bank_count; ++bank) {
        const Span seen = call.visible(bank, row, 0, args.queries);
        if (seen.empty()) continue;
        for (int64_t begin = seen.begin / kPiece * kPiece; begin < seen.end; begin += kPiece) {
          const Span piece = {static_cast<int32_t>(begin), static_cast<int32_t>(begin + kPiece)};
          plan.units.push_back({row, bank, head, intersect(piece, seen), nullptr});
        }
      }
    }
  }
  plan.first_units.push_back(plan.unit_count());
  float* memory = device->shared_scratch.take<float>(plan.unit_count() * plan.partials.floats());
  for (StreamUnit& unit : plan.units) {
    unit.partial = memory;
    memory += plan.partials.floats();
  }

  const int64_t scratch_floats = std::max(UnitScratch::floats(call), args.bank_count * call.padded);
  device->reserve_workers<float>(scratch_floats);
  const auto scratch_of = [&](int32_t worker) {
    return device->worker_scratch[static_cast<size_t>(worker)].take<float>(scratch_floats);
  };
  // The thread that streams the last unit of a row and KV head merges them: most of them are its own.
  const int64_t outputs = args.batch * args.kv_heads;
  std::vector<std::atomic<int64_t>> unfinished(static_cast<size_t>(outputs));
  std::vector<int64_t> without;  // rows and heads that see nothing
  for (int64_t i = 0; i < outputs; ++i) {
    unfinished[static_cast<size_t>(i)].store(plan.units_of(i), std::memory_order_relaxed);
    if (plan.units_of(i) == 0) without.push_back(i);
  }
  const auto merge = [&](int64_t output, int32_t worker) {
    HWY_DYNAMIC_DISPATCH(merge_pieces)
    (plan, output / args.kv_heads, output % args.kv_heads, scratch_of(worker));
  };
  device->pool.run(static_cast<int64_t>(without.size()),
                   [&](int64_t i, int32_t worker) { merge(without[static_cast<size_t>(i)], worker); });
  device->pool.run_neighbours(plan.unit_count(), [&](const ThreadPool::Turn& turn) {
    const StreamUnit& unit = plan.units[static_cast<size_t>(turn.chunk)];
    const StreamUnit* next = turn.next < 0 ? nullptr : plan.units.data() + turn.next;
    HWY_DYNAMIC_DISPATCH(stream_unit)(plan, unit, next, scratch_of(turn.worker));
    const int64_t output = plan.index_of(unit.row, unit.head);
    if (unfinished[static_cast<size_t>(output)].fetch_sub(1, std::memory_order_acq_rel) == 1)
      merge(output, turn.worker);
  });
}

}  // namespace duokv::cpu
#endif
