#include <algorithm>
#include <cstdint>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/add.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

void add_range(const float* x, float* y, int64_t n) {
  const hn::ScalableTag<float> d;
  for_each_vector(d, n, [&](int64_t i, auto span) HWY_ATTR {
    store(hn::Add(load(d, y + i, span), load(d, x + i, span)), d, y + i, span);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(add_range);

void add_values(const float* x, float* y, int64_t n) { HWY_DYNAMIC_DISPATCH(add_range)(x, y, n); }

void copy_values(ThreadPool& pool, const float* x, int64_t n, float* y) {
  for_elements(pool, n,
               [&](int64_t first, int64_t count, int64_t) { std::copy_n(x + first, count, y + first); });
}

Status add(Device* device, const ops::AddArgs* args) {
  return guarded([&] {
    require(args->n >= 0, "add: n is negative");
    for_elements(device->pool, args->n, [&](int64_t first, int64_t count, int64_t) {
      add_values(args->x + first, args->y + first, count);
    });
  });
}

}  // namespace duokv::cpu
#endif
