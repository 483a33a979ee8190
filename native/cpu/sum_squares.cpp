#include <cstdint>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"
#include "ops/rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/sum_squares.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

// Squares of FP32 values are exact in FP64.
double sum_squares_range(const float* x, int64_t n) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
  const auto add_square = [&](int64_t i, auto& sum) HWY_ATTR {
    const auto value = hn::PromoteTo(d, hn::LoadU(df, x + i));
    sum = hn::MulAdd(value, value, sum);
  };
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    add_square(i, sum0);
    add_square(i + lanes, sum1);
    add_square(i + 2 * lanes, sum2);
    add_square(i + 3 * lanes, sum3);
  }
  double sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return sum;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(sum_squares_range);

Status sum_squares(Device* device, const ops::SumSquaresArgs* args) {
  return guarded([&] {
    require(args->n >= 0, "sum_squares: n is negative");
    const int64_t chunks = ceil_div(args->n, kChunkElements);
    double* partial = device->shared_scratch.take<double>(chunks);
    for_elements(device->pool, args->n, [&](int64_t first, int64_t count, int64_t chunk) {
      partial[chunk] = HWY_DYNAMIC_DISPATCH(sum_squares_range)(args->x + first, count);
    });
    double sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk];
    *args->result = sum;
  });
}

}  // namespace duokv::cpu
#endif
