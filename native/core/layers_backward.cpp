// The backward pass of the decoder stack: the forward pass of layers.cpp read from its end. Normalised inputs
// and activation outputs are recomputed, which costs far less than the products around them and saves about a
// third of the tape.
#include <algorithm>
#include <cmath>

#include "core/layers.h"

namespace duokv {

using ops::OpTable;

namespace {

class Backward {
 public:
  Backward(const Pass& pass, const Tape& tape, float* gradients)
      : pass_(pass),
        tape_(tape),
        gradients_(gradients),
        plan_(pass.model.plan()),
        config_(plan_.config),
        device_(*pass.workspace.device()),
        m_(pass.positions.batch() * pass.positions.count()),
        where_(pass.positions.suffix(pass.positions.count())) {}

  void run(const int32_t* tokens, float* dx, const std::function<void(int64_t)>& layer_done) {
    const WorkspaceScope scope(pass_.workspace);
    const int64_t entries = m_ * config_.kv_width();
    for (size_t b = 0; b < plan_.banks.size(); ++b) {
      bank_gradients_.push_back({take(config_.kv_width()), take(config_.kv_width())});
      zero(bank_gradients_.back().dk, entries);
      zero(bank_gradients_.back().dv, entries);
    }
    for (size_t i = plan_.layers.size(); i-- > 0;) {
      poll(pass_.cancel);
      const WorkspaceScope layer_scope(pass_.workspace);
      const LayerPlan& plan = plan_.layers[i];
      const LayerTape kept = tape_.recompute ? rerun_layer(pass_, i, tape_.layers[i].input) : tape_.layers[i];
      if (plan.adapter_up != kNone) adapter(plan, kept, dx);
      feed_forward(plan, kept, dx);
      attention(plan, kept, dx);
      if (layer_done) layer_done(static_cast<int64_t>(i));
    }
    device_.run(&OpTable::embedding_backward,
                {tokens, m_, config_.hidden, config_.vocab, dx, gradient(plan_.embedding)});
  }

 private:
  void adapter(const LayerPlan& plan, const LayerTape& kept, float* dx) {
    const WorkspaceScope scope(pass_.workspace);
    const Normalised n = normalise(kept.ffn_output, plan.ffn_norm);
    float* s = take(config_.adapter_rank);
    device_.run(&OpTable::swiglu_forward, {kept.adapter, nullptr, m_ * config_.adapter_rank, s});
    float* ds = take(config_.adapter_rank);
    linear(s, dx, plan.adapter_down, ds, false);
    device_.run(&OpTable::swiglu_backward,
                {kept.adapter, nullptr, ds, m_ * config_.adapter_rank, ds, nullptr});
    float* dn = take(config_.hidden);
    linear(n.y, ds, plan.adapter_up, dn, false);
    normalise_backward(kept.ffn_output, plan.ffn_norm, n, dn, dx);
  }

  void feed_forward(const LayerPlan& plan, const LayerTape& kept, float* dx) {
    const WorkspaceScope scope(pass_.workspace);
    const int64_t n_hidden = m_ * config_.ffn;
    float* h = take(config_.ffn);
    device_.run(&OpTable::swiglu_forward, {kept.gate, kept.up, n_hidden, h});
    float* dh = take(config_.ffn);
    linear(h, dx, plan.down_proj, dh, false);
    float* dgate = h;  // the recomputed activation is used up
    float* dup = take(config_.ffn);
    device_.run(&OpTable::swiglu_backward, {kept.gate, kept.up, dh, n_hidden, dgate, dup});
    const Normalised n = normalise(kept.middle, plan.ffn_norm);
    float* dn = take(config_.hidden);
    linear(n.y, dgate, plan.gate_proj, dn, false);
    linear(n.y, dup, plan.up_proj, dn, true);
    normalise_backward(kept.middle, plan.ffn_norm, n, dn, dx);
  }

  void attention(const LayerPlan& plan, const LayerTape& kept, float* dx) {
    const WorkspaceScope scope(pass_.workspace);
    float* dattention = take(config_.query_width());
    linear(kept.attention, dx, plan.o_proj, dattention, false);
    float* dq = take(config_.query_width());
    attention_banks(plan, kept, dattention, dq);
    rotary_inverse(dq, config_.query_heads);

    const Normalised u = normalise(kept.input, plan.attention_norm);
    float* du = take(config_.hidden);
    linear(u.y, dq, plan.q_proj, du, false);
    for (int32_t index : plan.projections) {
      const Projection& projection = plan_.projections[static_cast<size_t>(index)];
      const ops::BankGradient& bank = bank_gradients_[static_cast<size_t>(index)];
      rotary_inverse(bank.dk, config_.kv_heads);
      if (projection.norm == plan.attention_norm) {
        linear(u.y, bank.dk, projection.k_proj, du, true);
        linear(u.y, bank.dv, projection.v_proj, du, true);
        continue;
      }
      const WorkspaceScope projection_scope(pass_.workspace);
      const Normalised other = normalise(kept.input, projection.norm);
      float* dother = take(config_.hidden);
      linear(other.y, bank.dk, projection.k_proj, dother, false);
      linear(other.y, bank.dv, projection.v_proj, dother, true);
      normalise_backward(kept.input, projection.norm, other, dother, dx);
    }
    normalise_backward(kept.input, plan.attention_norm, u, du, dx);
  }

