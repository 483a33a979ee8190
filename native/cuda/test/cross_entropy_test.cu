// Cross-entropy of rows of logits against FP64.
#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

// A thread takes four values at a time, a block 2,048 of them at once and 8,192 per round.
const int64_t kWidths[] = {1, 2, 3, 5, 37, 128, 2051, 2052, 8192, 8197, 10004};

struct Problem {
  int64_t rows, vocab;
  std::vector<float> logits, scale;
  std::vector<int32_t> targets;

  Problem(int64_t rows_, int64_t vocab_, float spread) : rows(rows_), vocab(vocab_) {
    logits = normals(static_cast<size_t>(rows * vocab), 1, spread);
    for (int64_t row = 0; row < rows; ++row) {
      // The first, the last and other columns; one row in three does not count.
      targets.push_back(static_cast<int32_t>(row == 0 ? 0 : row == 1 ? vocab - 1 : row * 31 % vocab));
      scale.push_back(row % 3 == 2 ? 0.0f : 0.01f * static_cast<float>(row + 1));
    }
  }
  std::vector<float> row(const std::vector<float>& of, int64_t index) const {
    return {of.begin() + index * vocab, of.begin() + (index + 1) * vocab};
  }
};

struct Reference {
  std::vector<double> nll, dlogits;
  explicit Reference(const Problem& p) : nll(static_cast<size_t>(p.rows)), dlogits(p.logits.size()) {
    for (size_t row = 0; row < nll.size(); ++row) {
      const auto width = static_cast<size_t>(p.vocab);
      const float* logits = &p.logits[row * width];
      const auto target = static_cast<size_t>(p.targets[row]);
      double max = logits[0], others = 0;
      for (size_t i = 0; i < width; ++i) max = std::fmax(max, logits[i]);
      for (size_t i = 0; i < width; ++i) others += i == target ? 0 : std::exp(logits[i] - max);
      const double below = logits[target] - max, total = others + std::exp(below);
      nll[row] = std::log1p(others + std::expm1(below)) - below;
      for (size_t i = 0; i < width; ++i)
        dlogits[row * width + i] = p.scale[row] * (i == target ? -others : std::exp(logits[i] - max)) / total;
    }
  }
};

struct Result {
  std::vector<float> nll, logits, dlogits;
};

// With `offset` the logits start that many floats past a 16-byte boundary.
Result run(const Problem& p, bool gradients, bool as_bf16, size_t offset = 0) {
  std::vector<float> shifted(offset, 7.0f);
  shifted.insert(shifted.end(), p.logits.begin(), p.logits.end());
  const Array<float> logits(shifted), scale(p.scale), nll(static_cast<size_t>(p.rows));
  const Array<int32_t> targets(p.targets);
  const Array<bf16> dlogits(as_bf16 ? p.logits.size() : 1);
  check(cross_entropy({.logits = logits.data() + offset,
                       .rows = p.rows,
                       .vocab = p.vocab,
                       .targets = targets.data(),
                       .token_scale = gradients ? scale.data() : nullptr,
                       .nll = nll.data(),
                       .dlogits = as_bf16 ? dlogits.data() : nullptr},
                      stream()));
  Result result;
  result.nll = nll.get();
  result.logits = logits.get();
  for (size_t i = 0; i < offset; ++i)
    expect(result.logits[i] == 7.0f, "something before the logits was written");
  result.logits.erase(result.logits.begin(), result.logits.begin() + static_cast<ptrdiff_t>(offset));
  if (gradients && as_bf16) {
    for (const bf16 value : dlogits.get()) result.dlogits.push_back(__bfloat162float(value));
  } else if (gradients) {
    result.dlogits = result.logits;
  }
  return result;
}

void compare(const Problem& p, size_t offset = 0) {
  const std::string name = std::to_string(p.rows) + " x " + std::to_string(p.vocab);
  const Reference expected(p);
  const Result forward = run(p, false, false, offset), single = run(p, true, false, offset),
               half = run(p, true, true, offset);
  for (size_t row = 0; row < expected.nll.size(); ++row) {
    const double limit = 5e-7 + 2e-7 * std::fabs(expected.nll[row]);
    expect(std::fabs(forward.nll[row] - expected.nll[row]) <= limit,
           "nll of %s, row %zu: %.9g, expected %.9g", name.c_str(), row,
           static_cast<double>(forward.nll[row]), expected.nll[row]);
  }
  expect_equal("nll with gradients, " + name, single.nll, forward.nll);
  expect_equal("nll with BF16 gradients, " + name, half.nll, forward.nll);
  expect_equal("logits after the forward pass, " + name, forward.logits, p.logits);
  expect_equal("logits after BF16 gradients, " + name, half.logits, p.logits);
  expect_relative("dlogits of " + name, single.dlogits, expected.dlogits, 1e-6);
  expect_relative("BF16 dlogits of " + name, half.dlogits, expected.dlogits, 3e-3);
  std::vector<float> rounded;
  for (const float value : single.dlogits) rounded.push_back(__bfloat162float(__float2bfloat16_rn(value)));
  expect_equal("BF16 dlogits of " + name, half.dlogits, rounded);
}

