#include "test/harness.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

using Values = std::vector<float>;

struct State {
  Values p, m, v;
};

struct Settings {
  double lr = 3e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, clip = 1;
};

void adamw(ops::Device* device, State& state, const Values& g, const Settings& s, int64_t update) {
  const Array<float> p(device, state.p), m(device, state.m), v(device, state.v), grads(device, g);
  const ops::AdamWArgs args = {.p = p.data(),
                               .g = grads.data(),
                               .m = m.data(),
                               .v = v.data(),
                               .n = p.size(),
                               .lr = s.lr,
                               .beta1 = s.beta1,
                               .beta2 = s.beta2,
                               .eps = s.eps,
                               .weight_decay = s.weight_decay,
                               .clip = s.clip,
                               .update = update};
  check(table().adamw(device, &args));
  state = {p.get(), m.get(), v.get()};
}

struct Exact {
  std::vector<double> p, m, v;
};

void exact_adamw(Exact& state, const Values& g, const Settings& s, int64_t update) {
  const double c1 = 1 - std::pow(s.beta1, update), c2 = 1 - std::pow(s.beta2, update);
  for (size_t i = 0; i < g.size(); ++i) {
    const double grad = s.clip * g[i];
    state.m[i] = s.beta1 * state.m[i] + (1 - s.beta1) * grad;
    state.v[i] = s.beta2 * state.v[i] + (1 - s.beta2) * grad * grad;
    state.p[i] = state.p[i] * (1 - s.lr * s.weight_decay) -
                 s.lr * (state.m[i] / c1) / (std::sqrt(state.v[i] / c2) + s.eps);
  }
}

// Gradients over many orders of magnitude, as the entries of one model have.
Values gradients(Rng& rng, int64_t n) {
  Values g = rng.normals(n);
  for (float& value : g) value *= std::pow(10.0f, rng.uniform(-6, 0));
  return g;
}

DUOKV_TEST(first_update_matches_fp64) {
  Rng rng;
  for (int64_t n : {1, 10, 40, 97, 768, 1024, 32771, 300007}) {
    const Settings settings = {.clip = 0.37};
    const Values p = rng.normals(n), g = gradients(rng, n), zero(static_cast<size_t>(n));
    State state = {p, zero, zero};
    Exact exact = {{p.begin(), p.end()}, std::vector<double>(p.size()), std::vector<double>(p.size())};
    adamw(device(), state, g, settings, 1);
    exact_adamw(exact, g, settings, 1);
    expect_close("p, n " + std::to_string(n), state.p, exact.p, 5e-9, 1e-7);
    expect_close("m, n " + std::to_string(n), state.m, exact.m, 0, 2e-7);
    expect_close("v, n " + std::to_string(n), state.v, exact.v, 1e-44, 4e-7);
  }
}

DUOKV_TEST(many_updates_match_fp64) {
  Rng rng;
  const int64_t n = 2003, updates = 300;
  const Values p = rng.normals(n, 0.1f), zero(static_cast<size_t>(n));
  State state = {p, zero, zero};
  Exact exact = {{p.begin(), p.end()}, std::vector<double>(p.size()), std::vector<double>(p.size())};
  for (int64_t update = 1; update <= updates; ++update) {
    const Settings settings = {.lr = 3e-4 * static_cast<double>(update) / updates,
                               .clip = rng.uniform(0.1f, 1)};
    const Values g = gradients(rng, n);
    adamw(device(), state, g, settings, update);
    exact_adamw(exact, g, settings, update);
  }
  expect_close("p after 300 updates", state.p, exact.p, 2e-6, 1e-6);
}

// Over a run the decay must be that of 1 - lr·wd, not of its FP32 rounding: 0.1 % of the decay would show
// here.
DUOKV_TEST(decay_alone) {
  const Settings settings = {};
  const size_t n = 64;
  State state = {Values(n, 1.0f), Values(n), Values(n)};
  for (size_t i = 0; i < n; ++i) state.p[i] = 0.5f + static_cast<float>(i) / 100;
  const Values start = state.p, zero(n);
  const int updates = 5000;
  for (int update = 1; update <= updates; ++update) adamw(device(), state, zero, settings, update);
  std::vector<double> expected;
  for (float value : start)
    expected.push_back(value * std::pow(1 - settings.lr * settings.weight_decay, updates));
  expect_close("p", state.p, expected, 0, 5e-5);
}

DUOKV_TEST(zero_gradient_and_moments_do_not_move) {
  const Values p = {1.0f, -2.0f, 0.0f}, zero(3);
  State state = {p, zero, zero};
  adamw(device(), state, zero, {.weight_decay = 0}, 1);
  expect_bitwise("p", state.p, p);
}

DUOKV_TEST(non_finite_stays_non_finite) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (float bad : {inf, -inf, nan}) {
    State state = {Values(9, 1.0f), Values(9), Values(9)};
    Values g(9, 0.5f);
    g[2] = g[8] = bad;
    adamw(device(), state, g, {}, 1);
    for (size_t i = 0; i < g.size(); ++i) {
      const bool finite = i != 2 && i != 8;
      expect(std::isfinite(state.m[i]) == finite && std::isfinite(state.v[i]) == finite &&
                 std::isfinite(state.p[i]) == finite,
             "gradient %g gives p %g, m %g, v %g", g[i], state.p[i], state.m[i], state.v[i]);
    }
  }
}

DUOKV_TEST(thread_counts) {
  Rng rng;
  const int64_t n = 200003;
  const State start = {rng.normals(n), rng.normals(n, 0.01f), Values(static_cast<size_t>(n), 1e-4f)};
  const Values g = gradients(rng, n);
  expect_same_for_any_threads("p", [&](ops::Device* device) {
    State state = start;
    for (int64_t update = 5; update < 8; ++update) adamw(device, state, g, {}, update);
    return state.p;
  });
}

DUOKV_TEST(update_counts_from_one) {
  const ops::AdamWArgs args = {};
  expect_status(table().adamw(device(), &args), ops::kInvalid, "update 0");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
