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

// Rows of a work unit: enough that a tile, read from the second-level cache, serves many rows.
constexpr int64_t kUnitRows = 96;

// Rows whose scores exist at a time.
constexpr int64_t kScoreRows = 6;

Span tile_span(int64_t tile) {
  return {static_cast<int32_t>(tile * kTile), static_cast<int32_t>((tile + 1) * kTile)};
}

// The tiles of one row of a bank that some query sees, packed for each KV head.
struct PackedRow {
  Span needed;  // what the row's queries see
  int64_t first_tile = 0, tiles = 0;
  float* data = nullptr;      // [kv_heads, tiles] of keys and values
  uint8_t* finite = nullptr;  // [kv_heads, tiles] whether all values are
};

struct PackedBanks {
  const AttentionCall& call;
  std::vector<PackedRow> rows;  // [bank_count, batch]

  const PackedRow& row(int32_t bank, int64_t r) const {
    return rows[static_cast<size_t>(bank * call.args.batch + r)];
  }
  int64_t key_floats() const { return kTile * call.args.head_dim; }
  int64_t tile_floats() const { return key_floats() + kTile * call.padded; }
  // Keys, transposed: panels [head_dim, panel_width]. Values: panels [kTile, panel_width], the last one
  // narrower.
  float* keys(const PackedRow& r, int64_t head, int64_t tile) const {
    return r.data + (head * r.tiles + tile - r.first_tile) * tile_floats();
  }
  float* values(const PackedRow& r, int64_t head, int64_t tile) const {
    return keys(r, head, tile) + key_floats();
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
  Running* running;  // [rows]
  float* sums;       // [rows, padded]
};

// What a unit computes with, laid out in `bytes` bytes of memory; without memory it only counts them.
struct UnitMemory {
  UnitMemory(const AttentionCall& call, int64_t rows, std::byte* memory) {
    const auto carve = [&]<class T>(T*& pointer, int64_t count) {
      pointer = memory ? reinterpret_cast<T*>(memory + bytes) : nullptr;
      bytes += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    };
    carve(queries, rows * call.args.head_dim);
    carve(scores, kScoreRows * kTile);
    for (int32_t bank = 0; bank < call.args.bank_count; ++bank) {
      carve(parts[bank].spans, rows);
      carve(parts[bank].running, rows);
      carve(parts[bank].sums, rows * call.padded);
    }
  }

