#include "core/workspace.h"

#include <algorithm>
#include <cstring>

#include "ops/rounding.h"

namespace duokv {
namespace {

constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t bytes) { return round_up(std::max<int64_t>(bytes, 1), kAlignment); }

}  // namespace

void Workspace::begin() {
  current_ = 0;
  used_ = depth_ = staged_ = 0;
  if (!inputs_.empty()) inputs_.back().used = inputs_.back().sent = 0;
}

void Workspace::begin(Size size) {
  if (size.values > values_held()) {
    blocks_.clear();
    blocks_.emplace_back(device_, size.values, values_name_);
  }
  if (size.inputs > inputs_held()) {
    inputs_.clear();
    add_inputs(size.inputs);
  }
  begin();
}

int64_t Workspace::growth(Size size) const {
  return std::max<int64_t>(0, size.values - values_held()) +
         std::max<int64_t>(0, size.inputs - inputs_held());
}

// A program wants its memory in one block.
int64_t Workspace::values_held() const { return blocks_.size() == 1 ? blocks_[0].bytes() : 0; }
int64_t Workspace::inputs_held() const { return inputs_.size() == 1 ? inputs_[0].device.bytes() : 0; }

void Workspace::add_inputs(int64_t bytes) {
  Inputs& inputs = inputs_.emplace_back();
  inputs.device = Buffer(device_, bytes, inputs_name_);
  inputs.host.resize(static_cast<size_t>(bytes));
}

const void* Workspace::stage(const void* host, int64_t bytes) {
  constexpr int64_t kSmallestBlock = int64_t{1} << 16;
  const int64_t room = aligned(bytes);
  if (inputs_.empty() || inputs_.back().used + room > inputs_.back().device.bytes())
    add_inputs(std::max(room, kSmallestBlock));
  Inputs& inputs = inputs_.back();
  const int64_t offset = inputs.used;
  inputs.used += room;
  staged_ += room;
  peak_.inputs = std::max(peak_.inputs, staged_);
  if (bytes > 0) std::memcpy(inputs.host.data() + offset, host, static_cast<size_t>(bytes));
  return inputs.device.as<char>() + offset;
}

void Workspace::flush() {
  for (Inputs& inputs : inputs_) {
    if (inputs.sent == inputs.used) continue;
    device_->upload(inputs.device.as<char>() + inputs.sent, inputs.host.data() + inputs.sent,
                    inputs.used - inputs.sent);
    inputs.sent = inputs.used;
  }
}

int64_t Workspace::bytes() const {
  int64_t total = 0;
  for (const Buffer& block : blocks_) total += block.bytes();
  for (const Inputs& inputs : inputs_) total += inputs.device.bytes();
  return total;
}

void* Workspace::take_bytes(int64_t bytes) {
  constexpr int64_t kSmallestBlock = int64_t{1} << 20;
  bytes = aligned(bytes);
  while (current_ < blocks_.size() && used_ + bytes > blocks_[current_].bytes()) {
    ++current_;
    used_ = 0;
  }
  if (current_ == blocks_.size())
    blocks_.emplace_back(device_, std::max(bytes, kSmallestBlock), values_name_);
  void* memory = blocks_[current_].as<char>() + used_;
  used_ += bytes;
  depth_ += bytes;
  peak_.values = std::max(peak_.values, depth_);
  return memory;
}

}  // namespace duokv
