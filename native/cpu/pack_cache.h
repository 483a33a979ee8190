// Prepared copies of weights, kept between calls for serving.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "cpu/product.h"

// A cache belongs to the owner of the weights and must be destroyed before their memory is reused. A copy is
// read only at the version it was made of; at another version it is made anew, in place.
struct duokv::ops::PackCache {
 public:
  // Wᵀ as the right operand of y = x · Wᵀ for m rows.
  cpu::RightOperand get(Device& device, const Weight& weight, ProductMode mode, int64_t m);
  int64_t bytes() const;

 private:
  struct Entry {
    explicit Entry(cpu::Memory& owner) : memory(owner) {}
    std::optional<uint64_t> version;
    int64_t n = 0, k = 0;
    cpu::RightOperand operand;
    cpu::Scratch memory;
  };
  std::map<std::tuple<const float*, ProductMode, cpu::ProductKernel>, Entry> entries_;
};
