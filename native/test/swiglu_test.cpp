#include <bit>

#include "test/harness.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

using Values = std::vector<float>;

Values forward(ops::Device* device, const Values& gate, const Values* up, bool alias = false) {
  const Array<float> gates(device, gate), ups(device, up ? *up : Values{}),
      h(device, Values(gate.size(), -7.0f));
  float* out = alias ? gates.data() : h.data();
  const ops::SwigluArgs args = {
      .gate = gates.data(), .up = up ? ups.data() : nullptr, .n = gates.size(), .h = out};
  check(table().swiglu_forward(device, &args));
  return alias ? gates.get() : h.get();
}

struct Gradients {
  Values dgate, dup;
};

Gradients backward(ops::Device* device, const Values& gate, const Values* up, const Values& dh,
                   bool alias = false) {
  const Array<float> gates(device, gate), ups(device, up ? *up : Values{}), grads(device, dh);
  const Array<float> dgate(device, Values(gate.size(), -7.0f)),
      dup(device, Values(up ? gate.size() : 0, -7.0f));
  float* out = alias ? grads.data() : dgate.data();
  const ops::SwigluBackwardArgs args = {.gate = gates.data(),
                                        .up = up ? ups.data() : nullptr,
                                        .dh = grads.data(),
                                        .n = gates.size(),
                                        .dgate = out,
                                        .dup = up ? dup.data() : nullptr};
  check(table().swiglu_backward(device, &args));
  return {alias ? grads.get() : dgate.get(), dup.get()};
}

long double exact_silu(float x) {
  const long double z = x;
  return z >= 0 ? z / (1 + std::exp(-z)) : z * std::exp(z) / (1 + std::exp(z));
}

long double exact_derivative(float x) {
  const long double z = x;
  const long double e = std::exp(-std::abs(z)), s = (z >= 0 ? 1 : e) / (1 + e),
                    c = (z >= 0 ? e : 1) / (1 + e);
  return s * (1 + z * c);
}

// Distance in units in the last place of an FP32 number of the size of `expected`, subnormal ones included.
double ulps(float got, long double expected) {
  const int exponent = std::max(expected == 0 ? -126 : std::ilogb(expected), -126);
  return static_cast<double>(std::abs(got - expected) / std::ldexp(1.0L, exponent - 23));
}

// Values of every exponent up to 2^7 and both signs, dense where the exponential matters.
Values whole_range() {
  Values x;
  for (uint32_t bits = 0; bits <= std::bit_cast<uint32_t>(128.0f); bits += 1021) {
    x.push_back(std::bit_cast<float>(bits));
    x.push_back(-x.back());
  }
  for (float value = -110; value <= 110; value += 0.00137f) x.push_back(value);
  for (float value : {1e5f, 1e30f, std::numeric_limits<float>::max()}) x.insert(x.end(), {value, -value});
  return x;
}

DUOKV_TEST(silu_is_accurate_over_the_whole_range) {
  const Values x = whole_range(), h = forward(device(), x, nullptr);
  double worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double error = ulps(h[i], exact_silu(x[i]));
    if (!(error <= worst)) worst = error, at = i;
  }
  std::printf("    worst %.3g ulp at x = %.9g of %zu\n", worst, x[at], x.size());
  expect(worst <= 3, "silu(%.9g) = %.9g is %g ulp off", x[at], h[at], worst);
}

DUOKV_TEST(derivative_is_accurate_over_the_whole_range) {
  const Values x = whole_range(), one(x.size(), 1.0f);
  const Values dgate = backward(device(), x, nullptr, one).dgate;
  std::vector<double> expected(x.size());
  for (size_t i = 0; i < x.size(); ++i) expected[i] = static_cast<double>(exact_derivative(x[i]));
  // Relative to 1 near the zero at x = -1.278, where 1 + x·sigmoid(-x) cancels.
  expect_close("silu'", dgate, expected, 1e-7, 4e-7);
}

DUOKV_TEST(matches_fp64) {
  Rng rng;
  for (int64_t n : {1, 10, 40, 97, 768, 1024, 32771, 100003}) {
    const Values gate = rng.normals(n, 4), up = rng.normals(n), dh = rng.normals(n);
    std::vector<double> h, dgate, dup;
    for (size_t i = 0; i < gate.size(); ++i) {
      h.push_back(static_cast<double>(exact_silu(gate[i]) * up[i]));
      dgate.push_back(static_cast<double>(exact_derivative(gate[i]) * up[i] * dh[i]));
      dup.push_back(static_cast<double>(exact_silu(gate[i]) * dh[i]));
    }
    const std::string size = std::to_string(n);
    expect_close("h, n " + size, forward(device(), gate, &up), h, 1e-40, 4e-7);
    const Gradients got = backward(device(), gate, &up, dh);
    expect_close("dgate, n " + size, got.dgate, dgate, 1e-6, 5e-7);
    expect_close("dup, n " + size, got.dup, dup, 1e-40, 5e-7);
  }
}

