// A model: a plan and its FP32 parameters on a device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/device.h"
#include "core/plan.h"
#include "core/precision.h"

namespace duokv {

using Cancel =
    const std::atomic<bool>*;  // null, or a flag polled between layers; set: the call throws kAbortCode

class Model {
 public:
  // Parameters drawn from `seed` (decimal digits), spec/architecture.md section 6. Empty seed: left zero, to
  // be written. Throws ERR_CONFIG, also where the backend has no kernel for the shape, and
  // ERR_DEVICE_MEMORY.
  static std::shared_ptr<Model> create(std::shared_ptr<Device> device, const ModelConfig& config,
                                       const std::string& seed);
  ~Model();

  const Plan& plan() const { return plan_; }
  const std::shared_ptr<Device>& device() const { return device_; }
  int64_t bytes() const;  // parameters and packed copies
  int64_t packed_bytes() const { return device_->table().pack_cache_bytes(packs_); }

  // Copies one tensor, [elements] FP32. Throw ERR_TENSOR_NAME, ERR_SHAPE (with both element counts).
  void read(const std::string& name, float* out, int64_t elements) const;
  void write(const std::string& name, const float* values, int64_t elements);

  // Parameter access for programs: [shape] of the plan's table.
  float* data(int32_t parameter) const { return parameters_.as() + plan_.parameter(parameter).offset; }
  float* arena() const { return parameters_.as(); }
  // The weight of a product; `serving` lets the backend keep packed copies of the current version.
  ops::Weight weight(int32_t parameter, bool serving) const;
  // logits [m, V] = norm(x) [m, d] · Eᵀ, `per_row` of the rows belonging together; without the final norm
  // where x has been through it.
  void head(const float* x, int64_t m, int64_t per_row, bool norm, const Precision& precision,
            float* logits) const;
  // Parameters changed: packed copies of the earlier version are stale from now on.
  void touch() { ++version_; }
  uint64_t version() const { return version_; }

  // (cos, sin) by position within a document for at least `positions` positions: [positions, head_dim/2, 2].
  // Moves when it has to grow.
  const float* rotary_table(int64_t positions);

  // The same model on a planning device (Device::planner), where programs run to see what memory they take.
  // Its packed copies, rotary table and scratch grow with the programs planned.
  Model& twin();
  // Throws ERR_DEVICE_MEMORY naming `what` unless `bytes` are free, and what the programs planned on the twin
  // take beside their workspaces.
  void require_memory(int64_t bytes, const std::string& what);

 private:
  Model(std::shared_ptr<Device> device, Plan plan);
  static void check_backend(const Device& device, const Plan& plan);
  std::shared_ptr<Device> device_;
  Plan plan_;
  Buffer parameters_;
  Buffer rotary_;
  int64_t rotary_positions_ = 0;
  uint64_t version_ = 1;
  ops::PackCache* packs_ = nullptr;
  std::unique_ptr<Model> twin_;
};

// Host arrays of one batch, all [rows, length].
struct Batch {
  int64_t rows = 0, length = 0;
  const int32_t* tokens = nullptr;
  const int64_t* document_ids = nullptr;         // null: one document per row
  const int32_t* targets = nullptr;              // null where a call needs none
  const int64_t* target_document_ids = nullptr;  // null: every target is valid
};

// Logits of every position, [rows, length, V] into host memory.
void compute_logits(Model& model, const Batch& batch, const Precision& precision, float* logits,
                    Cancel cancel);

// Token cross-entropies of every position in nats, valid or not: [rows, length] into host memory.
void compute_token_nll(Model& model, const Batch& batch, const Precision& precision, float* nll,
                       Cancel cancel);

// Throws ERR_TOKEN_RANGE, ERR_SHAPE, ERR_DOCUMENT_IDS naming argument, index, limit and value.
void validate_batch(const Plan& plan, const Batch& batch, bool needs_targets);

}  // namespace duokv
