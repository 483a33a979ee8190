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

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
