// The CPU backend's hot operations at the shapes of the 126M model, for times and for instruction counts.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ops/ops.h"

namespace duokv::bench {

// How much an operation is given.
struct Sizes {
  int64_t tokens;      // rows of training and prefill
  int64_t vocabulary;  // of the head and the loss
  int64_t
      uncached;  // bytes that no cache holds: decoding goes through copies of weights and banks that add up
};

struct Operation {
  std::string name;
  std::string mode;  // "fp32" or "bf16"
  double flops;      // of products and visible pairs; 0 where memory is all that counts
  double bytes;      // that must come from or go to memory; 0 where arithmetic is all that counts
  // Allocates the operands and returns the call; `i` counts calls, and chooses the copy.
  std::function<std::function<void(int64_t i)>()> prepare;
};

std::vector<Operation> operations(ops::Device* device, const Sizes& sizes);

}  // namespace duokv::bench
