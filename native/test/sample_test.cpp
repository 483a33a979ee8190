#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "test/harness.h"
#include "test/instruction_sets.h"
#include "test/sample_reference.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

Sampled sample(const SampleProblem& p, ops::Device* on = device()) {
  const Array<float> logits(on, p.logits), logprobs(on, p.rows());
  const Array<ops::SampleRow> options(on, p.options);
  const Array<int32_t> tokens(on, p.rows());
  const ops::SampleArgs args = {logits.data(),  p.rows(),      p.vocab,
                                options.data(), tokens.data(), logprobs.data()};
  check(table().sample(on, &args));
  return {tokens.get(), logprobs.get()};
}

void expect_right(const SampleProblem& p) {
  const Sampled got = sample(p);
  for (int64_t row = 0; row < p.rows(); ++row) {
    const std::string wrong = wrong_sample(p, row, got);
    expect(wrong.empty(), "%s", wrong.c_str());
  }
}

DUOKV_TEST(draws_what_fp64_draws) {
  uint64_t seed = 1;
  for (const int64_t vocab : {1, 2, 3, 17, 63, 64, 65, 97, 127, 128, 129, 512, 1031}) {
    for (int64_t rows = 1; rows <= 9; ++rows) {
      for (const float spread : {0.0f, 3.0f, 40.0f})
        expect_right(random_sample_problem(++seed, rows, vocab, spread));
    }
  }
  expect_right(random_sample_problem(3, 9, 32768, 12));
}

// Logits as the search for what is kept likes them least: of all magnitudes, mostly alike, mostly -infinity,
// a few far above the rest.
std::vector<SampleProblem> awkward_problems() {
  std::vector<SampleProblem> problems;
  std::mt19937_64 engine(5);
  const auto uniform = [&] { return static_cast<float>(static_cast<double>(engine() >> 11) * 0x1p-53); };
  const auto add = [&](uint64_t seed, int64_t vocab, auto&& change) {
    SampleProblem p = random_sample_problem(seed, 9, vocab, 6);
    for (float& x : p.logits) x = change(x);
    problems.push_back(std::move(p));
  };
  uint64_t seed = 100;
  for (const int64_t vocab : {97, 129, 257, 1031, 5003}) {
    add(++seed, vocab, [&](float x) { return std::copysign(std::exp(170 * uniform() - 85), x); });
    add(++seed, vocab, [&](float x) { return std::round(x); });
    add(++seed, vocab, [&](float x) { return uniform() < 0.3f ? x : 0.0f * x; });
    add(++seed, vocab,
        [&](float x) { return uniform() < 0.1f ? x : -std::numeric_limits<float>::infinity(); });
    add(++seed, vocab, [&](float x) { return uniform() < 0.01f ? 30 + x : 1e-3f * x; });
  }
  return problems;
}

DUOKV_TEST(draws_what_fp64_draws_of_awkward_logits) {
  for (const SampleProblem& p : awkward_problems()) expect_right(p);
}

DUOKV_TEST(every_instruction_set_draws_the_same) {
  std::vector<SampleProblem> problems = awkward_problems();
  for (const int64_t vocab : {1, 15, 16, 63, 1031})
    problems.push_back(random_sample_problem(7, 9, vocab, 12));
  std::vector<Sampled> expected;
  for_each_instruction_set([&](const std::string& name) {
    const bool is_first = expected.empty();
    for (size_t i = 0; i < problems.size(); ++i) {
      Sampled got = sample(problems[i]);
      if (is_first) {
        expected.push_back(std::move(got));
      } else {
        const std::string what = name + ", problem " + std::to_string(i);
        expect_bitwise(what + ": tokens", got.tokens, expected[i].tokens);
        expect_bitwise(what + ": log-probabilities", got.logprobs, expected[i].logprobs);
      }
    }
  });
}

// As many as the masses say, over many draws.
DUOKV_TEST(draws_in_proportion) {
  constexpr int64_t kDraws = 1000;
  const std::vector<double> probabilities = {0.5, 0.25, 0.15, 0.1};
  SampleProblem p = {4, {}, {}};
  for (int64_t i = 0; i < kDraws; ++i) {
    for (const double x : probabilities) p.logits.push_back(static_cast<float>(std::log(x)));
    p.options.push_back({1, 4, 1, (static_cast<double>(i) + 0.5) / kDraws});
  }
  const Sampled got = sample(p);
  for (int32_t token = 0; token < 4; ++token) {
    const auto count = std::count(got.tokens.begin(), got.tokens.end(), token);
    expect(std::abs(count - kDraws * probabilities[static_cast<size_t>(token)]) <= 1, "token %d: %td of %ld",
           token, count, static_cast<long>(kDraws));
  }
}

DUOKV_TEST(ties_go_to_the_lowest_id) {
  const auto [problem, tokens] = samples_of_ties();
  expect_bitwise("tokens", sample(problem).tokens, tokens);
}

DUOKV_TEST(extreme_options) {
  const auto [problem, tokens] = samples_of_extremes();
  expect_bitwise("tokens", sample(problem).tokens, tokens);
}

DUOKV_TEST(rows_that_cannot_be_drawn_from_say_why) {
  const auto [problem, tokens] = samples_that_cannot_be_drawn();
  const Sampled got = sample(problem);
  expect_bitwise("tokens", got.tokens, tokens);
  for (size_t row = 0; row < 4; ++row)
    expect(std::isnan(got.logprobs[row]) == (row < 3), "row %zu: %g", row,
           static_cast<double>(got.logprobs[row]));
}

DUOKV_TEST(both_backends_draw_the_same) {
  for (uint64_t s = 0; s < 5; ++s) {
    const int64_t sum = sample_checksum(sample(random_sample_problem(s, 2, 32768, 12)).tokens);
    expect(sum == kSampleChecksums[s], "the checksum is %ld", static_cast<long>(sum));
  }
}

DUOKV_TEST(arguments_are_checked) {
  ops::SampleArgs args = {};
  args.rows = 1;
  expect_status(table().sample(device(), &args), ops::kInvalid, "no vocabulary");
  args.vocab = ops::kMostSampled + 1;
  expect_status(table().sample(device(), &args), ops::kInvalid, "too large a vocabulary");
  args.vocab = 1, args.rows = -1;
  expect_status(table().sample(device(), &args), ops::kInvalid, "rows");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
