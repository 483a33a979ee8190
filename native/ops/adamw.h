// What AdamW's update multiplies with, the same on every backend.
#pragma once

#include <cmath>

#include "ops/ops.h"

namespace duokv::ops {

// The update's scalars, each computed in FP64 and rounded once.
struct AdamWFactors {
  float clip;
  float keep1, take1;  // beta1, 1 - beta1
  float keep2, take2;  // beta2, 1 - beta2
  float step;          // lr / (1 - beta1^update)
  float root;          // 1 / sqrt(1 - beta2^update)
  float eps;
  float decay;  // lr * weight_decay
};

inline AdamWFactors adamw_factors(const AdamWArgs& args) {
  const double update = static_cast<double>(args.update);
  return {
      .clip = static_cast<float>(args.clip),
      .keep1 = static_cast<float>(args.beta1),
      .take1 = static_cast<float>(1 - args.beta1),
      .keep2 = static_cast<float>(args.beta2),
      .take2 = static_cast<float>(1 - args.beta2),
      .step = static_cast<float>(args.lr / (1 - std::pow(args.beta1, update))),
      .root = static_cast<float>(1 / std::sqrt(1 - std::pow(args.beta2, update))),
      .eps = static_cast<float>(args.eps),
      .decay = static_cast<float>(args.lr * args.weight_decay),
  };
}

}  // namespace duokv::ops
