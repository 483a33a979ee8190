// Programs without a cache: logits of all positions and token cross-entropies. Rows run one by one, so that
// memory does not grow with the batch and a row's result cannot depend on its mates.
#include <algorithm>
#include <functional>

#include "core/batch.h"
#include "core/layers.h"

namespace duokv {
namespace {

// Calls use(row, hidden) with the normalised final hidden states [length, d] of every row.
void for_each_row(Model& model, const Batch& batch, const Precision& precision, Cancel cancel,
                  Workspace& workspace, const std::function<void(int64_t row, const float* hidden)>& use) {
  const Plan& plan = model.plan();
  const int64_t n = batch.length, d = plan.config.hidden;
  const Suffixes suffixes = suffix_lengths(plan, n, {Route::Kind::Full, 0});
  for (int64_t r = 0; r < batch.rows; ++r) {
    workspace.begin();
    DocumentLayout documents = lay_out_documents(batch, r, 1);
    const int32_t* tokens = workspace.upload(batch.tokens + r * n, n);
    Positions positions(workspace, 1, n, {0}, std::move(documents.start), std::move(documents.position),
                        plan.history_window);
    const float* rotary_table = model.rotary_table(n);
    TrainingBanks banks(workspace, plan, 1, n, rotary_table);
    prepare_layers(positions, suffixes, workspace);
    const Pass pass{model, workspace, precision, true, rotary_table, positions, suffixes, banks, cancel};
    float* x = run_layers(pass, tokens, nullptr);
    poll(cancel);
    float* hidden = workspace.take(n * d);
    model.device()->run(&ops::OpTable::rms_norm_forward,
                        {x, model.data(plan.final_norm), n, d, static_cast<float>(plan.config.rms_norm_eps),
                         hidden, nullptr});
    use(r, hidden);
  }
}

}  // namespace

void compute_logits(Model& model, const Batch& batch, const Precision& precision, float* logits,
                    Cancel cancel) {
  const Plan& plan = model.plan();
  validate_batch(plan, batch, false);
  Workspace workspace(model.device());
  const int64_t n = batch.length, d = plan.config.hidden, vocab = plan.config.vocab;
  constexpr int64_t kChunk = 512;  // positions whose logits are on the device at a time
  for_each_row(model, batch, precision, cancel, workspace, [&](int64_t row, const float* hidden) {
    float* chunk = workspace.take(std::min(n, kChunk) * vocab);
    for (int64_t t = 0; t < n; t += kChunk) {
      poll(cancel);
      const int64_t m = std::min(kChunk, n - t);
      ops::LinearArgs head{};
      head.x = hidden + t * d;
      head.m = m;
      head.per_row = n;
      head.count = 1;
      head.w[0] = model.weight(plan.embedding, true);
      head.y[0] = chunk;
      head.mode = precision.linear;
      model.device()->run(&ops::OpTable::linear_forward, head);
      model.device()->download(logits + (row * n + t) * vocab, chunk,
                               m * vocab * static_cast<int64_t>(sizeof(float)));
    }
  });
}

void compute_token_nll(Model& model, const Batch& batch, const Precision& precision, float* nll,
                       Cancel cancel) {
  const Plan& plan = model.plan();
  validate_batch(plan, batch, true);
  Workspace workspace(model.device());
  const int64_t n = batch.length;
  for_each_row(model, batch, precision, cancel, workspace, [&](int64_t row, const float* hidden) {
    const int32_t* targets = workspace.upload(batch.targets + row * n, n);
    workspace.flush();
    float* result = workspace.take(n);
    ops::LinearCrossEntropyArgs args{};
    args.x = hidden;
    args.m = n;
    args.embedding = model.weight(plan.embedding, true);
    args.targets = targets;
    args.nll = result;
    args.mode = precision.linear;
    model.device()->run(&ops::OpTable::linear_cross_entropy, args);
    model.device()->download(nll + row * n, result, n * static_cast<int64_t>(sizeof(float)));
  });
}

}  // namespace duokv
