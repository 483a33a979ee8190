#include <algorithm>
#include <array>
#include <string>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/pack_cache.h"
#include "cpu/product.h"
#include "cpu/rows.h"

namespace duokv::cpu {
namespace {

void check_mode(ops::ProductMode mode, const char* message) {
  require(mode == ops::ProductMode::FP32 || mode == ops::ProductMode::BF16, message);
}

// C = left · B with B prepared in the shared scratch.
void multiply_once(Device& device, int64_t m, const MatrixView& a, const MatrixView& b, int64_t k, int64_t n,
                   float* c, bool accumulate, bool round_output, ops::ProductMode mode) {
  const ProductKernel kernel = choose_kernel(mode, m);
  const int64_t bytes = prepared_bytes(kernel, k, n, mode);
  const int64_t workspace = workspace_bytes(device, kernel, m, k, n, round_output);
  char* memory = device.shared_scratch.take<char>(bytes + workspace);
  const RightOperand right = prepare(device, kernel, b, k, n, mode, memory);
  multiply(device, {m, a, right, c, accumulate, round_output},
           {memory + bytes, static_cast<size_t>(workspace)});
}

// Served weights, which are kept packed: one job for all of them, as a few rows leave little to do for each.
// Returns whether `activation` is computed.
bool multiply_served(Device& device, const ops::LinearArgs& args, const float* x, float* activation) {
  const int64_t m = args.m, k = args.w[0].k;
  std::array<Product, kMostProducts> products;
  int64_t n = 0;
  for (int32_t i = 0; i < args.count; ++i) {
    const ops::Weight& w = args.w[i];
    products[i] = {m,
                   {x, k, false},
                   w.packs->get(device, w, args.mode, m),
                   args.y[i],
                   args.residual != nullptr,
                   args.round_output};
    n += w.n;
  }
  const int64_t bytes = workspace_bytes(device, products[0].b.kernel, m, k, n, args.round_output);
  return multiply(device, std::span(products).first(args.count), activation,
                  {device.shared_scratch.take<char>(bytes), static_cast<size_t>(bytes)});
}

// The same for any weights.
bool multiply_all(Device& device, const ops::LinearArgs& args, const float* x, float* activation) {
  if (std::all_of(args.w, args.w + args.count, [](const ops::Weight& w) { return w.packs != nullptr; }))
    return multiply_served(device, args, x, activation);
  for (int32_t i = 0; i < args.count; ++i) {
    const ops::Weight& w = args.w[i];
    multiply_once(device, args.m, {x, w.k, false}, {w.data, w.k, true}, w.k, w.n, args.y[i],
                  args.residual != nullptr, args.round_output, args.mode);
  }
  return false;
}

}  // namespace

Status linear_forward(Device* device, const ops::LinearArgs* args) {
  return linear_activated(device, args, nullptr);
}

Status linear_activated(Device* device, const ops::LinearArgs* args, float* activation) {
  return guarded([&] {
    require(device && args, "linear_forward: device or args is null");
    const int64_t m = args->m, k = args->w[0].k;
    require(args->count >= 1 && args->count <= 3, "linear_forward: count must be in [1, 3]");
    require(args->x && m >= 1, "linear_forward: x is null or m is not positive");
    require(!args->residual || args->count == 1, "linear_forward: a residual needs count 1");
    check_mode(args->mode, "linear_forward: mode must be FP32 or BF16");
    for (int32_t i = 0; i < args->count; ++i) {
      const ops::Weight& w = args->w[i];
      require(w.data && args->y[i], "linear_forward: w or y is null");
      require(w.n >= 1 && w.k >= 1 && w.k == k,
              "linear_forward: n and k must be at least 1, and k the same for all weights");
    }
    const float* x = args->x;
    if (args->norm.weight) {
      float* normalised = device->block_scratch.take<float>(m * k);
      normalise_rows(*device, x, args->norm, m, k, normalised);
      x = normalised;
    }
    if (args->residual && args->residual != args->y[0])
      copy_values(device->pool, args->residual, m * args->w[0].n, args->y[0]);
    const bool activated = multiply_all(*device, *args, x, activation);
    if (activation && !activated)
      swiglu(device->pool, args->y[0], args->count > 1 ? args->y[1] : nullptr, m * args->w[0].n, activation);
  });
}

Status linear_backward(Device* device, const ops::LinearBackwardArgs* args) {
  return guarded([&] {
    require(device && args, "linear_backward: device or args is null");
    const auto& [x, dy, m, w, dx, accumulate_dx, dw, mode] = *args;
    require(dy != nullptr, "linear_backward: dy is null");
    require(!dx || w.data, "linear_backward: dx is wanted but w is null");
    require(!dw || x, "linear_backward: dw is wanted but x is null");
    require(m >= 1 && w.n >= 1 && w.k >= 1, "linear_backward: m, n and k must be at least 1");
    check_mode(mode, "linear_backward: mode must be FP32 or BF16");
    if (dx)
      multiply_once(*device, m, {dy, w.n, false}, {w.data, w.k, false}, w.n, w.k, dx, accumulate_dx, false,
                    mode);
    if (dw) multiply_once(*device, w.n, {dy, w.n, true}, {x, w.k, false}, m, w.k, dw, true, false, mode);
  });
}

}  // namespace duokv::cpu
