#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/attention.h"
#include "cpu/device.h"
#include "cpu/operations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_forward.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/attention_tiles-inl.h"

#ifndef DUOKV_CPU_ATTENTION_FORWARD_
#define DUOKV_CPU_ATTENTION_FORWARD_
namespace duokv::cpu {
namespace {

// Tile i of a bank holds positions i · kTile … The size is part of the result: weights are relative to the
// largest score up to the end of a tile. It is a multiple of every panel width.
constexpr int64_t kTile = 256;

// Rows of a work unit: enough that a tile, read from the second-level cache, serves many rows. Twice as many
// where kManyUnits such units are left: the tiles come from farther off than that.
constexpr int64_t kUnitRows = 96, kManyUnits = 64;

Span tile_span(int64_t tile) {
  return {static_cast<int32_t>(tile * kTile), static_cast<int32_t>((tile + 1) * kTile)};
}

// The tiles of one row of a bank that some query sees, packed for each KV head.
struct PackedRow {
  Span needed;  // what the row's queries see
  int64_t first_tile = 0, tiles = 0;
  float* data = nullptr;      // [kv_heads, tiles] of keys and values, FP32 or pairs of BF16
  uint8_t* finite = nullptr;  // [kv_heads, tiles] whether all values are
};

struct PackedBanks {
  const AttentionCall& call;
  int64_t step_values;          // of a step of a product: 1, or 2 where it is of BF16 pairs
  std::vector<PackedRow> rows;  // [bank_count, batch]

  const PackedRow& row(int32_t bank, int64_t r) const {
    return rows[static_cast<size_t>(bank * call.args.batch + r)];
  }
  // The steps of a product with keys, and of one with a tile's values.
  int64_t key_steps() const { return ceil_div(call.args.head_dim, step_values); }
  int64_t value_steps() const { return kTile / step_values; }
  int64_t tile_words() const { return kTile * key_steps() + value_steps() * call.padded; }
  // Keys, transposed: panels [key_steps, panel_width]. Values: panels [value_steps, panel_width], the last
  // one narrower.
  template <class T>
  T* keys(const PackedRow& r, int64_t head, int64_t tile) const {
    return reinterpret_cast<T*>(r.data) + (head * r.tiles + tile - r.first_tile) * tile_words();
  }
  template <class T>
  T* values(const PackedRow& r, int64_t head, int64_t tile) const {
    return keys<T>(r, head, tile) + kTile * key_steps();
  }
  uint8_t& finite(const PackedRow& r, int64_t head, int64_t tile) const {
    return r.finite[head * r.tiles + tile - r.first_tile];
  }
};

struct PackUnit {
  int32_t bank, head;
  int64_t row, tile;
};

// Query positions begin … end-1 of one row, for one KV head.
struct QueryUnit {
  int64_t row, begin, end;
  int32_t head;
  int64_t pairs;  // visible pairs of a query head
};

// The state of a unit's rows in one bank.
struct UnitPart {
  Span* spans;       // [rows] what each row sees
  Running* running;  // [rows] of products
  float* sums;       // [rows, padded]
};

// What a unit computes with, laid out in `bytes` bytes of memory; without memory it only counts them.
struct UnitMemory {
  UnitMemory(const AttentionCall& call, int64_t rows, std::byte* memory) {
    const auto carve = [&]<class T>(T*& pointer, int64_t count) {
      pointer = memory ? reinterpret_cast<T*>(memory + bytes) : nullptr;
      bytes += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    };
    carve(queries, rows * call.padded);
    carve(scores, kMostBlockRows * kTile);
    for (int32_t bank = 0; bank < call.args.bank_count; ++bank) {
      carve(parts[bank].spans, rows);
      carve(parts[bank].running, rows);
      carve(parts[bank].sums, rows * call.padded);
    }
  }

