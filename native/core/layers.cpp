#include "core/layers.h"

#include <algorithm>
#include <cmath>

namespace duokv {

using ops::OpTable;

Positions::Positions(Workspace& workspace, int64_t batch, int64_t count, std::vector<int32_t> first,
                     std::vector<int32_t> start, std::vector<int32_t> position, int64_t history_window)
    : workspace_(workspace),
      batch_(batch),
      count_(count),
      first_(std::move(first)),
      start_(std::move(start)),
      position_(std::move(position)),
      history_window_(history_window) {}

const Positions::Suffix& Positions::suffix(int64_t length) {
  const auto found = suffixes_.find(length);
  if (found != suffixes_.end()) return found->second;
  const auto last = [&](const std::vector<int32_t>& all) {
    std::vector<int32_t> part;
    part.reserve(static_cast<size_t>(batch_ * length));
    for (int64_t b = 0; b < batch_; ++b) {
      const auto row_end = all.begin() + static_cast<std::ptrdiff_t>((b + 1) * count_);
      part.insert(part.end(), row_end - static_cast<std::ptrdiff_t>(length), row_end);
    }
    return part;
  };
  std::vector<int32_t> first = first_;
  for (int32_t& f : first) f += static_cast<int32_t>(count_ - length);
  const std::vector<int32_t> position = last(position_);
  Suffix suffix{workspace_.upload(first), workspace_.upload(last(start_)), workspace_.upload(position),
                nullptr};
  if (history_window_ > 0) {
    std::vector<float> log_m(position.size());
    for (size_t t = 0; t < position.size(); ++t)
      log_m[t] = static_cast<float>(
          std::log(static_cast<double>(std::min<int64_t>(history_window_, int64_t{position[t]} + 1))));
    suffix.log_multiplicity = workspace_.upload(log_m);
  }
  return suffixes_.emplace(length, suffix).first->second;
}

TrainingBanks::TrainingBanks(Workspace& workspace, const Plan& plan, int64_t batch, int64_t count)
    : workspace_(workspace), plan_(plan), batch_(batch), count_(count) {
  const int64_t elements = batch * count * plan.config.kv_width();
  for (size_t b = 0; b < plan.banks.size(); ++b)
    entries_.push_back({workspace.take(elements), workspace.take(elements)});
}

ops::Bank TrainingBanks::view(const Read& read) {
  const int64_t row = count_ * plan_.config.kv_width();
  const float* k = entries_[static_cast<size_t>(read.k_bank)].k;
  const float* v = entries_[static_cast<size_t>(read.v_bank)].v;
  const int32_t count = static_cast<int32_t>(count_);
  std::vector<ops::BankRow> rows;
  for (int64_t b = 0; b < batch_; ++b) rows.push_back({k + b * row, v + b * row, 0, count, 0, count});
  return {
      workspace_.upload(rows), ops::DType::F32, plan_.config.head_dim, plan_.config.kv_width(), 0, nullptr};
}

namespace {

// One forward pass, layer by layer.
class Forward {
 public:
  Forward(const Pass& pass, Tape* tape)
      : pass_(pass),
        tape_(tape),
        plan_(pass.model.plan()),
        config_(plan_.config),
        device_(*pass.workspace.device()),
        batch_(pass.positions.batch()) {}

  float* run(const int32_t* tokens) {
    int64_t length = pass_.positions.count();  // tokens per row that x holds
    // Everything that outlives a layer is taken before the first one: the residual stream, a second copy for
    // suffixes of several rows (a suffix of one row is a pointer), the per-token arrays.
    float* x = take(length, config_.hidden);
    stream_[0] = x;
    if (tape_ == nullptr && batch_ > 1) stream_[1] = take(length, config_.hidden);
    for (int64_t suffix : pass_.suffixes.query) pass_.positions.suffix(suffix);
    for (int64_t suffix : pass_.suffixes.projection) pass_.positions.suffix(suffix);
    device_.run(&OpTable::embedding_forward,
                {tokens, batch_ * length, config_.hidden, pass_.model.data(plan_.embedding), x});
    if (tape_ != nullptr) tape_->layers.resize(plan_.layers.size());
    for (size_t i = 0; i < plan_.layers.size(); ++i) {
      poll(pass_.cancel);
      const Workspace::Mark mark = pass_.workspace.mark();
      x = layer(i, x, length);
      length = pass_.suffixes.query[i];
      if (tape_ == nullptr) pass_.workspace.release(mark);
    }
    return x;
  }

