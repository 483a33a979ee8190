// Suffix lengths of every route by one backward walk over the plan (spec/execution.md section 1). The paper's
// Proposition 1 and its group form are tests of this walk.
#include <algorithm>

#include "core/error.h"
#include "core/plan.h"

namespace duokv {
namespace {

// Positions at the end of the prompt that are needed for the last `wanted` outputs of the last layer.
Suffixes walk(const Plan& plan, int64_t n) {
  const size_t layers = plan.layers.size();
  Suffixes s{std::vector<int64_t>(layers), std::vector<int64_t>(plan.projections.size()), true};
  std::vector<int64_t> need(layers + 1, 0);  // of each representation
  std::vector<int64_t> bank_need(plan.banks.size(), 0);
  need[layers] = 1;
  // Later calls read every full bank, whatever this one needs of it, and the last `window` entries of the
  // others.
  for (size_t b = 0; b < plan.banks.size(); ++b)
    bank_need[b] = plan.banks[b].window == 0 ? n : plan.banks[b].window;

  for (size_t i = layers; i-- > 0;) {
    const LayerPlan& layer = plan.layers[i];
    // The lower stack is always computed whole; without a global bank there is no such border.
    if (plan.has_global_bank && !layer.upper) need[i + 1] = n;
    s.query[i] = std::min(n, need[i + 1]);
    for (const Read& read : layer.reads) {
      const int64_t entries = read.window == 0 ? n : s.query[i] + read.window - 1;
      for (int32_t bank : {read.k_bank, read.v_bank})
        bank_need[static_cast<size_t>(bank)] = std::max(bank_need[static_cast<size_t>(bank)], entries);
    }
    need[i] = s.query[i];
    for (int32_t p : layer.projections) {
      s.projection[static_cast<size_t>(p)] = std::min(n, bank_need[static_cast<size_t>(p)]);
      need[i] = std::max(need[i], s.projection[static_cast<size_t>(p)]);
    }
  }
  return s;
}

// Every upper layer, and every projection of theirs, over the same last `suffix` positions.
void flatten_upper(const Plan& plan, int64_t n, int64_t suffix, Suffixes& s) {
  for (size_t i = 0; i < plan.layers.size(); ++i)
    if (plan.layers[i].upper || !plan.has_global_bank) s.query[i] = std::min(n, suffix);
  for (size_t p = 0; p < plan.projections.size(); ++p)
    if (plan.banks[p].part == BankPlan::Part::Local) s.projection[p] = std::min(n, suffix);
}

bool is_upper_projection(const Plan& plan, size_t projection) {
  const int32_t representation = plan.projections[projection].representation;
  return plan.banks[projection].part != BankPlan::Part::Global &&
         plan.layers[static_cast<size_t>(representation)].upper;
}

}  // namespace

int64_t uniform_suffix(const Plan& plan) {
  constexpr int64_t kUnbounded = int64_t{1} << 40;
  const Suffixes s = walk(plan, kUnbounded);
  int64_t suffix = 1;
  for (size_t i = 0; i < plan.layers.size(); ++i)
    if (plan.layers[i].upper) suffix = std::max(suffix, s.query[i]);
  for (size_t p = 0; p < plan.projections.size(); ++p)
    if (is_upper_projection(plan, p)) suffix = std::max(suffix, s.projection[p]);
  return suffix;
}

Suffixes suffix_lengths(const Plan& plan, int64_t n, const Route& route) {
  if (n < 1) throw Error("ERR_SHAPE", "a prefill needs at least 1 position, not " + std::to_string(n));
  const bool flat = route.kind == Route::Kind::Uniform || route.kind == Route::Kind::Approximate;
  if (flat && !plan.has_global_bank)
    throw Error("ERR_CONFIG", std::string("schedule ") +
                                  (route.kind == Route::Kind::Uniform ? "'uniform'" : "{ approximate }") +
                                  " needs a design with a global bank; use 'exact' or 'full'");
  Suffixes s = walk(plan, n);
  switch (route.kind) {
    case Route::Kind::Exact:
      break;
    case Route::Kind::Full:
      flatten_upper(plan, n, n, s);
      break;
    case Route::Kind::Uniform:
      flatten_upper(plan, n, uniform_suffix(plan), s);
      break;
    case Route::Kind::Approximate:
      if (route.suffix < 1)
        throw Error("ERR_CONFIG",
                    "schedule.approximate is " + std::to_string(route.suffix) + "; it must be at least 1");
      s.exact = false;  // even where R happens to suffice: the caller asked for no guarantee and gets none
      flatten_upper(plan, n, route.suffix, s);
      break;
  }
  return s;
}

PositionCounts position_counts(const Plan& plan, const Suffixes& s) {
  PositionCounts counts{0, 0};
  for (size_t i = 0; i < plan.layers.size(); ++i)
    if (plan.layers[i].upper) counts.query_output += s.query[i];
  for (size_t p = 0; p < plan.projections.size(); ++p)
    if (is_upper_projection(plan, p)) counts.kv_input += s.projection[p];
  return counts;
}

}  // namespace duokv
