// The rotary embedding of one pair, which the rotary operation and the write of K into a cache share.
#pragma once

#include "cuda/primitives.cuh"

namespace duokv::cuda {

struct Pair {
  float low, high;  // elements i and i + head_dim / 2
};

// Rotated by the angle whose (cos, sin) these are. Products are spelled out, so that every kernel rounds
// alike.
DUOKV_DEVICE Pair rotate(Pair x, float cosine, float sine) {
  return {fmaf(-x.high, sine, x.low * cosine), fmaf(x.low, sine, x.high * cosine)};
}

}  // namespace duokv::cuda
