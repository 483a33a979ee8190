// y += x, bit for bit.
#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

DUOKV_CASE(adds) {
  for (const size_t n : {1, 3, 4, 97, 1024, 1028}) {
    const std::vector<float> x = normals(n, 1), y = normals(n, 2);
    std::vector<float> sum;
    for (size_t i = 0; i < n; ++i) sum.push_back(y[i] + x[i]);
    Array<float> dev_x(x), dev_y(y);
    check(add({dev_x.data(), static_cast<int64_t>(n), dev_y.data()}, stream()));
    expect_equal(std::to_string(n), dev_y.get(), sum);
  }
}

DUOKV_CASE(what_is_not_finite_stays_where_it_is) {
  for (const float bad : kNonFinite) {
    for (const size_t n : {97, 96}) {
      std::vector<float> x = normals(n, 1), y = normals(n, 2);
      x[13] = y[n - 1] = bad;
      Array<float> dev_x(x), dev_y(y);
      check(add({dev_x.data(), static_cast<int64_t>(n), dev_y.data()}, stream()));
      expect_non_finite_at(std::to_string(n), dev_y.get(), {13, n - 1});
    }
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