  float* queries;  // [rows, padded]; pairs take the first half of a row
  float* scores;   // [kMostBlockRows, kTile]; likewise the weights made of them
  UnitPart parts[2];
  int64_t bytes = 0;
};

}  // namespace
}  // namespace duokv::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

// scratch: kTile · padded floats.
template <class T>
void pack_tile_as(const PackedBanks& packed, const PackUnit& unit, float* scratch) {
  const AttentionCall& call = packed.call;
  const ops::Bank& bank = call.args.banks[unit.bank];
  const PackedRow& row = packed.row(unit.bank, unit.row);
  const int64_t head_dim = call.args.head_dim, padded = call.padded, width = panel_width();
  // Whole key panels, so that only what products read is written.
  const int64_t origin = unit.tile * kTile;
  const Span needed = intersect(tile_span(unit.tile), row.needed);
  const int64_t begin = (needed.begin - origin) / width * width, end = round_up(needed.end - origin, width);
  const Span span = {static_cast<int32_t>(origin + begin), static_cast<int32_t>(origin + end)};

  copy_entries(Entries(bank, unit.row, unit.head, false), span, head_dim, padded, call.bf16, scratch);
  T* keys = reinterpret_cast<T*>(scratch);
  pair_columns(scratch, end - begin, padded, padded, keys, padded);
  pack_transposed(keys, end - begin, packed.key_steps(), padded,
                  packed.keys<T>(row, unit.head, unit.tile) + begin * packed.key_steps());

  copy_entries(Entries(bank, unit.row, unit.head, true), span, head_dim, padded, call.bf16, scratch);
  T* values = packed.values<T>(row, unit.head, unit.tile);
  for (int64_t column = 0; column < padded; column += width) {
    const int64_t w = std::min(width, padded - column);
    pair_rows(scratch + column, end - begin, w, padded,
              values + column * packed.value_steps() + begin / kStepValues<T> * w, w);
  }
  packed.finite(row, unit.head, unit.tile) = all_finite(scratch, (end - begin) * padded);
}

void pack_tile(const PackedBanks& packed, const PackUnit& unit, float* scratch) {
  with_operands(packed.step_values, [&]<class T>(T) HWY_ATTR { pack_tile_as<T>(packed, unit, scratch); });
}

// One tile of keys against all rows of a unit.
template <class T>
void attend_tile(const PackedBanks& packed, const QueryUnit& unit, int32_t bank, int64_t tile,
                 const UnitMemory& memory) {
  const UnitPart& part = memory.parts[bank];
  const auto* queries = reinterpret_cast<const T*>(memory.queries);
  float* scores = memory.scores;
  const AttentionCall& call = packed.call;
  const PackedRow& packed_row = packed.row(bank, unit.row);
  const T* keys = packed.keys<T>(packed_row, unit.head, tile);
  const Panels<T> values{packed.values<T>(packed_row, unit.head, tile), packed.value_steps()};
  const bool finite = packed.finite(packed_row, unit.head, tile);
  const int64_t padded = call.padded, width = panel_width(), key_steps = packed.key_steps();
  const int64_t origin = tile * kTile, rows = (unit.end - unit.begin) * call.group;

  for (int64_t r0 = 0; r0 < rows; r0 += kBlockRows) {
    const int64_t count = std::min<int64_t>(kBlockRows, rows - r0);
    // Only the columns that one of these rows sees are computed; the others would add zeros.
    Span columns;
    bool same = true;
    Span own[kBlockRows];
    for (int64_t r = 0; r < count; ++r) {
      const Span s = intersect(part.spans[r0 + r], tile_span(tile));
      own[r] = s.empty() ? Span{}
                         : Span{static_cast<int32_t>(s.begin - origin), static_cast<int32_t>(s.end - origin)};
      columns = unite(columns, own[r]);
      same = same && own[r].begin == own[0].begin && own[r].end == own[0].end;
    }
    if (columns.empty()) continue;

    const int64_t begin = columns.begin / width * width, end = round_up(columns.end, width);
    multiply<Start::kZero>(count, Left<T>{queries + r0 * padded, padded, 1},
                           Panels<T>{keys + begin * key_steps, key_steps}, end - begin, key_steps,
                           scores + begin, kTile);
    float factors[kRowLanes] = {};
    softmax_block<T>(call, count, columns, own, scores, kTile, part.running + r0, factors);
    const T* weights = reinterpret_cast<const T*>(scores);
    // Pairs are of absolute positions; a partner that is not seen has no weight.
    const int64_t first = columns.begin / kStepValues<T>, last = ceil_div(columns.end, kStepValues<T>);
    same = same && columns.begin % kStepValues<T> == 0 && columns.end % kStepValues<T> == 0;
    float* sums = part.sums + r0 * padded;
    if (finite || same) {
      multiply<Start::kScale>(count, Left<T>{weights + first, kTile, 1}, values.from(first), padded,
                              last - first, sums, padded, factors);
      continue;
    }
    // 0 · inf is NaN: a row must not meet values it does not see.
    for (int64_t r = 0; r < count; ++r) {
      if (own[r].empty()) continue;
      for (int64_t i = 0; i < padded; ++i) sums[r * padded + i] *= factors[r];
      multiply_some(Left<T>{weights + r * kTile, kTile, 1}, values, padded, own[r].begin, own[r].end,
                    sums + r * padded);
    }
  }
}

