// Gradients of every design by directional differences, microbatches, resuming, and what a failed step leaves
// behind.
#include "test/models.h"

namespace duokv::test {
namespace {

TrainerOptions options(int64_t microbatch = 1) {
  TrainerOptions o;
  o.precision = parse_precision("fp32");
  o.microbatch = microbatch;
  return o;
}

std::vector<float> parameter(const Model& model, const Parameter& p) {
  std::vector<float> values(static_cast<size_t>(p.elements));
  model.read(p.name, values.data(), p.elements);
  return values;
}

double mean_loss(Model& model, const Batch& batch) {
  std::vector<float> nll(static_cast<size_t>(batch.rows * batch.length));
  compute_token_nll(model, batch, parse_precision("fp32"), nll.data(), nullptr);
  double sum = 0, valid = 0;
  for (size_t t = 0; t < nll.size(); ++t)
    if (batch.target_document_ids[t] == batch.document_ids[t]) sum += nll[t], valid += 1;
  return sum / valid;
}

DUOKV_TEST(gradients_match_directional_differences) {
  for (const ModelConfig& config : all_configs()) {
    const auto model = random_model(core_device(), config, 21);
    const RandomBatch random(config, 2, 23, 22);
    Trainer trainer(model, options());
    const GradientResult result = trainer.gradients(random.batch, nullptr);
    expect(std::abs(result.loss - mean_loss(*model, random.batch)) < 1e-5, "loss");
    // Along each tensor's own gradient, so that no tensor hides behind another.
    const std::vector<Parameter>& parameters = model->plan().parameters;
    for (int i = 0; i < trials(static_cast<int>(parameters.size())); ++i) {
      const Parameter& p = parameters[parameters.size() - 1 - static_cast<size_t>(i)];
      std::vector<float> g(static_cast<size_t>(p.elements));
      trainer.read_state(Trainer::State::Gradient, p.name, g.data(), p.elements);
      double norm = 0;
      for (float x : g) norm += static_cast<double>(x) * x;
      norm = std::sqrt(norm);
      if (norm < 1e-6) continue;
      const std::vector<float> at = parameter(*model, p);
      const double step = 5e-3;
      double loss[2];
      for (int side : {0, 1}) {
        std::vector<float> moved = at;
        for (size_t i = 0; i < moved.size(); ++i)
          moved[i] += static_cast<float>((side == 0 ? -step : step) * g[i] / norm);
        model->write(p.name, moved.data(), p.elements);
        loss[side] = mean_loss(*model, random.batch);
      }
      model->write(p.name, at.data(), p.elements);
      const double slope = (loss[1] - loss[0]) / (2 * step);
      expect(std::abs(slope - norm) <= 2e-2 * norm + 2e-4, "%s %s: slope %g, gradient norm %g",
             describe(config).c_str(), p.name.c_str(), slope, norm);
    }
  }
}

DUOKV_TEST(a_single_local_entry_under_separate_fusion_gives_its_key_no_gradient) {
  for (Design design : {Design::CurrentOnly, Design::RepeatedCurrent}) {
    ModelConfig config = small_config(design);
    config.fusion = Fusion::Separate;
    const auto model = random_model(core_device(), config, 23);
    Trainer trainer(model, options());
    trainer.gradients(RandomBatch(config, 2, 31, 24).batch, nullptr);
    for (const Projection& projection : model->plan().projections) {
      const Parameter& k_proj = model->plan().parameter(projection.k_proj);
      if (k_proj.name.find("layers.") == std::string::npos || projection.representation < config.lower_layers)
        continue;
      std::vector<float> g(static_cast<size_t>(k_proj.elements));
      trainer.read_state(Trainer::State::Gradient, k_proj.name, g.data(), k_proj.elements);
      for (float x : g)
        if (!expect(x == 0.0f, "%s: %g", k_proj.name.c_str(), static_cast<double>(x))) break;
    }
  }
}

DUOKV_TEST(microbatches_share_one_normalisation) {
  const ModelConfig config = small_config(Design::LocalHistory);
  const RandomBatch random(config, 5, 19, 25);
  const auto model = random_model(core_device(), config, 26);
  Trainer whole(model, options(5)), split(model, options(2));
  const GradientResult a = whole.gradients(random.batch, nullptr), b = split.gradients(random.batch, nullptr);
  expect(std::abs(a.loss - b.loss) < 1e-6, "loss %g and %g", a.loss, b.loss);
  for (const Parameter& p : model->plan().parameters) {
    std::vector<float> x(static_cast<size_t>(p.elements)), y = x;
    whole.read_state(Trainer::State::Gradient, p.name, x.data(), p.elements);
    split.read_state(Trainer::State::Gradient, p.name, y.data(), p.elements);
    expect_relative_l2(p.name, x, y, 1e-5);
  }
}

DUOKV_TEST(steps_are_reproducible_and_a_failed_one_changes_nothing) {
  const ModelConfig config = small_config(Design::LocalHistory);
  const RandomBatch random(config, 2, 19, 27);
  std::vector<float> reference;
  for (int run = 0; run < 2; ++run) {
    const auto model = random_model(core_device(), config, 28);
    Trainer trainer(model, options());
    const Parameter& embedding = model->plan().parameter(model->plan().embedding);
    for (int64_t s = 1; s <= 3; ++s) {
      const StepResult result = trainer.step(random.batch, nullptr);
      expect(result.update == s && trainer.update() == s, "update %lld",
             static_cast<long long>(result.update));
    }
    std::vector<float> after = parameter(*model, embedding);
    if (run == 0) reference = after;
    expect_bitwise("three steps", after, reference);

    const std::atomic<bool> cancelled{true};
    const auto fails = [&](const char* code, const Batch& batch, Cancel cancel) {
      try {
        trainer.step(batch, cancel);
        expect(false, "%s was not raised", code);
      } catch (const Error& e) {
        expect(e.code == code, "%s, expected %s: %s", e.code.c_str(), code, e.what());
      }
      expect(trainer.update() == 3, "%s: the update count changed", code);
      expect_bitwise(code, parameter(*model, embedding), reference);
    };
    fails(kAbortCode, random.batch, &cancelled);
    Batch none = random.batch;
    const std::vector<int64_t> other(random.ids.size(), 7);
    none.target_document_ids = other.data();
    fails("ERR_NO_TARGETS", none, nullptr);
    std::vector<float> poisoned = reference;
    poisoned[static_cast<size_t>(random.tokens[0]) * 24] = std::numeric_limits<float>::quiet_NaN();
    model->write(embedding.name, poisoned.data(), embedding.elements);
    reference = poisoned;
    fails("ERR_NOT_FINITE", random.batch, nullptr);
    reference = after;
  }
}

DUOKV_TEST(learning_rates) {
  const OptimizerOptions o;
  const ScheduleOptions s{128, 7630, 0.1};
  expect(learning_rate(o, s, 64) == 1.5e-4, "warmup");
  expect(learning_rate(o, s, 128) == 3e-4, "peak");
  expect(std::abs(learning_rate(o, s, 3879) - 1.65e-4) < 1e-18, "middle");
  expect(std::abs(learning_rate(o, s, 7629) - 3.0000011837211083e-05) < 1e-18, "last but one");
  expect(learning_rate(o, s, 7630) == 3e-4 * 0.1, "last");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
