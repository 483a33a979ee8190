#include "test/harness.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

using Values = std::vector<float>;

struct Output {
  Values y, rstd;
};

constexpr float kEps = 1e-5f;

// Input gradients are differences of terms of size rstd·dy·w, and cancel wholly where d is 1: they are
// compared in units of rstd.
template <class T>
std::vector<T> in_units_of(const std::vector<double>& rstd, std::vector<T> dx) {
  for (size_t i = 0; i < dx.size(); ++i) dx[i] = static_cast<T>(dx[i] / rstd[i / (dx.size() / rstd.size())]);
  return dx;
}

Output forward(ops::Device* device, const Values& x, const Values& w, int64_t m) {
  const int64_t d = static_cast<int64_t>(w.size());
  const Array<float> xs(device, x), ws(device, w), y(device, Values(x.size(), -7.0f)), rstd(device, m);
  const ops::RmsNormArgs args = {
      .x = xs.data(), .w = ws.data(), .m = m, .d = d, .eps = kEps, .y = y.data(), .rstd = rstd.data()};
  check(table().rms_norm_forward(device, &args));
  return {y.get(), rstd.get()};
}

struct Gradients {
  Values dx, dw;
};

// dx starts at `dx`, and is dy itself where that is null.
Gradients backward(ops::Device* device, const Values& x, const Values& w, const Values& rstd,
                   const Values& dy, const Values* dx, bool accumulate, const Values& dw) {
  const Array<float> xs(device, x), ws(device, w), rstds(device, rstd), dys(device, dy), dws(device, dw);
  const Array<float> own(device, dx ? *dx : Values{});
  const Array<float>& out = dx ? own : dys;
  const ops::RmsNormBackwardArgs args = {.x = xs.data(),
                                         .w = ws.data(),
                                         .rstd = rstds.data(),
                                         .dy = dys.data(),
                                         .m = rstds.size(),
                                         .d = ws.size(),
                                         .dx = out.data(),
                                         .accumulate = accumulate,
                                         .dw = dws.data()};
  check(table().rms_norm_backward(device, &args));
  return {out.get(), dws.get()};
}

struct Exact {
  std::vector<double> y, rstd, dx, dw;
};

Exact exact(const Values& x, const Values& w, const Values& dy, int64_t m) {
  const size_t d = w.size();
  Exact r = {std::vector<double>(x.size()), {}, std::vector<double>(x.size()), std::vector<double>(d)};
  for (size_t row = 0; row < static_cast<size_t>(m); ++row) {
    const float *xr = &x[row * d], *dyr = &dy[row * d];
    double squares = 0, dot = 0;
    for (size_t i = 0; i < d; ++i) {
      squares += static_cast<double>(xr[i]) * xr[i];
      dot += static_cast<double>(dyr[i]) * w[i] * xr[i];
    }
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(d) + static_cast<double>(kEps));
    r.rstd.push_back(rstd);
    for (size_t i = 0; i < d; ++i) {
      r.y[row * d + i] = xr[i] * rstd * w[i];
      r.dx[row * d + i] =
          rstd * (static_cast<double>(dyr[i]) * w[i] - xr[i] * dot * rstd * rstd / static_cast<double>(d));
      r.dw[i] += dyr[i] * xr[i] * rstd;
    }
  }
  return r;
}

const struct {
  int64_t m, d;
} kShapes[] = {{1, 1},     {1, 10},   {3, 40},   {97, 1},   {97, 97},   {1, 768},
               {131, 768}, {7, 1024}, {401, 10}, {2, 8192}, {1031, 97}, {0, 16}};

Values weights(Rng& rng, int64_t d) {
  Values w = rng.normals(d, 0.25f);
  for (float& value : w) value += 1;
  return w;
}

DUOKV_TEST(matches_fp64) {
  Rng rng;
  for (const auto& [m, d] : kShapes) {
    const Values x = rng.normals(m * d, 2), w = weights(rng, d), dy = rng.normals(m * d);
    const Exact ref = exact(x, w, dy, m);
    const std::string shape = std::to_string(m) + " x " + std::to_string(d);
    const Output out = forward(device(), x, w, m);
    expect_close("rstd " + shape, out.rstd, ref.rstd, 0, 1.2e-7);
    expect_close("y " + shape, out.y, ref.y, 0, 3e-7);
    const Values dx = rng.normals(m * d), dw = rng.normals(d);
    const Gradients got = backward(device(), x, w, out.rstd, dy, &dx, false, Values(w.size()));
    expect_close("dx " + shape, in_units_of(ref.rstd, got.dx), in_units_of(ref.rstd, ref.dx), 1e-6, 5e-7);
    expect_relative_l2("dw " + shape, got.dw, ref.dw, 1e-6);

    Values dx_sum(dx);
    std::vector<double> dw_sum(ref.dw);
    for (size_t i = 0; i < dx.size(); ++i) dx_sum[i] += got.dx[i];
    for (size_t i = 0; i < dw.size(); ++i) dw_sum[i] += dw[i];
    const Gradients sums = backward(device(), x, w, out.rstd, dy, &dx, true, dw);
    expect_bitwise("dx += " + shape, sums.dx, dx_sum);
    expect_relative_l2("dw += " + shape, sums.dw, dw_sum, 1e-6);
  }
}

