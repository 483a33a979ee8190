// Predictions of device memory: what a program takes on a device, before anything of it is allocated there.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "core/session.h"
#include "core/trainer.h"

namespace duokv {

// Bytes that a device object holds at the peak of a program, by what they are for: "parameters", "gradients",
// "AdamW first moments", "AdamW second moments", "key-value cache", "document ids", "rotary table",
// "packed weights", "workspace" (activations, staged entries, logits), "inputs" (tokens, positions,
// descriptors on their way to the device), "graphs" (the workspaces and inputs that recorded passes name),
// "scratch" (what operations hold for themselves). What the driver takes for an executable graph is not among
// them: it says so to nobody, and shows only as a fall of its free memory (GraphStats::driver_bytes).
struct MemoryPrediction {
  std::map<std::string, int64_t> parts;
  int64_t total = 0;
};

// Of a model with a trainer after its first step on batches of `rows` x `length` tokens. Throws ERR_CONFIG.
MemoryPrediction predict_training(const Device& device, const ModelConfig& config,
                                  const TrainerOptions& options, int64_t rows, int64_t length);

// Of a model with a session whose rows have been prefilled with `prompt` tokens in one call, and decoded to
// the end of their capacity. Throws ERR_CONFIG, ERR_CAPACITY, ERR_SHAPE.
MemoryPrediction predict_serving(const Device& device, const ModelConfig& config,
                                 const SessionOptions& options, int64_t prompt, const Route& route);

// Of a model while it scores rows of `length` tokens. Throws ERR_CONFIG.
MemoryPrediction predict_scoring(const Device& device, const ModelConfig& config, const Precision& precision,
                                 int64_t length);

}  // namespace duokv
