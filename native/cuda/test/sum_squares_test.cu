// The FP64 sum of squares.
#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

constexpr int64_t kBlockElements = 16384;
const int64_t kCounts[] = {
    0, 1, 3, 4, 1023, 1026, kBlockElements - 1, kBlockElements, 3 * kBlockElements + 5};

double sum_on_device(const float* x, int64_t n) {
  // Sentinels around the result and behind the workspace.
  const size_t blocks = sum_squares_workspace(n) / sizeof(double);
  Array<double> result(std::vector<double>(3, -1.0)), workspace(std::vector<double>(blocks + 1, -1.0));
  check(sum_squares(x, n, result.data() + 1, workspace.data(), stream()));
  const std::vector<double> got = result.get();
  expect(got[0] == -1 && got[2] == -1, "%lld: something beside the result was written",
         static_cast<long long>(n));
  expect(workspace.get()[blocks] == -1, "%lld: something past the workspace was written",
         static_cast<long long>(n));
  return got[1];
}

// Values of widely different size, so that FP32 sums would be far off.
std::vector<float> values(int64_t n) {
  std::vector<float> x = normals(static_cast<size_t>(n), 1);
  for (size_t i = 0; i < x.size(); i += 7) x[i] *= 1e4f;
  return x;
}

DUOKV_CASE(matches_fp64) {
  for (const int64_t n : kCounts) {
    const std::vector<float> x = values(n);
    long double expected = 0;
    for (const float value : x) expected += static_cast<long double>(value) * value;
    const Array<float> dev_x(x);
    const double got = sum_on_device(dev_x.data(), n);
    expect(std::fabs(got - static_cast<double>(expected)) <= 1e-14 * static_cast<double>(expected),
           "%lld: %.17g, expected %.17g", static_cast<long long>(n), got, static_cast<double>(expected));
  }
}

// The order depends on n alone: neither on the schedule nor on the alignment.
DUOKV_CASE(gives_the_same_bits_wherever_the_values_lie) {
  const int64_t n = kBlockElements + 37;
  const std::vector<float> x = values(n);
  static double first = 0;  // of the first seed
  for (const size_t offset : {0, 1, 4}) {
    std::vector<float> shifted(offset, 1e20f);
    shifted.insert(shifted.end(), x.begin(), x.end());
    const Array<float> dev_x(shifted);
    const double got = sum_on_device(dev_x.data() + offset, n);
    if (first == 0) first = got;
    expect(got == first, "offset %zu: %.17g, before %.17g", offset, got, first);
  }
}

DUOKV_CASE(passes_on_what_is_not_finite) {
  for (const float bad : {HUGE_VALF, -HUGE_VALF, NAN}) {
    std::vector<float> x = values(70);
    x[69] = bad;
    const Array<float> dev_x(x);
    expect(!std::isfinite(sum_on_device(dev_x.data(), 70)), "a sum with %f is finite",
           static_cast<double>(bad));
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