DUOKV_TEST(tiny_rows_are_dominated_by_eps) {
  Rng rng;
  const Values x = rng.normals(5 * 40, 1e-4f), w = weights(rng, 40), dy = rng.normals(5 * 40);
  const Exact ref = exact(x, w, dy, 5);
  const Output out = forward(device(), x, w, 5);
  expect_close("y", out.y, ref.y, 0, 3e-7);
  const Gradients got = backward(device(), x, w, out.rstd, dy, &x, false, Values(w.size()));
  expect_close("dx", in_units_of(ref.rstd, got.dx), in_units_of(ref.rstd, ref.dx), 1e-6, 5e-7);
  const Output zero = forward(device(), Values(80), w, 2);
  expect_bitwise("zero rows", zero.y, Values(80));
}

DUOKV_TEST(matches_finite_differences) {
  Rng rng;
  const int64_t m = 13, d = 97;
  const Values x = rng.normals(m * d), w = weights(rng, d), dy = rng.normals(m * d);
  const Values along_x = rng.normals(m * d), along_w = rng.normals(d);
  const Gradients got =
      backward(device(), x, w, forward(device(), x, w, m).rstd, dy, &x, false, Values(w.size()));
  const float step = 5e-3f;
  const auto loss = [&](float t) {
    Values xs = x, ws = w;
    for (size_t i = 0; i < xs.size(); ++i) xs[i] += t * along_x[i];
    for (size_t i = 0; i < ws.size(); ++i) ws[i] += t * along_w[i];
    const Values y = forward(device(), xs, ws, m).y;
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += static_cast<double>(y[i]) * dy[i];
    return sum;
  };
  double expected = 0;
  for (size_t i = 0; i < x.size(); ++i) expected += static_cast<double>(got.dx[i]) * along_x[i];
  for (size_t i = 0; i < w.size(); ++i) expected += static_cast<double>(got.dw[i]) * along_w[i];
  const double measured = (loss(step) - loss(-step)) / (2 * static_cast<double>(step));
  std::printf("    directional derivative %.6f, finite differences %.6f\n", expected, measured);
  expect(std::abs(measured - expected) <= 1e-3 * std::sqrt(static_cast<double>(m * d)), "they differ");
}

DUOKV_TEST(in_place) {
  Rng rng;
  const int64_t m = 211, d = 97;
  const Values x = rng.normals(m * d), w = weights(rng, d), dy = rng.normals(m * d);
  const Output out = forward(device(), x, w, m);
  const Array<float> xs(device(), x), ws(device(), w);
  const ops::RmsNormArgs args = {
      .x = xs.data(), .w = ws.data(), .m = m, .d = d, .eps = kEps, .y = xs.data(), .rstd = nullptr};
  check(table().rms_norm_forward(device(), &args));
  expect_bitwise("y in x", xs.get(), out.y);

  const Gradients apart = backward(device(), x, w, out.rstd, dy, &x, false, Values(w.size()));
  const Gradients aliased = backward(device(), x, w, out.rstd, dy, nullptr, false, Values(w.size()));
  expect_bitwise("dx in dy", aliased.dx, apart.dx);
  expect_bitwise("dw beside it", aliased.dw, apart.dw);
}

DUOKV_TEST(rows_are_independent) {
  Rng rng;
  for (int64_t d : {10, 97, 768}) {
    const int64_t m = 61;
    const Values x = rng.normals(m * d), w = weights(rng, d);
    const Output all = forward(device(), x, w, m);
    for (int64_t row = 0; row < m; ++row) {
      const auto slice = [&](const Values& v) {
        return Values(v.begin() + row * d, v.begin() + (row + 1) * d);
      };
      const Output one = forward(device(), slice(x), w, 1);
      expect_bitwise("row " + std::to_string(row), one.y, slice(all.y));
    }
  }
}

DUOKV_TEST(non_finite_stays_non_finite) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (float bad : {inf, -inf, nan}) {
    Values x(2 * 19, 1.0f);
    x[18] = bad;
    const Values y = forward(device(), x, Values(19, 1.0f), 2).y;
    expect(!std::isfinite(y[18]), "%g gives %g", bad, y[18]);
    expect(y[19] > 0.99f && y[19] < 1, "the next row gives %g", y[19]);
  }
}

DUOKV_TEST(thread_counts) {
  Rng rng;
  const int64_t m = 1031, d = 97;
  const Values x = rng.normals(m * d), w = weights(rng, d), dy = rng.normals(m * d);
  expect_same_for_any_threads("y", [&](ops::Device* device) { return forward(device, x, w, m).y; });
  const Values rstd = forward(device(), x, w, m).rstd;
  expect_same_for_any_threads(
      "dx", [&](ops::Device* device) { return backward(device, x, w, rstd, dy, &x, true, w).dx; });
  expect_same_for_any_threads(
      "dw", [&](ops::Device* device) { return backward(device, x, w, rstd, dy, &x, true, w).dw; });
}

DUOKV_TEST(forbidden_aliases) {
  Values x(8, 1.0f), w(8, 1.0f), rstd(1);
  const ops::RmsNormArgs forward_args = {
      .x = x.data(), .w = w.data(), .m = 1, .d = 8, .eps = kEps, .y = x.data(), .rstd = rstd.data()};
  expect_status(table().rms_norm_forward(device(), &forward_args), ops::kInvalid, "y is x with rstd");
  const ops::RmsNormBackwardArgs backward_args = {.x = w.data(),
                                                  .w = w.data(),
                                                  .rstd = rstd.data(),
                                                  .dy = x.data(),
                                                  .m = 1,
                                                  .d = 8,
                                                  .dx = x.data(),
                                                  .accumulate = true,
                                                  .dw = w.data()};
  expect_status(table().rms_norm_backward(device(), &backward_args), ops::kInvalid, "dx is dy, accumulating");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
