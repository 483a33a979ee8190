// Linear layers, forward and backward.
//
// Few positions per row (decoding) go to the skinny kernel, which streams the weights once; everything else
// to cuBLASLt. What decides is per_row, never m: a row must not depend on its batch mates. Under BF16 the
// operands are rounded into scratch memory, weights into the pack cache when they are served.
//
// Roofline: skinny_product.cu; cuBLASLt reaches its own (H100: about 50 of 67 TFLOP/s FP32, 600 to 700 of 989
// BF16). The casts around a BF16 product move 6 bytes an element of x, and 6 (10 when it accumulates) of y:
// m = 16,384, k = n = 768: 75 MB + 75 MB beside 19 GFLOP, 50 µs beside 30 µs.
#include <algorithm>

#include "cuda/linear.h"
#include "cuda/operations.h"
#include "cuda/pack_cache.h"

namespace duokv::cuda {
namespace {

void skinny(ops::Device& device, const ops::LinearArgs& args) {
  const bool packed = args.mode == ops::ProductMode::BF16 && args.w[0].packs != nullptr;
  const void* weights[3] = {};
  for (int32_t i = 0; i < args.count; ++i)
    weights[i] = packed ? static_cast<const void*>(args.w[i].packs->get(args.w[i])) : args.w[i].data;
  check(skinny_product(args, weights, packed, device.stream), "linear_forward");
}

Product product(const ops::LinearArgs& args, const ops::Weight& w) {
  Product p = {};
  p.rows = args.m;
  p.columns = w.n;
  p.depth = w.k;
  p.b_transposed = true;
  p.accumulate = args.accumulate;
  // Training has no rows to keep apart: one batch, one algorithm.
  p.reference_rows = reference_rows(w.packs ? args.per_row : args.m);
  return p;
}

void forward_fp32(ops::Device& device, const ops::LinearArgs& args) {
  for (int32_t i = 0; i < args.count; ++i) {
    Product p = product(args, args.w[i]);
    p.a = args.x;
    p.b = args.w[i].data;
    p.c = args.y[i];
    device.products.run(p, device.stream);
  }
}

void forward_bf16(ops::Device& device, const ops::LinearArgs& args) {
  const int64_t k = args.w[0].k;
  const bf16* weights[3] = {};
  for (int32_t i = 0; i < args.count; ++i) {
    if (args.w[i].packs) weights[i] = args.w[i].packs->get(args.w[i]);
  }
  // One weight and one result at a time.
  int64_t largest_weight = 0, largest_result = 0;
  for (int32_t i = 0; i < args.count; ++i) {
    if (!weights[i]) largest_weight = std::max(largest_weight, args.w[i].n * k);
    if (args.round_output) largest_result = std::max(largest_result, args.m * args.w[i].n);
  }
  Parts parts;
  const size_t x_at = parts.add<bf16>(args.m * k), weight_at = parts.add<bf16>(largest_weight),
               result_at = parts.add<bf16>(largest_result);
  void* block = device.workspace(parts.bytes());
  bf16* x = part<bf16>(block, x_at);
  bf16* result = part<bf16>(block, result_at);
  check(to_bf16(args.x, args.m * k, x, device.stream), "linear_forward");
  for (int32_t i = 0; i < args.count; ++i) {
    const ops::Weight& w = args.w[i];
    if (!weights[i]) {
      bf16* copy = part<bf16>(block, weight_at);
      check(to_bf16(w.data, w.n * k, copy, device.stream), "linear_forward");
      weights[i] = copy;
    }
    Product p = product(args, w);
    p.a = x;
    p.b = weights[i];
    p.operands = ops::DType::BF16;
    p.c = args.y[i];
    if (args.round_output) {
      p.c = result;
      p.result = ops::DType::BF16;
      p.accumulate = false;
    }
    device.products.run(p, device.stream);
    if (args.round_output)
      check(from_bf16(result, args.m * w.n, args.accumulate ? args.y[i] : nullptr, args.y[i], device.stream),
            "linear_forward");
  }
}

}  // namespace

void linear_forward(ops::Device& device, const ops::LinearArgs& args) {
  if (args.per_row <= kSkinnyPositions) return skinny(device, args);
  if (args.mode == ops::ProductMode::BF16) return forward_bf16(device, args);
  forward_fp32(device, args);
}

void linear_backward(ops::Device& device, const ops::LinearBackwardArgs& args) {
  const int64_t m = args.m, n = args.w.n, k = args.w.k;
  const void *x = args.x, *dy = args.dy, *weight = args.w.data;
  auto operands = ops::DType::F32;
  if (args.mode == ops::ProductMode::BF16) {
    operands = ops::DType::BF16;
    Parts parts;
    const size_t dy_at = parts.add<bf16>(m * n), weight_at = parts.add<bf16>(args.dx ? n * k : 0),
                 x_at = parts.add<bf16>(args.dw ? m * k : 0);
    void* block = device.workspace(parts.bytes());
    const auto cast = [&](const float* from, int64_t count, size_t offset) {
      bf16* to = part<bf16>(block, offset);
      check(to_bf16(from, count, to, device.stream), "linear_backward");
      return to;
    };
    dy = cast(args.dy, m * n, dy_at);
    if (args.dx) weight = cast(args.w.data, n * k, weight_at);
    if (args.dw) x = cast(args.x, m * k, x_at);
  }
  if (args.dx) {
    device.products.run({.rows = m,
                         .columns = k,
                         .depth = n,
                         .a = dy,
                         .a_transposed = false,
                         .b = weight,
                         .b_transposed = false,
                         .operands = operands,
                         .c = args.dx,
                         .result = ops::DType::F32,
                         .accumulate = args.accumulate_dx,
                         .reference_rows = reference_rows(m),
                         .may_split_depth = false},
                        device.stream);
  }
  if (args.dw) {
    device.products.run({.rows = n,
                         .columns = k,
                         .depth = m,
                         .a = dy,
                         .a_transposed = true,
                         .b = x,
                         .b_transposed = false,
                         .operands = operands,
                         .c = args.dw,
                         .result = ops::DType::F32,
                         .accumulate = true,
                         .reference_rows = n,
                         .may_split_depth = true},
                        device.stream);
  }
}

}  // namespace duokv::cuda
