// Training: gradients of the mean cross-entropy over a global batch, global-norm clipping, AdamW, schedule.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/data_parallel.h"
#include "core/model.h"
#include "core/workspace.h"

namespace duokv {

struct OptimizerOptions {
  double lr = 3e-4;  // peak
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
};

// lr(s) = peak * s / warmup for s <= warmup, then cosine to final_fraction * peak at s = total. total 0:
// constant peak.
struct ScheduleOptions {
  int64_t warmup = 0, total = 0;
  double final_fraction = 0.1;
};

struct TrainerOptions {
  Precision precision;
  OptimizerOptions optimizer;
  ScheduleOptions schedule;
  double clip_norm = 1.0;  // 0: no clipping
  int64_t microbatch = 1;  // rows per forward/backward pass
  bool recompute = false;  // activation checkpointing: less memory, the same bits, a slower step
  int64_t bucket_bytes = int64_t{25} << 20;  // of gradients that ranks sum at once
};

// Of the whole batch: with several ranks, of all their rows.
struct GradientResult {
  double loss;       // mean over valid targets
  double grad_norm;  // L2 over all parameters, before clipping
  int64_t valid_targets, tokens;
};

struct StepResult : GradientResult {
  int64_t update;  // from 1
  double learning_rate;
  double seconds;
};

double learning_rate(const OptimizerOptions&, const ScheduleOptions&, int64_t update);

class Trainer {
 public:
  // Allocates gradients and both moments. Throws ERR_CONFIG, ERR_DEVICE_MEMORY. With a `group` of several
  // ranks the trainer is one of theirs: every rank passes its own rows of each global batch, and
  // construction, gradients() and step() are calls that all ranks make in the same order. They throw
  // ERR_DISTRIBUTED.
  Trainer(std::shared_ptr<Model> model, const TrainerOptions& options,
          std::shared_ptr<dist::Collective> group = nullptr);

  const TrainerOptions& options() const { return options_; }
  const std::shared_ptr<Model>& model() const { return model_; }
  int64_t update() const { return update_; }  // updates done
  int64_t bytes() const;

  // Gradients of the mean loss over valid targets of the whole batch, no update; read them with read_state.
  GradientResult gradients(const Batch& batch, Cancel cancel);
  // One global batch: gradients, clip, AdamW. Nothing changes when it throws.
  StepResult step(const Batch& batch, Cancel cancel);

  // In place of gradients() or step() on a rank whose caller has found its rows unusable: theirs throw.
  void refuse(Cancel cancel);

  // State of one parameter tensor, FP32 [elements]: "gradient", "m" or "v".
  enum class State { Gradient, FirstMoment, SecondMoment };
  void read_state(State, const std::string& name, float* out, int64_t elements) const;
  // Throws ERR_DISTRIBUTED unless all ranks hold the same parameters, bit for bit. All ranks call it.
  void check_ranks() { parallel_.check_parameters(); }
  // For resuming: moments and the number of updates done.
  void write_state(State, const std::string& name, const float* values, int64_t elements);
  void set_update(int64_t update) { update_ = update; }

 private:
  std::shared_ptr<Model> model_;
  TrainerOptions options_;
  Buffer gradients_, first_moment_, second_moment_;
  Workspace workspace_;
  DataParallel parallel_;
  int64_t update_ = 0;
  int64_t planned_rows_ = 0, planned_length_ = 0;  // of the microbatch that the workspace has memory for
  bool checked_ = false;                           // that all ranks hold the same parameters

  // Valid targets and tokens of the whole batch. Throws where this rank's rows cannot be used.
  DataParallel::Opening open(const Batch& batch, Cancel cancel);
  // Adds one microbatch's gradients; `scale` is 1 / (valid targets of the whole batch). Returns its share of
  // the loss. After the `last` one of this rank, gradients are summed over ranks as layers complete.
  double accumulate(const Batch& batch, int64_t begin, int64_t rows, double scale, bool last, Cancel cancel);
  // Queues that microbatch; gives the cross-entropies [rows * length] (device).
  const float* queue(Model& model, Workspace& workspace, float* gradients, const Batch& batch, int64_t begin,
                     int64_t rows, double scale, const std::function<void(int64_t layer)>& layer_done,
                     Cancel cancel) const;
  // Gives the workspace the memory of microbatches of this batch's shape. Throws ERR_DEVICE_MEMORY.
  void plan(const Batch& batch);
};

}  // namespace duokv
