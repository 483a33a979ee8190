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

TrainingBanks::TrainingBanks(Workspace& workspace, const Plan& plan, int64_t batch, int64_t count,
                             const float* rotary_table)
    : plan_(plan), device_(*workspace.device()), batch_(batch), rotary_table_(rotary_table) {
  const int64_t row = count * plan.config.kv_width();
  for (size_t b = 0; b < plan.banks.size(); ++b)
    entries_.push_back({workspace.take(batch * row), workspace.take(batch * row)});
  const int32_t length = static_cast<int32_t>(count);
  for (const LayerPlan& layer : plan.layers) {
    for (const Read& read : layer.reads) {
      ops::Bank& view = views_[{read.k_bank, read.v_bank}];
      if (view.rows != nullptr) continue;
      const float* k = entries_[static_cast<size_t>(read.k_bank)].k;
      const float* v = entries_[static_cast<size_t>(read.v_bank)].v;
      std::vector<ops::BankRow> rows;
      for (int64_t b = 0; b < batch; ++b) rows.push_back({k + b * row, v + b * row, 0, length, 0, length});
      view = {workspace.upload(rows), length, ops::DType::F32, plan.config.head_dim,
              plan.config.kv_width(), 0,      nullptr};
    }
  }
}

void TrainingBanks::write(int32_t, const Entries& entries, int64_t length, const int32_t* positions) {
  device_.run(&OpTable::rotary,
              {entries.k, batch_ * length, static_cast<int32_t>(plan_.config.kv_heads),
               static_cast<int32_t>(plan_.config.head_dim), positions, rotary_table_, false});
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
    // suffixes of several rows (a suffix of one row is a pointer).
    float* x = take(length, config_.hidden);
    stream_[0] = x;
    if (tape_ == nullptr && batch_ > 1) stream_[1] = take(length, config_.hidden);
    device_.run(&OpTable::embedding_forward,
                {tokens, batch_ * length, config_.hidden, pass_.model.data(plan_.embedding), x});
    if (tape_ != nullptr) tape_->layers.resize(plan_.layers.size());
    for (size_t i = 0; i < plan_.layers.size(); ++i) {
      poll(pass_.cancel);
      const bool release = tape_ == nullptr || tape_->recompute;
      float* output = tape_ != nullptr && tape_->recompute ? take(length, config_.hidden) : nullptr;
      const Workspace::Mark mark = pass_.workspace.mark();
      x = layer(i, x, length, output);
      length = pass_.suffixes.query[i];
      if (release) pass_.workspace.release(mark);
    }
    return x;
  }

  LayerTape rerun(size_t i, float* input) {
    const LayerPlan& plan = plan_.layers[i];
    const int64_t queries = pass_.positions.count();
    LayerTape kept;
    kept.input = input;
    kept.q = take(queries, config_.query_width());
    products(input, queries, plan.attention_norm, {{plan.q_proj, kept.q}}, nullptr);
    attend(plan, queries, input, kept);
    if (plan.adapter_up == kNone) {
      kept.gate = take(queries, config_.ffn);
      kept.up = take(queries, config_.ffn);
      products(kept.middle, queries, plan.ffn_norm, {{plan.gate_proj, kept.gate}, {plan.up_proj, kept.up}},
               nullptr);
    } else {
      kept.ffn_output = feed_forward(plan, queries, kept, nullptr);
      kept.adapter = take(queries, config_.adapter_rank);
      products(kept.ffn_output, queries, plan.ffn_norm, {{plan.adapter_up, kept.adapter}}, nullptr);
    }
    return kept;
  }

 private:
  // `output`: where the layer's result goes, null: where residual() says.
  float* layer(size_t i, float* x, int64_t length, float* output) {
    const LayerPlan& plan = plan_.layers[i];
    LayerTape kept;
    kept.input = x;
    const int64_t queries = pass_.suffixes.query[i];

    kept.q = take(queries, config_.query_width());
    project(plan, x, length, queries, kept.q);
    attend(plan, queries, shorten(x, length, queries), kept);
    const bool adapted = plan.adapter_up != kNone;
    x = feed_forward(plan, queries, kept, adapted ? nullptr : output);
    if (adapted) x = adapter(plan, x, queries, kept, output);
    if (tape_ != nullptr) tape_->layers[i] = kept;
    return x;
  }

  // From Q before its rotary embedding to kept.middle. `x`: the residual stream of the queries.
  void attend(const LayerPlan& plan, int64_t queries, float* x, LayerTape& kept) {
    const Positions::Suffix& where = pass_.positions.suffix(queries);
    rotary(kept.q, batch_ * queries, config_.query_heads, where.position);
    attention(plan, queries, where, kept);
    kept.middle = residual(x, queries);
    products(kept.attention, queries, kNone, {{plan.o_proj, kept.middle}}, x);
  }

  // Q of the last `queries` tokens, and K and V of every bank projected from this layer's input. Projections
  // under one norm over the same tokens run together.
  void project(const LayerPlan& plan, const float* x, int64_t length, int64_t queries, float* q) {
    const WorkspaceScope scope(pass_.workspace);
    bool queries_done = false;
    for (int32_t index : plan.projections) {
      const Projection& projection = plan_.projections[static_cast<size_t>(index)];
      const int64_t entries = pass_.suffixes.projection[static_cast<size_t>(index)];
      const Banks::Entries out = pass_.banks.entries(index, entries);
      std::vector<Output> outputs{{projection.k_proj, out.k}, {projection.v_proj, out.v}};
      if (projection.norm == plan.attention_norm && entries == queries && !queries_done) {
        outputs.push_back({plan.q_proj, q});
        queries_done = true;
      }
      products(suffix(x, length, entries), entries, projection.norm, outputs, nullptr);
      pass_.banks.write(index, out, entries, pass_.positions.suffix(entries).position);
    }
    if (!queries_done)
      products(suffix(x, length, queries), queries, plan.attention_norm, {{plan.q_proj, q}}, nullptr);
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
      kept.reads[banks.size()] = bank;
      banks.push_back(bank);
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

  // x + Wdown(silu(Wgate n) * Wup n), n = RMSNorm(x; w_2)
  float* feed_forward(const LayerPlan& plan, int64_t queries, LayerTape& kept, float* output) {
    float* y = output != nullptr ? output : residual(kept.middle, queries);
    if (tape_ != nullptr) {
      kept.gate = take(queries, config_.ffn);
      kept.up = take(queries, config_.ffn);
    }
    device_.run(&OpTable::feed_forward,
                {kept.middle, y, batch_ * queries, queries, norm(plan.ffn_norm), weight(plan.gate_proj),
                 weight(plan.up_proj), weight(plan.down_proj), kept.gate, kept.up,
                 pass_.precision.rounds_outputs(), pass_.precision.linear});
    return y;
  }

  // x + Wad_down silu(Wad_up RMSNorm(x; w_2))
  float* adapter(const LayerPlan& plan, float* x, int64_t queries, LayerTape& kept, float* output) {
    kept.ffn_output = x;
    float* y = output != nullptr ? output : residual(x, queries);
    if (tape_ != nullptr) kept.adapter = take(queries, config_.adapter_rank);
    device_.run(&OpTable::feed_forward, {x,
                                         y,
                                         batch_ * queries,
                                         queries,
                                         norm(plan.ffn_norm),
                                         weight(plan.adapter_up),
                                         {},
                                         weight(plan.adapter_down),
                                         kept.adapter,
                                         nullptr,
                                         pass_.precision.rounds_outputs(),
                                         pass_.precision.linear});
    return y;
  }

  // Where a block that adds to x writes: in place, or with a tape elsewhere, since the backward pass reads
  // both.
  float* residual(float* x, int64_t queries) { return tape_ == nullptr ? x : take(queries, config_.hidden); }

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

  void rotary(float* x, int64_t m, int64_t heads, const int32_t* positions) {
    device_.run(&OpTable::rotary, {x, m, static_cast<int32_t>(heads), static_cast<int32_t>(config_.head_dim),
                                   positions, pass_.rotary_table, false});
  }
  struct Output {
    int32_t weight;
    float* y;
  };
  // Up to three products of norm(x), x [batch, per_row, k].
  void products(const float* x, int64_t per_row, int32_t norm_weight, const std::vector<Output>& outputs,
                const float* residual) {
    ops::LinearArgs args{};
    args.x = x;
    args.m = batch_ * per_row;
    args.per_row = per_row;
    if (norm_weight != kNone) args.norm = norm(norm_weight);
    args.residual = residual;
    args.round_output = pass_.precision.rounds_outputs();
    args.mode = pass_.precision.linear;
    for (const Output& output : outputs) {
      args.w[args.count] = weight(output.weight);
      args.y[args.count++] = output.y;
    }
    device_.run(&OpTable::linear_forward, args);
  }
  ops::Weight weight(int32_t parameter) const { return pass_.model.weight(parameter, pass_.serving); }
  ops::Norm norm(int32_t parameter) const {
    return {pass_.model.data(parameter), static_cast<float>(config_.rms_norm_eps)};
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

void prepare_layers(Positions& positions, const Suffixes& suffixes, Workspace& workspace) {
  for (int64_t length : suffixes.query) positions.suffix(length);
  for (int64_t length : suffixes.projection) positions.suffix(length);
  workspace.flush();
}

float* run_layers(const Pass& pass, const int32_t* tokens, Tape* tape) {
  return Forward(pass, tape).run(tokens);
}

LayerTape rerun_layer(const Pass& pass, size_t index, float* input) {
  Tape tape;
  return Forward(pass, &tape).rerun(index, input);
}

}  // namespace duokv
