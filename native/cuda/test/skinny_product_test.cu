// Products of few rows against FP64.
#include <memory>

#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

using ops::ProductMode;

float round_bf16(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

struct Problem {
  int64_t m, k;
  std::vector<int64_t> n;
  ProductMode mode = ProductMode::FP32;
  bool bf16_weights = false, accumulate = false, round_output = false;
  size_t offset = 0;  // floats, or BF16 values, that the weights start past a 16-byte boundary

  std::string name() const {
    std::string text = std::to_string(m) + " x " + std::to_string(k) + " by";
    for (const int64_t columns : n) text += " " + std::to_string(columns);
    return text +
           (bf16_weights                ? ", BF16 weights"
            : mode == ProductMode::BF16 ? ", BF16"
                                        : "") +
           (accumulate ? ", accumulated" : "") + (round_output ? ", rounded" : "");
  }
};

struct Data {
  std::vector<float> x;
  std::vector<std::vector<float>> w, y;
  explicit Data(const Problem& p) : x(normals(static_cast<size_t>(p.m * p.k), 1)) {
    for (size_t i = 0; i < p.n.size(); ++i) {
      w.push_back(normals(static_cast<size_t>(p.n[i] * p.k), 2 + i));
      y.push_back(normals(static_cast<size_t>(p.m * p.n[i]), 9 + i));
    }
  }
};

std::vector<std::vector<float>> run(const Problem& p, const Data& data) {
  const Array<float> x(data.x);
  std::vector<std::unique_ptr<Array<float>>> w, y;
  std::vector<std::unique_ptr<Array<bf16>>> halves;
  ops::LinearArgs args = {};
  args.x = x.data();
  args.m = p.m;
  args.per_row = 1;
  args.count = static_cast<int32_t>(p.n.size());
  args.round_output = p.round_output;
  args.mode = p.mode;
  const void* weights[3] = {};
  for (size_t i = 0; i < p.n.size(); ++i) {
    std::vector<float> shifted(p.offset, NAN);
    shifted.insert(shifted.end(), data.w[i].begin(), data.w[i].end());
    if (p.bf16_weights) {
      std::vector<bf16> half;
      for (const float value : shifted) half.push_back(__float2bfloat16_rn(value));
      halves.push_back(std::make_unique<Array<bf16>>(half));
      weights[i] = halves.back()->data() + p.offset;
    } else {
      w.push_back(std::make_unique<Array<float>>(shifted));
      weights[i] = w.back()->data() + p.offset;
    }
    y.push_back(std::make_unique<Array<float>>(data.y[i]));
    args.w[i] = {nullptr, p.n[i], p.k, 0, nullptr};
    args.y[i] = y.back()->data();
    if (p.accumulate) args.residual = args.y[i];
  }
  check(skinny_product(args, weights, p.bf16_weights, stream()));
  std::vector<std::vector<float>> results;
  for (const auto& array : y) results.push_back(array->get());
  return results;
}

void compare(const Problem& p) {
  const Data data(p);
  const std::vector<std::vector<float>> got = run(p, data);
  const auto operand = [&](float value) -> double {
    return p.mode == ProductMode::BF16 ? round_bf16(value) : value;
  };
  for (size_t i = 0; i < p.n.size(); ++i) {
    std::vector<double> expected(got[i].size());
    const auto columns = static_cast<size_t>(p.n[i]), k = static_cast<size_t>(p.k);
    for (size_t row = 0; row < static_cast<size_t>(p.m); ++row) {
      for (size_t column = 0; column < columns; ++column) {
        double sum = 0;
        for (size_t j = 0; j < k; ++j)
          sum += operand(data.x[row * k + j]) * operand(data.w[i][column * k + j]);
        const size_t at = row * columns + column;
        expected[at] = p.accumulate ? data.y[i][at] + sum : sum;
      }
    }
    expect_relative("y of " + p.name(), got[i], expected, p.round_output ? 3e-3 : 5e-7);
  }
}

// Every number of rows that a block takes, full and not; steps along k of 128 and, under BF16, 256, with
// remains; columns in fours with remains.
DUOKV_CASE(matches_fp64) {
  for (const int64_t m : {1, 2, 3, 4, 7, 8, 13, 16, 19}) {
    compare({m, 72, {5}});
    compare({m, 264, {3}, ProductMode::BF16, true});
  }
  compare({1, 1164, {2}});
  compare({2, 2312, {2}, ProductMode::BF16, true});
}

DUOKV_CASE(takes_three_weights_in_one_launch) {
  compare({3, 36, {7, 2, 5}});
  compare({5, 40, {7, 1, 4}, ProductMode::BF16, true, false, true});
  compare({4, 12, {1301, 411, 412}});
}

DUOKV_CASE(accumulates_and_rounds) {
  for (const bool accumulate : {false, true}) {
    compare({3, 100, {9}, ProductMode::FP32, false, accumulate});
    for (const bool rounded : {false, true}) {
      compare({17, 96, {9}, ProductMode::BF16, false, accumulate, rounded});
      compare({2, 96, {9}, ProductMode::BF16, true, accumulate, rounded});
    }
  }
}

// The product alone is rounded, not what it is added to.
DUOKV_CASE(rounds_before_adding) {
  Problem p{3, 96, {9}, ProductMode::BF16, true, false, true};
  const Data data(p);
  std::vector<float> expected = run(p, data)[0];
  for (const float value : expected)
    expect(round_bf16(value) == value, "%.9g is no BF16 value", static_cast<double>(value));
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += data.y[0][i];
  p.accumulate = true;
  expect_equal("y of " + p.name(), run(p, data)[0], expected);
}

DUOKV_CASE(takes_widths_and_addresses_that_are_not_aligned) {
  for (const int64_t k : {1, 2, 3, 131, 258}) {
    compare({3, k, {6}});
    compare({3, k, {6}, ProductMode::BF16, true});
  }
  compare({5, 64, {6}, ProductMode::FP32, false, false, false, 1});
  compare({5, 64, {6}, ProductMode::BF16, true, true, false, 1});
}

// So many columns that a warp takes four at once, and more than one group: 132 processors are the emulator's.
DUOKV_CASE(matches_fp64_with_many_columns) {
  for (const int64_t m : {1, 2, 3, 6, 12}) {
    compare({m, 12, {2122}});
    compare({m, 24, {2122}, ProductMode::BF16, true});
  }
  compare({2, 132, {9000}});
}

DUOKV_CASE(refuses_rows_that_do_not_fit) {
  ops::LinearArgs args = {};
  args.m = args.count = 1;
  args.w[0].n = 1;
  args.w[0].k = kSkinnyDepth + 1;
  const void* const weights[3] = {};
  expect(skinny_product(args, weights, false, stream()) == cudaErrorInvalidValue,
         "a depth past the limit was accepted");
}

// A row of 20,000 leaves shared memory for two rows only; sums of different signs keep their order visible.
DUOKV_CASE(takes_long_rows) { compare({3, 20000, {2}}); }

// The bits of a row are the same alone, among others, at any place, beside other weights, with or without
// alignment, and at every seed.
DUOKV_CASE(a_row_depends_on_itself_only) {
  static std::vector<float> first_seed[2];
  for (const bool halves : {false, true}) {
    const int64_t k = 272, n = 6;
    const ProductMode mode = halves ? ProductMode::BF16 : ProductMode::FP32;
    const Problem all{19, k, {n}, mode, halves};
    const Data data(all);
    const std::vector<float> expected = run(all, data)[0];
    if (first_seed[halves].empty()) first_seed[halves] = expected;
    expect_equal("between seeds", expected, first_seed[halves]);
    for (const int64_t m : {1, 2, 3, 4, 8, 11, 16}) {
      const int64_t first = 19 - m;
      const auto part = [&](const std::vector<float>& of, int64_t width) {
        return std::vector<float>(of.begin() + first * width, of.begin() + (first + m) * width);
      };
      for (const bool unaligned : {false, true}) {
        Problem some{m, k, {n}, mode, halves};
        some.offset = unaligned ? 1 : 0;
        Data some_data(some);
        some_data.x = part(data.x, k);
        some_data.w = data.w;
        expect_equal(some.name() + " of 19 rows", run(some, some_data)[0], part(expected, n));
      }
    }
    // Columns in fours.
    const Problem wide{3, k, {n, 2200}, mode, halves};
    Data wide_data(wide);
    wide_data.x.assign(data.x.begin(), data.x.begin() + 3 * k);
    wide_data.w[0] = data.w[0];
    expect_equal(wide.name(), run(wide, wide_data)[0],
                 std::vector<float>(expected.begin(), expected.begin() + 3 * n));
  }
}

DUOKV_CASE(passes_on_what_is_not_finite) {
  const Problem p{2, 64, {3}};
  Data data(p);
  data.w[0][64 + 63] = NAN;
  data.x[5] = HUGE_VALF;
  const std::vector<float> y = run(p, data)[0];
  for (size_t i = 0; i < y.size(); ++i)
    expect(std::isfinite(y[i]) == (i == 3 || i == 5), "element %zu is %g", i, static_cast<double>(y[i]));
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
