// FP32 products, in every tile, against FP64.
#include <algorithm>
#include <memory>

#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

enum class Residual { kNone, kInPlace, kApart };

struct Problem {
  int64_t m, k;
  std::vector<int64_t> n;
  Residual residual = Residual::kNone;
  size_t x_offset = 0, weight_offset = 0;  // floats past a 16-byte boundary
  int tile = -1;

  std::string name() const {
    std::string text = std::to_string(m) + " x " + std::to_string(k) + " by";
    for (const int64_t columns : n) text += " " + std::to_string(columns);
    return text + ", tile " + std::to_string(tile) +
           (residual == Residual::kNone      ? ""
            : residual == Residual::kInPlace ? ", added in place"
                                             : ", added");
  }
};

struct Data {
  std::vector<float> x, residual;
  std::vector<std::vector<float>> w;
  explicit Data(const Problem& p)
      : x(normals(static_cast<size_t>(p.m * p.k), 1)),
        residual(normals(static_cast<size_t>(p.m * p.n[0]), 9)) {
    for (size_t i = 0; i < p.n.size(); ++i) w.push_back(normals(static_cast<size_t>(p.n[i] * p.k), 2 + i));
  }
};

// What lies before the values is never read.
std::vector<float> shifted(const std::vector<float>& values, size_t offset) {
  std::vector<float> all(offset, NAN);
  all.insert(all.end(), values.begin(), values.end());
  return all;
}

std::vector<std::vector<float>> run(const Problem& p, const Data& data) {
  const Array<float> x(shifted(data.x, p.x_offset)), residual(data.residual);
  std::vector<std::unique_ptr<Array<float>>> w, y;
  ops::LinearArgs args = {};
  args.x = x.data() + p.x_offset;
  args.m = args.per_row = p.m;
  args.count = static_cast<int32_t>(p.n.size());
  for (size_t i = 0; i < p.n.size(); ++i) {
    w.push_back(std::make_unique<Array<float>>(shifted(data.w[i], p.weight_offset)));
    y.push_back(std::make_unique<Array<float>>(static_cast<size_t>(p.m * p.n[i])));
    args.w[i] = {w.back()->data() + p.weight_offset, p.n[i], p.k, 0, nullptr};
    args.y[i] = y.back()->data();
  }
  if (p.residual == Residual::kInPlace) y[0]->put(data.residual);
  if (p.residual != Residual::kNone)
    args.residual = p.residual == Residual::kInPlace ? args.y[0] : residual.data();
  check(fp32_product(args, stream(), p.tile));
  std::vector<std::vector<float>> results;
  for (const auto& array : y) results.push_back(array->get());
  expect_equal("the residual of " + p.name(), residual.get(), data.residual);
  return results;
}

void compare(const Problem& p) {
  const Data data(p);
  const std::vector<std::vector<float>> got = run(p, data);
  for (size_t i = 0; i < p.n.size(); ++i) {
    std::vector<double> expected(got[i].size());
    const auto columns = static_cast<size_t>(p.n[i]), k = static_cast<size_t>(p.k);
    for (size_t row = 0; row < static_cast<size_t>(p.m); ++row) {
      for (size_t column = 0; column < columns; ++column) {
        double sum =
            p.residual == Residual::kNone ? 0 : static_cast<double>(data.residual[row * columns + column]);
        for (size_t j = 0; j < k; ++j)
          sum += static_cast<double>(data.x[row * k + j]) * static_cast<double>(data.w[i][column * k + j]);
        expected[row * columns + column] = sum;
      }
    }
    expect_relative("y " + std::to_string(i) + " of " + p.name(), got[i], expected, 1e-6);
  }
}

// One tile and a part of the next, in rows and columns; of k less than a step, a step, and a remainder.
DUOKV_CASE(matches_fp64_in_every_tile) {
  for (int tile = 0; tile < kFp32Tiles; ++tile) {
    compare({133, 36, {131}, Residual::kNone, 0, 0, tile});
    compare({5, 4, {7}, Residual::kNone, 0, 0, tile});
    compare({9, 32, {33}, Residual::kNone, 0, 0, tile});
  }
}