template <class T>
void attend_unit_as(const PackedBanks& packed, const QueryUnit& unit, std::byte* scratch) {
  const AttentionCall& call = packed.call;
  const ops::AttentionArgs& args = call.args;
  const int64_t head_dim = args.head_dim, rows = (unit.end - unit.begin) * call.group;
  const UnitMemory memory(call, rows, scratch);
  float* query = memory.queries;
  for (int64_t t = unit.begin; t < unit.end; ++t) {
    prefetch(args.q + call.query_offset(unit.row, std::min(t + 4, args.queries - 1), unit.head),
             call.group * head_dim);
    const float* q = args.q + call.query_offset(unit.row, t, unit.head);
    for (int64_t h = 0; h < call.group; ++h, q += head_dim, query += call.padded)
      copy_padded(q, head_dim, call.padded, call.bf16, query);
  }
  pair_columns(memory.queries, rows, call.padded, call.padded, reinterpret_cast<T*>(memory.queries),
               call.padded);

  for (int32_t bank = 0; bank < args.bank_count; ++bank) {
    const UnitPart& part = memory.parts[bank];
    std::fill_n(part.running, rows, Running{});
    std::fill_n(part.sums, rows * call.padded, 0.0f);
    Span all;
    for (int64_t t = unit.begin, r = 0; t < unit.end; ++t, r += call.group) {
      const Span seen = call.visible(bank, unit.row, t);
      std::fill_n(part.spans + r, call.group, seen);
      all = unite(all, seen);
    }
    if (all.empty()) continue;
    for (int64_t tile = all.begin / kTile; tile * kTile < all.end; ++tile) {
      attend_tile<T>(packed, unit, bank, tile, memory);
    }
  }

  const int64_t lse_stride = args.batch * args.queries * args.query_heads;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t t = unit.begin + r / call.group, head = r % call.group;
    BankPart finished[2];
    for (int32_t bank = 0; bank < args.bank_count; ++bank) {
      const UnitPart& part = memory.parts[bank];
      const Running running = call.scores(part.running[r], call.bias(bank, unit.row, t));
      finished[bank] = {!part.spans[r].empty(), running, part.sums + r * call.padded};
    }
    float* lse = args.lse ? args.lse + call.lse_offset(0, unit.row, t, unit.head) + head : nullptr;
    finish_query(finished, args.bank_count, head_dim,
                 args.out + call.query_offset(unit.row, t, unit.head) + head * head_dim, lse, lse_stride);
  }
}

