// Matrix-product FLOPs, 2 per multiply-add: projections, FFN, head, and attention over the visible
// same-document pairs. Norms, softmax, rotary, elementwise work, the optimiser and padding are not counted
// (spec/protocols.md section 2).
#include <algorithm>

#include "core/plan.h"

namespace duokv {
namespace {

// Pairs (query, entry) that a read of this window sees: per token on average, or in total over documents.
template <class Pairs>
FlopCount count(const Plan& plan, double tokens, Pairs pairs) {
  const ModelConfig& c = plan.config;
  const double d = static_cast<double>(c.hidden);
  FlopCount flops;
  for (const LayerPlan& layer : plan.layers) {
    flops.projections += tokens * 2 * 2 * d * static_cast<double>(c.query_width());
    flops.ffn += tokens * 2 * 3 * d * static_cast<double>(c.ffn);
    if (layer.adapter_up != kNone) flops.ffn += tokens * 2 * 2 * d * static_cast<double>(c.adapter_rank);
    for (const Read& read : layer.reads)
      flops.attention += pairs(read.window) * 4 * static_cast<double>(c.head_dim * c.query_heads);
  }
  flops.projections +=
      static_cast<double>(plan.projections.size()) * tokens * 2 * 2 * d * static_cast<double>(c.kv_width());
  flops.head = tokens * 2 * d * static_cast<double>(c.vocab);
  return flops;
}

}  // namespace

FlopCount count_flops(const Plan& plan, const std::vector<int64_t>& document_lengths) {
  double tokens = 0;
  for (int64_t length : document_lengths) tokens += static_cast<double>(length);
  return count(plan, tokens, [&](int64_t window) {
    double pairs = 0;
    for (int64_t length : document_lengths) {
      const double n = static_cast<double>(length);
      const double w = window == 0 ? n : std::min(n, static_cast<double>(window));
      pairs += w * (w + 1) / 2 + (n - w) * w;
    }
    return pairs;
  });
}

FlopCount count_flops(const Plan& plan, double tokens, double causal_pairs, double window_pairs) {
  return count(plan, tokens, [&](int64_t window) {
    if (window == 0) return tokens * causal_pairs;
    return tokens * (window == 1 ? 1.0 : window_pairs);
  });
}

}  // namespace duokv
