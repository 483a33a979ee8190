// Sampling against FP64; the problems are those of the CPU's tests.
#include "cuda/operations.h"
#include "cuda/test/harness.h"
#include "test/sample_reference.h"

namespace duokv::cuda::test {
namespace {

using duokv::test::random_sample_problem;
using duokv::test::Sampled;
using duokv::test::SampleProblem;

constexpr float kInf = std::numeric_limits<float>::infinity();

Sampled draw(const SampleProblem& p) {
  const Array<float> logits(p.logits), logprobs(static_cast<size_t>(p.rows()));
  const Array<ops::SampleRow> options(p.options);
  const Array<int32_t> tokens(static_cast<size_t>(p.rows()));
  check(sample({logits.data(), p.rows(), p.vocab, options.data(), tokens.data(), logprobs.data()}, stream()));
  return {tokens.get(), logprobs.get()};
}

void expect_right(const SampleProblem& p) {
  const Sampled got = draw(p);
  for (int64_t row = 0; row < p.rows(); ++row) {
    const std::string wrong = wrong_sample(p, row, got);
    expect(wrong.empty(), "%s", wrong.c_str());
  }
}

DUOKV_CASE(draws_what_fp64_draws) {
  uint64_t seed = current_seed;
  for (const int64_t vocab : {1, 2, 97, 1031}) {
    for (const float spread : {0.0f, 3.0f, 40.0f}) {
      ++seed;
      expect_right(random_sample_problem(seed, 1 + static_cast<int64_t>(seed) % 9, vocab, spread));
    }
  }
}

// Of equal logits the first are kept, and the first is the likeliest.
DUOKV_CASE(ties_go_to_the_lowest_id) {
  SampleProblem p = {5, {}, {}};
  for (const ops::SampleRow& options : {ops::SampleRow{0, 5, 1, 0.9},
                                        {1, 1, 1, 0.9999},
                                        {1, 2, 1, 0.9999},
                                        {1, 5, 0.3, 0.9999},
                                        {1, 5, 1, 0.9999}}) {
    p.logits.insert(p.logits.end(), {-1, 2, 0.0f, 2, 2});
    p.options.push_back(options);
  }
  expect_equal("tokens", draw(p).tokens, std::vector<int32_t>{1, 1, 3, 1, 4});
}

DUOKV_CASE(extreme_options) {
  SampleProblem p = {3, {}, {}};
  const auto add = [&](std::vector<float> logits, ops::SampleRow options) {
    p.logits.insert(p.logits.end(), logits.begin(), logits.end());
    p.options.push_back(options);
  };
  add({1, 3, 2}, {1e-38f, 3, 1, 0.99});       // the likeliest, whatever the draw
  add({1, 3, 3}, {1e-45f, 3, 1, 0.99});       // both of the likeliest
  add({-kInf, 0, -kInf}, {1, 3, 1, 0.99});    // masses of 0
  add({-kInf, 0, -kInf}, {1, 2, 0.9999, 0});  // kept for their rank alone
  add({3e38f, -3e38f, 0}, {2, 3, 1, 0.99});   // differences that overflow
  add({0, -0.0f, 0}, {1, 2, 1, 0.99});        // zeros of both signs are equal
  add({1, 2, 3}, {1e38f, 3, 1, 0.99});        // all alike
  add({5, 5, 5}, {1, 3, 1e-300, 0.99});       // at least one is kept
  expect_equal("tokens", draw(p).tokens, std::vector<int32_t>{1, 2, 1, 1, 0, 1, 2, 0});
}

DUOKV_CASE(rows_that_cannot_be_drawn_from_say_why) {
  const SampleProblem p = {3,
                           {0, NAN, kInf, -kInf, -kInf, -kInf, 0, 1, kInf, 1, 2, 3},
                           {{1, 3, 1, 0}, {1, 3, 1, 0}, {0, 3, 1, 0}, {0, 3, 1, 0}}};
  const Sampled got = draw(p);
  expect_equal("tokens", got.tokens, std::vector<int32_t>{-2, -1, -3, 2});
  for (size_t row = 0; row < 4; ++row)
    expect(std::isnan(got.logprobs[row]) == (row < 3), "row %zu: %g", row,
           static_cast<double>(got.logprobs[row]));
}

// One of five problems per seed on the emulator, where one takes seconds.
DUOKV_CASE(both_backends_draw_the_same) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    if (kEmulated && current_seed % 5 != seed) continue;
    const Sampled got = draw(random_sample_problem(seed, 2, 32768, 12));
    expect(duokv::test::sample_checksum(got.tokens) == duokv::test::kSampleChecksums[seed],
           "seed %lu: the checksum is %ld", static_cast<unsigned long>(seed),
           static_cast<long>(duokv::test::sample_checksum(got.tokens)));
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
