#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/attention.h"
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

// Tile i of a bank holds positions i · kTile …; a multiple of the register block's rows and of 32 columns.
constexpr int64_t kTile = 96;
constexpr int64_t kBlockRowsTarget = 96;

// With fewer rows and KV heads than this, each of them is cut into groups of key tiles, so that many cores
// find work.
constexpr int64_t kUnitsWanted = 32;

// Per query: what P = exp(score - lse) and dS = P ∘ (dP - delta) need. Where a query sees one entry in all
// its weight is 1 whatever the score, and `factor` 0 makes dS exactly so.
struct QueryTerms {
  float lse, delta, factor;
};

// Queries and output gradients of every row and KV head, stacked.
struct Stacked {
  float* q;           // [batch, kv_heads, queries · group, padded]
  float* dout;        // the same
  QueryTerms* terms;  // [batch, kv_heads, queries · group]
  uint8_t* finite;    // [batch, kv_heads, blocks] whether all of a block's q and dout are
};

// A tile of a row of a bank and the query blocks that see some of it.
struct KeyTile {
  int32_t bank;
  int64_t tile, first_block, last_block;
  int64_t pairs;
};

// A run of one row's key tiles, for one KV head: the owner of these keys' gradients, and of its own part of
// dq.
struct KeyUnit {
  int64_t row;
  int32_t head;
  size_t first, last;  // key_tiles[row], last exclusive
  int64_t begin, end;  // query positions
  int64_t pairs;
  float* dq;  // [(end - begin) · group, padded]
};

struct BackwardPlan {
  const AttentionCall& call;
  const ops::AttentionBackwardArgs& args;
  int64_t block;  // query positions of a block
  Stacked stacked;
  std::vector<Span> block_spans;                // [bank_count, batch, blocks] what a block sees
  std::vector<std::vector<KeyTile>> key_tiles;  // by row, bank after bank
  std::vector<KeyUnit> units;                   // by row, KV head, group
  std::vector<size_t> first_units;              // [batch · kv_heads + 1]

  int64_t blocks() const { return ceil_div(call.args.queries, block); }
  int64_t stack_rows() const { return call.args.queries * call.group; }
  uint8_t& finite(int64_t row, int64_t head, int64_t b) const {
    return stacked.finite[(row * call.args.kv_heads + head) * blocks() + b];
  }
  int64_t stack(int64_t row, int64_t head) const { return (row * call.args.kv_heads + head) * stack_rows(); }
  Span block_span(int32_t bank, int64_t row, int64_t b) const {
    return block_spans[static_cast<size_t>((bank * call.args.batch + row) * blocks() + b)];
  }
};

Span tile_span(int64_t tile) {
  return {static_cast<int32_t>(tile * kTile), static_cast<int32_t>((tile + 1) * kTile)};
}

}  // namespace
}  // namespace duokv::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

// Stacks query block b of one row and KV head and computes its terms.
void stack_block(const BackwardPlan& plan, int64_t row, int64_t head, int64_t b) {
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  const F f;
  const int64_t head_dim = args.head_dim, padded = call.padded;
  const int64_t end = std::min(args.queries, (b + 1) * plan.block);
  for (int64_t t = b * plan.block; t < end; ++t) {
    int64_t seen = 0;
    for (int32_t bank = 0; bank < args.bank_count; ++bank) seen += call.visible(bank, row, t).size();
    for (int64_t h = 0; h < call.group; ++h) {
      const int64_t r = plan.stack(row, head) + t * call.group + h;
      const int64_t offset = call.query_offset(row, t, head) + h * head_dim;
      float* dout = plan.stacked.dout + r * padded;
      copy_padded(args.q + offset, head_dim, padded, call.bf16, plan.stacked.q + r * padded);
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
      plan.stacked.terms[r] = {lse, delta, seen == 1 ? 0.0f : 1.0f};
    }
  }
  const int64_t first = (plan.stack(row, head) + b * plan.block * call.group) * padded,
                floats = (end - b * plan.block) * call.group * padded;
  plan.finite(row, head, b) =
      all_finite(plan.stacked.q + first, floats) && all_finite(plan.stacked.dout + first, floats);
}

