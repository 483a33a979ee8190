// The rotary embedding against FP64.
#include <array>

#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

constexpr int kPositions = 50;

std::vector<float> angles(int half) {
  std::vector<float> table;
  for (int p = 0; p < kPositions; ++p) {
    for (int i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) / (1 + i);
      table.push_back(static_cast<float>(std::cos(angle)));
      table.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

DUOKV_CASE(matches_fp64_and_turns_back) {
  for (const auto& [m, heads, head_dim] :
       {std::array<int, 3>{1, 1, 2}, {3, 5, 16}, {7, 12, 64}, {17, 3, 128}, {31, 1, 10}}) {
    const int half = head_dim / 2;
    const auto count = static_cast<size_t>(m * heads * head_dim);
    const std::vector<float> x = normals(count, 1), table = angles(half);
    std::vector<int32_t> positions;
    for (int row = 0; row < m; ++row) positions.push_back(row * 7 % kPositions);
    std::vector<double> expected(count);
    for (int row = 0; row < m; ++row) {
      for (int h = 0; h < heads; ++h) {
        for (int i = 0; i < half; ++i) {
          const auto at = static_cast<size_t>((row * heads + h) * head_dim + i);
          const auto angle = static_cast<size_t>((positions[static_cast<size_t>(row)] * half + i) * 2);
          const double c = table[angle], s = table[angle + 1], a = x[at],
                       b = x[at + static_cast<size_t>(half)];
          expected[at] = a * c - b * s;
          expected[at + static_cast<size_t>(half)] = a * s + b * c;
        }
      }
    }
    Array<float> dev_x(x), dev_table(table);
    Array<int32_t> dev_positions(positions);
    ops::RotaryArgs args{dev_x.data(), m, heads, head_dim, dev_positions.data(), dev_table.data(), false};
    check(rotary(args, stream()));
    const std::string name =
        std::to_string(m) + " x " + std::to_string(heads) + " x " + std::to_string(head_dim);
    expect_relative(name, dev_x.get(), expected, 1e-6);
    args.inverse = true;
    check(rotary(args, stream()));
    expect_relative(name + " back", dev_x.get(), {x.begin(), x.end()}, 1e-6);
  }
}

DUOKV_CASE(what_is_not_finite_stays_in_its_pair) {
  constexpr int kHeads = 2, kDim = 10, kHead = 3 * kDim;  // row 1, head 1
  for (const float bad : kNonFinite) {
    for (const bool inverse : {false, true}) {
      std::vector<float> x = normals(2 * kHeads * kDim, 1);
      x[kHead + 8] = bad;
      Array<float> dev_x(x), table(angles(kDim / 2));
      Array<int32_t> positions(std::vector<int32_t>{2, 5});
      check(rotary({dev_x.data(), 2, kHeads, kDim, positions.data(), table.data(), inverse}, stream()));
      expect_non_finite_at("x", dev_x.get(), {kHead + 3, kHead + 8});
    }
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