DUOKV_CASE(matches_fp64) {
  for (const int64_t vocab : kWidths) compare(Problem(vocab > 3000 ? 2 : 4, vocab, 3));
}

DUOKV_CASE(takes_unaligned_logits) { compare(Problem(2, 132, 3), 1); }

// Sums of many equal terms and of terms far below the maximum.
DUOKV_CASE(holds_at_extreme_spreads) {
  compare(Problem(2, 4100, 0));
  compare(Problem(2, 4100, 60));
}

// What is left of 1 beside a target's probability is as accurate as any other: relative to itself.
DUOKV_CASE(nearly_certain_targets) {
  for (const int64_t vocab : {int64_t{2}, int64_t{37}, int64_t{2052}, int64_t{8197}}) {
    for (const float lead : {5.0f, 12.0f, 30.0f}) {
      Problem p(4, vocab, 1);
      for (int64_t row = 0; row < 4; ++row)
        p.logits[static_cast<size_t>(row * vocab + p.targets[row])] += lead;
      compare(p);
      const Reference expected(p);
      const Result result = run(p, true, false);
      for (int64_t row = 0; row < 4; ++row) {
        const auto target = static_cast<size_t>(row * vocab + p.targets[row]);
        const double nll = expected.nll[row], d = expected.dlogits[target];
        expect(std::fabs(result.nll[row] - nll) <= 2e-6 * nll, "nll is %g, expected %g",
               static_cast<double>(result.nll[row]), nll);
        expect(std::fabs(result.dlogits[target] - d) <= 2e-6 * std::fabs(d), "dlogit is %g, expected %g",
               static_cast<double>(result.dlogits[target]), d);
      }
    }
  }
}

// The softmax of a row that counts sums to one: its gradient to zero. A row that does not has no gradient at
// all, whatever its logits are.
DUOKV_CASE(gradients_of_a_row) {
  for (const bool as_bf16 : {false, true}) {
    Problem p(3, 260, 2);
    p.logits[2 * 260 + 100] = NAN;
    const Result result = run(p, true, as_bf16);
    expect(!std::isfinite(result.nll[2]), "the loss of a row with NaN is finite");
    for (const float d : p.row(result.dlogits, 2)) expect(d == 0, "a row that does not count has a gradient");
    double sum = 0;
    for (const float d : p.row(result.dlogits, 1)) sum += d;
    expect(std::fabs(sum) <= (as_bf16 ? 0x1p-8 : 1e-6) * p.scale[1], "a row's gradient sums to %g", sum);
  }
}

// -inf is a logit that has no probability; NaN and +inf make the loss NaN.
DUOKV_CASE(logits_that_are_not_finite) {
  Problem p(2, 2060, 1);
  p.logits[0] = 200;  // whose exponential, relative to less than itself, is not finite
  for (int64_t i = 1; i < 2060; ++i) p.logits[static_cast<size_t>(i)] = -HUGE_VALF;
  const Result masked = run(p, true, false);
  expect(masked.nll[0] == 0, "the loss of the only possible target is %g",
         static_cast<double>(masked.nll[0]));
  for (const float d : p.row(masked.dlogits, 0)) expect(d == 0, "its gradient is %g", static_cast<double>(d));
  for (const float bad : {HUGE_VALF, NAN}) {
    p.logits[2060 + 7] = bad;
    const Result result = run(p, true, false);
    expect(std::isnan(result.nll[1]), "the loss beside %g is finite", static_cast<double>(bad));
  }
}

DUOKV_CASE(a_row_depends_on_itself_only) {
  const Problem p(3, 1030, 3);
  static std::vector<float> first_nll;  // of the first seed
  const Result all = run(p, true, false);
  if (first_nll.empty()) first_nll = all.nll;
  expect_equal("nll between seeds", all.nll, first_nll);
  Problem alone(1, 1030, 3);
  alone.logits = p.row(p.logits, 1);
  alone.targets = {p.targets[1]};
  alone.scale = {p.scale[1]};
  for (const size_t offset : {0, 1}) {
    const Result one = run(alone, true, false, offset);
    expect_equal("nll of a row alone", one.nll, {all.nll[1]});
    expect_equal("gradient of a row alone", one.dlogits, p.row(all.dlogits, 1));
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
