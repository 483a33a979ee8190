// Embedding: the lookup is a copy and the gradient a sum in row order, so both are compared bit by bit.
#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

struct Shape {
  int64_t m, d, vocab;
};
const Shape kShapes[] = {{1, 1, 1},     {1, 64, 7},       {7, 33, 3},  {65, 132, 11},
                         {300, 36, 40}, {257, 130, 1000}, {90, 400, 5}};

std::vector<int32_t> draw_tokens(const Shape& shape) {
  std::mt19937_64 engine(static_cast<uint64_t>(shape.m * 31 + shape.vocab));
  std::vector<int32_t> tokens(static_cast<size_t>(shape.m));
  // Squaring makes small tokens frequent, as in text.
  for (int32_t& token : tokens) {
    const double u = std::uniform_real_distribution<double>()(engine);
    token = static_cast<int32_t>(u * u * static_cast<double>(shape.vocab));
  }
  tokens.back() = static_cast<int32_t>(shape.vocab) - 1;
  return tokens;
}

void compare(const Shape& shape, const std::vector<int32_t>& tokens) {
  const auto [m, d, vocab] = shape;
  const auto width = static_cast<size_t>(d);
  const std::string name = std::to_string(m) + " x " + std::to_string(d) + " of " + std::to_string(vocab);
  const std::vector<float> table = normals(static_cast<size_t>(vocab * d), 1),
                           dx = normals(static_cast<size_t>(m * d), 2);
  std::vector<float> x(dx.size()), dtable = normals(table.size(), 3);
  Array<int32_t> dev_tokens(tokens);
  Array<float> dev_table(table), dev_dx(dx), dev_x(dx.size()), dev_dtable(dtable);
  Array<char> workspace(embedding_backward_workspace(m, vocab));
  for (size_t row = 0; row < tokens.size(); ++row) {
    for (size_t c = 0; c < width; ++c) {
      const size_t entry = static_cast<size_t>(tokens[row]) * width + c;
      x[row * width + c] = table[entry];
      dtable[entry] += dx[row * width + c];
    }
  }
  check(embedding_forward({dev_tokens.data(), m, d, dev_table.data(), dev_x.data()}, stream()));
  check(embedding_backward({dev_tokens.data(), m, d, vocab, dev_dx.data(), dev_dtable.data()},
                           workspace.data(), stream()));
  expect_equal("x " + name, dev_x.get(), x);
  expect_equal("dtable " + name, dev_dtable.get(), dtable);
}

DUOKV_CASE(matches_sequential_sums) {
  for (const Shape& shape : kShapes) compare(shape, draw_tokens(shape));
}

DUOKV_CASE(sums_one_repeated_token) { compare({150, 20, 9}, std::vector<int32_t>(150, 4)); }

DUOKV_CASE(what_is_not_finite_stays_with_its_token) {
  const std::vector<int32_t> tokens = {4, 1, 4, 0};
  for (const float bad : kNonFinite) {
    for (const size_t d : {19, 20}) {
      std::vector<float> table = normals(5 * d, 1), dx = normals(4 * d, 2), dtable = normals(5 * d, 3);
      table[4 * d + 18] = table[2 * d] = bad;  // nothing reads token 2
      dx[2 * d + 7] = dtable[3 * d + 3] = bad;
      Array<int32_t> dev_tokens(tokens);
      Array<float> dev_table(table), dev_dx(dx), dev_x(dx.size()), dev_dtable(dtable);
      Array<char> workspace(embedding_backward_workspace(4, 5));
      const auto width = static_cast<int64_t>(d);
      check(embedding_forward({dev_tokens.data(), 4, width, dev_table.data(), dev_x.data()}, stream()));
      check(embedding_backward({dev_tokens.data(), 4, width, 5, dev_dx.data(), dev_dtable.data()},
                               workspace.data(), stream()));
      expect_non_finite_at("x", dev_x.get(), {0 * d + 18, 2 * d + 18});
      expect_non_finite_at("dtable", dev_dtable.get(), {3 * d + 3, 4 * d + 7});
    }
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
