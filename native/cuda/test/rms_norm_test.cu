// RMSNorm against FP64.
#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

constexpr float kEps = 1e-5f;

struct Shape {
  int64_t m, d;
};
const Shape kShapes[] = {{1, 3},    {1, 64},   {3, 37},   {31, 128}, {32, 100},
                         {33, 130}, {67, 257}, {300, 40}, {1, 768}};

struct Reference {
  std::vector<double> y, dx, dw;
};

Reference reference(const std::vector<float>& x, const std::vector<float>& w, const std::vector<float>& dy,
                    int64_t m, int64_t d) {
  Reference r{std::vector<double>(x.size()), std::vector<double>(x.size()), std::vector<double>(w.size())};
  for (int64_t row = 0; row < m; ++row) {
    const float *xs = &x[static_cast<size_t>(row * d)], *dys = &dy[static_cast<size_t>(row * d)];
    double squares = 0, dot = 0;
    for (int64_t c = 0; c < d; ++c) squares += double{xs[c]} * xs[c];
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(d) + double{kEps});
    for (int64_t c = 0; c < d; ++c) dot += double{dys[c]} * w[static_cast<size_t>(c)] * xs[c];
    for (int64_t c = 0; c < d; ++c) {
      const auto i = static_cast<size_t>(row * d + c), column = static_cast<size_t>(c);
      r.y[i] = xs[c] * rstd * w[column];
      r.dx[i] = rstd * dys[c] * w[column] - xs[c] * rstd * rstd * rstd * dot / static_cast<double>(d);
      r.dw[column] += dys[c] * xs[c] * rstd;
    }
  }
  return r;
}

void compare(const Shape& shape, bool aliased) {
  const auto [m, d] = shape;
  const auto count = static_cast<size_t>(m * d), width = static_cast<size_t>(d);
  const std::string name = std::to_string(m) + " x " + std::to_string(d) + (aliased ? " in place" : "");
  const std::vector<float> x = normals(count, 1), dy = normals(count, 2), w = normals(width, 3),
                           old_dx = normals(count, 4);
  std::vector<float> old_dw = normals(width, 5);
  Reference expected = reference(x, w, dy, m, d);

  Array<float> dev_x(x), dev_w(w), dev_dy(dy), dev_y(count), dev_rstd(static_cast<size_t>(m)), dev_dx(old_dx),
      dev_dw(old_dw);
  check(rms_norm_forward({dev_x.data(), dev_w.data(), m, d, kEps, dev_y.data(), dev_rstd.data()}, stream()));
  expect_relative("y " + name, dev_y.get(), expected.y, 1e-6);

  Array<char> workspace(rms_norm_backward_workspace(m, d));
  const bool accumulate = !aliased;
  float* dx = aliased ? dev_dy.data() : dev_dx.data();
  check(rms_norm_backward(
      {dev_x.data(), dev_w.data(), dev_rstd.data(), dev_dy.data(), m, d, dx, accumulate, dev_dw.data()},
      workspace.data(), stream()));
  for (size_t i = 0; i < count && accumulate; ++i) expected.dx[i] += old_dx[i];
  for (size_t i = 0; i < width; ++i) expected.dw[i] += old_dw[i];
  expect_relative("dx " + name, (aliased ? dev_dy : dev_dx).get(), expected.dx, 1e-6);
  expect_relative("dw " + name, dev_dw.get(), expected.dw, 1e-6);

  if (aliased) {
    check(rms_norm_forward({dev_x.data(), dev_w.data(), m, d, kEps, dev_x.data(), nullptr}, stream()));
    expect_relative("y " + name, dev_x.get(), expected.y, 1e-6);
  }
}

DUOKV_CASE(rounds_to_bf16) {
  for (const Shape& shape : kShapes) {
    const auto [m, d] = shape;
    const auto count = static_cast<size_t>(m * d);
    Array<float> x(normals(count, 1)), w(normals(static_cast<size_t>(d), 3)), y(count);
    Array<bf16> rounded(count);
    const ops::RmsNormArgs args{x.data(), w.data(), m, d, kEps, y.data(), nullptr};
    check(rms_norm_forward(args, stream()));
    check(rms_norm_forward_bf16(args, rounded.data(), stream()));
    const std::vector<float> expected = y.get();
    const std::vector<bf16> got = rounded.get();
    std::vector<float> widened, nearest;
    for (size_t i = 0; i < count; ++i) {
      widened.push_back(__bfloat162float(got[i]));
      nearest.push_back(__bfloat162float(__float2bfloat16_rn(expected[i])));
    }
    expect_equal(std::to_string(m) + " x " + std::to_string(d), widened, nearest);
  }
}

DUOKV_CASE(matches_fp64) {
  for (const Shape& shape : kShapes) compare(shape, false);
}

