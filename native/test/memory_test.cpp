// Predictions of memory against what programs take, recomputation, and programs that do not fit.
#include "core/memory.h"

#include "test/models.h"

namespace duokv::test {
namespace {

const char* const kPrecisions[] = {"fp32", "bf16"};

TrainerOptions training(const char* precision, int64_t microbatch, bool recompute) {
  TrainerOptions options;
  options.precision = parse_precision(precision);
  options.microbatch = microbatch;
  options.recompute = recompute;
  return options;
}

std::shared_ptr<Device> fresh_device() { return Device::open(cpu::op_table(), 2); }

void expect_predicted(const char* what, const ModelConfig& config, const Device& device,
                      const MemoryPrediction& prediction) {
  const ops::DeviceInfo info = device.info();
  expect(prediction.total == info.memory_peak, "%s, %s: predicted %lld, measured %lld", what,
         describe(config).c_str(), static_cast<long long>(prediction.total),
         static_cast<long long>(info.memory_peak));
  int64_t sum = 0;
  for (const auto& [part, bytes] : prediction.parts) {
    sum += bytes;
    const auto held = device.held().find(part);
    if (held != device.held().end() && part != "workspace" && part != "inputs")
      expect(held->second == bytes, "%s, %s: %s predicted %lld, held %lld", what, describe(config).c_str(),
             part.c_str(), static_cast<long long>(bytes), static_cast<long long>(held->second));
  }
  expect(sum == prediction.total, "%s: the parts add up to %lld of %lld", what, static_cast<long long>(sum),
         static_cast<long long>(prediction.total));
}

DUOKV_TEST(training_takes_what_is_predicted) {
  for (const ModelConfig& config : all_configs())
    for (const char* precision : kPrecisions)
      for (bool recompute : {false, true}) {
        const auto device = fresh_device();
        const TrainerOptions options = training(precision, 2, recompute);
        const MemoryPrediction prediction = predict_training(*device, config, options, 3, 37);
        expect(device->info().memory_peak == 0, "a prediction took memory");
        const auto model = random_model(device, config, 41);
        Trainer trainer(model, options);
        const RandomBatch random(config, 3, 37, 42);
        // Packed documents take no more than whole ones.
        for (const int64_t* ids : {random.batch.document_ids, static_cast<const int64_t*>(nullptr)}) {
          Batch batch = random.batch;
          batch.document_ids = ids;
          if (ids == nullptr) batch.target_document_ids = nullptr;
          trainer.step(batch, nullptr);
        }
        expect_predicted(recompute ? "training, recomputed" : "training", config, *device, prediction);
      }
}

DUOKV_TEST(serving_takes_what_is_predicted) {
  constexpr int64_t kCapacity = 90, kPrompt = 61;
  for (const ModelConfig& config : all_configs())
    for (const char* precision : kPrecisions)
      for (const Route::Kind kind : {Route::Kind::Exact, Route::Kind::Full}) {
        const auto device = fresh_device();
        const SessionOptions options{2, kCapacity, parse_precision(precision)};
        const MemoryPrediction prediction = predict_serving(*device, config, options, kPrompt, {kind, 0});
        const auto model = random_model(device, config, 43);
        Session session(model, options);
        const RandomBatch random(config, 2, kCapacity, 44);
        std::vector<float> logits(static_cast<size_t>(2 * config.vocab));
        const auto append = [&](int64_t first, int64_t count, const Route& route) {
          session.prefill({{0, random.tokens.data() + first, nullptr, count},
                           {1, random.tokens.data() + kCapacity + first, nullptr, count}},
                          route, {logits.data()}, nullptr);
        };
        append(0, kPrompt, {kind, 0});
        for (int64_t t = kPrompt; t < kCapacity; ++t) append(t, 1, {Route::Kind::Exact, 0});
        expect_predicted("serving", config, *device, prediction);
      }
}

DUOKV_TEST(scoring_takes_what_is_predicted) {
  for (const ModelConfig& config : all_configs()) {
    const auto device = fresh_device();
    const Precision precision = parse_precision("fp32");
    const MemoryPrediction prediction = predict_scoring(*device, config, precision, 53);
    const auto model = random_model(device, config, 45);
    RandomBatch random(config, 3, 53, 46);
    random.batch.document_ids = random.batch.target_document_ids = nullptr;
    std::vector<float> nll(3 * 53);
    compute_token_nll(*model, random.batch, precision, nll.data(), nullptr);
    expect_predicted("scoring", config, *device, prediction);
  }
}

DUOKV_TEST(recomputed_gradients_have_the_same_bits) {
  for (const ModelConfig& config : all_configs())
    for (const char* precision : kPrecisions) {
      const auto model = random_model(core_device(), config, 47);
      const RandomBatch random(config, 3, 29, 48);
      Trainer kept(model, training(precision, 2, false)), rerun(model, training(precision, 2, true));
      const GradientResult a = kept.gradients(random.batch, nullptr),
                           b = rerun.gradients(random.batch, nullptr);
      expect(a.loss == b.loss && a.grad_norm == b.grad_norm, "%s: loss %g and %g", describe(config).c_str(),
             a.loss, b.loss);
      expect(rerun.bytes() < kept.bytes(), "%s: %lld bytes recomputed, %lld kept", describe(config).c_str(),
             static_cast<long long>(rerun.bytes()), static_cast<long long>(kept.bytes()));
      for (const Parameter& p : model->plan().parameters) {
        std::vector<float> x(static_cast<size_t>(p.elements)), y = x;
        kept.read_state(Trainer::State::Gradient, p.name, x.data(), p.elements);
        rerun.read_state(Trainer::State::Gradient, p.name, y.data(), p.elements);
        expect_bitwise((describe(config) + " " + p.name).c_str(), x, y);
      }
    }
}

// The CPU with as much memory as a test allows it.
int64_t allowed_bytes = 0;
ops::Status capped_info(ops::Device* device, ops::DeviceInfo* info) {
  const ops::Status status = cpu::op_table().info(device, info);
  if (info->memory_free != std::numeric_limits<int64_t>::max())
    info->memory_free = allowed_bytes - info->memory_used;
  return status;
}

DUOKV_TEST(what_does_not_fit_is_refused_before_anything_changes) {
  static ops::OpTable table = cpu::op_table();
  table.info = capped_info;
  allowed_bytes = int64_t{1} << 40;
  const ModelConfig config = small_config(Design::LocalHistory);
  const auto device = Device::open(table, 2);
  const auto model = random_model(device, config, 49);
  Trainer trainer(model, training("fp32", 8, false));
  Session session(model, {1, 3000, parse_precision("fp32")});
  const RandomBatch small(config, 1, 20, 50), large(config, 8, 400, 51);
  std::vector<float> logits(static_cast<size_t>(config.vocab));
  const auto refuses = [&](const char* holder, auto&& call) {
    const int64_t used = device->info().memory_used;
    try {
      call();
      expect(false, "nothing was refused");
    } catch (const Error& error) {
      const std::string message = error.what();
      expect(error.code == "ERR_DEVICE_MEMORY", "%s: %s", error.code.c_str(), error.what());
      expect(message.find(holder) != std::string::npos && message.find("parameters") != std::string::npos,
             "\"%s\" does not name %s and who holds memory", error.what(), holder);
    }
    expect(device->info().memory_used == used, "memory was allocated");
  };
  trainer.step(small.batch, nullptr);
  session.prefill({{0, small.tokens.data(), nullptr, 20}}, {}, {logits.data()}, nullptr);
  // Enough for what has run.
  allowed_bytes = device->info().memory_used + (int64_t{1} << 16);
  refuses("training on 8 x 400", [&] { trainer.step(large.batch, nullptr); });
  refuses("1 x 2000 positions", [&] {
    session.prefill({{0, large.tokens.data(), nullptr, 2000}}, {}, {logits.data()}, nullptr);
  });
  refuses("scoring 3200 positions", [&] {
    Batch batch = large.batch;
    batch.rows = 1, batch.length = 3200, batch.document_ids = batch.target_document_ids = nullptr;
    std::vector<float> nll(3200);
    compute_token_nll(*model, batch, parse_precision("fp32"), nll.data(), nullptr);
  });
  expect(trainer.update() == 1 && session.length(0) == 20, "a refused call changed something");
  // The device goes on.
  trainer.step(small.batch, nullptr);
  session.prefill({{0, small.tokens.data(), nullptr, 1}}, {}, {logits.data()}, nullptr);
  expect(trainer.update() == 2 && session.length(0) == 21, "what fits did not run");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