// One tile of keys as right operands, and its gradients.
struct TileBuffers {
  float* keys;               // [kTile, padded]
  float* keys_transposed;    // panels [head_dim, panel_width]
  float* values_transposed;  // the same
  float* dk;                 // [kTile, padded]
  float* dv;                 // the same
  float* p;                  // [rows, kTile]
  float* ds;                 // the same
  bool finite;               // whether all keys are
};

// A row's P and dS from raw products s and dp, in columns [begin, end) of the tile, zero outside of [first,
// last).
template <bool kRound>
HWY_INLINE void score_gradients(float* HWY_RESTRICT s, float* HWY_RESTRICT dp, int64_t begin, int64_t end,
                                int64_t first, int64_t last, float scale, float bias,
                                const QueryTerms& terms) {
  const F f;
  const V scales = hn::Set(f, scale), biases = hn::Set(f, bias), lse = hn::Set(f, terms.lse);
  const V delta = hn::Set(f, terms.delta), factor = hn::Set(f, terms.factor), zero = hn::Zero(f);
  for_columns(begin, end, first, last, [&](int64_t c, auto keep) HWY_ATTR {
    V p = exp_of_score(hn::Sub(hn::MulAdd(hn::LoadU(f, s + c), scales, biases), lse));
    V ds = keep(hn::Mul(hn::Mul(p, hn::Sub(hn::LoadU(f, dp + c), delta)), factor), zero);
    p = keep(p, zero);
    if constexpr (kRound) p = round_to_bf16(f, p), ds = round_to_bf16(f, ds);
    hn::StoreU(p, f, s + c);
    hn::StoreU(ds, f, dp + c);
  });
}

// C [rows, padded] += left · right [steps, padded].
HWY_INLINE void accumulate(int64_t rows, Left<float> left, const float* right, int64_t padded, int64_t steps,
                           float* c) {
  multiply<Start::kAdd>(rows, left, Matrix<float>{right, padded}, padded, steps, c, padded);
}

