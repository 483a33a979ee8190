#include <cstdint>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/swiglu.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

void swiglu_block(const float* gate, const float* up, int64_t rows, int64_t columns, int64_t stride,
                  float* h) {
  const hn::ScalableTag<float> d;
  for (int64_t r = 0; r < rows; ++r, gate += stride, up += stride, h += stride) {
    for_each_vector(d, columns, [&](int64_t i, auto span) HWY_ATTR {
      store(hn::Mul(silu(d, load(d, gate + i, span)), load(d, up + i, span)), d, h + i, span);
    });
  }
}

void silu_block(const float* gate, int64_t rows, int64_t columns, int64_t stride, float* h) {
  const hn::ScalableTag<float> d;
  for (int64_t r = 0; r < rows; ++r, gate += stride, h += stride) {
    for_each_vector(d, columns, [&](int64_t i, auto span) HWY_ATTR {
      store(silu(d, load(d, gate + i, span)), d, h + i, span);
    });
  }
}

void swiglu_backward_range(const float* gate, const float* up, const float* dh, float* dgate, float* dup,
                           int64_t n) {
  const hn::ScalableTag<float> d;
  for_each_vector(d, n, [&](int64_t i, auto span) HWY_ATTR {
    const auto g = silu_and_derivative(d, load(d, gate + i, span));
    const auto grad = load(d, dh + i, span);
    store(hn::Mul(hn::Mul(grad, load(d, up + i, span)), g.derivative), d, dgate + i, span);
    store(hn::Mul(grad, g.value), d, dup + i, span);
  });
}

void silu_backward_range(const float* gate, const float* dh, float* dgate, int64_t n) {
  const hn::ScalableTag<float> d;
  for_each_vector(d, n, [&](int64_t i, auto span) HWY_ATTR {
    const auto g = silu_and_derivative(d, load(d, gate + i, span));
    store(hn::Mul(load(d, dh + i, span), g.derivative), d, dgate + i, span);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(swiglu_block);
HWY_EXPORT(silu_block);
HWY_EXPORT(swiglu_backward_range);
HWY_EXPORT(silu_backward_range);

void swiglu_rows(const float* gate, const float* up, int64_t rows, int64_t columns, int64_t stride,
                 float* h) {
  if (up) {
    HWY_DYNAMIC_DISPATCH(swiglu_block)(gate, up, rows, columns, stride, h);
  } else {
    HWY_DYNAMIC_DISPATCH(silu_block)(gate, rows, columns, stride, h);
  }
}

void swiglu(ThreadPool& pool, const float* gate, const float* up, int64_t n, float* h) {
  for_elements(pool, n, [&](int64_t first, int64_t count, int64_t) {
    swiglu_rows(gate + first, up ? up + first : nullptr, 1, count, count, h + first);
  });
}

Status swiglu_forward(Device* device, const ops::SwigluArgs* args) {
  return guarded([&] {
    require(args->n >= 0, "swiglu_forward: n is negative");
    swiglu(device->pool, args->gate, args->up, args->n, args->h);
  });
}

Status swiglu_backward(Device* device, const ops::SwigluBackwardArgs* args) {
  return guarded([&] {
    require(args->n >= 0, "swiglu_backward: n is negative");
    require(!args->up == !args->dup, "swiglu_backward: up and dup must both be given or both be null");
    for_elements(device->pool, args->n, [&](int64_t first, int64_t count, int64_t) {
      const float* gate = args->gate + first;
      const float* dh = args->dh + first;
      float* dgate = args->dgate + first;
      if (args->up) {
        HWY_DYNAMIC_DISPATCH(swiglu_backward_range)
        (gate, args->up + first, dh, dgate, args->dup + first, count);
      } else {
        HWY_DYNAMIC_DISPATCH(silu_backward_range)(gate, dh, dgate, count);
      }
    });
  });
}

}  // namespace duokv::cpu
#endif
