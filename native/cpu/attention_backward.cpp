#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/attention_backward_plan.h"
#include "cpu/device.h"
#include "cpu/operations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_backward.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/attention_tiles-inl.h"

#ifndef DUOKV_CPU_ATTENTION_BACKWARD_
#define DUOKV_CPU_ATTENTION_BACKWARD_
namespace duokv::cpu {
namespace {

constexpr int64_t kTile = KeyTile::kKeys;

}  // namespace
}  // namespace duokv::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

// Where a stacked block has its rows for products along them.
template <class T>
int64_t along_rows(const BackwardPlan& plan) {
  return kStepValues<T> == 1 ? 0 : plan.block_rows() * plan.call.padded / 2;
}

// Stacks query block b of one row and KV head and computes its terms. scratch: 2 · block_rows · padded
// floats.
template <class T>
void stack_block_as(const BackwardPlan& plan, int64_t row, int64_t head, int64_t b, float* scratch) {
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  const F f;
  const int64_t head_dim = args.head_dim, padded = call.padded;
  const int64_t begin = b * plan.block, end = std::min(args.queries, begin + plan.block);
  const int64_t rows = (end - begin) * call.group, even_rows = round_up(rows, 2);
  float* block_q = scratch;
  float* block_dout = block_q + even_rows * padded;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t ahead = call.query_offset(row, std::min(t + 4, args.queries - 1), head),
                  count = call.group * head_dim;
    for (const float* x : {args.q, plan.args.dout, static_cast<const float*>(args.out)})
      prefetch(x + ahead, count);
    int64_t seen = 0;
    for (int32_t bank = 0; bank < args.bank_count; ++bank) seen += call.visible(bank, row, t).size();
    for (int64_t h = 0; h < call.group; ++h) {
      const int64_t r = (t - begin) * call.group + h;
      const int64_t offset = call.query_offset(row, t, head) + h * head_dim;
      float* dout = block_dout + r * padded;
      copy_padded(args.q + offset, head_dim, padded, call.bf16, block_q + r * padded);
      copy_padded(plan.args.dout + offset, head_dim, padded, call.bf16, dout);
      // Σ P dP = dO · O, with dO as the product dP sees it.
      V sum = hn::Zero(f);
      int64_t i = 0;
      for (; i + lane_count() <= head_dim; i += lane_count()) {
        sum = hn::MulAdd(hn::LoadU(f, dout + i), hn::LoadU(f, args.out + offset + i), sum);
      }
      float delta = hn::GetLane(hn::SumOfLanes(f, sum));
      for (; i < head_dim; ++i) delta += dout[i] * args.out[offset + i];
      float lse = args.lse[call.lse_offset(0, row, t, head) + h];
      if (args.bank_count == 2) {
        const float other = args.lse[call.lse_offset(1, row, t, head) + h];
        // Unlike std::min this keeps NaN of either.
        const float larger = other > lse ? other : lse, smaller = other > lse ? lse : other;
        lse = smaller == kMinusInfinity ? larger : larger + std::log1p(std::exp(smaller - larger));
      }
      plan.stacked.terms[plan.stack(row, head) + begin * call.group + r] = {lse, delta,
                                                                            seen == 1 ? 0.0f : 1.0f};
    }
  }
  plan.finite(row, head, b) = all_finite(block_q, rows * padded) && all_finite(block_dout, rows * padded);
  const auto stack = [&](float* x, T* block) {
    pair_columns(x, rows, padded, padded, block, padded / kStepValues<T>);
    if constexpr (kStepValues<T> == 2) {
      std::fill_n(x + rows * padded, (even_rows - rows) * padded, 0.0f);
      pair_rows(x, rows, padded, padded, block + along_rows<T>(plan), padded);
    }
  };
  stack(block_q, plan.stacked_block<T>(plan.stacked.q, row, head, b));
  stack(block_dout, plan.stacked_block<T>(plan.stacked.dout, row, head, b));
}

void stack_block(const BackwardPlan& plan, int64_t row, int64_t head, int64_t b, float* scratch) {
  with_operands(plan.step_values,
                [&]<class T>(T) HWY_ATTR { stack_block_as<T>(plan, row, head, b, scratch); });
}