 private:
  float* layer(size_t i, float* x, int64_t length) {
    const LayerPlan& plan = plan_.layers[i];
    LayerTape kept;
    kept.input = x;
    const int64_t queries = pass_.suffixes.query[i];
    const int64_t m = batch_ * queries;

    kept.q = take(queries, config_.query_width());
    {
      const WorkspaceScope normalised(pass_.workspace);
      linear(project_banks(plan, x, length, queries), m, plan.q_proj, kept.q);
    }
    const Positions::Suffix& where = pass_.positions.suffix(queries);
    rotary(kept.q, m, config_.query_heads, where.position);
    attention(plan, queries, where, kept);
    kept.middle = residual(shorten(x, length, queries), m);
    accumulate(kept.attention, m, plan.o_proj, kept.middle);

    x = feed_forward(plan, m, kept);
    if (plan.adapter_up != kNone) x = adapter(plan, x, m, kept);
    if (tape_ != nullptr) tape_->layers[i] = kept;
    return x;
  }

  // K and V of every bank projected from this layer's input. Returns the layer's own normalised input of the
  // last `queries` tokens, which most layers share with their projection, in workspace memory.
  const float* project_banks(const LayerPlan& plan, const float* x, int64_t length, int64_t queries) {
    int64_t shared = queries;  // longest suffix wanted under the layer's own norm
    for (int32_t p : plan.projections)
      if (plan_.projections[static_cast<size_t>(p)].norm == plan.attention_norm)
        shared = std::max(shared, pass_.suffixes.projection[static_cast<size_t>(p)]);
    float* u = take(shared, config_.hidden);
    normalise(suffix(x, length, shared), batch_ * shared, plan.attention_norm, u);

    for (int32_t index : plan.projections) {
      const Projection& projection = plan_.projections[static_cast<size_t>(index)];
      const int64_t entries = pass_.suffixes.projection[static_cast<size_t>(index)];
      const int64_t m = batch_ * entries;
      const Banks::Entries out = pass_.banks.entries(index, entries);
      const float* input;
      if (projection.norm == plan.attention_norm) {
        input = suffix(u, shared, entries);
      } else {
        float* other = take(entries, config_.hidden);
        normalise(suffix(x, length, entries), m, projection.norm, other);
        input = other;
      }
      linear(input, m, projection.k_proj, out.k);
      linear(input, m, projection.v_proj, out.v);
      rotary(out.k, m, config_.kv_heads, pass_.positions.suffix(entries).position);
      pass_.banks.write(index, out, entries);
    }
    return suffix(u, shared, queries);
  }

