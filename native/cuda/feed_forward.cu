// The feed-forward block: a norm, two products of it, the activation, the product back and the residual.
//
// Roofline (H100), m = 1,792, d = 768, f = 2,048: 6 m d f = 16.9 GFLOP, 28 µs at 600 TFLOP/s in BF16, 340 µs
// at 50 in FP32. Around the products in BF16: norm 6 m d, activation 6 m f, residual 10 m d bytes = 44 MB, 15
// µs.
#include <algorithm>

#include "cuda/linear.h"
#include "cuda/operations.h"

namespace duokv::cuda {

// gate, up and h never leave BF16 on their way between two rounded BF16 products.
static void feed_forward_bf16(ops::Device& device, const ops::FeedForwardArgs& args) {
  const int64_t m = args.m, d = args.w_gate.k, f = args.w_gate.n;
  const bool gated = args.w_up.data != nullptr;
  Parts parts;
  const size_t x_at = parts.add<bf16>(m * d),
               weight_at = parts.add<bf16>(std::max(transient(args.w_gate), transient(args.w_down))),
               gate_at = parts.add<bf16>(m * f), up_at = parts.add<bf16>(gated ? m * f : 0);
  void* block = device.workspace(parts.bytes());
  bf16 *x = part<bf16>(block, x_at), *gate = part<bf16>(block, gate_at),
       *up = gated ? part<bf16>(block, up_at) : nullptr, *room = part<bf16>(block, weight_at);
  round_input(device, args.x, args.norm, m, d, x);
  const auto project = [&](const ops::Weight& w, bf16* result) {
    Product p = product(m, args.per_row, w);
    p.a = x;
    p.b = rounded(device, w, room);
    p.operands = ops::DType::BF16;
    p.c = result;
    p.result = ops::DType::BF16;
    device.products.run(p, device.stream);
  };
  project(args.w_gate, gate);
  if (gated) project(args.w_up, up);
  check(swiglu_forward_bf16(gate, up, m * f, args.gate, args.up, gate, device.stream), "feed_forward");
  // x is read, so the product of w_down can take its place.
  product_bf16(device, m, args.per_row, gate, args.w_down, rounded(device, args.w_down, room), true, x,
               args.x, args.y);
}

void feed_forward(ops::Device& device, const ops::FeedForwardArgs& args) {
  if (args.mode == ops::ProductMode::BF16 && args.round_output && args.per_row > kSkinnyPositions)
    return feed_forward_bf16(device, args);
  const int64_t m = args.m, f = args.w_gate.n;
  const bool gated = args.w_up.data != nullptr;
  // h takes the gate's place, unless that is kept. The scratch is apart from what the products use.
  float *gate = args.gate, *up = args.up, *h = nullptr;
  float* memory = static_cast<float*>(device.activations(static_cast<size_t>(2 * m * f) * sizeof(float)));
  if (gate == nullptr) gate = h = memory;
  if (h == nullptr) h = memory;
  if (gated && up == nullptr) up = memory + m * f;
  ops::LinearArgs in = {};
  in.x = args.x;
  in.m = m;
  in.per_row = args.per_row;
  in.norm = args.norm;
  in.count = gated ? 2 : 1;
  in.w[0] = args.w_gate;
  in.w[1] = args.w_up;
  in.y[0] = gate;
  in.y[1] = up;
  in.round_output = args.round_output;
  in.mode = args.mode;
  linear_forward(device, in);
  check(swiglu_forward({gate, gated ? up : nullptr, m * f, h}, device.stream), "feed_forward");
  ops::LinearArgs out = {};
  out.x = h;
  out.m = m;
  out.per_row = args.per_row;
  out.count = 1;
  out.w[0] = args.w_down;
  out.y[0] = args.y;
  out.residual = args.x;
  out.round_output = args.round_output;
  out.mode = args.mode;
  linear_forward(device, out);
}

}  // namespace duokv::cuda