DUOKV_CASE(works_in_place) {
  for (const Shape& shape : kShapes) compare(shape, true);
}

// 4 rows of 4,100 floats are more shared memory than a block has without opting in.
DUOKV_CASE(opts_in_to_large_shared_memory) { compare({5, 4100}, false); }

DUOKV_CASE(refuses_rows_that_do_not_fit) {
  ops::RmsNormBackwardArgs args = {};
  args.m = 1;
  args.d = kMaxNormWidth + 1;
  expect(rms_norm_backward(args, nullptr, stream()) == cudaErrorInvalidValue,
         "a width past the limit was accepted");
}

DUOKV_CASE(gradient_is_reproducible_and_ignores_other_rows) {
  const int64_t m = 70, d = 36;
  const auto count = static_cast<size_t>(m * d);
  const std::vector<float> x = normals(count, 1), dy = normals(count, 2),
                           w = normals(static_cast<size_t>(d), 3);
  static std::vector<float> first_dw, first_dx;  // of the first seed
  Array<float> dev_x(x), dev_w(w), dev_dy(dy), dev_y(count), dev_rstd(static_cast<size_t>(m)), dev_dx(count);
  Array<float> dev_dw(std::vector<float>(static_cast<size_t>(d), 0.0f));
  Array<char> workspace(rms_norm_backward_workspace(m, d));
  check(rms_norm_forward({dev_x.data(), dev_w.data(), m, d, kEps, dev_y.data(), dev_rstd.data()}, stream()));
  check(rms_norm_backward(
      {dev_x.data(), dev_w.data(), dev_rstd.data(), dev_dy.data(), m, d, dev_dx.data(), false, dev_dw.data()},
      workspace.data(), stream()));
  const std::vector<float> dw = dev_dw.get(), dx = dev_dx.get();
  if (first_dw.empty()) first_dw = dw, first_dx = dx;
  expect_equal("dw between seeds", dw, first_dw);
  expect_equal("dx between seeds", dx, first_dx);

  // Row 41 alone, as row 0: same bits.
  const size_t row = 41, width = static_cast<size_t>(d);
  const auto slice = [&](const std::vector<float>& v) {
    return std::vector<float>(v.begin() + static_cast<ptrdiff_t>(row * width),
                              v.begin() + static_cast<ptrdiff_t>((row + 1) * width));
  };
  Array<float> one_x(slice(x)), one_y(width);
  check(rms_norm_forward({one_x.data(), dev_w.data(), 1, d, kEps, one_y.data(), nullptr}, stream()));
  expect_equal("a row alone", one_y.get(), slice(dev_y.get()));
}

DUOKV_CASE(what_is_not_finite_stays_so_in_its_row) {
  constexpr int64_t kRows = 5, kWidth = 97, kBad = 2 * kWidth + 31;
  const std::vector<float> clean = normals(kRows * kWidth, 1), w = normals(kWidth, 2);
  struct Result {
    std::vector<float> y, dx, dw;
  };
  const auto run = [&](const std::vector<float>& x, const std::vector<float>& dy) {
    Array<float> dev_x(x), dev_w(w), dev_dy(dy), y(x.size()), rstd(kRows), dx(x.size()),
        dw(std::vector<float>(kWidth, 0.0f));
    check(
        rms_norm_forward({dev_x.data(), dev_w.data(), kRows, kWidth, kEps, y.data(), rstd.data()}, stream()));
    Array<char> workspace(rms_norm_backward_workspace(kRows, kWidth));
    check(rms_norm_backward(
        {dev_x.data(), dev_w.data(), rstd.data(), dev_dy.data(), kRows, kWidth, dx.data(), false, dw.data()},
        workspace.data(), stream()));
    return Result{y.get(), dx.get(), dw.get()};
  };
  const Result expected = run(clean, clean);
  const auto other_rows = [&](const char* what, const std::vector<float>& got,
                              const std::vector<float>& all) {
    for (size_t i = 0; i < got.size(); ++i) {
      if (static_cast<int64_t>(i) / kWidth != kBad / kWidth)
        expect(got[i] == all[i], "%s: element %zu is %g", what, i, static_cast<double>(got[i]));
    }
  };
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> poisoned = clean;
    poisoned[kBad] = bad;
    const Result x = run(poisoned, clean), dy = run(clean, poisoned);
    other_rows("y", x.y, expected.y);
    other_rows("dx of x", x.dx, expected.dx);
    other_rows("dx of dy", dy.dx, expected.dx);
    expect(!std::isfinite(x.y[kBad]) && !std::isfinite(x.dx[kBad]) && !std::isfinite(x.dw[kBad % kWidth]),
           "an x of %g is lost", static_cast<double>(bad));
    expect(!std::isfinite(dy.dx[kBad]) && !std::isfinite(dy.dw[kBad % kWidth]), "a dy of %g is lost",
           static_cast<double>(bad));
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