  // dq, and the gradients of the banks read.
  void attention_banks(const LayerPlan& plan, const LayerTape& kept, float* dattention, float* dq) {
    ops::AttentionBackwardArgs args{};
    args.forward.batch = pass_.positions.batch();
    args.forward.queries = pass_.positions.count();
    args.forward.query_heads = static_cast<int32_t>(config_.query_heads);
    args.forward.kv_heads = static_cast<int32_t>(config_.kv_heads);
    args.forward.head_dim = static_cast<int32_t>(config_.head_dim);
    args.forward.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.head_dim)));
    args.forward.q = kept.q;
    args.forward.positions = where_.first;
    args.forward.document_start = where_.start;
    args.forward.mode = pass_.precision.attention;
    const auto gradients_of = [&](const Read& read) -> ops::BankGradient {
      return {bank_gradients_[static_cast<size_t>(read.k_bank)].dk,
              bank_gradients_[static_cast<size_t>(read.v_bank)].dv};
    };
    const size_t reads = plan.reads.size();
    if (plan.fusion_logit == kNone) {
      args.forward.bank_count = static_cast<int32_t>(reads);
      for (size_t r = 0; r < reads; ++r) {
        args.forward.banks[r] = kept.reads[r];
        args.grads[r] = gradients_of(plan.reads[r]);
      }
      args.forward.out = kept.attention;
      args.forward.lse = kept.lse;
      args.dout = dattention;
      args.dq = dq;
      device_.run(&OpTable::attention_backward, args);
      return;
    }
    float* dbranch[2] = {take(config_.query_width()), take(config_.query_width())};
    device_.run(&OpTable::fuse_backward,
                {{kept.branch[0], kept.branch[1], pass_.model.data(plan.fusion_logit), m_,
                  static_cast<int32_t>(config_.query_heads), static_cast<int32_t>(config_.head_dim), nullptr},
                 dattention,
                 dbranch[0],
                 dbranch[1],
                 gradient(plan.fusion_logit)});
    float* dq_branch[2] = {dq, take(config_.query_width())};
    args.forward.bank_count = 1;
    for (size_t r = 0; r < reads; ++r) {
      args.forward.banks[0] = kept.reads[r];
      args.grads[0] = gradients_of(plan.reads[r]);
      args.forward.out = kept.branch[r];
      args.forward.lse = kept.lse + static_cast<int64_t>(r) * m_ * config_.query_heads;
      args.dout = dbranch[r];
      args.dq = dq_branch[r];
      device_.run(&OpTable::attention_backward, args);
    }
    device_.run(&OpTable::add, {dq_branch[1], m_ * config_.query_width(), dq});
  }

  struct Normalised {
    float* y;     // [M, d]
    float* rstd;  // [M]
  };
  Normalised normalise(const float* x, int32_t norm) {
    const Normalised n{take(config_.hidden), take(1)};
    device_.run(&OpTable::rms_norm_forward, {x, pass_.model.data(norm), m_, config_.hidden,
                                             static_cast<float>(config_.rms_norm_eps), n.y, n.rstd});
    return n;
  }
  // dx += d(norm)/dx
  void normalise_backward(const float* x, int32_t norm, const Normalised& n, const float* dy, float* dx) {
    device_.run(&OpTable::rms_norm_backward,
                {x, pass_.model.data(norm), n.rstd, dy, m_, config_.hidden, dx, true, gradient(norm)});
  }
  void rotary_inverse(float* x, int64_t heads) {
    device_.run(&OpTable::rotary, {x, m_, static_cast<int32_t>(heads), static_cast<int32_t>(config_.head_dim),
                                   where_.position, pass_.rotary_table, true});
  }
  void linear(const float* x, const float* dy, int32_t weight, float* dx, bool accumulate) {
    device_.run(&OpTable::linear_backward, {x, dy, m_, pass_.model.weight(weight, false), dx, accumulate,
                                            gradient(weight), pass_.precision.linear});
  }
  float* gradient(int32_t parameter) const { return gradients_ + plan_.parameter(parameter).offset; }
  float* take(int64_t width) { return pass_.workspace.take(m_ * width); }
  void zero(float* x, int64_t n) { device_.zero(x, n * static_cast<int64_t>(sizeof(float))); }

  const Pass& pass_;
  const Tape& tape_;
  float* gradients_;
  const Plan& plan_;
  const ModelConfig& config_;
  Device& device_;
  int64_t m_;
  const Positions::Suffix& where_;
  std::vector<ops::BankGradient> bank_gradients_;
};

}  // namespace

void run_layers_backward(const Pass& pass, const int32_t* tokens, const Tape& tape, float* dx,
                         float* gradients, const std::function<void(int64_t layer)>& layer_done) {
  Backward(pass, tape, gradients).run(tokens, dx, layer_done);
}

}  // namespace duokv
