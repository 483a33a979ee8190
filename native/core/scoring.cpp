// Programs without a cache: logits of all positions and token cross-entropies. Rows run one by one, so that
// memory does not grow with the batch and a row's result cannot depend on its mates.
#include <algorithm>
#include <functional>

#include "core/batch.h"
#include "core/layers.h"
#include "core/planning.h"

namespace duokv {
namespace {

// What is computed of a row's normalised final hidden states [length, d].
using Use = std::function<void(Model&, Workspace&, const float* hidden)>;

// Queues the pass of one row of a batch, up to its hidden states and what is wanted of them.
void queue_row(Model& model, Workspace& workspace, const Batch& batch, int64_t row,
               const Precision& precision, Cancel cancel, const Use& use) {
  const Plan& plan = model.plan();
  const int64_t n = batch.length, d = plan.config.hidden;
  const Suffixes suffixes = suffix_lengths(plan, n, {Route::Kind::Full, 0});
  DocumentLayout documents = lay_out_documents(batch, row, 1);
  const int32_t* tokens = workspace.upload(batch.tokens + row * n, n);
  Positions positions(workspace, 1, n, {0}, std::move(documents.start), std::move(documents.position),
                      plan.history_window);
  const float* rotary_table = model.rotary_table(n);
  TrainingBanks banks(workspace, plan, 1, n, rotary_table);
  prepare_layers(positions, suffixes, workspace);
  const Pass pass{model, workspace, precision, true, rotary_table, positions, suffixes, banks, cancel};
  float* x = run_layers(pass, tokens, nullptr);
  poll(cancel);
  float* hidden = workspace.take(n * d);
  model.device()->run(
      &ops::OpTable::rms_norm_forward,
      {x, model.data(plan.final_norm), n, d, static_cast<float>(plan.config.rms_norm_eps), hidden, nullptr});
  use(model, workspace, hidden);
}

// Calls use(row) for every row of the batch, whose program takes the same memory whatever its documents are.
void for_each_row(Model& model, const Batch& batch, const Precision& precision, Cancel cancel,
                  const std::function<Use(int64_t row)>& use) {
  Workspace workspace(model.device());
  Batch whole = batch;  // every row one document: none sees more
  whole.document_ids = nullptr;
  begin_planned(
      model, workspace, "scoring " + std::to_string(batch.length) + " positions",
      [&](Model& planned, Workspace& dry) { queue_row(planned, dry, whole, 0, precision, nullptr, use(0)); });
  for (int64_t row = 0; row < batch.rows; ++row) {
    workspace.begin();
    queue_row(model, workspace, batch, row, precision, cancel, use(row));
  }
}

}  // namespace

void compute_logits(Model& model, const Batch& batch, const Precision& precision, float* logits,
                    Cancel cancel) {
  validate_batch(model.plan(), batch, false);
  const int64_t n = batch.length, d = model.plan().config.hidden, vocab = model.plan().config.vocab;
  constexpr int64_t kChunk = 512;  // positions whose logits are on the device at a time
  for_each_row(model, batch, precision, cancel, [&](int64_t row) {
    return [&, row](Model& on, Workspace& workspace, const float* hidden) {
      float* chunk = workspace.take(std::min(n, kChunk) * vocab);
      for (int64_t t = 0; t < n; t += kChunk) {
        poll(cancel);
        const int64_t m = std::min(kChunk, n - t);
        on.head(hidden + t * d, m, n, false, precision, chunk);
        on.device()->download(logits + (row * n + t) * vocab, chunk,
                              m * vocab * static_cast<int64_t>(sizeof(float)));
      }
    };
  });
}

void compute_token_nll(Model& model, const Batch& batch, const Precision& precision, float* nll,
                       Cancel cancel) {
  validate_batch(model.plan(), batch, true);
  const int64_t n = batch.length;
  for_each_row(model, batch, precision, cancel, [&](int64_t row) {
    return [&, row](Model& on, Workspace& workspace, const float* hidden) {
      const int32_t* targets = workspace.upload(batch.targets + row * n, n);
      workspace.flush();
      float* result = workspace.take(n);
      ops::LinearCrossEntropyArgs args{};
      args.x = hidden;
      args.m = n;
      args.embedding = on.weight(on.plan().embedding, true);
      args.targets = targets;
      args.nll = result;
      args.mode = precision.linear;
      on.device()->run(&ops::OpTable::linear_cross_entropy, args);
      on.device()->download(nll + row * n, result, n * static_cast<int64_t>(sizeof(float)));
    };
  });
}

}  // namespace duokv
