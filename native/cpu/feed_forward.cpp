#include <cstdint>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"

namespace duokv::cpu {

Status feed_forward(Device* device, const ops::FeedForwardArgs* args) {
  const bool gated = args->w_up.data != nullptr;
  const int64_t m = args->m, d = args->w_gate.k, f = args->w_gate.n;
  float *n = nullptr, *gate = args->gate, *up = args->up, *h = nullptr;
  const Status laid_out = guarded([&] {
    require(args->x && args->y && args->norm.weight, "feed_forward: x, y or norm is null");
    require(m >= 1 && d >= 1 && f >= 1, "feed_forward: m, d and f must be at least 1");
    require(args->w_down.n == d && args->w_down.k == f, "feed_forward: w_down must be [d, f]");
    require(!gated || (args->w_up.n == f && args->w_up.k == d), "feed_forward: w_up must be [f, d]");
    // h replaces the gate, unless that is kept.
    const int64_t kept = (gate ? 1 : 0) + (up || !gated ? 1 : 0);
    float* memory = device->block_scratch.take<float>(m * (d + (2 - kept) * f + (gate ? f : 0)));
    n = memory;
    memory += m * d;
    const auto own = [&](float*& buffer) {
      if (buffer) return;
      buffer = memory;
      memory += m * f;
    };
    h = gate ? nullptr : memory;
    own(gate);
    if (gated) own(up);
    own(h);
    normalise_rows(*device, args->x, args->norm, m, d, n);
  });
  if (laid_out != ops::kOk) return laid_out;

  ops::LinearArgs in{};
  in.x = n;
  in.m = m;
  in.per_row = args->per_row;
  in.count = gated ? 2 : 1;
  in.w[0] = args->w_gate;
  in.w[1] = args->w_up;
  in.y[0] = gate;
  in.y[1] = up;
  in.round_output = args->round_output;
  in.mode = args->mode;
  if (const Status status = linear_activated(device, &in, h); status != ops::kOk) return status;
  ops::LinearArgs out{};
  out.x = h;
  out.m = m;
  out.per_row = args->per_row;
  out.count = 1;
  out.w[0] = args->w_down;
  out.y[0] = args->y;
  out.residual = args->x;
  out.round_output = args->round_output;
  out.mode = args->mode;
  return linear_forward(device, &out);
}

}  // namespace duokv::cpu
