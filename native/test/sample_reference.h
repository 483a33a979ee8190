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

// The tokens that both backends draw from random_sample_problem(seed, 2, 32768, 12), seed 0 … 4.
inline int64_t sample_checksum(const std::vector<int32_t>& tokens) {
  int64_t sum = 0;
  for (size_t i = 0; i < tokens.size(); ++i) sum += (1 + static_cast<int64_t>(i)) * tokens[i];
  return sum;
}
inline constexpr int64_t kSampleChecksums[] = {41326, 67086, 64899, 62955, 27180};

}  // namespace duokv::test
