// Sampling against FP64; the problems are those of the CPU's tests.
#include "cuda/operations.h"
#include "cuda/test/harness.h"
#include "test/sample_reference.h"

namespace duokv::cuda::test {
namespace {

using duokv::test::random_sample_problem;
using duokv::test::Sampled;
using duokv::test::SampleProblem;

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

DUOKV_CASE(ties_go_to_the_lowest_id) {
  const auto [problem, tokens] = duokv::test::samples_of_ties();
  expect_equal("tokens", draw(problem).tokens, tokens);
}

DUOKV_CASE(extreme_options) {
  const auto [problem, tokens] = duokv::test::samples_of_extremes();
  expect_equal("tokens", draw(problem).tokens, tokens);
}

DUOKV_CASE(rows_that_cannot_be_drawn_from_say_why) {
  const auto [problem, tokens] = duokv::test::samples_that_cannot_be_drawn();
  const Sampled got = draw(problem);
  expect_equal("tokens", got.tokens, tokens);
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