// One tile of keys as right operands, its gradients, and the weights and score gradients of a query block.
template <class T>
struct TileBuffers {
  Span used;             // the columns that hold anything: whole panels and register blocks
  T* keys;               // [kTile / kStepValues, padded]
  T* keys_transposed;    // panels [steps along a key, panel_width]
  T* values_transposed;  // the same
  float* dk;             // [kTile, padded]
  float* dv;             // the same
  T* p;                  // [block_rows / kStepValues, kTile]
  T* ds;                 // the same
  float* s;              // [kMostBlockRows, kTile] of a register block, before they are paired
  float* dp;             // the same
  Span* own;             // [block_rows] the columns that a row sees
  float* biases;         // [block_rows]
  bool finite;           // whether all keys are
};

// A row's P and dS from raw products s and dp, in columns [begin, end) of the tile, zero outside of [first,
// last).
template <bool kRound>
void differentiate_scores(float* HWY_RESTRICT s, float* HWY_RESTRICT dp, int64_t begin, int64_t end,
                          int64_t first, int64_t last, float scale, float bias, const QueryTerms& terms) {
  const F f;
  const V scales = hn::Set(f, scale), biases = hn::Set(f, bias), lse = hn::Set(f, terms.lse);
  const int64_t lanes = lane_count();
  const V delta = hn::Set(f, terms.delta), factor = hn::Set(f, terms.factor), zero = hn::Zero(f);
  const ExpScale base(1.0f);
  const auto differentiate = [&](int64_t c, auto vectors, auto keep) HWY_ATTR {
    V p[vectors];
    for (int v = 0; v < vectors; ++v)
      p[v] = hn::Sub(hn::MulAdd(hn::LoadU(f, s + c + v * lanes), scales, biases), lse);
    exp_of_scaled(base, p);
    for (int v = 0; v < vectors; ++v) {
      const V product = hn::LoadU(f, dp + c + v * lanes);
      V ds = keep(hn::Mul(hn::Mul(p[v], hn::Sub(product, delta)), factor), zero);
      p[v] = keep(p[v], zero);
      if constexpr (kRound) p[v] = round_to_bf16(f, p[v]), ds = round_to_bf16(f, ds);
      hn::StoreU(p[v], f, s + c + v * lanes);
      hn::StoreU(ds, f, dp + c + v * lanes);
    }
  };
  for_column_groups<kExpVectors>(begin, end, first, last, differentiate);
}

// C [rows, padded] += left · right [steps, padded].
template <class T>
void accumulate(int64_t rows, Left<T> left, const T* right, int64_t padded, int64_t steps, float* c) {
  multiply<Start::kAdd>(rows, left, Matrix<T>{right, padded}, padded, steps, c, padded);
}

// Adds what query block b's P and dS say of a tile's keys to its dk and dv. Of each group of kBlockRows keys
// the rows first_row … last_row-1 see some.
template <class T>
void add_to_keys(const BackwardPlan& plan, const KeyUnit& unit, int64_t b, const TileBuffers<T>& buffers,
                 const int64_t* first_row, const int64_t* last_row) {
  constexpr int64_t kValues = kStepValues<T>;
  const int64_t padded = plan.call.padded;
  const T* q = plan.stacked_block<T>(plan.stacked.q, unit.row, unit.head, b) + along_rows<T>(plan);
  const T* dout = plan.stacked_block<T>(plan.stacked.dout, unit.row, unit.head, b) + along_rows<T>(plan);
  for (int64_t g = 0; g < kTile / kBlockRows; ++g) {
    const int64_t key = g * kBlockRows;
    if (first_row[g] >= last_row[g]) continue;
    if (plan.finite(unit.row, unit.head, b)) {
      const int64_t first = first_row[g] / kValues, steps = ceil_div(last_row[g], kValues) - first;
      accumulate(kBlockRows, Left<T>{buffers.p + first * kTile + key, 1, kTile}, dout + first * padded,
                 padded, steps, buffers.dv + key * padded);
      accumulate(kBlockRows, Left<T>{buffers.ds + first * kTile + key, 1, kTile}, q + first * padded, padded,
                 steps, buffers.dk + key * padded);
      continue;
    }
    // 0 · inf is NaN: a key must not meet rows that do not see it. Those that do are consecutive.
    for (int64_t k = key; k < key + kBlockRows; ++k) {
      int64_t begin = last_row[g], end = 0;
      for (int64_t r = first_row[g]; r < last_row[g]; ++r) {
        const Span s = buffers.own[r];
        if (s.begin <= k && k < s.end) begin = std::min(begin, r), end = r + 1;
      }
      if (begin >= end) continue;
      multiply_some(Left<T>{buffers.p + k, 1, kTile}, Matrix<T>{dout, padded}, padded, begin, end,
                    buffers.dv + k * padded);
      multiply_some(Left<T>{buffers.ds + k, 1, kTile}, Matrix<T>{q, padded}, padded, begin, end,
                    buffers.dk + k * padded);
    }
  }
}

