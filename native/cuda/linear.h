// The products of the op table: which kernel or library call computes each.
#pragma once

#include "cuda/device.h"

namespace duokv::cuda {

// Parts of one scratch block, each 256-byte aligned.
class Parts {
 public:
  // The offset of `count` values of T.
  template <class T>
  size_t add(int64_t count) {
    const size_t offset = bytes_;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return offset;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

template <class T>
T* part(void* block, size_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(block) + offset);
}

void linear_forward(ops::Device& device, const ops::LinearArgs& args);
void linear_backward(ops::Device& device, const ops::LinearBackwardArgs& args);
void linear_cross_entropy(ops::Device& device, const ops::LinearCrossEntropyArgs& args);

}  // namespace duokv::cuda
