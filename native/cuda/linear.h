// The products of the op table: which kernel or library call computes each.
#pragma once

#include "cuda/device.h"
#include "cuda/primitives.cuh"

namespace duokv::cuda {

void linear_forward(ops::Device& device, const ops::LinearArgs& args);
void linear_backward(ops::Device& device, const ops::LinearBackwardArgs& args);
void feed_forward(ops::Device& device, const ops::FeedForwardArgs& args);
void linear_cross_entropy(ops::Device& device, const ops::LinearCrossEntropyArgs& args);

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

// y [m, n] = x [m, k] · Wᵀ in FP32; operands and results are for the caller to set or replace.
Product product(int64_t m, int64_t per_row, const ops::Weight& w);

// x [m, k], normalised where there is a norm, as an operand of BF16 products.
void round_input(ops::Device& device, const float* x, const ops::Norm& norm, int64_t m, int64_t k, bf16* y);

// The weight in BF16: the copy kept for serving, or a transient one in `room` [transient(w)].
const bf16* rounded(ops::Device& device, const ops::Weight& w, bf16* room);
inline int64_t transient(const ops::Weight& w) { return w.packs ? 0 : w.n * w.k; }

// y = residual + x · Wᵀ of BF16 operands, the product rounded on its way where asked; `room` [m, n] is for
// that.
void product_bf16(ops::Device& device, int64_t m, int64_t per_row, const bf16* x, const ops::Weight& w,
                  const bf16* weight, bool round_output, bf16* room, const float* residual, float* y);

}  // namespace duokv::cuda
