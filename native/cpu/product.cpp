#include "cpu/product.h"

#include <array>
#include <stdexcept>
#include <string>

#include "cpu/bf16.h"
#include "cpu/onednn_product.h"
#include "cpu/rows.h"
#include "ops/rounding.h"

namespace duokv::cpu {
namespace {

// Up to how many rows panels win where the processor has AMX, which they do not use: reading B takes long,
// and oneDNN arranges B anew in every product. Elsewhere they always do.
constexpr int64_t kMostPanelRows = 64;

int64_t align(int64_t bytes) { return round_up(bytes, 64); }

void to_bf16(ThreadPool& pool, const float* x, int64_t n, uint16_t* bf16) {
  for_elements(pool, n, [&](int64_t first, int64_t count, int64_t) {
    bf16_from_floats(x + first, bf16 + first, count);
  });
}

ops::DType panel_dtype(ops::ProductMode mode) {
  return mode == ops::ProductMode::BF16 ? ops::DType::BF16 : ops::DType::F32;
}

void multiply_onednn(ops::Device& device, const Product& p, void* workspace) {
  const int64_t k = p.b.panels.k, n = p.b.panels.n, outputs = p.m * n;
  auto* a = static_cast<uint16_t*>(workspace);
  to_bf16(device.pool, p.a.data, p.m * k, a);
  // A product that is rounded before it is added needs memory of its own.
  const bool apart = p.round_output && p.accumulate;
  float* c = apart ? reinterpret_cast<float*>(static_cast<char*>(workspace) + align(2 * p.m * k)) : p.c;
  onednn_product(device, {p.m,
                          n,
                          k,
                          {a, p.a.stride, p.a.transposed},
                          {p.b.panels.data, p.b.stride, p.b.transposed},
                          ops::DType::BF16,
                          c,
                          p.accumulate && !apart});
  if (!p.round_output) return;
  for_elements(device.pool, outputs, [&](int64_t first, int64_t count, int64_t) {
    round_to_bf16(c + first, c + first, count);
    if (apart) add_values(c + first, p.c + first, count);
  });
}

}  // namespace

ProductKernel choose_kernel(ops::ProductMode mode, int64_t m) {
  const bool wanted = mode == ops::ProductMode::BF16 && m > kMostPanelRows && onednn_has_amx();
  return wanted && onednn_has_native_bf16() ? ProductKernel::OneDnn : ProductKernel::Panels;
}

int64_t prepared_bytes(ProductKernel kernel, int64_t k, int64_t n, ops::ProductMode mode) {
  return kernel == ProductKernel::OneDnn ? align(2 * k * n) : align(panel_bytes(k, n, panel_dtype(mode)));
}

RightOperand prepare(ops::Device& device, ProductKernel kernel, const MatrixView& b, int64_t k, int64_t n,
                     ops::ProductMode mode, void* memory) {
  if (kernel == ProductKernel::Panels)
    return {kernel, pack_panels(device, b, k, n, panel_dtype(mode), memory), b.stride, b.transposed};
  to_bf16(device.pool, b.data, k * n, static_cast<uint16_t*>(memory));
  return {kernel, {memory, k, n, panel_dtype(mode)}, b.stride, b.transposed};
}

int64_t workspace_bytes(const ops::Device& device, ProductKernel kernel, int64_t m, int64_t k, int64_t n,
                        bool round_output) {
  if (kernel == ProductKernel::Panels) return panel_workspace_bytes(device, m, k, n);
  return align(2 * m * k) + (round_output ? align(4 * m * n) : 0);
}

void multiply(ops::Device& device, const Product& p, std::span<char> workspace) {
  multiply(device, std::span(&p, 1), nullptr, workspace);
}

bool multiply(ops::Device& device, std::span<const Product> products, float* activation,
              std::span<char> workspace) {
  const Product& first = products[0];
  int64_t n = 0;
  for (const Product& p : products) n += p.b.panels.n;
  const int64_t needed =
      workspace_bytes(device, first.b.kernel, first.m, first.b.panels.k, n, first.round_output);
  if (needed > static_cast<int64_t>(workspace.size()))
    throw std::logic_error("a product of " + std::to_string(first.m) + " rows needs " +
                           std::to_string(needed) + " bytes of workspace, got " +
                           std::to_string(workspace.size()));
  if (first.b.kernel == ProductKernel::OneDnn) {
    for (const Product& p : products) multiply_onednn(device, p, workspace.data());
    return false;
  }
  std::array<PanelProduct, kMostProducts> panels;
  for (size_t i = 0; i < products.size(); ++i) {
    const Product& p = products[i];
    panels[i] = {p.m, p.a, p.b.panels, p.c, p.accumulate, p.round_output};
  }
  return panel_products(device, std::span(panels).first(products.size()), activation, workspace.data());
}

}  // namespace duokv::cpu
