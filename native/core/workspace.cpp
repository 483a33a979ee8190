#include "core/workspace.h"

#include <algorithm>

namespace duokv {

void Workspace::begin() {
  if (blocks_.size() > 1) {
    const int64_t total = bytes();
    blocks_.clear();
    blocks_.emplace_back(device_, total, "workspace");
  }
  current_ = 0;
  used_ = 0;
}

int64_t Workspace::bytes() const {
  int64_t total = 0;
  for (const Buffer& block : blocks_) total += block.bytes();
  return total;
}

void* Workspace::take_bytes(int64_t bytes) {
  constexpr int64_t kAlignment = 64;
  constexpr int64_t kSmallestBlock = int64_t{1} << 20;
  bytes = (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  while (current_ < blocks_.size() && used_ + bytes > blocks_[current_].bytes()) {
    ++current_;
    used_ = 0;
  }
  if (current_ == blocks_.size()) blocks_.emplace_back(device_, std::max(bytes, kSmallestBlock), "workspace");
  void* memory = blocks_[current_].as<char>() + used_;
  used_ += bytes;
  return memory;
}

}  // namespace duokv
