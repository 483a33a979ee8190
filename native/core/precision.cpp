#include "core/precision.h"

#include "core/error.h"

namespace duokv {

Precision parse_precision(const std::string& name) {
  using ops::DType;
  using ops::ProductMode;
  if (name == "fp32") return {name, ProductMode::FP32, ProductMode::FP32, DType::F32};
  if (name == "fp32-tf32x3") return {name, ProductMode::FP32, ProductMode::TF32x3, DType::F32};
  if (name == "bf16-tf32x3") return {name, ProductMode::BF16, ProductMode::TF32x3, DType::F32};
  if (name == "bf16") return {name, ProductMode::BF16, ProductMode::BF16, DType::BF16};
  throw Error("ERR_CONFIG",
              "precision is '" + name + "'; it must be one of fp32, fp32-tf32x3, bf16-tf32x3, bf16");
}

}  // namespace duokv