  float* queries;  // [rows, head_dim]
  float* scores;   // [kScoreRows, kTile]
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
void pack_tile(const PackedBanks& packed, const PackUnit& unit, float* scratch) {
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
  pack_transposed(scratch, end - begin, head_dim, padded,
                  packed.keys(row, unit.head, unit.tile) + begin * head_dim);

  copy_entries(Entries(bank, unit.row, unit.head, true), span, head_dim, padded, call.bf16, scratch);
  const F f;
  float* values = packed.values(row, unit.head, unit.tile);
  for (int64_t column = 0; column < padded; column += width) {
    const int64_t w = std::min(width, padded - column);
    float* dst = values + column * kTile + begin * w;
    for (int64_t key = 0; key < end - begin; ++key, dst += w) {
      for (int64_t i = 0; i < w; i += lane_count())
        hn::StoreU(hn::LoadU(f, scratch + key * padded + column + i), f, dst + i);
    }
  }
  packed.finite(row, unit.head, unit.tile) = all_finite(scratch, (end - begin) * padded);
}

// One tile of keys against all rows of a unit.
void attend_tile(const PackedBanks& packed, const QueryUnit& unit, int32_t bank, int64_t tile,
                 const UnitMemory& memory) {
  static_assert(kScoreRows == kBlockRows);
  const UnitPart& part = memory.parts[bank];
  const float* queries = memory.queries;
  float* scores = memory.scores;
  const AttentionCall& call = packed.call;
  const PackedRow& packed_row = packed.row(bank, unit.row);
  const float* keys = packed.keys(packed_row, unit.head, tile);
  const float* values = packed.values(packed_row, unit.head, tile);
  const bool finite = packed.finite(packed_row, unit.head, tile);
  const int64_t head_dim = call.args.head_dim, padded = call.padded, width = panel_width();
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
    multiply<Start::kZero>(count, Left{queries + r0 * head_dim, head_dim, 1},
                           Panels{keys + begin * head_dim, head_dim}, end - begin, head_dim, scores + begin,
                           kTile);
    float factors[kBlockRows];
    for (int64_t r = 0; r < count; ++r) {
      const float bias = call.bias(bank, unit.row, unit.begin + (r0 + r) / call.group);
      factors[r] = softmax_columns(call.bf16, scores + r * kTile, columns.begin, columns.end, own[r].begin,
                                   own[r].end, call.args.scale, bias, part.running[r0 + r]);
    }
    const auto add_values = [&](int64_t r, int64_t rows_added, Span weights) HWY_ATTR {
      multiply<Start::kScale>(rows_added, Left{scores + r * kTile + weights.begin, kTile, 1},
                              Panels{values, kTile, weights.begin}, padded, weights.size(),
                              part.sums + (r0 + r) * padded, padded, factors + r);
    };
    if (finite || same) {
      add_values(0, count, columns);
      continue;
    }
    // 0 · inf is NaN: a row must not meet values it does not see.
    for (int64_t r = 0; r < count; ++r) {
      if (!own[r].empty()) add_values(r, 1, own[r]);
    }
  }
}

void attend_unit(const PackedBanks& packed, const QueryUnit& unit, std::byte* scratch) {
  const AttentionCall& call = packed.call;
  const ops::AttentionArgs& args = call.args;
  const int64_t head_dim = args.head_dim, rows = (unit.end - unit.begin) * call.group;
  const UnitMemory memory(call, rows, scratch);
  for (int64_t t = unit.begin; t < unit.end; ++t) {
    copy_padded(args.q + call.query_offset(unit.row, t, unit.head), call.group * head_dim,
                call.group * head_dim, call.bf16, memory.queries + (t - unit.begin) * call.group * head_dim);
  }

  for (int32_t bank = 0; bank < args.bank_count; ++bank) {
    const UnitPart& part = memory.parts[bank];
    std::fill_n(part.running, rows, Running{});
    std::fill_n(part.sums, rows * call.padded, 0.0f);
    Span all;
    for (int64_t r = 0; r < rows; ++r) {
      part.spans[r] = call.visible(bank, unit.row, unit.begin + r / call.group);
      all = unite(all, part.spans[r]);
    }
    if (all.empty()) continue;
    for (int64_t tile = all.begin / kTile; tile * kTile < all.end; ++tile) {
      attend_tile(packed, unit, bank, tile, memory);
    }
  }

  const int64_t lse_stride = args.batch * args.queries * args.query_heads;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t t = unit.begin + r / call.group, head = r % call.group;
    BankPart finished[2];
    for (int32_t bank = 0; bank < args.bank_count; ++bank) {
      const UnitPart& part = memory.parts[bank];
      finished[bank] = {!part.spans[r].empty(), part.running[r], part.sums + r * call.padded};
    }
    float* lse = args.lse ? args.lse + call.lse_offset(0, unit.row, t, unit.head) + head : nullptr;
    finish_query(finished, args.bank_count, head_dim,
                 args.out + call.query_offset(unit.row, t, unit.head) + head * head_dim, lse, lse_stride);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(pack_tile);
HWY_EXPORT(attend_unit);

void tiled_attention(Device* device, const AttentionCall& call) {
  const ops::AttentionArgs& args = call.args;
  const int64_t positions = std::max<int64_t>(1, kUnitRows / call.group);

  PackedBanks packed{call, {}};
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
  float* data = device->shared_scratch.take<float>(tiles * packed.tile_floats());
  std::vector<PackUnit> pack_units;
  int64_t offset = 0;
  for (int32_t bank = 0; bank < args.bank_count; ++bank) {
    for (int64_t row = 0; row < args.batch; ++row) {
      PackedRow& r = packed.rows[static_cast<size_t>(bank * args.batch + row)];
      r.data = data + offset * packed.tile_floats();
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