// A tile of keys against query block b: adds to the tile's dk, dv and to dq [rows of the block, padded].
void differentiate_block(const BackwardPlan& plan, const KeyUnit& unit, const KeyTile& tile, int64_t b,
                         const TileBuffers& buffers, float* dq) {
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  const int64_t head_dim = args.head_dim, padded = call.padded, width = panel_width();
  const int64_t begin_position = b * plan.block,
                end_position = std::min(args.queries, begin_position + plan.block);
  const int64_t rows = (end_position - begin_position) * call.group;
  const int64_t stack = plan.stack(unit.row, unit.head) + begin_position * call.group;
  const float* q = plan.stacked.q + stack * padded;
  const float* dout = plan.stacked.dout + stack * padded;
  const QueryTerms* terms = plan.stacked.terms + stack;
  const auto origin = static_cast<int32_t>(tile.tile * kTile);

  // The rows that see some of each group of kBlockRows keys.
  int64_t first_row[kTile / kBlockRows], last_row[kTile / kBlockRows];
  std::fill_n(first_row, kTile / kBlockRows, rows);
  std::fill_n(last_row, kTile / kBlockRows, 0);

  for (int64_t r0 = 0; r0 < rows; r0 += kBlockRows) {
    const int64_t count = std::min<int64_t>(kBlockRows, rows - r0);
    Span columns, own[kBlockRows];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t t = begin_position + (r0 + r) / call.group;
      const Span s = intersect(call.visible(tile.bank, unit.row, t), tile_span(tile.tile));
      own[r] = s.empty() ? Span{} : Span{s.begin - origin, s.end - origin};
      columns = unite(columns, own[r]);
    }
    float* p = buffers.p + r0 * kTile;
    float* ds = buffers.ds + r0 * kTile;
    const int64_t begin = columns.begin / width * width, end = std::min(kTile, round_up(columns.end, width));
    const auto scores = [&](const float* rows_of_block, const float* transposed, float* c) HWY_ATTR {
      multiply<Start::kZero>(count, Left<float>{rows_of_block + r0 * padded, padded, 1},
                             Panels<float>{transposed + begin * head_dim, head_dim}, end - begin, head_dim,
                             c + begin, kTile);
    };
    scores(q, buffers.keys_transposed, p);
    scores(dout, buffers.values_transposed, ds);
    for (int64_t r = 0; r < count; ++r) {
      float* row_p = p + r * kTile;
      float* row_ds = ds + r * kTile;
      // Other rows may have every column of this one read.
      std::fill(row_p, row_p + begin, 0.0f), std::fill(row_p + end, row_p + kTile, 0.0f);
      std::fill(row_ds, row_ds + begin, 0.0f), std::fill(row_ds + end, row_ds + kTile, 0.0f);
      const float bias = call.bias(tile.bank, unit.row, begin_position + (r0 + r) / call.group);
      const auto run = call.bf16 ? score_gradients<true> : score_gradients<false>;
      run(row_p, row_ds, begin, end, own[r].begin, own[r].end, args.scale, bias, terms[r0 + r]);
    }
    if (columns.empty()) continue;
    for (int64_t g = columns.begin / kBlockRows; g * kBlockRows < columns.end; ++g) {
      first_row[g] = std::min(first_row[g], r0);
      last_row[g] = r0 + count;
    }
    const auto add_keys = [&](int64_t r, int64_t rows_added, Span seen) HWY_ATTR {
      accumulate(rows_added, Left<float>{ds + r * kTile + seen.begin, kTile, 1}, buffers.keys + seen.begin * padded,
                 padded, seen.size(), dq + (r0 + r) * padded);
    };
    if (buffers.finite) {
      add_keys(0, count, columns);
      continue;
    }
    // 0 · inf is NaN: a row must not meet keys it does not see.
    for (int64_t r = 0; r < count; ++r) {
      if (!own[r].empty()) add_keys(r, 1, own[r]);
    }
  }

  for (int64_t g = 0; g < kTile / kBlockRows; ++g) {
    const int64_t key = g * kBlockRows, first = first_row[g], steps = last_row[g] - first;
    if (steps <= 0) continue;
    const auto add_rows = [&](int64_t k, int64_t keys_added, int64_t r, int64_t rows_added) HWY_ATTR {
      accumulate(keys_added, Left<float>{buffers.p + r * kTile + k, 1, kTile}, dout + r * padded, padded, rows_added,
                 buffers.dv + k * padded);
      accumulate(keys_added, Left<float>{buffers.ds + r * kTile + k, 1, kTile}, q + r * padded, padded, rows_added,
                 buffers.dk + k * padded);
    };
    if (plan.finite(unit.row, unit.head, b)) {
      add_rows(key, kBlockRows, first, steps);
      continue;
    }
    // Likewise a key and rows that do not see it. Those that do are consecutive.
    for (int64_t k = key; k < key + kBlockRows; ++k) {
      int64_t begin = last_row[g], end = 0;
      for (int64_t r = first; r < last_row[g]; ++r) {
        const Span s = call.visible(tile.bank, unit.row, begin_position + r / call.group);
        if (s.begin <= origin + k && origin + k < s.end) begin = std::min(begin, r), end = r + 1;
      }
      if (begin < end) add_rows(k, 1, begin, end - begin);
    }
  }
}

// Adds a finished tile to the bank's gradients.
void add_gradients(const BackwardPlan& plan, const KeyUnit& unit, const KeyTile& tile,
                   const TileBuffers& buffers) {
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  const ops::BankGradient& gradient = plan.args.grads[tile.bank];
  const Span stored = call.stored(tile.bank, unit.row), span = intersect(tile_span(tile.tile), stored);
  for (int64_t p = span.begin; p < span.end; ++p) {
    const int64_t entry = unit.row * stored.size() + p - stored.begin;
    const int64_t offset = (entry * args.kv_heads + unit.head) * args.head_dim;
    const float* dk = buffers.dk + (p - tile.tile * kTile) * call.padded;
    const float* dv = buffers.dv + (p - tile.tile * kTile) * call.padded;
    for (int64_t i = 0; i < args.head_dim; ++i) {
      gradient.dk[offset + i] += args.scale * dk[i];
      gradient.dv[offset + i] += dv[i];
    }
  }
}

