#include "test/harness.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

using Values = std::vector<float>;

// [positions, head_dim / 2, 2] with theta 10,000.
Values angles(int32_t positions, int32_t head_dim) {
  Values table;
  for (int32_t p = 0; p < positions; ++p) {
    for (int32_t i = 0; i < head_dim / 2; ++i) {
      const double angle = p / std::pow(10000.0, 2.0 * i / head_dim);
      table.push_back(static_cast<float>(std::cos(angle)));
      table.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

Values rotary(ops::Device* device, const Values& x, const std::vector<int32_t>& positions, int32_t heads,
              int32_t head_dim, const Values& angle_table, bool inverse) {
  const Array<float> xs(device, x), angles(device, angle_table);
  const Array<int32_t> at(device, positions);
  const ops::RotaryArgs args = {.x = xs.data(),
                                .m = at.size(),
                                .heads = heads,
                                .head_dim = head_dim,
                                .positions = at.data(),
                                .table = angles.data(),
                                .inverse = inverse};
  check(table().rotary(device, &args));
  return xs.get();
}

const struct {
  int64_t m;
  int32_t heads, head_dim;
} kShapes[] = {{1, 1, 2},  {1, 12, 64},   {7, 3, 10},  {97, 4, 64},
               {5, 2, 16}, {131, 16, 64}, {3, 1, 194}, {0, 4, 64}};

DUOKV_TEST(matches_fp64) {
  Rng rng;
  for (const auto& [m, heads, head_dim] : kShapes) {
    const int32_t positions = 211;
    const Values table = angles(positions, head_dim), x = rng.normals(m * heads * head_dim);
    std::vector<int32_t> at;
    for (int64_t row = 0; row < m; ++row) at.push_back(rng.integer(0, positions - 1));
    for (bool inverse : {false, true}) {
      std::vector<double> expected(x.begin(), x.end());
      for (int64_t row = 0; row < m; ++row) {
        for (int32_t head = 0; head < heads; ++head) {
          for (int32_t i = 0; i < head_dim / 2; ++i) {
            const size_t low = static_cast<size_t>((row * heads + head) * head_dim + i);
            const size_t high = low + static_cast<size_t>(head_dim / 2);
            const size_t entry = static_cast<size_t>(at[static_cast<size_t>(row)] * head_dim + 2 * i);
            const double c = table[entry], s = inverse ? -table[entry + 1] : table[entry + 1];
            expected[low] = x[low] * c - x[high] * s;
            expected[high] = x[high] * c + x[low] * s;
          }
        }
      }
      expect_close(std::to_string(m) + " x " + std::to_string(heads) + " x " + std::to_string(head_dim),
                   rotary(device(), x, at, heads, head_dim, table, inverse), expected, 3e-7, 1e-7);
    }
  }
}

DUOKV_TEST(position_zero_changes_nothing) {
  Rng rng;
  const Values x = rng.normals(3 * 2 * 64);
  expect_bitwise("x", rotary(device(), x, {0, 0, 0}, 2, 64, angles(1, 64), false), x);
}

// The rotation is orthogonal, so its inverse is its transpose, which is the backward pass.
DUOKV_TEST(inverse_is_the_transpose) {
  Rng rng;
  const int32_t head_dim = 64, heads = 5;
  const std::vector<int32_t> at = {3, 77, 0, 200, 9};
  const Values table = angles(201, head_dim), x = rng.normals(5 * heads * head_dim),
               dy = rng.normals(5 * heads * head_dim);
  const Values y = rotary(device(), x, at, heads, head_dim, table, false);
  const Values dx = rotary(device(), dy, at, heads, head_dim, table, true);
  double forward = 0, backward = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    forward += static_cast<double>(y[i]) * dy[i];
    backward += static_cast<double>(x[i]) * dx[i];
  }
  expect(std::abs(forward - backward) <= 1e-5, "<Rx, dy> = %.9g, <x, R'dy> = %.9g", forward, backward);
  expect_close("round trip", rotary(device(), y, at, heads, head_dim, table, true), x, 1e-6, 0);
}

DUOKV_TEST(rows_are_independent) {
  Rng rng;
  const int64_t m = 67;
  const int32_t heads = 3, head_dim = 64, width = heads * head_dim;
  const Values table = angles(100, head_dim), x = rng.normals(m * width);
  std::vector<int32_t> at;
  for (int64_t row = 0; row < m; ++row) at.push_back(rng.integer(0, 99));
  const Values all = rotary(device(), x, at, heads, head_dim, table, false);
  for (int64_t row = 0; row < m; ++row) {
    const auto slice = [&](const Values& v) {
      return Values(v.begin() + row * width, v.begin() + (row + 1) * width);
    };
    expect_bitwise("row " + std::to_string(row),
                   rotary(device(), slice(x), {at[static_cast<size_t>(row)]}, heads, head_dim, table, false),
                   slice(all));
  }
}

DUOKV_TEST(non_finite_stays_in_its_pair) {
  for (float bad : kNonFinite) {
    for (int32_t head_dim : {10, 64}) {
      for (bool inverse : {false, true}) {
        const auto width = static_cast<size_t>(head_dim), half = width / 2;
        const size_t head = 3 * width;  // row 1, head 1
        Values x(4 * width, 1.0f);
        x[head + half + 3] = bad;
        expect_non_finite_at("x", rotary(device(), x, {2, 5}, 2, head_dim, angles(6, head_dim), inverse),
                             {head + 3, head + half + 3});
      }
    }
  }
}

DUOKV_TEST(thread_counts) {
  Rng rng;
  const Values table = angles(50, 64), x = rng.normals(301 * 12 * 64);
  std::vector<int32_t> at;
  for (int row = 0; row < 301; ++row) at.push_back(rng.integer(0, 49));
  expect_same_for_any_threads(
      "rotary", [&](ops::Device* device) { return rotary(device, x, at, 12, 64, table, false); });
}

DUOKV_TEST(odd_head_dim) {
  const ops::RotaryArgs args = {.x = nullptr,
                                .m = 1,
                                .heads = 1,
                                .head_dim = 3,
                                .positions = nullptr,
                                .table = nullptr,
                                .inverse = false};
  expect_status(table().rotary(device(), &args), ops::kInvalid, "head_dim 3");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
