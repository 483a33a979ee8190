// C [m, n] = A [m, k] · B [k, n], the product behind every linear operation. One place decides which kernel
// multiplies:
//   * packed panels, whose rows do not depend on m;
//   * oneDNN for many rows in BF16 where the CPU has AMX, which panels do not use.
#pragma once

#include <cstdint>
#include <span>

#include "cpu/device.h"
#include "cpu/panel_product.h"
#include "ops/ops.h"

namespace duokv::cpu {

enum class ProductKernel { Panels, OneDnn };

ProductKernel choose_kernel(ops::ProductMode mode, int64_t m);

// B prepared for a kernel: panels, or a BF16 copy in B's own layout.
struct RightOperand {
  ProductKernel kernel;
  Panels panels;   // its data is the prepared memory
  int64_t stride;  // of the BF16 copy
  bool transposed;
};

// Bytes that `prepare` fills.
int64_t prepared_bytes(ProductKernel kernel, int64_t k, int64_t n, ops::ProductMode mode);
RightOperand prepare(ops::Device& device, ProductKernel kernel, const MatrixView& b, int64_t k, int64_t n,
                     ops::ProductMode mode, void* memory);

// Bytes of workspace that `multiply` needs with a right operand of this kernel; of several, n is the sum.
// Fewer rows may need more.
int64_t workspace_bytes(const ops::Device& device, ProductKernel kernel, int64_t m, int64_t k, int64_t n,
                        bool round_output);

struct Product {
  int64_t m;
  MatrixView a;  // dense: the stride is the width
  RightOperand b;
  float* c;
  bool accumulate;
  bool round_output;  // round the product to BF16 before it is stored or added
};

// Uses the worker scratch; `workspace` is 64-byte aligned and of at least workspace_bytes.
void multiply(ops::Device& device, const Product& product, std::span<char> workspace);
// Up to kMostProducts products of one A, whose right operands have one kernel, depth and dtype.
// `activation` and the result: as panel_products says.
bool multiply(ops::Device& device, std::span<const Product> products, float* activation,
              std::span<char> workspace);

}  // namespace duokv::cpu
