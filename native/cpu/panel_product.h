// Matrix products on packed panels: C [m, n] = A [m, k] · B [k, n], FP32 arithmetic, FP32 or BF16 operands.
//
// B is packed into panels of panel_width() columns, the width of the register tile of this CPU's vector
// target. Panel j holds columns j·width … as [k][width], zero past column n; BF16 panels hold the rounded
// values at half the size, as pairs along k where the processor multiplies such (bf16_dot-inl.h).
//
// Every output is the sum, in order, of chains of fused multiply-adds along k, each of kChain values or, in
// pairs, of kPairChain. So a row's bits depend neither on m, nor on its index, nor on the number of threads.
#pragma once

#include <cstdint>
#include <span>

#include "cpu/device.h"
#include "ops/ops.h"

namespace duokv::cpu {

inline constexpr int64_t kChain = 256, kPairChain = 384;

// Many rows of A are packed in blocks of kPanelDepth along k, whole chains. A product no deeper, like most of
// models of that width, keeps its sums in one tile's place.
inline constexpr int64_t kPanelDepth = 768;
static_assert(kPanelDepth % kChain == 0 && kPanelDepth % kPairChain == 0);

// Element (i, j) is data[i * stride + j], or data[j * stride + i] when transposed.
struct MatrixView {
  const float* data;
  int64_t stride;
  bool transposed;
};

struct Panels {
  const void* data;
  int64_t k, n;
  ops::DType dtype;
  bool pairs = false;  // along k, of BF16 values
};

int64_t panel_width();
int64_t panel_bytes(int64_t k, int64_t n, ops::DType dtype);

// Packs b [k, n] into panel_bytes(k, n, dtype) bytes at `memory`, 64-byte aligned.
Panels pack_panels(ops::Device& device, const MatrixView& b, int64_t k, int64_t n, ops::DType dtype,
                   void* memory);

struct PanelProduct {
  int64_t m;
  MatrixView a;  // [m, b.k]; rounded to BF16 where b is BF16
  Panels b;
  float* c;  // [m, b.n]
  bool accumulate;
  bool round_output;  // round the product to BF16 before it is stored or added
};

// Bytes of workspace of products [m, k] · [k, n_i] whose n_i add up to n.
int64_t panel_workspace_bytes(const ops::Device& device, int64_t m, int64_t k, int64_t n);

inline constexpr size_t kMostProducts = 3;

// Up to kMostProducts products of one A, whose right operands have one depth and dtype. Returns whether it
// has computed `activation` too, [m, n]: silu(first product) · second one, or silu of the only one. That is
// left to the caller where it is null or another pass is faster. Uses the worker scratch; `workspace` is
// 64-byte aligned.
bool panel_products(ops::Device& device, std::span<const PanelProduct> products, float* activation,
                    void* workspace);

}  // namespace duokv::cpu
