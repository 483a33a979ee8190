// AdamW against the formula of ops/ops.h in FP64.
#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

struct State {
  std::vector<float> p, m, v;
};

State start(size_t n) {
  State state{normals(n, 1), normals(n, 2, 0.1f), normals(n, 3, 0.01f)};
  for (float& v : state.v) v = v * v;
  return state;
}

ops::AdamWArgs settings(int64_t n, int64_t update) {
  ops::AdamWArgs args = {};
  args.n = n;
  args.lr = 3e-4;
  args.beta1 = 0.9;
  args.beta2 = 0.95;
  args.eps = 1e-8;
  args.weight_decay = 0.1;
  args.clip = 0.37;
  args.update = update;
  return args;
}

// Runs one update on memory that starts `offset` floats past a 16-byte boundary, and gives the state after
// it.
State run(const State& state, const std::vector<float>& g, int64_t update, size_t offset) {
  const auto shifted = [&](const std::vector<float>& values) {
    std::vector<float> longer(offset, 7.0f);
    longer.insert(longer.end(), values.begin(), values.end());
    return longer;
  };
  const Array<float> p(shifted(state.p)), dev_g(shifted(g)), m(shifted(state.m)), v(shifted(state.v));
  ops::AdamWArgs args = settings(static_cast<int64_t>(g.size()), update);
  args.p = p.data() + offset;
  args.g = dev_g.data() + offset;
  args.m = m.data() + offset;
  args.v = v.data() + offset;
  check(adamw(args, stream()));
  const auto got = [&](const Array<float>& array) {
    const std::vector<float> all = array.get();
    for (size_t i = 0; i < offset; ++i) expect(all[i] == 7.0f, "something before the arrays was written");
    return std::vector<float>(all.begin() + static_cast<ptrdiff_t>(offset), all.end());
  };
  expect_equal("gradient", got(dev_g), g);
  return {got(p), got(m), got(v)};
}

void compare(size_t n, int64_t update, size_t offset) {
  const std::string name = std::to_string(n) + " at update " + std::to_string(update);
  const State before = start(n);
  const std::vector<float> g = normals(n, 4, 0.1f);
  const State after = run(before, g, update, offset);
  const ops::AdamWArgs a = settings(static_cast<int64_t>(n), update);
  const double c1 = 1 - std::pow(a.beta1, static_cast<double>(update)),
               c2 = 1 - std::pow(a.beta2, static_cast<double>(update));
  std::vector<double> m(n), v(n), change(n);
  std::vector<float> got_change(n);
  for (size_t i = 0; i < n; ++i) {
    const double gradient = a.clip * g[i];
    m[i] = a.beta1 * before.m[i] + (1 - a.beta1) * gradient;
    v[i] = a.beta2 * before.v[i] + (1 - a.beta2) * gradient * gradient;
    change[i] = before.p[i] * -(a.lr * a.weight_decay) - a.lr * (m[i] / c1) / (std::sqrt(v[i] / c2) + a.eps);
    got_change[i] = after.p[i] - before.p[i];
  }
  expect_relative("m of " + name, after.m, m, 2e-7);
  expect_relative("v of " + name, after.v, v, 2e-7);
  // p itself is rounded to 2^-24 of about 1, the change is about 1e-3.
  expect_relative("change of p, " + name, got_change, change, 1e-3);
}

DUOKV_CASE(matches_fp64) {
  for (const size_t n : {1, 4, 255, 1024, 1025, 4100}) {
    for (const int64_t update : {1, 2, 1000}) compare(n, update, 0);
  }
}

DUOKV_CASE(takes_unaligned_arrays) { compare(516, 3, 1); }

// Whole vectors and single elements give the same bits, which are those of the formula in FP32 with one
// rounding an operation.
DUOKV_CASE(rounds_as_the_cpu_backend_does) {
  const size_t n = 1028;
  const State before = start(n);
  const std::vector<float> g = normals(n, 5, 0.1f);
  const State after = run(before, g, 5, 0), unaligned = run(before, g, 5, 1);
  expect_equal("p of unaligned arrays", unaligned.p, after.p);
  expect_equal("m of unaligned arrays", unaligned.m, after.m);
  expect_equal("v of unaligned arrays", unaligned.v, after.v);

  const ops::AdamWArgs a = settings(static_cast<int64_t>(n), 5);
  const auto clip = static_cast<float>(a.clip), keep1 = static_cast<float>(a.beta1),
             take1 = static_cast<float>(1 - a.beta1), keep2 = static_cast<float>(a.beta2),
             take2 = static_cast<float>(1 - a.beta2),
             step = static_cast<float>(a.lr / (1 - std::pow(a.beta1, 5.0))),
             root = static_cast<float>(1 / std::sqrt(1 - std::pow(a.beta2, 5.0))),
             decay = static_cast<float>(a.lr * a.weight_decay), eps = static_cast<float>(a.eps);
  State expected = before;
  for (size_t i = 0; i < n; ++i) {
    const float gradient = clip * g[i], scaled = take1 * gradient, square = gradient * gradient;
    expected.m[i] = std::fma(keep1, before.m[i], scaled);
    expected.v[i] = std::fma(keep2, before.v[i], take2 * square);
    const float denominator = std::fma(std::sqrt(expected.v[i]), root, eps);
    const float stepped = step * expected.m[i];
    expected.p[i] = before.p[i] - std::fma(decay, before.p[i], stepped / denominator);
  }
  expect_equal("p", after.p, expected.p);
  expect_equal("m", after.m, expected.m);
  expect_equal("v", after.v, expected.v);
}

DUOKV_CASE(keeps_what_is_not_finite) {
  for (const float bad : {HUGE_VALF, NAN}) {
    State before = start(8);
    std::vector<float> g = normals(8, 6);
    g[5] = bad;
    const State after = run(before, g, 1, 0);
    for (size_t i = 0; i < 8; ++i)
      expect(std::isfinite(after.m[i]) == (i != 5), "element %zu is %g", i, static_cast<double>(after.m[i]));
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
