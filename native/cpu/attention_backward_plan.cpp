#include "cpu/attention_backward_plan.h"

#include <algorithm>
#include <cstddef>

namespace duokv::cpu {

namespace {

// Rows of a query block, about.
constexpr int64_t kBlockRowsTarget = 96;

// With fewer rows and KV heads than this, each of them is cut into groups of key tiles, so that many cores
// find work.
constexpr int64_t kUnitsWanted = 32;

// The row's key tiles that some query sees, with their numbers of visible pairs.
std::vector<KeyTile> plan_tiles(const BackwardPlan& plan, int64_t row) {
  const AttentionCall& call = plan.call;
  std::vector<KeyTile> tiles;
  for (int32_t bank = 0; bank < call.args.bank_count; ++bank) {
    const Span seen = call.visible(bank, row, 0, call.args.queries);
    if (seen.empty()) continue;
    const int64_t first = seen.begin / KeyTile::kKeys, last = ceil_div(seen.end, KeyTile::kKeys);
    const auto base = tiles.size();
    for (int64_t tile = first; tile < last; ++tile) tiles.push_back({bank, tile, plan.blocks(), -1, 0, {}});
    for (int64_t t = 0; t < call.args.queries; ++t) {
      const Span span = call.visible(bank, row, t);
      if (span.empty()) continue;
      for (int64_t tile = span.begin / KeyTile::kKeys; tile * KeyTile::kKeys < span.end; ++tile) {
        KeyTile& key_tile = tiles[base + static_cast<size_t>(tile - first)];
        key_tile.first_block = std::min(key_tile.first_block, t / plan.block);
        key_tile.last_block = std::max(key_tile.last_block, t / plan.block);
        const Span seen_of_tile = intersect(span, key_tile.span());
        key_tile.pairs += seen_of_tile.size();
        key_tile.seen = unite(key_tile.seen, seen_of_tile);
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

BackwardPlan::BackwardPlan(const AttentionCall& attention, const ops::AttentionBackwardArgs& arguments,
                           int64_t values)
    : call(attention),
      args(arguments),
      block(std::max<int64_t>(1, kBlockRowsTarget / attention.group)),
      step_values(values) {
  const ops::AttentionArgs& forward = call.args;
  for (int32_t bank = 0; bank < forward.bank_count; ++bank) {
    for (int64_t row = 0; row < forward.batch; ++row) {
      for (int64_t b = 0; b < blocks(); ++b) {
        const int64_t end = std::min(forward.queries, (b + 1) * block);
        block_spans.push_back(call.visible(bank, row, b * block, end));
      }
    }
  }
  const int64_t groups = ceil_div(kUnitsWanted, std::max<int64_t>(1, forward.batch * forward.kv_heads));
  for (int64_t row = 0; row < forward.batch; ++row) {
    key_tiles.push_back(plan_tiles(*this, row));
    plan_units(*this, row, groups);
  }
  first_units.push_back(units.size());
}

}  // namespace duokv::cpu
