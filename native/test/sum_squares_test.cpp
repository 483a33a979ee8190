#include "test/harness.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

double sum_squares(ops::Device* device, const std::vector<float>& x) {
  const Array<float> xs(device, x);
  double result = -1;
  const ops::SumSquaresArgs args = {.x = xs.data(), .n = xs.size(), .result = &result};
  check(table().sum_squares(device, &args));
  return result;
}

DUOKV_TEST(matches_extended_precision) {
  Rng rng;
  for (int64_t n : {0, 1, 3, 10, 97, 1024, 32768, 32769, 1000003}) {
    const std::vector<float> x = rng.normals(n, 3);
    long double expected = 0;
    for (float value : x) expected += static_cast<long double>(value) * value;
    const double got = sum_squares(device(), x), error = std::abs(static_cast<double>(got - expected));
    expect(error <= 1e-14 * static_cast<double>(expected), "n %lld: %.17g, expected %.17Lg",
           static_cast<long long>(n), got, expected);
  }
}

DUOKV_TEST(keeps_squares_beyond_the_fp32_range) {
  expect(sum_squares(device(), std::vector<float>(5, 1e30f)) == 5 * (static_cast<double>(1e30f) * 1e30f),
         "1e30");
  const float tiny = 1e-30f;
  expect(sum_squares(device(), std::vector<float>(8, tiny)) == 8 * (static_cast<double>(tiny) * tiny),
         "1e-30");
}

DUOKV_TEST(non_finite_stays_non_finite) {
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()}) {
    for (size_t at : {size_t{0}, size_t{40000}, size_t{40002}}) {
      std::vector<float> x(40003, 1.0f);
      x[at] = bad;
      const double got = sum_squares(device(), x);
      expect(!std::isfinite(got), "%g at %zu gives %g", bad, at, got);
    }
  }
}

DUOKV_TEST(thread_counts) {
  Rng rng;
  const std::vector<float> x = rng.normals(1000003);
  expect_same_for_any_threads(
      "sum_squares", [&](ops::Device* device) { return std::vector<double>{sum_squares(device, x)}; });
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
