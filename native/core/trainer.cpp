#include "core/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <numbers>

#include "core/batch.h"
#include "core/layers.h"
#include "core/planning.h"
#include "dist/hash.h"

namespace duokv {

using ops::OpTable;

double learning_rate(const OptimizerOptions& optimizer, const ScheduleOptions& schedule, int64_t update) {
  const double s = static_cast<double>(update);
  if (update <= schedule.warmup) return optimizer.lr * s / static_cast<double>(schedule.warmup);
  if (schedule.total == 0) return optimizer.lr;
  if (update >= schedule.total) return optimizer.lr * schedule.final_fraction;
  const double progress =
      (s - static_cast<double>(schedule.warmup)) / static_cast<double>(schedule.total - schedule.warmup);
  const double cosine = (1 + std::cos(std::numbers::pi * progress)) / 2;
  return optimizer.lr * (schedule.final_fraction + (1 - schedule.final_fraction) * cosine);
}

namespace {

constexpr int64_t kFloat = sizeof(float);

void require(bool legal, const std::string& key, const std::string& value, const std::string& rule) {
  if (!legal) throw Error("ERR_CONFIG", key + " is " + value + "; it must be " + rule);
}

const TrainerOptions& checked(const TrainerOptions& o) {
  const auto at_least_zero = [](double x) { return std::isfinite(x) && x >= 0; };
  require(at_least_zero(o.optimizer.lr), "optimizer.lr", std::to_string(o.optimizer.lr),
          "a number of at least 0");
  require(o.optimizer.beta1 >= 0 && o.optimizer.beta1 < 1, "optimizer.betas[0]",
          std::to_string(o.optimizer.beta1), "in [0, 1)");
  require(o.optimizer.beta2 >= 0 && o.optimizer.beta2 < 1, "optimizer.betas[1]",
          std::to_string(o.optimizer.beta2), "in [0, 1)");
  require(std::isfinite(o.optimizer.eps) && o.optimizer.eps > 0, "optimizer.eps",
          std::to_string(o.optimizer.eps), "a positive number");
  require(at_least_zero(o.optimizer.weight_decay), "optimizer.weightDecay",
          std::to_string(o.optimizer.weight_decay), "a number of at least 0");
  require(at_least_zero(o.clip_norm), "clipNorm", std::to_string(o.clip_norm),
          "a number of at least 0 (0: no clipping)");
  require(o.microbatch >= 1, "microbatch", std::to_string(o.microbatch), "at least 1");
  require(o.bucket_bytes >= kFloat, "bucketBytes", std::to_string(o.bucket_bytes), "at least 4");
  require(o.schedule.warmup >= 0, "schedule.warmup", std::to_string(o.schedule.warmup), "at least 0");
  require(o.schedule.total == 0 || o.schedule.total >= o.schedule.warmup, "schedule.total",
          std::to_string(o.schedule.total), "0 or at least schedule.warmup");
  require(o.schedule.final_fraction >= 0 && o.schedule.final_fraction <= 1, "schedule.finalFraction",
          std::to_string(o.schedule.final_fraction), "in [0, 1]");
  return o;
}

// Of what decides how an update changes the parameters: ranks that differ in it would drift apart.
int64_t fingerprint(const Model& model, const TrainerOptions& o, int64_t update) {
  const double numbers[] = {o.optimizer.lr,
                            o.optimizer.beta1,
                            o.optimizer.beta2,
                            o.optimizer.eps,
                            o.optimizer.weight_decay,
                            static_cast<double>(o.schedule.warmup),
                            static_cast<double>(o.schedule.total),
                            o.schedule.final_fraction,
                            o.clip_norm,
                            static_cast<double>(o.bucket_bytes),
                            static_cast<double>(o.precision.linear),
                            static_cast<double>(o.precision.attention),
                            static_cast<double>(update)};
  int64_t hash = dist::hash_bytes(numbers, sizeof numbers);
  for (const Parameter& p : model.plan().parameters) {
    hash = dist::hash_bytes(p.name.data(), p.name.size(), hash);
    hash = dist::hash_bytes(&p.elements, sizeof p.elements, hash);
  }
  const std::string backend = model.device()->table().backend;
  return dist::hash_bytes(backend.data(), backend.size(), hash);
}

// Without the sign that a NaN happens to carry.
std::string text(double x) { return std::isnan(x) ? "NaN" : std::to_string(x); }

}  // namespace

Trainer::Trainer(std::shared_ptr<Model> model, const TrainerOptions& options,
                 std::shared_ptr<dist::Collective> group)
    : model_(std::move(model)),
      options_(checked(options)),
      workspace_(model_->device()),
      parallel_(std::move(group), model_, options.bucket_bytes / kFloat) {
  parallel_.guard([&] {
    const int64_t bytes = model_->plan().arena_elements * kFloat;
    gradients_ = Buffer(model_->device(), bytes, "gradients");
    first_moment_ = Buffer(model_->device(), bytes, "AdamW first moments");
    second_moment_ = Buffer(model_->device(), bytes, "AdamW second moments");
    for (Buffer* buffer : {&gradients_, &first_moment_, &second_moment_})
      model_->device()->zero(buffer->as(), bytes);
  });
}

int64_t Trainer::bytes() const {
  return gradients_.bytes() + first_moment_.bytes() + second_moment_.bytes() + workspace_.bytes();
}

const float* Trainer::queue(Model& model, Workspace& workspace, float* gradients, const Batch& batch,
                            int64_t begin, int64_t rows, double scale,
                            const std::function<void(int64_t layer)>& layer_done, Cancel cancel) const {
  const Plan& plan = model.plan();
  Device& device = *model.device();
  const int64_t n = batch.length, m = rows * n, d = plan.config.hidden;
  const int64_t offset = begin * n;

  std::vector<float> token_scale(static_cast<size_t>(m));
  for (int64_t t = 0; t < m; ++t)
    token_scale[static_cast<size_t>(t)] =
        is_valid_target(batch, offset + t) ? static_cast<float>(scale) : 0.0f;
  const int32_t* tokens = workspace.upload(batch.tokens + offset, m);
  const int32_t* targets = workspace.upload(batch.targets + offset, m);
  const float* scales = workspace.upload(token_scale);

  DocumentLayout documents = lay_out_documents(batch, begin, rows);
  Positions positions(workspace, rows, n, std::vector<int32_t>(static_cast<size_t>(rows), 0),
                      std::move(documents.start), std::move(documents.position), plan.history_window);
  const Suffixes suffixes = suffix_lengths(plan, n, {Route::Kind::Full, 0});
  const float* rotary_table = model.rotary_table(n);
  TrainingBanks banks(workspace, plan, rows, n, rotary_table);
  prepare_layers(positions, suffixes, workspace);
  const Pass pass{model, workspace, options_.precision, false, rotary_table, positions, suffixes,
                  banks, cancel};
  Tape tape;
  tape.recompute = options_.recompute;
  float* x = run_layers(pass, tokens, &tape);
  poll(cancel);

  float* hidden = workspace.take(m * d);
  float* rstd = workspace.take(m);
  const float eps = static_cast<float>(plan.config.rms_norm_eps);
  device.run(&OpTable::rms_norm_forward, {x, model.data(plan.final_norm), m, d, eps, hidden, rstd});
  float* nll = workspace.take(m);
  float* dhidden = workspace.take(m * d);
  float* dx = workspace.take(m * d);
  const auto gradient = [&](int32_t parameter) { return gradients + plan.parameter(parameter).offset; };
  device.run(&OpTable::linear_cross_entropy,
             {hidden, m, model.weight(plan.embedding, false), targets, scales, nll, dhidden,
              gradient(plan.embedding), options_.precision.linear});
  device.run(&OpTable::rms_norm_backward,
             {x, model.data(plan.final_norm), rstd, dhidden, m, d, dx, false, gradient(plan.final_norm)});
  run_layers_backward(pass, tokens, tape, dx, gradients, layer_done);
  return nll;
}

void Trainer::plan(const Batch& batch) {
  const int64_t rows = std::min(options_.microbatch, batch.rows);
  if (rows <= planned_rows_ && batch.length == planned_length_) return;
  // Every row one document, in which every query sees the most.
  Batch whole = batch;
  whole.document_ids = whole.target_document_ids = nullptr;
  begin_planned(
      *model_, workspace_,
      "training on " + std::to_string(rows) + " x " + std::to_string(batch.length) + " positions",
      [&](Model& twin, Workspace& dry) {
        // Laid out as the gradients are.
        queue(twin, dry, twin.arena(), whole, 0, rows, 1, {}, nullptr);
        double squares = 0;
        twin.device()->run(&OpTable::sum_squares, {twin.arena(), twin.plan().arena_elements, &squares});
      });
  planned_rows_ = rows;
  planned_length_ = batch.length;
}

double Trainer::accumulate(const Batch& batch, int64_t begin, int64_t rows, double scale, bool last,
                           Cancel cancel) {
  workspace_.begin();
  std::function<void(int64_t)> layer_done;
  if (last && parallel_.active())
    layer_done = [&](int64_t layer) { parallel_.layer_done(layer, gradients_.as()); };
  const float* nll =
      queue(*model_, workspace_, gradients_.as(), batch, begin, rows, scale, layer_done, cancel);
  const int64_t m = rows * batch.length, offset = begin * batch.length;
  std::vector<float> losses(static_cast<size_t>(m));
  model_->device()->download(losses.data(), nll, m * kFloat);
  double sum = 0;
  for (int64_t t = 0; t < m; ++t)
    if (is_valid_target(batch, offset + t)) sum += losses[static_cast<size_t>(t)];
  return sum * scale;
}

void Trainer::refuse(Cancel cancel) {
  DataParallel::Opening opening{0, 0, fingerprint(*model_, options_, update_), true};
  parallel_.open(opening, cancel);
}

DataParallel::Opening Trainer::open(const Batch& batch, Cancel cancel) {
  DataParallel::Opening opening{0, batch.rows * batch.length, fingerprint(*model_, options_, update_), false};
  std::exception_ptr refusal;
  try {
    validate_batch(model_->plan(), batch, true);
    for (int64_t t = 0; t < opening.tokens; ++t) opening.valid_targets += is_valid_target(batch, t) ? 1 : 0;
  } catch (const Error&) {
    refusal = std::current_exception();
    opening = {0, 0, opening.fingerprint, true};
  }
  parallel_.open(opening, cancel);
  if (refusal) std::rethrow_exception(refusal);
  if (opening.valid_targets == 0)
    throw Error("ERR_NO_TARGETS",
                "the batch has no valid target: no target's document id equals its input's");
  return opening;
}

GradientResult Trainer::gradients(const Batch& batch, Cancel cancel) {
  const DataParallel::Opening whole = open(batch, cancel);
  GradientResult result{0, 0, whole.valid_targets, whole.tokens};
  parallel_.guard([&] {
    plan(batch);
    model_->device()->zero(gradients_.as(), gradients_.bytes());
    for (int64_t row = 0; row < batch.rows; row += options_.microbatch) {
      const int64_t rows = std::min(options_.microbatch, batch.rows - row);
      result.loss += accumulate(batch, row, rows, 1.0 / static_cast<double>(whole.valid_targets),
                                row + rows == batch.rows, cancel);
    }
    parallel_.finish(gradients_.as(), cancel);
    double squares = 0;
    model_->device()->run(&OpTable::sum_squares, {gradients_.as(), model_->plan().arena_elements, &squares});
    parallel_.close(result.loss, squares, cancel);
    result.grad_norm = std::sqrt(squares);
  });
  return result;
}

StepResult Trainer::step(const Batch& batch, Cancel cancel) {
  const auto begin = std::chrono::steady_clock::now();
  StepResult result{};
  static_cast<GradientResult&>(result) = gradients(batch, cancel);
  if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm))
    throw Error("ERR_NOT_FINITE", "update " + std::to_string(update_ + 1) + ": loss " + text(result.loss) +
                                      ", gradient norm " + text(result.grad_norm) + "; nothing was changed");
  poll(cancel);
  result.update = update_ + 1;
  result.learning_rate = learning_rate(options_.optimizer, options_.schedule, result.update);
  const double clip =
      options_.clip_norm > 0 ? std::min(1.0, options_.clip_norm / (result.grad_norm + 1e-6)) : 1.0;
  const OptimizerOptions& o = options_.optimizer;
  model_->device()->run(&OpTable::adamw,
                        {model_->arena(), gradients_.as(), first_moment_.as(), second_moment_.as(),
                         model_->plan().arena_elements, result.learning_rate, o.beta1, o.beta2, o.eps,
                         o.weight_decay, clip, result.update});
  model_->touch();
  update_ = result.update;
  if (!checked_) parallel_.check_parameters();
  checked_ = true;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

void Trainer::read_state(State state, const std::string& name, float* out, int64_t elements) const {
  const Buffer& buffer = state == State::Gradient      ? gradients_
                         : state == State::FirstMoment ? first_moment_
                                                       : second_moment_;
  model_->device()->download(out, buffer.as() + model_->plan().parameter(name, elements).offset,
                             elements * kFloat);
}

void Trainer::write_state(State state, const std::string& name, const float* values, int64_t elements) {
  if (state == State::Gradient) throw Error("ERR_CONFIG", "gradients are computed, not written");
  const Buffer& buffer = state == State::FirstMoment ? first_moment_ : second_moment_;
  model_->device()->upload(buffer.as() + model_->plan().parameter(name, elements).offset, values,
                           elements * kFloat);
}

}  // namespace duokv
