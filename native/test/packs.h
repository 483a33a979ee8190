#pragma once

#include "test/harness.h"

namespace duokv::test {

// Packed copies of weights, for as long as this lives.
class Packs {
 public:
  explicit Packs(ops::Device* device) : device_(device) { check(table().pack_cache_create(device, &packs_)); }
  ~Packs() { table().pack_cache_destroy(device_, packs_); }
  Packs(const Packs&) = delete;
  Packs& operator=(const Packs&) = delete;
  operator ops::PackCache*() const { return packs_; }
  int64_t bytes() const { return table().pack_cache_bytes(packs_); }

 private:
  ops::Device* device_;
  ops::PackCache* packs_ = nullptr;
};

}  // namespace duokv::test