void attend_unit(const PackedBanks& packed, const QueryUnit& unit, std::byte* scratch) {
  with_operands(packed.step_values, [&]<class T>(T) HWY_ATTR { attend_unit_as<T>(packed, unit, scratch); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(step_values);
HWY_EXPORT(pack_tile);
HWY_EXPORT(attend_unit);

void tiled_attention(Device* device, const AttentionCall& call) {
  const ops::AttentionArgs& args = call.args;
  const int64_t large_units = args.batch * args.kv_heads * (args.queries * call.group / (2 * kUnitRows));
  const int64_t unit_rows = large_units < kManyUnits ? kUnitRows : 2 * kUnitRows;
  const int64_t positions = std::max<int64_t>(1, unit_rows / call.group);

  PackedBanks packed{call, HWY_DYNAMIC_DISPATCH(step_values)(call), {}};
  int64_t tiles = 0;
  for (int32_t bank = 0; bank < args.bank_count; ++bank) {
    for (int64_t row = 0; row < args.batch; ++row) {
      PackedRow r;
      r.needed = call.visible(bank, row, 0, args.queries);
      if (!r.needed.empty()) {
        r.first_tile = r.needed.begin / kTile;
        r.tiles = ceil_div(r.needed.end, kTile) - r.first_tile;
      }
      tiles += r.tiles * args.kv_heads;
      packed.rows.push_back(r);
    }
  }
  std::vector<uint8_t> finite(static_cast<size_t>(tiles));
  float* data = device->shared_scratch.take<float>(tiles * packed.tile_words());
  std::vector<PackUnit> pack_units;
  int64_t offset = 0;
  for (int32_t bank = 0; bank < args.bank_count; ++bank) {
    for (int64_t row = 0; row < args.batch; ++row) {
      PackedRow& r = packed.rows[static_cast<size_t>(bank * args.batch + row)];
      r.data = data + offset * packed.tile_words();
      r.finite = finite.data() + offset;
      offset += r.tiles * args.kv_heads;
      for (int32_t head = 0; head < args.kv_heads; ++head) {
        for (int64_t tile = r.first_tile; tile < r.first_tile + r.tiles; ++tile) {
          pack_units.push_back({bank, head, row, tile});
        }
      }
    }
  }
  device->reserve_workers<float>(kTile * call.padded);
  device->pool.run(static_cast<int64_t>(pack_units.size()), [&](int64_t chunk, int32_t worker) {
    float* scratch = device->worker_scratch[static_cast<size_t>(worker)].take<float>(kTile * call.padded);
    HWY_DYNAMIC_DISPATCH(pack_tile)(packed, pack_units[static_cast<size_t>(chunk)], scratch);
  });

  std::vector<QueryUnit> units;
  for (int64_t row = 0; row < args.batch; ++row) {
    for (int64_t begin = 0; begin < args.queries; begin += positions) {
      const int64_t end = std::min(args.queries, begin + positions);
      int64_t pairs = 0;
      for (int64_t t = begin; t < end; ++t) {
        for (int32_t bank = 0; bank < args.bank_count; ++bank) pairs += call.visible(bank, row, t).size();
      }
      for (int32_t head = 0; head < args.kv_heads; ++head) units.push_back({row, begin, end, head, pairs});
    }
  }
  // The longest first, so that none is left running alone at the end.
  std::stable_sort(units.begin(), units.end(),
                   [](const QueryUnit& a, const QueryUnit& b) { return a.pairs > b.pairs; });

  const int64_t scratch_bytes = UnitMemory(call, positions * call.group, nullptr).bytes;
  device->reserve_workers<std::byte>(scratch_bytes);
  device->pool.run(static_cast<int64_t>(units.size()), [&](int64_t chunk, int32_t worker) {
    std::byte* scratch = device->worker_scratch[static_cast<size_t>(worker)].take<std::byte>(scratch_bytes);
    HWY_DYNAMIC_DISPATCH(attend_unit)(packed, units[static_cast<size_t>(chunk)], scratch);
  });
}

}  // namespace duokv::cpu
#endif
