// SwiGLU: h = silu(gate) * up with silu(z) = z * sigmoid(z); without `up`, h = silu(gate).
// Backward, with s = sigmoid(gate):  dgate = dh * up * s * (1 + gate * (1 - s));  dup = dh * gate * s.
//
// Elementwise, four elements a thread where the addresses allow it. No pointer is __restrict__: h may alias
// gate, dgate may alias dh.
//
// Roofline (bandwidth; H100: 3.35 TB/s), n = 16,384 * 2,048:
//   forward   12 n bytes = 403 MB: 120 µs; between BF16 products 6 n bytes = 201 MB: 60 µs, 14 n where gate
//   and
//             up are kept: 140 µs
//   backward  20 n bytes = 671 MB: 200 µs
#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

constexpr int kThreads = 256;

DUOKV_DEVICE float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }

DUOKV_DEVICE float forward(float gate, float up) { return gate * sigmoid(gate) * up; }

struct Gradients {
  float gate, up;
};
DUOKV_DEVICE Gradients backward(float gate, float up, float dh) {
  const float s = sigmoid(gate);
  return {dh * up * s * (1.0f + gate * (1.0f - s)), dh * gate * s};
}

DUOKV_DEVICE int64_t global_thread() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

__global__ void __launch_bounds__(kThreads)
    swiglu_forward_kernel(const float* gate, const float* up, int64_t n, float* h) {
  const int64_t i = global_thread();
  if (i < n) h[i] = forward(gate[i], up ? up[i] : 1.0f);
}

__global__ void __launch_bounds__(kThreads)
    swiglu_forward_vector_kernel(const float* gate, const float* up, int64_t n, float* h) {
  const int64_t i = global_thread() * 4;
  if (i >= n) return;
  const float4 g = load4(gate + i), u = up ? load4(up + i) : make_float4(1, 1, 1, 1);
  store4(h + i, make_float4(forward(g.x, u.x), forward(g.y, u.y), forward(g.z, u.z), forward(g.w, u.w)));
}

__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const float* gate, const float* up, const float* dh, int64_t n, float* dgate,
                           float* dup) {
  const int64_t i = global_thread();
  if (i >= n) return;
  const Gradients d = backward(gate[i], up ? up[i] : 1.0f, dh[i]);
  dgate[i] = d.gate;
  if (dup) dup[i] = d.up;
}

__global__ void __launch_bounds__(kThreads)
    swiglu_backward_vector_kernel(const float* gate, const float* up, const float* dh, int64_t n,
                                  float* dgate, float* dup) {
  const int64_t i = global_thread() * 4;
  if (i >= n) return;
  const float4 g = load4(gate + i), u = up ? load4(up + i) : make_float4(1, 1, 1, 1), d = load4(dh + i);
  const Gradients x = backward(g.x, u.x, d.x), y = backward(g.y, u.y, d.y);
  const Gradients z = backward(g.z, u.z, d.z), w = backward(g.w, u.w, d.w);
  store4(dgate + i, make_float4(x.gate, y.gate, z.gate, w.gate));
  if (dup) store4(dup + i, make_float4(x.up, y.up, z.up, w.up));
}

// Between two BF16 products: gate and up as the first left them, h as the second reads it, and FP32 copies of
// gate and up for the backward pass where they are wanted.
__global__ void __launch_bounds__(kThreads)
    swiglu_forward_bf16_kernel(const bf16* gate, const bf16* up, int64_t n, float* kept_gate, float* kept_up,
                               bf16* h) {
  const int64_t i = global_thread();
  if (i >= n) return;
  const float g = __bfloat162float(gate[i]), u = up ? __bfloat162float(up[i]) : 1.0f;
  h[i] = __float2bfloat16_rn(forward(g, u));
  if (kept_gate) kept_gate[i] = g;
  if (kept_up) kept_up[i] = u;
}

DUOKV_DEVICE float4 load_bf16x4(const bf16* p) {
  return unpack_bf16x4(load2(reinterpret_cast<const float*>(p)));
}

__global__ void __launch_bounds__(kThreads)
    swiglu_forward_bf16_vector_kernel(const bf16* gate, const bf16* up, int64_t n, float* kept_gate,
                                      float* kept_up, bf16* h) {
  const int64_t i = global_thread() * 4;
  if (i >= n) return;
  const float4 g = load_bf16x4(gate + i), u = up ? load_bf16x4(up + i) : make_float4(1, 1, 1, 1);
  store2(reinterpret_cast<float*>(h + i),
         make_float2(__uint_as_float(pack_bf16(forward(g.x, u.x), forward(g.y, u.y))),
                     __uint_as_float(pack_bf16(forward(g.z, u.z), forward(g.w, u.w)))));
  if (kept_gate) store4(kept_gate + i, g);
  if (kept_up) store4(kept_up + i, u);
}

}  // namespace

cudaError_t swiglu_forward(const ops::SwigluArgs& args, cudaStream_t stream) {
  if (args.n == 0) return cudaSuccess;
  if (vectorizable(args.n, {args.gate, args.up, args.h})) {
    return DUOKV_LAUNCH(swiglu_forward_vector_kernel, grid_of(args.n / 4, kThreads), kThreads, 0, stream,
                        args.gate, args.up, args.n, args.h);
  }
  return DUOKV_LAUNCH(swiglu_forward_kernel, grid_of(args.n, kThreads), kThreads, 0, stream, args.gate,
                      args.up, args.n, args.h);
}

cudaError_t swiglu_forward_bf16(const bf16* gate, const bf16* up, int64_t n, float* kept_gate, float* kept_up,
                                bf16* h, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  if (vectorizable(n, {gate, up, kept_gate, kept_up, h})) {
    return DUOKV_LAUNCH(swiglu_forward_bf16_vector_kernel, grid_of(n / 4, kThreads), kThreads, 0, stream,
                        gate, up, n, kept_gate, kept_up, h);
  }
  return DUOKV_LAUNCH(swiglu_forward_bf16_kernel, grid_of(n, kThreads), kThreads, 0, stream, gate, up, n,
                      kept_gate, kept_up, h);
}

cudaError_t swiglu_backward(const ops::SwigluBackwardArgs& args, cudaStream_t stream) {
  if (args.n == 0) return cudaSuccess;
  if (vectorizable(args.n, {args.gate, args.up, args.dh, args.dgate, args.dup})) {
    return DUOKV_LAUNCH(swiglu_backward_vector_kernel, grid_of(args.n / 4, kThreads), kThreads, 0, stream,
                        args.gate, args.up, args.dh, args.n, args.dgate, args.dup);
  }
  return DUOKV_LAUNCH(swiglu_backward_kernel, grid_of(args.n, kThreads), kThreads, 0, stream, args.gate,
                      args.up, args.dh, args.n, args.dgate, args.dup);
}

}  // namespace duokv::cuda
