// Precision policies, spec/numerics.md section 1.
#pragma once

#include <string>

#include "ops/ops.h"

namespace duokv {

struct Precision {
  std::string name;         // "fp32", "fp32-tf32x3", "bf16-tf32x3", "bf16"
  ops::ProductMode linear;  // projections, FFN, head
  ops::ProductMode attention;
  ops::DType cache;

  bool rounds_outputs() const { return linear == ops::ProductMode::BF16; }
  int64_t cache_element() const { return cache == ops::DType::BF16 ? 2 : 4; }
};

// Throws ERR_CONFIG naming the choices.
Precision parse_precision(const std::string& name);

}  // namespace duokv