// More steps than a tile has stages: 8 at most.
DUOKV_CASE(matches_fp64_along_many_steps) {
  for (int tile = 0; tile < kFp32Tiles; ++tile) compare({10, 324, {11}, Residual::kNone, 0, 0, tile});
}

DUOKV_CASE(chooses_a_tile_for_every_shape) {
  for (const int64_t m : {1, 5, 8, 17, 40, 100}) compare({m, 40, {77}});
  compare({65, 8, {1100}});
  compare({150, 4, {1400}});
}

DUOKV_CASE(takes_three_weights_in_one_launch) {
  compare({35, 44, {70, 33, 129}});
  for (const int tile : {0, 2, 6}) compare({11, 12, {130, 1, 32}, Residual::kNone, 0, 0, tile});
}

DUOKV_CASE(adds_a_residual_there_or_elsewhere) {
  for (const Residual residual : {Residual::kInPlace, Residual::kApart}) {
    for (const int tile : {-1, 0, 3}) compare({37, 40, {66}, residual, 0, 0, tile});
  }
}

DUOKV_CASE(takes_widths_and_addresses_that_are_not_aligned) {
  for (const int64_t k : {1, 2, 3, 35, 131}) compare({6, k, {9, 5}});
  for (int tile = 0; tile < kFp32Tiles; ++tile) compare({18, 70, {35}, Residual::kNone, 0, 0, tile});
  compare({7, 64, {6}, Residual::kNone, 1, 0});
  compare({7, 64, {6, 3}, Residual::kNone, 0, 1});
}

DUOKV_CASE(takes_no_rows) {
  ops::LinearArgs args = {};
  args.count = 1;
  args.w[0] = {nullptr, 8, 8, 0, nullptr};
  check(fp32_product(args, stream()));
}

// The bits of a row are the same alone, among others, at any place, beside other weights, in any tile, with
// or without alignment, and at every seed.
DUOKV_CASE(a_row_depends_on_itself_only) {
  static std::vector<float> first_seed;
  const int64_t k = 140, n = 35;
  const Problem all{41, k, {n}};
  const Data data(all);
  const std::vector<float> expected = run(all, data)[0];
  if (first_seed.empty()) first_seed = expected;
  expect_equal("between seeds", expected, first_seed);
  for (int tile = 0; tile < kFp32Tiles; ++tile) {
    const int64_t m = tile % 2 == 0 ? 1 : 18, first = 41 - m - tile;
    for (const bool unaligned : {false, true}) {
      Problem some{m, k, {5, n}, Residual::kNone, 0, unaligned ? size_t{1} : 0, tile};
      Data some_data(some);
      some_data.x.assign(data.x.begin() + first * k, data.x.begin() + (first + m) * k);
      some_data.w[1] = data.w[0];
      expect_equal(some.name(), run(some, some_data)[1],
                   std::vector<float>(expected.begin() + first * n, expected.begin() + (first + m) * n));
    }
  }
}

// The order of a sum is that of k: of 2^24, 1 and -2^24 the 1 is lost where it comes second, and kept where
// it comes last.
DUOKV_CASE(sums_in_order_of_k) {
  for (int tile = 0; tile < kFp32Tiles; ++tile) {
    Problem p{2, 68, {1}, Residual::kNone, 0, 0, tile};
    Data data(p);
    std::fill(data.x.begin(), data.x.end(), 0.0f);
    std::fill(data.w[0].begin(), data.w[0].end(), 1.0f);
    data.x[3] = 0x1p24f, data.x[4] = 1, data.x[66] = -0x1p24f;
    data.x[68 + 3] = 0x1p24f, data.x[68 + 65] = -0x1p24f, data.x[68 + 66] = 1;
    expect_equal(p.name(), run(p, data)[0], {0.0f, 1.0f});
  }
}

DUOKV_CASE(passes_on_what_is_not_finite) {
  for (int tile = 0; tile < kFp32Tiles; ++tile) {
    const Problem p{2, 64, {3}, Residual::kNone, 0, 0, tile};
    Data data(p);
    data.w[0][64 + 63] = NAN;
    data.x[5] = HUGE_VALF;
    const std::vector<float> y = run(p, data)[0];
    for (size_t i = 0; i < y.size(); ++i)
      expect(std::isfinite(y[i]) == (i == 3 || i == 5), "element %zu is %g", i, static_cast<double>(y[i]));
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
