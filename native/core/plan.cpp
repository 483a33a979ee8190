#include "core/plan.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "ops/rounding.h"

namespace duokv {
namespace {

constexpr int64_t kAlignment = 16;  // elements: 64 bytes

// Builds the table layer by layer, adding parameters in the order of their names in a checkpoint.
class Builder {
 public:
  explicit Builder(const ModelConfig& config) { plan_.config = config; }

  Plan build() {
    const ModelConfig& c = plan_.config;
    plan_.embedding = matrix("model.embed_tokens.weight", c.vocab, c.hidden);
    for (int64_t i = 0; i < c.layers(); ++i) layer(i);
    if (provider_projects_) {
      const int32_t projection = global_read_.k_bank;
      plan_.projections[static_cast<size_t>(projection)].norm = ones("model.global_kv.norm.weight", c.hidden);
      plan_.projections[static_cast<size_t>(projection)].k_proj =
          matrix("model.global_kv.k_proj.weight", c.kv_width(), c.hidden);
      plan_.projections[static_cast<size_t>(projection)].v_proj =
          matrix("model.global_kv.v_proj.weight", c.kv_width(), c.hidden);
    }
    plan_.final_norm = ones("model.norm.weight", c.hidden);
    plan_.has_global_bank = has_global_bank();
    plan_.history_window = c.history_window;
    for (size_t p = 0; p < plan_.projections.size(); ++p)
      plan_.layers[static_cast<size_t>(plan_.projections[p].representation)].projections.push_back(
          static_cast<int32_t>(p));
    return std::move(plan_);
  }

 private:
  bool has_local_bank() const {
    const Design d = plan_.config.design;
    return d == Design::LocalHistory || d == Design::CurrentOnly || d == Design::RepeatedCurrent;
  }
  bool has_global_bank() const {
    return has_local_bank() || plan_.config.design == Design::GlobalOnly ||
           plan_.config.design == Design::GlobalAdapters;
  }

  int32_t add(std::string name, std::vector<int64_t> shape, Parameter::Init init, double std) {
    int64_t elements = 1;
    for (int64_t extent : shape) elements *= extent;
    plan_.parameters.push_back(
        {std::move(name), std::move(shape), plan_.arena_elements, elements, init, std});
    plan_.parameter_count += elements;
    plan_.arena_elements += round_up(elements, kAlignment);
    return static_cast<int32_t>(plan_.parameters.size()) - 1;
  }
  int32_t matrix(const std::string& name, int64_t out, int64_t in, double scale = 1.0) {
    return add(name, {out, in}, Parameter::Init::Normal, 0.02 * scale);
  }
  int32_t ones(const std::string& name, int64_t n) { return add(name, {n}, Parameter::Init::Ones, 0); }

  // A bank of its own for the K and V that `norm`, `k_proj` and `v_proj` make of `representation`.
  int32_t bank(const std::string& name, BankPlan::Part part, int64_t window, int64_t representation,
               int32_t norm, int32_t k_proj, int32_t v_proj) {
    plan_.projections.push_back({static_cast<int32_t>(representation), norm, k_proj, v_proj});
    plan_.banks.push_back({name, part, window});
    return static_cast<int32_t>(plan_.banks.size()) - 1;
  }

