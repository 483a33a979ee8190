#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"
#include "ops/rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/rms_norm.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

// Σ of `n` terms; accumulate(i, span, sum) adds the terms from i on to a vector of FP32 sums. At most 16
// additions fall on one FP32 lane of eight before it joins the FP64 total, so the error stays near 1e-7
// however long the row is.
template <class D, class Accumulate>
HWY_INLINE double blocked_sum(D d, int64_t n, Accumulate&& accumulate) {
  constexpr int64_t kBlock = 512;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    auto sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
    int64_t i = begin;
    for (; i + 4 * lanes <= end; i += 4 * lanes) {
      accumulate(i, Whole{}, sum0);
      accumulate(i + lanes, Whole{}, sum1);
      accumulate(i + 2 * lanes, Whole{}, sum2);
      accumulate(i + 3 * lanes, Whole{}, sum3);
    }
    for (; i + lanes <= end; i += lanes) accumulate(i, Whole{}, sum0);
    if (i < end) accumulate(i, Part{end - i}, sum1);
    total += hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
  }
  return total;
}

// x, y [rows, n]; w [n]; rstd [rows] or null.
void rms_norm_rows(const float* x, const float* w, int64_t rows, int64_t n, float eps, float* y,
                   float* rstd) {
  const hn::ScalableTag<float> d;
  for (int64_t row = 0; row < rows; ++row, x += n, y += n) {
    const double squares = blocked_sum(d, n, [&](int64_t i, auto span, auto& sum) HWY_ATTR {
      const auto value = load(d, x + i, span);
      sum = hn::MulAdd(value, value, sum);
    });
    const float factor = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(n) + eps));
    if (rstd) rstd[row] = factor;
    const auto factors = hn::Set(d, factor);
    for_each_vector(d, n, [&](int64_t i, auto span) HWY_ATTR {
      store(hn::Mul(hn::Mul(load(d, x + i, span), factors), load(d, w + i, span)), d, y + i, span);
    });
  }
}

// With g = dy·w and c = Σ g·x · rstd² / n:  dx = rstd · (g - c·x), and dw += dy·x·rstd over the rows, in
// their order.
template <bool kAccumulate>
void rms_norm_backward_rows(const float* x, const float* w, const float* rstd, const float* dy, int64_t rows,
                            int64_t n, float* dx, float* dw) {
  const hn::ScalableTag<float> d;
  for (int64_t row = 0; row < rows; ++row, x += n, dy += n, dx += n) {
    const double dot = blocked_sum(d, n, [&](int64_t i, auto span, auto& sum) HWY_ATTR {
      sum = hn::MulAdd(hn::Mul(load(d, dy + i, span), load(d, w + i, span)), load(d, x + i, span), sum);
    });
    const double r = rstd[row];
    const auto factors = hn::Set(d, rstd[row]);
    const auto correction = hn::Set(d, static_cast<float>(dot * r * r / static_cast<double>(n)));
    for_each_vector(d, n, [&](int64_t i, auto span) HWY_ATTR {
      const auto value = load(d, x + i, span);
      const auto grad = load(d, dy + i, span);
      const auto scaled = hn::Mul(grad, load(d, w + i, span));
      auto out = hn::Mul(factors, hn::NegMulAdd(correction, value, scaled));
      if constexpr (kAccumulate) out = hn::Add(load(d, dx + i, span), out);
      store(out, d, dx + i, span);
      store(hn::MulAdd(grad, hn::Mul(value, factors), load(d, dw + i, span)), d, dw + i, span);
    });
  }
}

void rms_norm_backward_overwrite(const float* x, const float* w, const float* rstd, const float* dy,
                                 int64_t rows, int64_t n, float* dx, float* dw) {
  rms_norm_backward_rows<false>(x, w, rstd, dy, rows, n, dx, dw);
}

void rms_norm_backward_accumulate(const float* x, const float* w, const float* rstd, const float* dy,
                                  int64_t rows, int64_t n, float* dx, float* dw) {
  rms_norm_backward_rows<true>(x, w, rstd, dy, rows, n, dx, dw);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(rms_norm_rows);
HWY_EXPORT(rms_norm_backward_overwrite);
HWY_EXPORT(rms_norm_backward_accumulate);

void normalise_rows(ops::Device& device, const float* x, const ops::Norm& norm, int64_t m, int64_t d,
                    float* y) {
  for_rows(device.pool, m, d, [&](int64_t first, int64_t count) {
    HWY_DYNAMIC_DISPATCH(rms_norm_rows)
    (x + first * d, norm.weight, count, d, norm.eps, y + first * d, nullptr);
  });
}

Status rms_norm_forward(Device* device, const ops::RmsNormArgs* args) {
  return guarded([&] {
    const int64_t d = args->d;
    require(args->m >= 0 && d >= 1, "rms_norm_forward: m is negative or d is not positive");
    require(args->y != args->x || !args->rstd, "rms_norm_forward: y may be x only when rstd is null");
    for_rows(device->pool, args->m, d, [&](int64_t first, int64_t count) {
      HWY_DYNAMIC_DISPATCH(rms_norm_rows)
      (args->x + first * d, args->w, count, d, args->eps, args->y + first * d,
       args->rstd ? args->rstd + first : nullptr);
    });
  });
}

Status rms_norm_backward(Device* device, const ops::RmsNormBackwardArgs* args) {
  return guarded([&] {
    const int64_t m = args->m, d = args->d;
    require(m >= 0 && d >= 1, "rms_norm_backward: m is negative or d is not positive");
    require(args->dx != args->dy || !args->accumulate,
            "rms_norm_backward: dx may be dy only when not accumulating");
    // Every block of rows has its own sum for dw: wide enough to be worth a chunk, short enough for FP32
    // sums.
    const int64_t rows = std::clamp<int64_t>(2 * kChunkElements / d, 16, 256);
    const int64_t blocks = ceil_div(m, rows);
    float* partial = device->shared_scratch.take<float>(blocks * d);
    device->pool.run(blocks, [&](int64_t block, int32_t) {
      const int64_t first = block * rows, offset = first * d, count = std::min(rows, m - first);
      float* dw = partial + block * d;
      std::fill_n(dw, d, 0.0f);
      if (args->accumulate) {
        HWY_DYNAMIC_DISPATCH(rms_norm_backward_accumulate)
        (args->x + offset, args->w, args->rstd + first, args->dy + offset, count, d, args->dx + offset, dw);
      } else {
        HWY_DYNAMIC_DISPATCH(rms_norm_backward_overwrite)
        (args->x + offset, args->w, args->rstd + first, args->dy + offset, count, d, args->dx + offset, dw);
      }
    });
    for (int64_t block = 1; block < blocks; ++block) add_values(partial + block * d, partial, d);
    if (blocks > 0) add_values(partial, args->dw, d);
  });
}

}  // namespace duokv::cpu
#endif
