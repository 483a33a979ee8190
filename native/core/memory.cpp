#include "core/memory.h"

#include <algorithm>
#include <vector>

namespace duokv {
namespace {

// What a planning device has counted. `model` is on it.
MemoryPrediction counted(const Model& model) {
  const ops::DeviceInfo info = model.device()->info();
  MemoryPrediction prediction{model.device()->held(), info.memory_peak};
  const auto add = [&](const char* part, int64_t bytes) {
    if (bytes > 0) prediction.parts[part] = bytes;
  };
  add("packed weights", model.packed_bytes());
  add("scratch", info.memory_scratch);
  int64_t held = 0;
  for (const auto& [part, bytes] : prediction.parts) held += bytes;
  // A program that ended has released its workspace.
  if (held < prediction.total) prediction.parts["workspace"] += prediction.total - held;
  return prediction;
}

}  // namespace

MemoryPrediction predict_training(const Device& device, const ModelConfig& config,
                                  const TrainerOptions& options, int64_t rows, int64_t length) {
  const auto model = Model::create(device.planner(), config, "");
  Trainer trainer(model, options);
  const std::vector<int32_t> tokens(static_cast<size_t>(rows * length), 0);
  trainer.step({rows, length, tokens.data(), nullptr, tokens.data(), nullptr}, nullptr);
  return counted(*model);
}

MemoryPrediction predict_serving(const Device& device, const ModelConfig& config,
                                 const SessionOptions& options, int64_t prompt, const Route& route) {
  const auto model = Model::create(device.planner(), config, "");
  Session session(model, options);
  std::vector<float> logits(static_cast<size_t>(options.batch * config.vocab));
  const std::vector<int32_t> tokens(static_cast<size_t>(std::max(prompt, int64_t{1})), 0);
  const auto append = [&](int64_t count, const Route& along) {
    std::vector<PrefillRow> rows;
    for (int64_t row = 0; row < options.batch; ++row) rows.push_back({row, tokens.data(), nullptr, count});
    session.prefill(rows, along, {logits.data()}, nullptr);
  };
  append(prompt, route);
  for (int64_t length = prompt; length < options.capacity; ++length) append(1, {Route::Kind::Exact, 0});
  return counted(*model);
}

MemoryPrediction predict_scoring(const Device& device, const ModelConfig& config, const Precision& precision,
                                 int64_t length) {
  const auto model = Model::create(device.planner(), config, "");
  const std::vector<int32_t> tokens(static_cast<size_t>(length), 0);
  std::vector<float> nll(static_cast<size_t>(length));
  compute_token_nll(*model, {1, length, tokens.data(), nullptr, tokens.data(), nullptr}, precision,
                    nll.data(), nullptr);
  return counted(*model);
}

}  // namespace duokv
