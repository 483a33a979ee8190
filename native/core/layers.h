// The decoder stack: one forward pass of appended tokens through all layers, and its backward pass. Training,
// scoring, prefill and decode are this pass with other banks and other suffixes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/model.h"
#include "core/workspace.h"

namespace duokv {

// The appended tokens of `batch` rows, `count` each. Suffixes of them share the per-token arrays on the
// device.
class Positions {
 public:
  // `first` [batch]: absolute position of each row's first token. `start`, `position` [batch, count]: where
  // the token's document starts (absolute) and the position within it. `history_window` caps m_t; 0 where no
  // read uses it.
  Positions(Workspace& workspace, int64_t batch, int64_t count, std::vector<int32_t> first,
            std::vector<int32_t> start, std::vector<int32_t> position, int64_t history_window);

  int64_t batch() const { return batch_; }
  int64_t count() const { return count_; }
  const std::vector<int32_t>& first() const { return first_; }

  // Device arrays over the last `length` tokens of every row.
  struct Suffix {
    const int32_t* first;           // [batch]
    const int32_t* start;           // [batch, length]
    const int32_t* position;        // [batch, length]
    const float* log_multiplicity;  // [batch, length] log m_t; null where no read uses it
  };
  const Suffix& suffix(int64_t length);

 private:
  Workspace& workspace_;
  int64_t batch_, count_;
  std::vector<int32_t> first_, start_, position_;
  int64_t history_window_;
  std::map<int64_t, Suffix> suffixes_;
};

// Where a pass stores the K and V it projects, and what its queries read. Descriptors reach the device with
// the workspace's next flush after construction.
class Banks {
 public:
  virtual ~Banks() = default;
  // K and V of a projection, [batch, length, kv_heads, head_dim].
  struct Entries {
    float* k;
    float* v;
  };
  // Memory for the projection of the last `length` tokens, valid until the layer ends.
  virtual Entries entries(int32_t bank, int64_t length) = 0;
  // The entries are complete but for K's rotary embedding, at `positions` [batch, length] within the document
  // (device).
  virtual void write(int32_t bank, const Entries& entries, int64_t length, const int32_t* positions) = 0;
  // Rows of the bank as `read` sees them (K and V may come from two banks), without window and bias.
  virtual ops::Bank view(const Read& read) = 0;
};

// What is read, by the banks of K and V.
using BankViews = std::map<std::pair<int32_t, int32_t>, ops::Bank>;

// What the backward pass needs of one layer's forward pass. M = batch * count.
struct LayerTape {
  float* input = nullptr;                 // [M, d] representation i
  float* q = nullptr;                     // [M, query_width] after rotary
  float* attention = nullptr;             // [M, query_width] what o_proj reads
  float* branch[2] = {nullptr, nullptr};  // [M, query_width] global and local output under separate fusion
  float* lse = nullptr;                   // [reads, M, query_heads]
  float* middle = nullptr;                // [M, d] after the attention residual
  float* gate = nullptr;                  // [M, f]
  float* up = nullptr;                    // [M, f]
  float* ffn_output = nullptr;            // [M, d] after the FFN residual, where an adapter follows
  float* adapter = nullptr;               // [M, rank] before its SiLU
  ops::Bank reads[2] = {};                // what attention read
};

struct Tape {
  // Activation checkpointing: of every layer only the input is kept, beside the banks, and the backward pass
  // reruns the layer.
  bool recompute = false;
  std::vector<LayerTape> layers;
};

struct Pass {
  Model& model;
  Workspace& workspace;
  const Precision& precision;
  bool serving;  // packed weights may be kept
  const float* rotary_table;
  Positions& positions;
  const Suffixes& suffixes;
  Banks& banks;
  Cancel cancel;
};

// Uploads the per-token arrays of every suffix the pass uses, and what was uploaded before, in one transfer.
// run_layers needs nothing else from the host.
void prepare_layers(Positions& positions, const Suffixes& suffixes, Workspace& workspace);

// Runs all layers from the embeddings of `tokens` (device, [batch, count]). Gives the last layer's output for
// the last suffixes.query.back() tokens of every row, [batch, that, d], in workspace memory. With a tape
// (training: all suffixes are whole) everything the backward pass reads is kept in the workspace.
float* run_layers(const Pass& pass, const int32_t* tokens, Tape* tape);

// Reruns layer `index` from its input [M, d] as far as its backward pass needs it, with the bits of the first
// time; K and V are taken from the banks.
LayerTape rerun_layer(const Pass& pass, size_t index, float* input);

// Gradients of the stack, accumulated into the arena `gradients` (laid out as the parameters). `dx` [M, d] is
// the gradient of the last layer's output, and is used up. The pass is the one that filled the tape, over
// `TrainingBanks`. `layer_done`, which may be empty, is called as each layer's part has been queued.
void run_layers_backward(const Pass& pass, const int32_t* tokens, const Tape& tape, float* dx,
                         float* gradients, const std::function<void(int64_t layer)>& layer_done);

// Banks of a pass without a cache: every row starts empty, all positions are projected, and the entries stay
// where the projections put them, token-major FP32.
class TrainingBanks : public Banks {
 public:
  TrainingBanks(Workspace& workspace, const Plan& plan, int64_t batch, int64_t count,
                const float* rotary_table);
  Entries entries(int32_t bank, int64_t) override { return entries_[static_cast<size_t>(bank)]; }
  void write(int32_t bank, const Entries& entries, int64_t length, const int32_t* positions) override;
  ops::Bank view(const Read& read) override { return views_.at({read.k_bank, read.v_bank}); }

 private:
  const Plan& plan_;
  Device& device_;
  int64_t batch_;
  const float* rotary_table_;
  std::vector<Entries> entries_;
  BankViews views_;
};

inline void poll(Cancel cancel) {
  if (cancel != nullptr && cancel->load(std::memory_order_relaxed))
    throw Error(kAbortCode, "the call was aborted");
}

}  // namespace duokv
