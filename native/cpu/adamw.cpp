#include "ops/adamw.h"

#include <cstdint>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

// Decay and step are subtracted as one term: rounding 1 - lr * weight_decay to FP32 would change the decay
// itself by up to 2^-25 / (lr * weight_decay), 0.1 % at the paper's 3e-5.
void adamw_range(float* p, const float* g, float* m, float* v, int64_t n, const ops::AdamWFactors& f) {
  const hn::ScalableTag<float> d;
  const auto clip = hn::Set(d, f.clip);
  const auto keep1 = hn::Set(d, f.keep1), take1 = hn::Set(d, f.take1);
  const auto keep2 = hn::Set(d, f.keep2), take2 = hn::Set(d, f.take2);
  const auto step = hn::Set(d, f.step), root = hn::Set(d, f.root), eps = hn::Set(d, f.eps);
  const auto decay = hn::Set(d, f.decay);
  for_each_vector(d, n, [&](int64_t i, auto span) HWY_ATTR {
    const auto grad = hn::Mul(clip, load(d, g + i, span));
    const auto moment1 = hn::MulAdd(keep1, load(d, m + i, span), hn::Mul(take1, grad));
    const auto moment2 = hn::MulAdd(keep2, load(d, v + i, span), hn::Mul(take2, hn::Mul(grad, grad)));
    store(moment1, d, m + i, span);
    store(moment2, d, v + i, span);
    const auto value = load(d, p + i, span);
    const auto denominator = hn::MulAdd(hn::Sqrt(moment2), root, eps);
    const auto change = hn::MulAdd(decay, value, hn::Div(hn::Mul(step, moment1), denominator));
    store(hn::Sub(value, change), d, p + i, span);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(adamw_range);

Status adamw(Device* device, const ops::AdamWArgs* args) {
  return guarded([&] {
    require(args->n >= 0, "adamw: n is negative");
    require(args->update >= 1, "adamw: update counts from 1");
    const ops::AdamWFactors factors = ops::adamw_factors(*args);
    for_elements(device->pool, args->n, [&](int64_t first, int64_t count, int64_t) {
      HWY_DYNAMIC_DISPATCH(adamw_range)
      (args->p + first, args->g + first, args->m + first, args->v + first, count, factors);
    });
  });
}

}  // namespace duokv::cpu
#endif