// A tile of keys against query block b: adds to the tile's dk, dv and to dq [rows of the block, padded].
template <class T>
void differentiate_block(const BackwardPlan& plan, const KeyUnit& unit, const KeyTile& tile, int64_t b,
                         const TileBuffers<T>& buffers, float* dq) {
  constexpr int64_t kValues = kStepValues<T>;
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  const int64_t padded = call.padded, width = panel_width(), key_steps = ceil_div(args.head_dim, kValues);
  const int64_t begin_position = b * plan.block,
                end_position = std::min(args.queries, begin_position + plan.block);
  const int64_t rows = (end_position - begin_position) * call.group;
  const T* q = plan.stacked_block<T>(plan.stacked.q, unit.row, unit.head, b);
  const T* dout = plan.stacked_block<T>(plan.stacked.dout, unit.row, unit.head, b);
  const QueryTerms* terms =
      plan.stacked.terms + plan.stack(unit.row, unit.head) + begin_position * call.group;
  const auto origin = static_cast<int32_t>(tile.tile * kTile);
  const Span used = buffers.used;
  const auto score_gradients =
      call.bf16 && kValues == 1 ? &differentiate_scores<true> : &differentiate_scores<false>;

  // The rows that see some of each group of kBlockRows keys.
  int64_t first_row[kTile / kBlockRows], last_row[kTile / kBlockRows];
  std::fill_n(first_row, kTile / kBlockRows, rows);
  std::fill_n(last_row, kTile / kBlockRows, 0);
  for (int64_t t = begin_position, r = 0; t < end_position; ++t, r += call.group) {
    const Span s = intersect(call.visible(tile.bank, unit.row, t), tile.span());
    std::fill_n(buffers.own + r, call.group, s.empty() ? Span{} : Span{s.begin - origin, s.end - origin});
    std::fill_n(buffers.biases + r, call.group, call.bias(tile.bank, unit.row, t));
  }

  for (int64_t r0 = 0; r0 < rows; r0 += kBlockRows) {
    const int64_t count = std::min<int64_t>(kBlockRows, rows - r0);
    const Span* own = buffers.own + r0;
    Span columns;
    for (int64_t r = 0; r < count; ++r) columns = unite(columns, own[r]);
    // The next rows, of this block or of the next one.
    prefetch(q + (r0 + kBlockRows) * padded / kValues, kBlockRows * padded / kValues);
    prefetch(dout + (r0 + kBlockRows) * padded / kValues, kBlockRows * padded / kValues);
    prefetch(dq + (r0 + kBlockRows) * padded, kBlockRows * padded);
    T* p = buffers.p + r0 / kValues * kTile;
    T* ds = buffers.ds + r0 / kValues * kTile;
    // FP32 values are computed where they stay.
    float* row_p = kValues == 1 ? reinterpret_cast<float*>(p) : buffers.s;
    float* row_ds = kValues == 1 ? reinterpret_cast<float*>(ds) : buffers.dp;
    if (columns.empty()) columns = {used.begin, used.begin};
    const int64_t begin = columns.begin / width * width, end = round_up(columns.end, width);
    const auto scores = [&](const T* rows_of_block, const T* transposed, float* c) HWY_ATTR {
      multiply<Start::kZero>(count, Left<T>{rows_of_block + r0 * padded / kValues, padded / kValues, 1},
                             Panels<T>{transposed + begin * key_steps, key_steps}, end - begin, key_steps,
                             c + begin, kTile);
    };
    scores(q, buffers.keys_transposed, row_p);
    scores(dout, buffers.values_transposed, row_ds);
    for (int64_t r = 0; r < count; ++r) {
      // Other rows may have every column of this one read.
      for (float* x : {row_p + r * kTile, row_ds + r * kTile})
        std::fill(x + used.begin, x + begin, 0.0f), std::fill(x + end, x + used.end, 0.0f);
      score_gradients(row_p + r * kTile, row_ds + r * kTile, begin, end, own[r].begin, own[r].end, args.scale,
                      buffers.biases[r0 + r], terms[r0 + r]);
    }
    T* row_left = reinterpret_cast<T*>(row_ds);
    if constexpr (kValues == 2) {
      for (float* x : {row_p, row_ds}) std::fill_n(x + count * kTile, count % 2 * kTile, 0.0f);
      pair_rows(row_p + used.begin, count, used.size(), kTile, p + used.begin, kTile);
      pair_rows(row_ds + used.begin, count, used.size(), kTile, ds + used.begin, kTile);
      pair_columns(row_ds + used.begin, count, used.size(), kTile, row_left + used.begin / 2, kTile);
    }
    if (columns.empty()) continue;
    for (int64_t g = columns.begin / kBlockRows; g * kBlockRows < columns.end; ++g) {
      first_row[g] = std::min(first_row[g], r0);
      last_row[g] = r0 + count;
    }
    float* rows_dq = dq + r0 * padded;
    if (buffers.finite) {
      const int64_t first = columns.begin / kValues, steps = ceil_div(columns.end, kValues) - first;
      accumulate(count, Left<T>{row_left + first, kTile, 1}, buffers.keys + first * padded, padded, steps,
                 rows_dq);
      continue;
    }
    // Likewise a row and keys that it does not see.
    for (int64_t r = 0; r < count; ++r) {
      if (own[r].empty()) continue;
      multiply_some(Left<T>{row_left + r * kTile, kTile, 1}, Matrix<T>{buffers.keys, padded}, padded,
                    own[r].begin, own[r].end, rows_dq + r * padded);
    }
  }

  add_to_keys(plan, unit, b, buffers, first_row, last_row);
}