  void layer(int64_t i) {
    const ModelConfig& c = plan_.config;
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    const double residual_scale = 1.0 / std::sqrt(2.0 * static_cast<double>(c.layers()));
    const bool upper = i >= c.lower_layers;
    const int64_t in_pair =
        (i - (has_local_bank() ? c.lower_layers : 0)) % 2;  // 0: first of its pair, 1: second

    // A layer reads its own full bank, its pair's, or (upper layers over a global bank) the global and a
    // local one.
    const bool reads_global = upper && has_global_bank();
    const bool pairs_full_banks = c.design == Design::Gqa4Cla2;
    const bool pairs_local_banks =
        reads_global && has_local_bank() && c.local_source != LocalSource::PerLayer;
    const bool projects = reads_global
                              ? has_local_bank() && !(c.local_source == LocalSource::SharedKv && in_pair == 1)
                              : !(pairs_full_banks && in_pair == 1);

    LayerPlan row{};
    row.upper = upper;
    row.attention_norm = ones(prefix + "input_layernorm.weight", c.hidden);
    row.q_proj = matrix(prefix + "self_attn.q_proj.weight", c.query_width(), c.hidden);
    int32_t k_proj = kNone, v_proj = kNone;
    if (projects) {
      k_proj = matrix(prefix + "self_attn.k_proj.weight", c.kv_width(), c.hidden);
      v_proj = matrix(prefix + "self_attn.v_proj.weight", c.kv_width(), c.hidden);
    }
    row.o_proj = matrix(prefix + "self_attn.o_proj.weight", c.hidden, c.query_width(), residual_scale);
    row.fusion_logit =
        reads_global && has_local_bank() && c.fusion == Fusion::Separate
            ? add(prefix + "self_attn.fusion_logit", {c.query_heads}, Parameter::Init::Zeros, 0)
            : kNone;
    row.ffn_norm = ones(prefix + "post_attention_layernorm.weight", c.hidden);
    row.gate_proj = matrix(prefix + "mlp.gate_proj.weight", c.ffn, c.hidden);
    row.up_proj = matrix(prefix + "mlp.up_proj.weight", c.ffn, c.hidden);
    row.down_proj = matrix(prefix + "mlp.down_proj.weight", c.hidden, c.ffn, residual_scale);
    row.adapter_up = row.adapter_down = kNone;
    if (upper && c.design == Design::GlobalAdapters) {
      row.adapter_up = matrix(prefix + "adapter.up_proj.weight", c.adapter_rank, c.hidden);
      row.adapter_down =
          matrix(prefix + "adapter.down_proj.weight", c.hidden, c.adapter_rank, residual_scale);
    }

    if (!reads_global) {
      if (projects)
        own_bank_ = bank("layer." + std::to_string(i), BankPlan::Part::Lower, 0, i, row.attention_norm,
                         k_proj, v_proj);
      row.reads.push_back({own_bank_, own_bank_, 0, false});
    } else {
      if (i == c.lower_layers) provide_global_bank();
      row.reads.push_back(global_read_);
      if (projects) {
        const int64_t representation = pairs_local_banks ? i - in_pair : i;
        own_bank_ = bank("local." + std::to_string(i), BankPlan::Part::Local, c.window, representation,
                         row.attention_norm, k_proj, v_proj);
      }
      if (has_local_bank())
        row.reads.push_back({own_bank_, own_bank_, c.window, c.design == Design::RepeatedCurrent});
    }
    plan_.layers.push_back(std::move(row));
  }

  // `boundary`: a projection of the lower stack's output. `cross`: the last lower layer's K and the first
  // one's V.
  void provide_global_bank() {
    const ModelConfig& c = plan_.config;
    if (c.provider == Provider::Cross) {
      global_read_ = {static_cast<int32_t>(c.lower_layers) - 1, 0, 0, false};
      return;
    }
    const int32_t index = bank("global", BankPlan::Part::Global, 0, c.lower_layers, kNone, kNone, kNone);
    global_read_ = {index, index, 0, false};
    provider_projects_ = true;
  }

  Plan plan_{};
  int32_t own_bank_ = kNone;  // the bank the current layer, or its pair, projected
  Read global_read_{kNone, kNone, 0, false};
  bool provider_projects_ = false;
};

}  // namespace

const Parameter& Plan::parameter(const std::string& name, int64_t elements) const {
  for (const Parameter& p : parameters) {
    if (p.name != name) continue;
    if (p.elements != elements)
      throw Error("ERR_SHAPE", "parameter '" + name + "' has " + std::to_string(p.elements) +
                                   " elements, but " + std::to_string(elements) + " were given");
    return p;
  }
  throw Error("ERR_TENSOR_NAME", "this model has no parameter '" + name + "'");
}

Plan make_plan(const ModelConfig& config) {
  validate(config);
  return Builder(config).build();
}

CacheBytes planned_cache_bytes(const Plan& plan, int64_t batch, int64_t n, int64_t element) {
  CacheBytes bytes;
  for (const BankPlan& bank : plan.banks) {
    const int64_t entries = bank.window == 0 ? n : std::min(n, bank.window);
    const int64_t size = 2 * batch * plan.config.kv_width() * element * entries;
    bytes.part(bank.part) += size;
  }
  bytes.document_ids = static_cast<int64_t>(sizeof(int64_t)) * batch * n;
  return bytes;
}

}  // namespace duokv
