// Sampling problems for the tests, and what FP64 says of their answers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "ops/ops.h"

namespace duokv::test {

struct SampleProblem {
  int64_t vocab;
  std::vector<float> logits;  // [rows, vocab]
  std::vector<ops::SampleRow> options;

  int64_t rows() const { return static_cast<int64_t>(options.size()); }
};

struct Sampled {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
};

// Logits of `spread`, some of them equal; every row has other options.
inline SampleProblem random_sample_problem(uint64_t seed, int64_t rows, int64_t vocab, float spread) {
  std::mt19937_64 engine(seed);
  const auto uniform = [&] { return static_cast<double>(engine() >> 11) * 0x1p-53; };
  SampleProblem p = {vocab, {}, {}};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < vocab; ++i) {
      const bool again = i > 0 && uniform() < 0.3;
      p.logits.push_back(again
                             ? p.logits[static_cast<size_t>(row * vocab) + static_cast<size_t>(uniform() * i)]
                             : spread * static_cast<float>(uniform() - 0.5));
    }
    const int64_t choice = static_cast<int64_t>(seed) + row;
    ops::SampleRow options = {};
    options.temperature = choice % 5 == 4 ? 0.0f : static_cast<float>(0.3 + uniform());
    options.top_k = static_cast<int32_t>(choice % 3 == 0 ? vocab : 1 + uniform() * vocab);
    options.top_p = choice % 2 == 0 ? 1.0 : 0.05 + 0.94 * uniform();
    options.draw = uniform();
    p.options.push_back(options);
  }
  return p;
}

// What is wrong with a row's token, or "". Masses are known to 1e-5, so that tokens and truncations which
// depend on less are both right.
inline std::string wrong_sample(const SampleProblem& p, int64_t row, const Sampled& got) {
  const float* logits = p.logits.data() + row * p.vocab;
  const ops::SampleRow& options = p.options[static_cast<size_t>(row)];
  const int32_t token = got.tokens[static_cast<size_t>(row)];
  const auto fail = [&](const std::string& what) {
    return "vocab " + std::to_string(p.vocab) + ", row " + std::to_string(row) + ", token " +
           std::to_string(token) + ": " + what;
  };
  if (token < 0 || token >= p.vocab) return fail("there is no such token");
  std::vector<int64_t> order(static_cast<size_t>(p.vocab));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  const double peak = logits[order[0]];
  double sum = 0;
  for (int64_t i = 0; i < p.vocab; ++i) sum += std::exp(logits[i] - peak);
  const double logprob = logits[token] - peak - std::log(sum);
  if (!(std::abs(got.logprobs[static_cast<size_t>(row)] - logprob) <= 1e-6 + 1e-6 * std::abs(logprob)))
    return fail("its log-probability is " + std::to_string(got.logprobs[static_cast<size_t>(row)]) +
                ", not " + std::to_string(logprob));
  if (options.temperature == 0) return token == order[0] ? "" : fail("it is not the first of the largest");

  order.resize(static_cast<size_t>(std::min<int64_t>(options.top_k, p.vocab)));
  const auto weight = [&](int64_t i) {
    return std::exp((logits[i] - peak) / static_cast<double>(options.temperature));
  };
  double total = 0;
  for (int64_t i : order) total += weight(i);
  size_t least = 0, most = 0;  // tokens that top-p keeps
  double mass = 0;
  for (int64_t i : order) {
    if (mass < (options.top_p - 1e-5) * total) ++least;
    if (options.top_p == 1 || mass < (options.top_p + 1e-5) * total) ++most;
    mass += weight(i);
  }
  const size_t place = static_cast<size_t>(std::find(order.begin(), order.end(), token) - order.begin());
  if (place >= most) return fail("it is not among the " + std::to_string(most) + " that are kept");
  if (least + 1 < most) return "";  // what is kept, and so the draw, is known too little
  for (const size_t kept : {least, most}) {
    double kept_mass = 0, before = 0;
    for (size_t i = 0; i < kept; ++i) {
      kept_mass += weight(order[i]);
      if (order[i] < token) before += weight(order[i]);
    }
    const double drawn = options.draw * kept_mass, margin = 1e-5 * kept_mass;
    if (before <= drawn + margin && drawn - margin < before + weight(token)) return "";
  }
  return fail("it is not the one that was drawn");
}

// A problem and the tokens that are drawn from it.
struct SampleExpectation {
  SampleProblem problem;
  std::vector<int32_t> tokens;
};

// Of equal logits the first are kept, and the first is the likeliest.
inline SampleExpectation samples_of_ties() {
  SampleProblem p = {5, {}, {}};
  for (const ops::SampleRow& options : {ops::SampleRow{0, 5, 1, 0.9},
                                        {1, 1, 1, 0.9999},
                                        {1, 2, 1, 0.9999},
                                        {1, 5, 0.3, 0.9999},
                                        {1, 5, 1, 0.9999}}) {
    p.logits.insert(p.logits.end(), {-1, 2, 0.0f, 2, 2});
    p.options.push_back(options);
  }
  return {p, {1, 1, 3, 1, 4}};
}

inline SampleExpectation samples_of_extremes() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  SampleProblem p = {3, {}, {}};
  const auto add = [&](std::vector<float> logits, ops::SampleRow options) {
    p.logits.insert(p.logits.end(), logits.begin(), logits.end());
    p.options.push_back(options);
  };
  add({1, 3, 2}, {1e-38f, 3, 1, 0.99});                 // the likeliest, whatever the draw
  add({1, 3, 3}, {1e-45f, 3, 1, 0.99});                 // both of the likeliest
  add({-kInfinity, 0, -kInfinity}, {1, 3, 1, 0.99});    // masses of 0
  add({-kInfinity, 0, -kInfinity}, {1, 2, 0.9999, 0});  // kept for their rank alone
  add({3e38f, -3e38f, 0}, {2, 3, 1, 0.99});             // differences that overflow
  add({0, -0.0f, 0}, {1, 2, 1, 0.99});                  // zeros of both signs are equal
  add({1, 2, 3}, {1e38f, 3, 1, 0.99});                  // all alike
  add({5, 5, 5}, {1, 3, 1e-300, 0.99});                 // at least one is kept
  return {p, {1, 2, 1, 1, 0, 1, 2, 0}};
}

// Rows that nothing can be drawn from, whose log-probability is NaN, and one that is sound, the last.
inline SampleExpectation samples_that_cannot_be_drawn() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  return {{3,
           {0, kNaN, kInfinity, -kInfinity, -kInfinity, -kInfinity, 0, 1, kInfinity, 1, 2, 3},
           {{1, 3, 1, 0}, {1, 3, 1, 0}, {0, 3, 1, 0}, {0, 3, 1, 0}}},
          {-2, -1, -3, 2}};
}

// The tokens that both backends draw from random_sample_problem(seed, 2, 32768, 12), seed 0 … 4.
inline int64_t sample_checksum(const std::vector<int32_t>& tokens) {
  int64_t sum = 0;
  for (size_t i = 0; i < tokens.size(); ++i) sum += (1 + static_cast<int64_t>(i)) * tokens[i];
  return sum;
}
inline constexpr int64_t kSampleChecksums[] = {41326, 67086, 64899, 62955, 27180};

}  // namespace duokv::test