// Adds a finished tile to the bank's gradients.
void add_gradients(const BackwardPlan& plan, const KeyUnit& unit, const KeyTile& tile,
                   const float* dk_of_tile, const float* dv_of_tile) {
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  const ops::BankGradient& gradient = plan.args.grads[tile.bank];
  const Span stored = call.stored(tile.bank, unit.row);
  for (int64_t p = tile.seen.begin; p < tile.seen.end; ++p) {
    const int64_t entry = unit.row * stored.size() + p - stored.begin;
    const int64_t offset = (entry * args.kv_heads + unit.head) * args.head_dim;
    const float* dk = dk_of_tile + (p - tile.tile * kTile) * call.padded;
    const float* dv = dv_of_tile + (p - tile.tile * kTile) * call.padded;
    for (int64_t i = 0; i < args.head_dim; ++i) {
      gradient.dk[offset + i] += args.scale * dk[i];
      gradient.dv[offset + i] += dv[i];
    }
  }
}

template <class T>
void differentiate_unit_as(const BackwardPlan& plan, const KeyUnit& unit, float* scratch) {
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  const int64_t padded = call.padded, tile_floats = kTile * padded;
  const int64_t key_steps = ceil_div(args.head_dim, kStepValues<T>);
  TileBuffers<T> buffers;
  const auto carve = [&]<class Word>(Word*& pointer, int64_t words) {
    pointer = reinterpret_cast<Word*>(scratch);
    scratch += words;
  };
  carve(buffers.keys, tile_floats / kStepValues<T>);
  carve(buffers.keys_transposed, kTile * key_steps);
  carve(buffers.values_transposed, kTile * key_steps);
  carve(buffers.dk, tile_floats);
  carve(buffers.dv, tile_floats);
  carve(buffers.p, plan.block_rows() / kStepValues<T> * kTile);
  carve(buffers.ds, plan.block_rows() / kStepValues<T> * kTile);
  carve(buffers.s, kMostBlockRows * kTile);
  carve(buffers.dp, kMostBlockRows * kTile);
  carve(buffers.own, 2 * plan.block_rows());
  carve(buffers.biases, plan.block_rows());

  // Blocks whose dq is no longer undefined: it is zeroed when it is about to be used.
  std::vector<uint8_t> started(static_cast<size_t>(plan.blocks()));
  const auto dq_of = [&](int64_t b) {
    float* dq = unit.dq + (b * plan.block - unit.begin) * call.group * padded;
    if (!started[static_cast<size_t>(b)]) {
      const int64_t end = std::min(args.queries, (b + 1) * plan.block);
      std::fill_n(dq, (end - b * plan.block) * call.group * padded, 0.0f);
      started[static_cast<size_t>(b)] = 1;
    }
    return dq;
  };
  for (size_t i = unit.first; i < unit.last; ++i) {
    const KeyTile& tile = plan.key_tiles[static_cast<size_t>(unit.row)][i];
    const ops::Bank& bank = args.banks[tile.bank];
    const int64_t origin = tile.tile * kTile, unit_columns = std::lcm<int64_t>(panel_width(), kBlockRows);
    const int64_t begin = (tile.seen.begin - origin) / unit_columns * unit_columns;
    const int64_t end = round_up(tile.seen.end - origin, unit_columns), keys = end - begin;
    buffers.used = {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
    const Span span = {static_cast<int32_t>(origin + begin), static_cast<int32_t>(origin + end)};
    // dk and dv hold the keys and values until they are packed.
    float* dk = buffers.dk + begin * padded;
    float* dv = buffers.dv + begin * padded;
    const auto pack = [&](float* x, T* transposed) {
      T* rows = reinterpret_cast<T*>(x);
      pair_columns(x, keys, padded, padded, rows, padded);
      pack_transposed(rows, keys, key_steps, padded, transposed + begin * key_steps);
    };
    copy_entries(Entries(bank, unit.row, unit.head, true), span, args.head_dim, padded, call.bf16, dv);
    pack(dv, buffers.values_transposed);
    copy_entries(Entries(bank, unit.row, unit.head, false), span, args.head_dim, padded, call.bf16, dk);
    buffers.finite = all_finite(dk, keys * padded);
    pair_rows(dk, keys, padded, padded, buffers.keys + begin / kStepValues<T> * padded, padded);
    pack(dk, buffers.keys_transposed);
    std::fill_n(dk, keys * padded, 0.0f);
    std::fill_n(dv, keys * padded, 0.0f);
    for (int64_t b = tile.first_block; b <= tile.last_block; ++b) {
      if (intersect(plan.block_span(tile.bank, unit.row, b), span).empty()) continue;
      differentiate_block(plan, unit, tile, b, buffers, dq_of(b));
    }
    add_gradients(plan, unit, tile, buffers.dk, buffers.dv);
  }
  for (int64_t t = unit.begin; t < unit.end; t += plan.block) dq_of(t / plan.block);
}

void differentiate_unit(const BackwardPlan& plan, const KeyUnit& unit, float* scratch) {
  with_operands(plan.step_values,
                [&]<class T>(T) HWY_ATTR { differentiate_unit_as<T>(plan, unit, scratch); });
}

// dq of query block b = scale · the sum of the units' parts, in the order of the units.
void merge_block(const BackwardPlan& plan, int64_t row, int64_t head, int64_t b) {
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  const auto index = static_cast<size_t>(row * args.kv_heads + head);
  const int64_t end = std::min(args.queries, (b + 1) * plan.block), floats = call.group * args.head_dim;
  for (int64_t t = b * plan.block; t < end; ++t) {
    float* dq = plan.args.dq + call.query_offset(row, t, head);
    std::fill_n(dq, floats, 0.0f);
    for (size_t u = plan.first_units[index]; u < plan.first_units[index + 1]; ++u) {
      const KeyUnit& unit = plan.units[u];
      if (t < unit.begin || t >= unit.end) continue;
      const float* part = unit.dq + (t - unit.begin) * call.group * call.padded;
      for (int64_t h = 0; h < call.group; ++h) {
        for (int64_t i = 0; i < args.head_dim; ++i) dq[h * args.head_dim + i] += part[h * call.padded + i];
      }
    }
    for (int64_t i = 0; i < floats; ++i) dq[i] *= args.scale;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

namespace {

HWY_EXPORT(step_values);
HWY_EXPORT(stack_block);
HWY_EXPORT(differentiate_unit);
HWY_EXPORT(merge_block);

}  // namespace

Status attention_backward(Device* device, const ops::AttentionBackwardArgs* backward) {
  return guarded([&] {
    const ops::AttentionArgs& args = backward->forward;
    check_attention(args);
    require(args.lse != nullptr, "attention_backward: lse is null");
    for (int32_t bank = 0; bank < args.bank_count; ++bank) {
      require(args.banks[bank].dtype == ops::DType::F32, "attention_backward: a bank is not FP32");
      for (int64_t row = 1; row < args.batch; ++row) {
        require(args.banks[bank].rows[row].count == args.banks[bank].rows[0].count,
                "attention_backward: rows of a bank hold different numbers of entries");
      }
    }
    const AttentionCall call(args);
    BackwardPlan plan(call, *backward, HWY_DYNAMIC_DISPATCH(step_values)(call));
    const int64_t rows = args.batch * args.kv_heads * plan.stack_rows();
    const int64_t blocks = args.batch * args.kv_heads * plan.blocks();
    const int64_t block_floats = plan.block_rows() * call.padded, stack_floats = blocks * block_floats;
    std::vector<uint8_t> finite(static_cast<size_t>(blocks));
    int64_t dq_rows = 0;
    for (const KeyUnit& unit : plan.units) dq_rows += (unit.end - unit.begin) * call.group;
    const int64_t term_floats = round_up(rows * 3, kPadding);
    float* memory =
        device->shared_scratch.take<float>(2 * stack_floats + dq_rows * call.padded + term_floats);
    plan.stacked = {memory, memory + stack_floats, reinterpret_cast<QueryTerms*>(memory + 2 * stack_floats),
                    finite.data()};
    memory += 2 * stack_floats + term_floats;
    for (KeyUnit& unit : plan.units) {
      unit.dq = memory;
      memory += (unit.end - unit.begin) * call.group * call.padded;
    }

    // Blocks of every row and KV head, in that order.
    const auto for_blocks = [&](auto&& body) {
      device->pool.run(blocks, [&](int64_t chunk, int32_t worker) {
        const int64_t index = chunk / plan.blocks();
        body(index / args.kv_heads, index % args.kv_heads, chunk % plan.blocks(), worker);
      });
    };
    device->reserve_workers<float>(2 * block_floats);
    for_blocks([&](int64_t row, int64_t head, int64_t b, int32_t worker) {
      float* scratch = device->worker_scratch[static_cast<size_t>(worker)].take<float>(2 * block_floats);
      HWY_DYNAMIC_DISPATCH(stack_block)(plan, row, head, b, scratch);
    });

    std::vector<size_t> order(plan.units.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return plan.units[a].pairs > plan.units[b].pairs; });
    const int64_t scratch_floats =
        5 * kTile * call.padded + 2 * (plan.block_rows() + kMostBlockRows) * kTile + 3 * plan.block_rows();
    device->reserve_workers<float>(scratch_floats);
    device->pool.run(static_cast<int64_t>(order.size()), [&](int64_t chunk, int32_t worker) {
      float* scratch = device->worker_scratch[static_cast<size_t>(worker)].take<float>(scratch_floats);
      HWY_DYNAMIC_DISPATCH(differentiate_unit)(plan, plan.units[order[static_cast<size_t>(chunk)]], scratch);
    });

    for_blocks([&](int64_t row, int64_t head, int64_t b, int32_t) {
      HWY_DYNAMIC_DISPATCH(merge_block)(plan, row, head, b);
    });
  });
}

}  // namespace duokv::cpu
#endif
