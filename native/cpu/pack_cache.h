// Prepared copies of weights, kept between calls for serving.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/product.h"

namespace duokv::cpu {

// Pieces of blocks that grow with what is held, so that most of it lies on huge pages even where each copy is
// too small for one. All is given back at once.
class PackMemory {
 public:
  explicit PackMemory(Memory& owner) : owner_(owner) {}
  ~PackMemory();
  PackMemory(const PackMemory&) = delete;
  PackMemory& operator=(const PackMemory&) = delete;

  // `bytes`, a multiple of 64, 64-byte aligned, contents undefined.
  void* take(int64_t bytes);
  int64_t bytes() const { return held_; }

 private:
  char* block_of(int64_t bytes);

  Memory& owner_;
  std::vector<void*> blocks_;
  int64_t held_ = 0, left_ = 0;  // of all blocks, of the last one
  char* next_ = nullptr;
};

}  // namespace duokv::cpu

// A cache belongs to the owner of the weights and must be destroyed before their memory is reused. A copy is
// read only at the version it was made of; at another version it is made anew, in place.
struct duokv::ops::PackCache {
 public:
  explicit PackCache(cpu::Memory& owner) : memory_(owner) {}

  // Wᵀ as the right operand of y = x · Wᵀ for m rows.
  cpu::RightOperand get(Device& device, const Weight& weight, ProductMode mode, int64_t m);
  int64_t bytes() const { return memory_.bytes(); }

 private:
  struct Entry {
    std::optional<uint64_t> version;
    int64_t n = 0, k = 0;
    cpu::RightOperand operand;
    void* memory = nullptr;
    int64_t bytes = 0;
  };
  cpu::PackMemory memory_;
  std::map<std::tuple<const float*, ProductMode, cpu::ProductKernel>, Entry> entries_;
};