  void attention(const LayerPlan& plan, int64_t queries, const Positions::Suffix& where, LayerTape& kept) {
    const int64_t m = batch_ * queries;
    const bool separate = plan.fusion_logit != kNone;
    const size_t reads = plan.reads.size();
    kept.attention = take(queries, config_.query_width());
    kept.lse = tape_ != nullptr ? take(queries, static_cast<int64_t>(reads) * config_.query_heads) : nullptr;

    ops::AttentionArgs args{};
    args.batch = batch_;
    args.queries = queries;
    args.query_heads = static_cast<int32_t>(config_.query_heads);
    args.kv_heads = static_cast<int32_t>(config_.kv_heads);
    args.head_dim = static_cast<int32_t>(config_.head_dim);
    args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.head_dim)));
    args.q = kept.q;
    args.positions = where.first;
    args.document_start = where.start;
    args.mode = pass_.precision.attention;
    std::vector<ops::Bank> banks;
    for (const Read& read : plan.reads) {
      ops::Bank bank = pass_.banks.view(read);
      bank.window = static_cast<int32_t>(read.window);
      bank.bias = read.multiplicity_bias ? where.log_multiplicity : nullptr;
      banks.push_back(bank);
      if (tape_ != nullptr) tape_->reads.push_back(bank);
    }
    if (!separate) {
      args.bank_count = static_cast<int32_t>(reads);
      for (size_t r = 0; r < reads; ++r) args.banks[r] = banks[r];
      args.out = kept.attention;
      args.lse = kept.lse;
      device_.run(&OpTable::attention_forward, args);
      return;
    }
    args.bank_count = 1;
    for (size_t r = 0; r < reads; ++r) {
      kept.branch[r] = take(queries, config_.query_width());
      args.banks[0] = banks[r];
      args.out = kept.branch[r];
      args.lse = kept.lse != nullptr ? kept.lse + static_cast<int64_t>(r) * m * config_.query_heads : nullptr;
      device_.run(&OpTable::attention_forward, args);
    }
    device_.run(&OpTable::fuse_forward, {kept.branch[0], kept.branch[1], pass_.model.data(plan.fusion_logit),
                                         m, static_cast<int32_t>(config_.query_heads),
                                         static_cast<int32_t>(config_.head_dim), kept.attention});
  }

  // x + Wdown(silu(Wgate n) * Wup n)
  float* feed_forward(const LayerPlan& plan, int64_t m, LayerTape& kept) {
    float* x = residual(kept.middle, m);
    kept.gate = take_rows(m, config_.ffn);
    kept.up = take_rows(m, config_.ffn);
    const WorkspaceScope scope(pass_.workspace);
    float* n = take_rows(m, config_.hidden);
    normalise(kept.middle, m, plan.ffn_norm, n);
    linear(n, m, plan.gate_proj, kept.gate);
    linear(n, m, plan.up_proj, kept.up);
    float* h = scratch(kept.gate, m, config_.ffn);
    device_.run(&OpTable::swiglu_forward, {kept.gate, kept.up, m * config_.ffn, h});
    accumulate(h, m, plan.down_proj, x);
    return x;
  }

  // x + Wad_down silu(Wad_up RMSNorm(x; w_2))
  float* adapter(const LayerPlan& plan, float* ffn_output, int64_t m, LayerTape& kept) {
    kept.ffn_output = ffn_output;
    float* x = residual(ffn_output, m);
    kept.adapter = take_rows(m, config_.adapter_rank);
    const WorkspaceScope scope(pass_.workspace);
    float* n = take_rows(m, config_.hidden);
    normalise(ffn_output, m, plan.ffn_norm, n);
    linear(n, m, plan.adapter_up, kept.adapter);
    float* s = scratch(kept.adapter, m, config_.adapter_rank);
    device_.run(&OpTable::swiglu_forward, {kept.adapter, nullptr, m * config_.adapter_rank, s});
    accumulate(s, m, plan.adapter_down, x);
    return x;
  }

  // The residual stream to add to: the same memory, or with a tape a copy, since the backward pass reads
  // both.
  float* residual(float* x, int64_t m) {
    if (tape_ == nullptr) return x;
    float* copy = take_rows(m, config_.hidden);
    device_.copy(copy, x, m * config_.hidden * static_cast<int64_t>(sizeof(float)));
    return copy;
  }

  // Where an activation function writes: in place, unless the backward pass needs its input.
  float* scratch(float* input, int64_t m, int64_t width) {
    return tape_ == nullptr ? input : take_rows(m, width);
  }

  // The last `keep` of `length` tokens of every row.
  const float* suffix(const float* x, int64_t length, int64_t keep) {
    if (keep == length) return x;
    if (batch_ == 1) return x + (length - keep) * config_.hidden;
    float* rows = take(keep, config_.hidden);
    device_.run(&OpTable::suffix_rows, {x, batch_, length, keep, config_.hidden, false, rows});
    return rows;
  }

  // The same of the residual stream, in memory that outlives the layer.
  float* shorten(float* x, int64_t length, int64_t keep) {
    if (keep == length) return x;
    if (batch_ == 1) return x + (length - keep) * config_.hidden;
    float* rows = x == stream_[0] ? stream_[1] : stream_[0];
    device_.run(&OpTable::suffix_rows, {x, batch_, length, keep, config_.hidden, false, rows});
    return rows;
  }

  void normalise(const float* x, int64_t m, int32_t norm, float* y) {
    device_.run(&OpTable::rms_norm_forward, {x, pass_.model.data(norm), m, config_.hidden,
                                             static_cast<float>(config_.rms_norm_eps), y, nullptr});
  }
  void rotary(float* x, int64_t m, int64_t heads, const int32_t* positions) {
    device_.run(&OpTable::rotary, {x, m, static_cast<int32_t>(heads), static_cast<int32_t>(config_.head_dim),
                                   positions, pass_.model.rotary_table(1), false});
  }
  void linear(const float* x, int64_t m, int32_t weight, float* y) { product(x, m, weight, y, false); }
  void accumulate(const float* x, int64_t m, int32_t weight, float* y) { product(x, m, weight, y, true); }
  void product(const float* x, int64_t m, int32_t weight, float* y, bool add) {
    device_.run(&OpTable::linear_forward, {x, m, pass_.model.weight(weight, pass_.serving), y, add,
                                           pass_.precision.rounds_outputs(), pass_.precision.linear});
  }
  float* take(int64_t per_row, int64_t width) { return take_rows(batch_ * per_row, width); }
  float* take_rows(int64_t m, int64_t width) { return pass_.workspace.take(m * width); }

  const Pass& pass_;
  Tape* tape_;
  const Plan& plan_;
  const ModelConfig& config_;
  Device& device_;
  int64_t batch_;
  float* stream_[2] = {nullptr, nullptr};
};

}  // namespace

float* run_layers(const Pass& pass, const int32_t* tokens, Tape* tape) {
  const std::vector<int32_t>& first = pass.positions.first();
  const int32_t longest = *std::max_element(first.begin(), first.end());
  pass.model.rotary_table(longest + pass.positions.count());
  return Forward(pass, tape).run(tokens);
}

}  // namespace duokv