void differentiate_unit(const BackwardPlan& plan, const KeyUnit& unit, float* scratch) {
  const AttentionCall& call = plan.call;
  const ops::AttentionArgs& args = call.args;
  const int64_t tile_floats = kTile * call.padded, score_floats = plan.block * call.group * kTile;
  TileBuffers buffers;
  const auto carve = [&](float*& pointer, int64_t floats) {
    pointer = scratch;
    scratch += floats;
  };
  carve(buffers.keys, tile_floats);
  carve(buffers.keys_transposed, tile_floats);
  carve(buffers.values_transposed, tile_floats);
  carve(buffers.dk, tile_floats);
  carve(buffers.dv, tile_floats);
  carve(buffers.p, score_floats);
  carve(buffers.ds, score_floats);

  std::fill_n(unit.dq, (unit.end - unit.begin) * call.group * call.padded, 0.0f);
  for (size_t i = unit.first; i < unit.last; ++i) {
    const KeyTile& tile = plan.key_tiles[static_cast<size_t>(unit.row)][i];
    const ops::Bank& bank = args.banks[tile.bank];
    const Span span = tile_span(tile.tile);
    // dv holds the values until they are transposed.
    copy_entries(Entries(bank, unit.row, unit.head, true), span, args.head_dim, call.padded, call.bf16,
                 buffers.dv);
    pack_transposed(buffers.dv, kTile, args.head_dim, call.padded, buffers.values_transposed);
    copy_entries(Entries(bank, unit.row, unit.head, false), span, args.head_dim, call.padded, call.bf16,
                 buffers.keys);
    pack_transposed(buffers.keys, kTile, args.head_dim, call.padded, buffers.keys_transposed);
    buffers.finite = all_finite(buffers.keys, tile_floats);
    std::fill_n(buffers.dk, tile_floats, 0.0f);
    std::fill_n(buffers.dv, tile_floats, 0.0f);
    for (int64_t b = tile.first_block; b <= tile.last_block; ++b) {
      if (intersect(plan.block_span(tile.bank, unit.row, b), span).empty()) continue;
      float* dq = unit.dq + (b * plan.block - unit.begin) * call.group * call.padded;
      differentiate_block(plan, unit, tile, b, buffers, dq);
    }
    add_gradients(plan, unit, tile, buffers);
  }
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

HWY_EXPORT(stack_block);
HWY_EXPORT(differentiate_unit);
HWY_EXPORT(merge_block);

// The row's key tiles that some query sees, with their numbers of visible pairs.
std::vector<KeyTile> plan_tiles(const BackwardPlan& plan, int64_t row) {
  const AttentionCall& call = plan.call;
  std::vector<KeyTile> tiles;
  for (int32_t bank = 0; bank < call.args.bank_count; ++bank) {
    const Span seen = call.visible(bank, row, 0, call.args.queries);
    if (seen.empty()) continue;
    const int64_t first = seen.begin / kTile, last = ceil_div(seen.end, kTile);
    const auto base = tiles.size();
    for (int64_t tile = first; tile < last; ++tile) tiles.push_back({bank, tile, plan.blocks(), -1, 0});
    for (int64_t t = 0; t < call.args.queries; ++t) {
      const Span span = call.visible(bank, row, t);
      if (span.empty()) continue;
      for (int64_t tile = span.begin / kTile; tile * kTile < span.end; ++tile) {
        KeyTile& key_tile = tiles[base + static_cast<size_t>(tile - first)];
        key_tile.first_block = std::min(key_tile.first_block, t / plan.block);
        key_tile.last_block = std::max(key_tile.last_block, t / plan.block);
        key_tile.pairs += intersect(span, tile_span(tile)).size();
      }
    }
    tiles.erase(std::remove_if(tiles.begin() + static_cast<std::ptrdiff_t>(base), tiles.end(),
                               [](const KeyTile& tile) { return tile.pairs == 0; }),
                tiles.end());
  }
  return tiles;
}

// Cuts a row's tiles into `groups` runs of about equal work, for every KV head.
void plan_units(BackwardPlan& plan, int64_t row, int64_t groups) {
  const ops::AttentionArgs& args = plan.call.args;
  const std::vector<KeyTile>& tiles = plan.key_tiles[static_cast<size_t>(row)];
  int64_t total = 0;
  for (const KeyTile& tile : tiles) total += tile.pairs;
  std::vector<KeyUnit> cuts;
  int64_t done = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const auto cut_count = static_cast<int64_t>(cuts.size());
    if (cuts.empty() || done * groups >= total * cut_count) {
      cuts.push_back({row, 0, i, i, args.queries, 0, 0, nullptr});
    }
    KeyUnit& unit = cuts.back();
    unit.last = i + 1;
    unit.begin = std::min(unit.begin, tiles[i].first_block * plan.block);
    unit.end = std::max(unit.end, std::min(args.queries, (tiles[i].last_block + 1) * plan.block));
    unit.pairs += tiles[i].pairs;
    done += tiles[i].pairs;
  }
  for (int32_t head = 0; head < args.kv_heads; ++head) {
    plan.first_units.push_back(plan.units.size());
    for (KeyUnit unit : cuts) {
      unit.head = head;
      plan.units.push_back(unit);
    }
  }
}

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
    BackwardPlan plan{call, *backward, std::max<int64_t>(1, kBlockRowsTarget / call.group), {}, {}, {},
                      {},   {}};
    for (int32_t bank = 0; bank < args.bank_count; ++bank) {
      for (int64_t row = 0; row < args.batch; ++row) {
        for (int64_t b = 0; b < plan.blocks(); ++b) {
          const int64_t end = std::min(args.queries, (b + 1) * plan.block);
          plan.block_spans.push_back(call.visible(bank, row, b * plan.block, end));
        }
      }
    }
    const int64_t groups = ceil_div(kUnitsWanted, std::max<int64_t>(1, args.batch * args.kv_heads));
    for (int64_t row = 0; row < args.batch; ++row) {
      plan.key_tiles.push_back(plan_tiles(plan, row));
      plan_units(plan, row, groups);
    }
    plan.first_units.push_back(plan.units.size());

    const int64_t rows = args.batch * args.kv_heads * plan.stack_rows();
    std::vector<uint8_t> finite(static_cast<size_t>(args.batch * args.kv_heads * plan.blocks()));
    int64_t dq_rows = 0;
    for (const KeyUnit& unit : plan.units) dq_rows += (unit.end - unit.begin) * call.group;
    const int64_t term_floats = round_up(rows * 3, kPadding);
    float* memory = device->shared_scratch.take<float>((2 * rows + dq_rows) * call.padded + term_floats);
    plan.stacked = {memory, memory + rows * call.padded,
                    reinterpret_cast<QueryTerms*>(memory + 2 * rows * call.padded), finite.data()};
    memory += 2 * rows * call.padded + term_floats;
    for (KeyUnit& unit : plan.units) {
      unit.dq = memory;
      memory += (unit.end - unit.begin) * call.group * call.padded;
    }

    // Blocks of every row and KV head, in that order.
    const auto for_blocks = [&](auto&& body) {
      device->pool.run(args.batch * args.kv_heads * plan.blocks(), [&](int64_t chunk, int32_t) {
        const int64_t index = chunk / plan.blocks();
        body(index / args.kv_heads, index % args.kv_heads, chunk % plan.blocks());
      });
    };
    for_blocks([&](int64_t row, int64_t head, int64_t b) {
      HWY_DYNAMIC_DISPATCH(stack_block)(plan, row, head, b);
    });

    std::vector<size_t> order(plan.units.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return plan.units[a].pairs > plan.units[b].pairs; });
    const int64_t scratch_floats = 5 * kTile * call.padded + 2 * plan.block * call.group * kTile;
    device->reserve_workers<float>(scratch_floats);
    device->pool.run(static_cast<int64_t>(order.size()), [&](int64_t chunk, int32_t worker) {
      float* scratch = device->worker_scratch[static_cast<size_t>(worker)].take<float>(scratch_floats);
      HWY_DYNAMIC_DISPATCH(differentiate_unit)(plan, plan.units[order[static_cast<size_t>(chunk)]], scratch);
    });

    for_blocks([&](int64_t row, int64_t head, int64_t b) {
      HWY_DYNAMIC_DISPATCH(merge_block)(plan, row, head, b);
    });
  });
}

}  // namespace duokv::cpu
#endif
