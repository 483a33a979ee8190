// Matrix products by oneDNN, single-threaded primitives on row blocks that the device's pool shares out.
#pragma once

#include <cstdint>

#include "cpu/device.h"
#include "ops/ops.h"

namespace duokv::cpu {

// Element (i, j) is data[i * stride + j], or data[j * stride + i] when transposed.
struct OneDnnMatrix {
  const void* data;
  int64_t stride;
  bool transposed;
};

// C [m, n] = A [m, k] · B [k, n] with FP32 accumulation, or += where `accumulate`.
struct OneDnnProduct {
  int64_t m, n, k;
  OneDnnMatrix a, b;
  ops::DType operands;
  float* c;
  bool accumulate;
};

// Whether oneDNN multiplies BF16 with instructions made for it on this CPU, in every layout a product here
// has. Emulated BF16 is slower than FP32 panels. Decided once per process.
bool onednn_has_native_bf16();
// Whether these are the tile instructions of AMX.
bool onednn_has_amx();

// Uses the worker scratch. Throws when oneDNN offers only its reference implementation.
void onednn_product(ops::Device& device, const OneDnnProduct& product);

}  // namespace duokv::cpu
