#include "test/harness.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

std::vector<float> add(ops::Device* device, const std::vector<float>& x, const std::vector<float>& y) {
  const Array<float> xs(device, x), ys(device, y);
  const ops::AddArgs args = {.x = xs.data(), .n = xs.size(), .y = ys.data()};
  check(table().add(device, &args));
  return ys.get();
}

DUOKV_TEST(adds_with_one_rounding) {
  Rng rng;
  for (int64_t n : {0, 1, 7, 10, 97, 1024, 32768, 32769, 100003}) {
    const std::vector<float> x = rng.normals(n), y = rng.normals(n, 100);
    std::vector<float> expected(y);
    for (size_t i = 0; i < x.size(); ++i) expected[i] = static_cast<float>(static_cast<double>(x[i]) + y[i]);
    expect_bitwise("n " + std::to_string(n), add(device(), x, y), expected);
  }
}

DUOKV_TEST(non_finite_stays_where_it_is) {
  Rng rng;
  for (float bad : kNonFinite) {
    for (size_t at : {0, 13, 96}) {
      const std::vector<float> clean = rng.normals(97);
      std::vector<float> spoilt = clean;
      spoilt[at] = bad;
      expect_non_finite_at("of x", add(device(), spoilt, clean), {at});
      expect_non_finite_at("of y", add(device(), clean, spoilt), {at});
    }
  }
}

DUOKV_TEST(thread_counts) {
  Rng rng;
  const std::vector<float> x = rng.normals(200003), y = rng.normals(200003);
  expect_same_for_any_threads("add", [&](ops::Device* device) { return add(device, x, y); });
}

DUOKV_TEST(negative_count) {
  const ops::AddArgs args = {.x = nullptr, .n = -1, .y = nullptr};
  expect_status(table().add(device(), &args), ops::kInvalid, "n = -1");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
