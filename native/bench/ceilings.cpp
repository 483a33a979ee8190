#include "bench/ceilings.h"

#include <chrono>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/ceilings.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace duokv::bench {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// `steps` times twelve independent multiply-adds; returns the floating-point operations done.
double multiply_adds(int64_t steps, float* sink) {
  const hn::ScalableTag<float> d;
  const auto x = hn::Set(d, 0.999f), y = hn::Set(d, 1e-3f);
  // Unlike starts, or the compiler would merge the chains.
  auto a = hn::Set(d, 0.01f), b = hn::Set(d, 0.02f), c = hn::Set(d, 0.03f), e = hn::Set(d, 0.04f);
  auto f = hn::Set(d, 0.05f), g = hn::Set(d, 0.06f), h = hn::Set(d, 0.07f), i = hn::Set(d, 0.08f);
  auto j = hn::Set(d, 0.09f), k = hn::Set(d, 0.11f), l = hn::Set(d, 0.12f), m = hn::Set(d, 0.13f);
  for (int64_t step = 0; step < steps; ++step) {
    a = hn::MulAdd(a, x, y), b = hn::MulAdd(b, x, y), c = hn::MulAdd(c, x, y), e = hn::MulAdd(e, x, y);
    f = hn::MulAdd(f, x, y), g = hn::MulAdd(g, x, y), h = hn::MulAdd(h, x, y), i = hn::MulAdd(i, x, y);
    j = hn::MulAdd(j, x, y), k = hn::MulAdd(k, x, y), l = hn::MulAdd(l, x, y), m = hn::MulAdd(m, x, y);
  }
  const auto low = hn::Add(hn::Add(hn::Add(a, b), hn::Add(c, e)), hn::Add(f, g));
  const auto high = hn::Add(hn::Add(hn::Add(h, i), hn::Add(j, k)), hn::Add(l, m));
  *sink = hn::GetLane(hn::SumOfLanes(d, hn::Add(low, high)));
  return static_cast<double>(steps) * 24.0 * static_cast<double>(hn::Lanes(d));
}

// Four streams, which keep the memory busier than one.
float sum(const float* x, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), quarter = n / 4;
  auto a = hn::Zero(d), b = a, c = a, e = a;
  for (int64_t i = 0; i + lanes <= quarter; i += lanes) {
    a = hn::Add(a, hn::LoadU(d, x + i)), b = hn::Add(b, hn::LoadU(d, x + quarter + i));
    c = hn::Add(c, hn::LoadU(d, x + 2 * quarter + i)), e = hn::Add(e, hn::LoadU(d, x + 3 * quarter + i));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e))));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::bench {
namespace {

HWY_EXPORT(multiply_adds);
HWY_EXPORT(sum);

constexpr int64_t kPiece = int64_t{1} << 18;  // floats that one chunk reads
constexpr int64_t kPieces = 64;

template <class Body>
double seconds(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Ceilings::Ceilings(ops::Device* device)
    : device_(device), memory_(static_cast<size_t>(4 * kPiece * kPieces), 1.0f) {}

double Ceilings::flops() {
  const int32_t threads = device_->pool.threads();
  // A cache line of its own for each thread's results.
  std::vector<float> sinks(static_cast<size_t>(threads) * 16);
  std::vector<double> done(sinks.size());
  const double taken = seconds([&] {
    device_->pool.run(threads, [&](int64_t chunk, int32_t) {
      const size_t at = static_cast<size_t>(chunk) * 16;
      done[at] = HWY_DYNAMIC_DISPATCH(multiply_adds)(4'000'000, &sinks[at]);
    });
  });
  double total = 0;
  for (double flops : done) total += flops;
  return total / taken;
}

double Ceilings::read() {
  const float* from = memory_.data() + round_++ % 4 * kPiece * kPieces;
  std::vector<float> sums(static_cast<size_t>(kPieces));
  const double taken = seconds([&] {
    device_->pool.run(kPieces, [&](int64_t chunk, int32_t) {
      sums[static_cast<size_t>(chunk)] = HWY_DYNAMIC_DISPATCH(sum)(from + chunk * kPiece, kPiece);
    });
  });
  return static_cast<double>(kPieces * kPiece) * 4 / taken;
}

}  // namespace duokv::bench
#endif
