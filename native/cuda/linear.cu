// Linear layers, forward and backward.
//
// Few positions per row (decoding) go to the skinny kernel, which streams the weights once, more of them
// (prefill) under FP32 to our own product, as cuBLASLt leaves most of the GPU idle unless it may split sums,
// everything else to cuBLASLt. What decides is per_row, never m: a row must not depend on its batch mates.
// Under BF16 the operands are rounded into scratch memory, weights into the pack cache when they are served.
//
// Roofline: skinny_product.cu, fp32_product.cu; cuBLASLt reaches its own (H100: about 50 of 67 TFLOP/s FP32,
// 600 to 700 of 989 BF16). The casts around a BF16 product move 6 bytes an element of x, and 6 (10 when it
// accumulates) of y: m = 16,384, k = n = 768: 75 MB + 75 MB beside 19 GFLOP, 50 µs beside 30 µs.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/operations.h"
#include "cuda/pack_cache.h"

namespace duokv::cuda {

Product product(int64_t m, int64_t per_row, const ops::Weight& w) {
  Product p = {};
  p.rows = m;
  p.columns = w.n;
  p.depth = w.k;
  p.b = w.data;
  p.b_transposed = true;
  // Training has no rows to keep apart: one batch, one algorithm.
  p.reference_rows = reference_rows(w.packs ? per_row : m);
  return p;
}

namespace {

// Per row, at most, of a served FP32 product that is ours.
constexpr int64_t kFp32Positions = 4096;

// y = residual, where the product is to be added to it there.
void place_residual(ops::Device& device, const float* residual, int64_t n, float* y) {
  if (residual == nullptr || residual == y) return;
  check(copy_on_device(y, residual, static_cast<size_t>(n) * sizeof(float), device.stream),
        "the residual of a product");
}

}  // namespace

void round_input(ops::Device& device, const float* x, const ops::Norm& norm, int64_t m, int64_t k, bf16* y) {
  check(norm.weight
            ? rms_norm_forward_bf16({x, norm.weight, m, k, norm.eps, nullptr, nullptr}, y, device.stream)
            : to_bf16(x, m * k, y, device.stream),
        "an operand of a product");
}

const bf16* rounded(ops::Device& device, const ops::Weight& w, bf16* room) {
  if (w.packs) return w.packs->get(w);
  check(to_bf16(w.data, w.n * w.k, room, device.stream), "a weight of a product");
  return room;
}

void product_bf16(ops::Device& device, int64_t m, int64_t per_row, const bf16* x, const ops::Weight& w,
                  const bf16* weight, bool round_output, bf16* room, const float* residual, float* y) {
  Product p = product(m, per_row, w);
  p.a = x;
  p.b = weight;
  p.operands = ops::DType::BF16;
  if (round_output) {
    p.c = room;
    p.result = ops::DType::BF16;
    device.products.run(p, device.stream);
    return check(from_bf16(room, m * w.n, residual, y, device.stream), "the result of a product");
  }
  place_residual(device, residual, m * w.n, y);
  p.c = y;
  p.accumulate = residual != nullptr;
  device.products.run(p, device.stream);
}

namespace {

// The weights as the skinny kernel streams them: BF16 where a copy is kept.
struct Streamed {
  const void* weights[3] = {};
  bool bf16;
};
Streamed streamed(const ops::Weight* weights, int32_t count, ops::ProductMode mode) {
  Streamed s;
  s.bf16 = mode == ops::ProductMode::BF16 && weights[0].packs != nullptr;
  for (int32_t i = 0; i < count; ++i)
    s.weights[i] = s.bf16 ? static_cast<const void*>(weights[i].packs->get(weights[i])) : weights[i].data;
  return s;
}

// The arguments without their norm: x normalised into scratch memory where there is one.
ops::LinearArgs normalised(ops::Device& device, const ops::LinearArgs& args) {
  if (!args.norm.weight) return args;
  const int64_t m = args.m, k = args.w[0].k;
  auto* x = static_cast<float*>(device.workspace(static_cast<size_t>(m * k) * sizeof(float)));
  check(rms_norm_forward({args.x, args.norm.weight, m, k, args.norm.eps, x, nullptr}, device.stream),
        "linear_forward");
  ops::LinearArgs plain = args;
  plain.x = x;
  plain.norm = {};
  return plain;
}

void skinny(ops::Device& device, const ops::LinearArgs& args) {
  const Streamed s = streamed(args.w, args.count, args.mode);
  check(skinny_product(normalised(device, args), s.weights, s.bf16, device.stream), "linear_forward");
}

void forward_fp32(ops::Device& device, const ops::LinearArgs& with_norm) {
  const ops::LinearArgs args = normalised(device, with_norm);
  if (args.w[0].packs && args.per_row <= kFp32Positions)
    return check(fp32_product(args, device.stream), "linear_forward");
  place_residual(device, args.residual, args.m * args.w[0].n, args.y[0]);
  for (int32_t i = 0; i < args.count; ++i) {
    Product p = product(args.m, args.per_row, args.w[i]);
    p.a = args.x;
    p.c = args.y[i];
    p.accumulate = args.residual != nullptr;
    device.products.run(p, device.stream);
  }
}

void forward_bf16(ops::Device& device, const ops::LinearArgs& args) {
  const int64_t k = args.w[0].k;
  // One weight and one result at a time.
  int64_t largest_weight = 0, largest_result = 0;
  for (int32_t i = 0; i < args.count; ++i) {
    largest_weight = std::max(largest_weight, transient(args.w[i]));
    if (args.round_output) largest_result = std::max(largest_result, args.m * args.w[i].n);
  }
  Parts parts;
  const size_t x_at = parts.add<bf16>(args.m * k), weight_at = parts.add<bf16>(largest_weight),
               result_at = parts.add<bf16>(largest_result);
  void* block = device.workspace(parts.bytes());
  bf16* x = part<bf16>(block, x_at);
  round_input(device, args.x, args.norm, args.m, k, x);
  for (int32_t i = 0; i < args.count; ++i) {
    const bf16* weight = rounded(device, args.w[i], part<bf16>(block, weight_at));
    product_bf16(device, args.m, args.per_row, x, args.w[i], weight, args.round_output,
                 part<bf16>(block, result_at), args.residual, args.y[i]);
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