DUOKV_TEST(matches_finite_differences) {
  Rng rng;
  const int64_t n = 997;
  const Values gate = rng.normals(n, 2), up = rng.normals(n), dh = rng.normals(n);
  const Values along_gate = rng.normals(n), along_up = rng.normals(n);
  const Gradients got = backward(device(), gate, &up, dh);
  const float step = 1e-2f;
  const auto loss = [&](float t) {
    Values g = gate, u = up;
    for (size_t i = 0; i < g.size(); ++i) g[i] += t * along_gate[i], u[i] += t * along_up[i];
    const Values h = forward(device(), g, &u);
    double sum = 0;
    for (size_t i = 0; i < h.size(); ++i) sum += static_cast<double>(h[i]) * dh[i];
    return sum;
  };
  double expected = 0;
  for (size_t i = 0; i < gate.size(); ++i) {
    expected +=
        static_cast<double>(got.dgate[i]) * along_gate[i] + static_cast<double>(got.dup[i]) * along_up[i];
  }
  const double measured = (loss(step) - loss(-step)) / (2 * static_cast<double>(step));
  std::printf("    directional derivative %.6f, finite differences %.6f\n", expected, measured);
  expect(std::abs(measured - expected) <= 1e-3 * std::sqrt(static_cast<double>(n)), "they differ");
}

DUOKV_TEST(in_place) {
  Rng rng;
  const Values gate = rng.normals(40009, 3), up = rng.normals(40009), dh = rng.normals(40009);
  for (const Values* ups : {&up, static_cast<const Values*>(nullptr)}) {
    expect_bitwise("h in gate", forward(device(), gate, ups, true), forward(device(), gate, ups));
    const Gradients apart = backward(device(), gate, ups, dh),
                    aliased = backward(device(), gate, ups, dh, true);
    expect_bitwise("dgate in dh", aliased.dgate, apart.dgate);
    expect_bitwise("dup beside it", aliased.dup, apart.dup);
  }
}

// Decoding computes an element at another index, and in another vector lane, than prefill does.
DUOKV_TEST(elements_are_independent_of_their_place) {
  Rng rng;
  const Values gate = rng.normals(101, 5), up = rng.normals(101);
  const Values all = forward(device(), gate, &up);
  for (size_t first = 0; first < gate.size(); ++first) {
    const auto tail = [&](const Values& v) {
      return Values(v.begin() + static_cast<std::ptrdiff_t>(first), v.end());
    };
    const Values gates = tail(gate), ups = tail(up);
    expect_bitwise("from " + std::to_string(first), forward(device(), gates, &ups), tail(all));
  }
}

DUOKV_TEST(non_finite_stays_non_finite) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (float bad : {inf, -inf, nan}) {
    for (float other : {0.0f, 1.5f, -200.0f}) {
      for (size_t n : {1, 16}) {
        const Values bads(n, bad), others(n, other);
        const auto none_finite = [&](const char* what, const Values& values) {
          for (float value : values)
            expect(!std::isfinite(value), "%s: %g beside %g gives %g", what, bad, other, value);
        };
        none_finite("silu", forward(device(), bads, nullptr));
        none_finite("gate", forward(device(), bads, &others));
        none_finite("dh", backward(device(), others, &others, bads).dup);
        if (other != 0) {
          none_finite("up", forward(device(), others, &bads));
          none_finite("dh", backward(device(), others, &others, bads).dgate);
        }
        none_finite("dgate of gate", backward(device(), Values(n, nan), &others, others).dgate);
      }
    }
  }
}

DUOKV_TEST(thread_counts) {
  Rng rng;
  const Values gate = rng.normals(200003, 3), up = rng.normals(200003), dh = rng.normals(200003);
  expect_same_for_any_threads("forward", [&](ops::Device* device) { return forward(device, gate, &up); });
  expect_same_for_any_threads("dgate",
                              [&](ops::Device* device) { return backward(device, gate, &up, dh).dgate; });
  expect_same_for_any_threads("dup",
                              [&](ops::Device* device) { return backward(device, gate, &up, dh).dup; });
}

DUOKV_TEST(up_without_its_gradient) {
  float value = 1;
  const ops::SwigluBackwardArgs args = {
      .gate = &value, .up = &value, .dh = &value, .n = 1, .dgate = &value, .dup = nullptr};
  expect_status(table().swiglu_backward(device(), &args), ops::kInvalid, "up without dup");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
