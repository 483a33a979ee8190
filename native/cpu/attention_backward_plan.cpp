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

// The key tiles of a row of a bank that some query sees, with their numbers of visible pairs.
std::vector<KeyTile> plan_bank(const BackwardPlan& plan, int32_t bank, int64_t row) {
  const AttentionCall& call = plan.call;
  const Span seen = call.visible(bank, row, 0, call.args.queries);
  if (seen.empty()) return {};
  const int64_t first = seen.begin / KeyTile::kKeys, last = ceil_div(seen.end, KeyTile::kKeys);
  std::vector<KeyTile> tiles;
  for (int64_t tile = first; tile < last; ++tile) tiles.push_back({bank, tile, plan.blocks(), -1, 0, {}});
  const auto index = [&](int64_t tile) { return static_cast<size_t>(tile - first); };
  // Work per query and tile would be quadratic in a row's length: a tile's blocks are noted where it comes
  // into sight and where it leaves it, and inner tiles of a query's span, which are seen whole, are counted
  // where they begin and end.
  const auto for_each_only_in = [&](Span a, Span b, auto note) {
    for (int64_t tile = a.begin; tile < std::min(a.end, b.begin); ++tile) note(tiles[index(tile)]);
    for (int64_t tile = std::max(a.begin, b.end); tile < a.end; ++tile) note(tiles[index(tile)]);
  };
  std::vector<int64_t> whole(index(last) + 1, 0);
  Span in_sight;  // tiles that the query before sees
  int64_t last_block = -1;
  const auto leave = [&](KeyTile& tile) { tile.last_block = std::max(tile.last_block, last_block); };
  for (int64_t t = 0; t < call.args.queries; ++t) {
    const Span span = call.visible(bank, row, t);
    if (span.empty()) continue;
    const int64_t begin = span.begin / KeyTile::kKeys, end = ceil_div(span.end, KeyTile::kKeys);
    const Span now{static_cast<int32_t>(begin), static_cast<int32_t>(end)};
    const int64_t block = t / plan.block;
    for_each_only_in(in_sight, now, leave);
    for_each_only_in(now, in_sight,
                     [&](KeyTile& tile) { tile.first_block = std::min(tile.first_block, block); });
    in_sight = now, last_block = block;
    const auto see = [&](KeyTile& key_tile) {
      const Span seen_of_tile = intersect(span, key_tile.span());
      key_tile.pairs += seen_of_tile.size();
      key_tile.seen = unite(key_tile.seen, seen_of_tile);
    };
    see(tiles[index(begin)]);
    if (end - begin == 1) continue;
    see(tiles[index(end - 1)]);
    ++whole[index(begin + 1)];
    --whole[index(end - 1)];
  }
  for_each_only_in(in_sight, {}, leave);
  int64_t queries = 0;
  for (KeyTile& key_tile : tiles) {
    queries += whole[index(key_tile.tile)];
    if (queries == 0) continue;
    key_tile.pairs += queries * KeyTile::kKeys;
    key_tile.seen = key_tile.span();
  }
  tiles.erase(std::remove_if(tiles.begin(), tiles.end(), [](const KeyTile& tile) { return tile.pairs == 0; }),
              tiles.end());
  return tiles;
}

// The row's key tiles, bank after bank.
std::vector<KeyTile> plan_tiles(const BackwardPlan& plan, int64_t row) {
  std::vector<KeyTile> tiles;
  for (int32_t bank = 0; bank < plan.call.args.bank_count; ++bank) {
    const std::vector<KeyTile> of_bank = plan_bank(plan, bank, row);
    tiles.insert(tiles.end(), of_bank.begin(), of_bank.end());
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
