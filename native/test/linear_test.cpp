#include <array>
#include <span>
#include <string>

#include "cpu/onednn_product.h"
#include "cpu/operations.h"
#include "cpu/product.h"
#include "test/bf16_routes.h"
#include "test/harness.h"
#include "test/packs.h"
#include "test/threads.h"

namespace {

using namespace duokv;
using namespace duokv::test;
using Mode = ops::ProductMode;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

// Rows, inputs and outputs: tile and block edges to either side, one of everything, and a layer's real
// widths.
struct Shape {
  int64_t m, k, n;
};
constexpr Shape kShapes[] = {{2, 255, 33},   {3, 256, 16},  {5, 257, 64},   {97, 64, 192},  {4, 383, 40},
                             {5, 385, 40},   {1, 1, 1},     {1, 40, 97},    {1, 1600, 200}, {2, 767, 33},
                             {3, 768, 16},   {5, 769, 64},  {6, 7, 15},     {7, 300, 31},   {8, 768, 160},
                             {8, 2048, 96},  {24, 100, 17}, {25, 40, 97},   {25, 1536, 70}, {96, 513, 128},
                             {97, 1537, 65}, {131, 96, 65}, {200, 768, 48}, {530, 33, 40},  {769, 33, 1040},
                             {1601, 20, 40}};

std::string name(const Shape& s) {
  return std::to_string(s.m) + "x" + std::to_string(s.k) + "->" + std::to_string(s.n);
}

// c [m, n] = start + a · b in FP64, a(i, l) and b(l, j) given as functions.
template <class A, class B>
Doubles product(int64_t m, int64_t n, int64_t k, const A& a, const B& b, const Floats* start = nullptr) {
  Doubles c(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = start ? (*start)[static_cast<size_t>(i * n + j)] : 0.0;
      for (int64_t l = 0; l < k; ++l) sum += static_cast<double>(a(i, l)) * b(l, j);
      c[static_cast<size_t>(i * n + j)] = sum;
    }
  }
  return c;
}

struct Case {
  Case(const Shape& shape, Mode product_mode, uint64_t stream) : s(shape), mode(product_mode) {
    Rng rng(stream);
    x = rng.normals(s.m * s.k);
    w = rng.normals(s.n * s.k);
    dy = rng.normals(s.m * s.n);
    y = rng.normals(s.m * s.n);
    dx = rng.normals(s.m * s.k);
    dw = rng.normals(s.n * s.k);
  }
  Floats operand(const Floats& values) const { return mode == Mode::BF16 ? to_bf16(values) : values; }

  Doubles forward(bool accumulate) const {
    const Floats a = operand(x), b = operand(w);
    return product(
        s.m, s.n, s.k, [&](int64_t i, int64_t l) { return a[static_cast<size_t>(i * s.k + l)]; },
        [&](int64_t l, int64_t j) { return b[static_cast<size_t>(j * s.k + l)]; }, accumulate ? &y : nullptr);
  }
  Doubles input_gradient(bool accumulate) const {
    const Floats a = operand(dy), b = operand(w);
    return product(
        s.m, s.k, s.n, [&](int64_t i, int64_t l) { return a[static_cast<size_t>(i * s.n + l)]; },
        [&](int64_t l, int64_t j) { return b[static_cast<size_t>(l * s.k + j)]; },
        accumulate ? &dx : nullptr);
  }
  Doubles weight_gradient() const {
    const Floats a = operand(dy), b = operand(x);
    return product(
        s.n, s.k, s.m, [&](int64_t i, int64_t l) { return a[static_cast<size_t>(l * s.n + i)]; },
        [&](int64_t l, int64_t j) { return b[static_cast<size_t>(l * s.k + j)]; }, &dw);
  }

  Floats run_forward(ops::Device* device, ops::PackCache* packs, bool accumulate,
                     bool round_output = false) const {
    Array<float> xs(device, x), ws(device, w), ys(device, y);
    const ops::LinearArgs args{xs.data(),
                               s.m,
                               1,
                               {},
                               1,
                               {{ws.data(), s.n, s.k, 1, packs}},
                               {ys.data()},
                               accumulate ? ys.data() : nullptr,
                               round_output,
                               mode};
    check(table().linear_forward(device, &args));
    return ys.get();
  }
  // dx, then dw.
  Floats run_backward(ops::Device* device, bool accumulate) const {
    Array<float> xs(device, x), ws(device, w), dys(device, dy), dxs(device, dx), dws(device, dw);
    const ops::LinearBackwardArgs args{xs.data(),  dys.data(), s.m,        {ws.data(), s.n, s.k, 1, nullptr},
                                       dxs.data(), accumulate, dws.data(), mode};
    check(table().linear_backward(device, &args));
    Floats both = dxs.get();
    const Floats second = dws.get();
    both.insert(both.end(), second.begin(), second.end());
    return both;
  }

  Shape s;
  Mode mode;
  Floats x, w, dy, y, dx, dw;
};

// Operands are compared after rounding, so only FP32 accumulation of `terms` terms remains: a few ulps of
// their magnitude in all, and for one element as many more as partial sums may wander.
void expect_product(const std::string& what, const Floats& got, const std::vector<double>& expected,
                    int64_t terms) {
  expect_relative_l2(what, got, expected, 6e-7);
  expect_close(what, got, expected, 3e-6 * std::sqrt(static_cast<double>(terms)) + 1e-6, 1e-6);
}

void forward_matches(Mode mode, const char* label) {
  uint64_t stream = 0;
  for (const Shape& shape : kShapes) {
    const Case c(shape, mode, ++stream);
    for (bool accumulate : {false, true}) {
      Packs packs(device());
      const std::string what = std::string(label) + " " + name(shape) + (accumulate ? " accumulate" : "");
      const Floats packed = c.run_forward(device(), packs, accumulate);
      expect_product(what, packed, c.forward(accumulate), shape.k);
      expect_bitwise(what + ", packed or not", c.run_forward(device(), nullptr, accumulate), packed);
    }
  }
}

DUOKV_TEST(forward_fp32) { forward_matches(Mode::FP32, "FP32"); }
DUOKV_TEST(forward_bf16) {
  by_each_bf16_route([](const char* what) { forward_matches(Mode::BF16, what); });
}

// The product is rounded before it is added.
DUOKV_TEST(forward_rounds_its_output) {
  uint64_t stream = 100;
  for (const Shape& shape : kShapes) {
    const Case c(shape, Mode::BF16, ++stream);
    const Floats plain = c.run_forward(device(), nullptr, false);
    Floats rounded = to_bf16(plain);
    expect_bitwise(name(shape) + " rounded", c.run_forward(device(), nullptr, false, true), rounded);
    for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = c.y[i] + rounded[i];
    expect_bitwise(name(shape) + " rounded, added", c.run_forward(device(), nullptr, true, true), rounded);
  }
}

void backward_matches(Mode mode, const char* label) {
  uint64_t stream = 200;
  for (const Shape& shape : kShapes) {
    const Case c(shape, mode, ++stream);
    for (bool accumulate : {false, true}) {
      const Floats both = c.run_backward(device(), accumulate);
      const auto middle = both.begin() + static_cast<std::ptrdiff_t>(c.dx.size());
      const std::string what = std::string(label) + " " + name(shape) + (accumulate ? " accumulate" : "");
      expect_product(what + " dx", Floats(both.begin(), middle), c.input_gradient(accumulate), shape.n);
      expect_product(what + " dw", Floats(middle, both.end()), c.weight_gradient(), shape.m);
    }
  }
}

DUOKV_TEST(backward_fp32) { backward_matches(Mode::FP32, "FP32"); }
DUOKV_TEST(backward_bf16) {
  by_each_bf16_route([](const char* what) { backward_matches(Mode::BF16, what); });
}

DUOKV_TEST(backward_takes_one_gradient_alone) {
  const Case c({9, 40, 33}, Mode::FP32, 300);
  const Floats both = c.run_backward(device(), false);
  const auto middle = both.begin() + static_cast<std::ptrdiff_t>(c.dx.size());
  Array<float> xs(device(), c.x), ws(device(), c.w), dys(device(), c.dy), dxs(device(), c.dx),
      dws(device(), c.dw);
  ops::LinearBackwardArgs args{nullptr,    dys.data(), 9,       {ws.data(), 33, 40, 1, nullptr},
                               dxs.data(), false,      nullptr, Mode::FP32};
  check(table().linear_backward(device(), &args));
  expect_bitwise("dx alone", dxs.get(), Floats(both.begin(), middle));
  args.x = xs.data();
  args.dx = nullptr;
  args.dw = dws.data();
  args.w.data = nullptr;
  check(table().linear_backward(device(), &args));
  expect_bitwise("dw alone", dws.get(), Floats(middle, both.end()));
}

// Row i of a product of M rows has the bits of the same row alone, for M around every tile and block edge.
void rows_do_not_depend_on_their_mates(Mode mode, int64_t rows_of_all) {
  const std::array<std::array<int64_t, 2>, 3> widths{{{768, 160}, {2048, 33}, {40, 97}}};
  for (const auto& [k, n] : widths) {
    const Case all({rows_of_all, k, n}, mode, 400);
    for (bool accumulate : {false, true}) {
      Packs packs(device());
      const Floats whole = all.run_forward(device(), packs, accumulate);
      for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 24, 25, 63, 64, 95, 96, 97, 193}) {
        if (m >= rows_of_all) break;
        for (int64_t first : {int64_t{0}, rows_of_all - m}) {
          Case part = all;
          part.s.m = m;
          const auto rows = [&](const Floats& from, int64_t columns) {
            return Floats(from.begin() + first * columns, from.begin() + (first + m) * columns);
          };
          part.x = rows(all.x, k);
          part.y = rows(all.y, n);
          expect_bitwise("rows " + std::to_string(first) + " to " + std::to_string(first + m) + " of " +
                             std::to_string(rows_of_all),
                         part.run_forward(device(), packs, accumulate), rows(whole, n));
        }
      }
    }
  }
}

DUOKV_TEST(fp32_rows_do_not_depend_on_their_mates) { rows_do_not_depend_on_their_mates(Mode::FP32, 260); }

// With AMX only few rows are multiplied by panels.
DUOKV_TEST(bf16_rows_do_not_depend_on_their_mates) {
  const int64_t rows = cpu::onednn_has_amx() ? 64 : 600;
  by_each_bf16_route([&](const char*) { rows_do_not_depend_on_their_mates(Mode::BF16, rows); });
}

DUOKV_TEST(bits_do_not_depend_on_threads_or_repetition) {
  for (Mode mode : {Mode::FP32, Mode::BF16}) {
    for (const Shape& shape :
         {Shape{1, 768, 331}, Shape{8, 300, 97}, Shape{50, 257, 130}, Shape{300, 130, 260}}) {
      const Case c(shape, mode, 500);
      expect_same_for_any_threads(name(shape) + " forward", [&](ops::Device* device) {
        Packs packs(device);
        return c.run_forward(device, packs, true, mode == Mode::BF16);
      });
      expect_same_for_any_threads(name(shape) + " backward",
                                  [&](ops::Device* device) { return c.run_backward(device, true); });
      expect_bitwise(name(shape) + " again", c.run_backward(device(), true), c.run_backward(device(), true));
    }
  }
}

DUOKV_TEST(stale_copies_are_never_read) {
  for (Mode mode : {Mode::FP32, Mode::BF16}) {
    const Case first({4, 96, 70}, mode, 600), second({4, 96, 70}, mode, 601);
    Packs packs(device());
    expect(packs.bytes() == 0, "an empty cache holds %lld bytes", static_cast<long long>(packs.bytes()));
    Array<float> x(device(), first.x), w(device(), first.w), y(device(), first.y);
    ops::LinearArgs args{x.data(),   4,       1,     {},  1, {{w.data(), 70, 96, 7, packs}},
                         {y.data()}, nullptr, false, mode};
    check(table().linear_forward(device(), &args));
    expect_bitwise("version 7", y.get(), first.run_forward(device(), nullptr, false));
    const int64_t bytes = packs.bytes();
    expect(bytes >= 70 * 96 * (mode == Mode::FP32 ? 4 : 2), "the cache holds %lld bytes",
           static_cast<long long>(bytes));

    Case updated = first;
    updated.w = second.w;
    w.put(second.w);
    // At the same version the copy is what is read; that is what makes the next check mean something.
    check(table().linear_forward(device(), &args));
    expect_bitwise("version 7 again", y.get(), first.run_forward(device(), nullptr, false));
    for (uint64_t version : {8, 7}) {
      args.w[0].version = version;
      check(table().linear_forward(device(), &args));
      expect_bitwise("version " + std::to_string(version), y.get(),
                     updated.run_forward(device(), nullptr, false));
    }
    expect(packs.bytes() == bytes, "repacking changed the cache from %lld to %lld bytes",
           static_cast<long long>(bytes), static_cast<long long>(packs.bytes()));
  }
}

// Not finite stays not finite, and only in the row and column it belongs to.
DUOKV_TEST(infinities_and_nans_stay_in_their_place) {
  for (Mode mode : {Mode::FP32, Mode::BF16}) {
    Case c({30, 70, 40}, mode, 700);
    c.x[3 * 70 + 5] = std::numeric_limits<float>::quiet_NaN();
    c.w[7 * 70 + 9] = std::numeric_limits<float>::infinity();
    const Floats y = c.run_forward(device(), nullptr, false);
    for (int64_t i = 0; i < 30; ++i) {
      for (int64_t j = 0; j < 40; ++j) {
        const float value = y[static_cast<size_t>(i * 40 + j)];
        expect(std::isfinite(value) == (i != 3 && j != 7), "y[%d, %d] is %g", static_cast<int>(i),
               static_cast<int>(j), value);
      }
    }
  }
}

// Whether each is multiplied by itself or, where all are packed, in one job.
DUOKV_TEST(weights_that_share_x_give_what_each_gives_alone) {
  for (Mode mode : {Mode::FP32, Mode::BF16}) {
    for (const auto& [m, k] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 40}, {1, 768}, {2, 768}, {3, 257}, {8, 768}, {37, 40}, {64, 768}, {200, 300}}) {
      const Case a({m, k, 97}, mode, 700), b({m, k, 33}, mode, 701), c({m, k, 64}, mode, 702);
      const auto alone = [&](const Case& one) {
        Case shared = one;
        shared.x = a.x;
        return shared.run_forward(device(), nullptr, false);
      };
      Packs packs(device());
      Array<float> x(device(), a.x), wa(device(), a.w), wb(device(), b.w), wc(device(), c.w);
      for (int packed : {0, 2, 3}) {
        const auto of = [&](int i) { return i < packed ? packs : static_cast<ops::PackCache*>(nullptr); };
        Array<float> ya(device(), a.y), yb(device(), b.y), yc(device(), c.y);
        const ops::LinearArgs args{
            x.data(),
            m,
            1,
            {},
            3,
            {{wa.data(), 97, k, 1, of(0)}, {wb.data(), 33, k, 1, of(1)}, {wc.data(), 64, k, 1, of(2)}},
            {ya.data(), yb.data(), yc.data()},
            nullptr,
            false,
            mode};
        check(table().linear_forward(device(), &args));
        const std::string what =
            std::to_string(m) + " rows of " + std::to_string(k) + ", " + std::to_string(packed) + " packed, ";
        expect_bitwise(what + "first", ya.get(), alone(a));
        expect_bitwise(what + "second", yb.get(), alone(b));
        expect_bitwise(what + "third", yc.get(), alone(c));
      }
    }
  }
}

// A norm on the way in and a residual elsewhere are the operations one after the other.
DUOKV_TEST(norm_and_residual) {
  for (Mode mode : {Mode::FP32, Mode::BF16}) {
    for (int64_t m : {1, 37}) {
      Case c({m, 40, 97}, mode, 710);
      Rng rng(711);
      const Floats weight = rng.normals(40), residual = rng.normals(m * 97);
      const Array<float> x(device(), c.x), w(device(), c.w), norm(device(), weight),
          normalised(device(), m * 40), y(device(), m * 97), added(device(), residual);
      const ops::LinearArgs args{
          x.data(),     m,     1,   {norm.data(), 1e-5f}, 1, {{w.data(), 97, 40, 1, nullptr}}, {y.data()},
          added.data(), false, mode};
      check(table().linear_forward(device(), &args));
      const ops::RmsNormArgs rms{x.data(), norm.data(), m, 40, 1e-5f, normalised.data(), nullptr};
      check(table().rms_norm_forward(device(), &rms));
      c.x = normalised.get();
      c.y = residual;
      expect_bitwise("y", y.get(), c.run_forward(device(), nullptr, true));
      expect_bitwise("residual", added.get(), residual);
    }
  }
}

DUOKV_TEST(bad_arguments_are_refused_before_anything_is_written) {
  const Case c({2, 8, 8}, Mode::FP32, 800);
  Array<float> x(device(), c.x), w(device(), c.w), y(device(), c.y);
  const ops::LinearArgs good{x.data(),   2,       1,     {},        1, {{w.data(), 8, 8, 1, nullptr}},
                             {y.data()}, nullptr, false, Mode::FP32};
  const auto refuse = [&](const char* what, auto change) {
    ops::LinearArgs args = good;
    change(args);
    expect_status(table().linear_forward(device(), &args), ops::kInvalid, what);
  };
  refuse("x null", [](auto& args) { args.x = nullptr; });
  refuse("w null", [](auto& args) { args.w[0].data = nullptr; });
  refuse("y null", [](auto& args) { args.y[0] = nullptr; });
  refuse("m 0", [](auto& args) { args.m = 0; });
  refuse("n -1", [](auto& args) { args.w[0].n = -1; });
  refuse("k 0", [](auto& args) { args.w[0].k = 0; });
  refuse("no weight", [](auto& args) { args.count = 0; });
  refuse("4 weights", [](auto& args) { args.count = 4; });
  refuse("a residual of two", [](auto& args) {
    args.count = 2;
    args.w[1] = args.w[0];
    args.y[1] = args.y[0];
    args.residual = args.y[0];
  });
  refuse("TF32x3", [](auto& args) { args.mode = Mode::TF32x3; });
  expect_status(table().linear_forward(device(), nullptr), ops::kInvalid, "no arguments");
  expect_bitwise("y is untouched", y.get(), c.y);

  ops::LinearBackwardArgs backward{nullptr, y.data(), 2,        {w.data(), 8, 8, 1, nullptr},
                                   nullptr, false,    x.data(), Mode::FP32};
  expect_status(table().linear_backward(device(), &backward), ops::kInvalid, "dw without x");
  backward = {x.data(), nullptr, 2, {w.data(), 8, 8, 1, nullptr}, x.data(), false, nullptr, Mode::FP32};
  expect_status(table().linear_backward(device(), &backward), ops::kInvalid, "dy null");
}

// The wrapper that BF16 products use on CPUs with AMX, here in FP32, which oneDNN has everywhere.
DUOKV_TEST(onednn_products_match_in_every_layout) {
  std::printf("    native BF16: %s\n", cpu::onednn_has_native_bf16() ? "yes" : "no");
  for (const Shape& shape : {Shape{1, 40, 97}, Shape{300, 70, 33}, Shape{512, 64, 48}}) {
    const auto& [m, k, n] = shape;
    const Case c(shape, Mode::FP32, 900);
    for (bool accumulate : {false, true}) {
      const std::string what = name(shape) + (accumulate ? " accumulate" : "");
      Floats y = c.y, dx = c.dx, dw = c.dw;
      const auto multiply = [&](const cpu::OneDnnProduct& p) { cpu::onednn_product(*device(), p); };
      multiply(
          {m, n, k, {c.x.data(), k, false}, {c.w.data(), k, true}, ops::DType::F32, y.data(), accumulate});
      expect_product(what + " y", y, c.forward(accumulate), k);
      multiply(
          {m, k, n, {c.dy.data(), n, false}, {c.w.data(), k, false}, ops::DType::F32, dx.data(), accumulate});
      expect_product(what + " dx", dx, c.input_gradient(accumulate), n);
      if (!accumulate) continue;
      multiply({n, k, m, {c.dy.data(), n, true}, {c.x.data(), k, false}, ops::DType::F32, dw.data(), true});
      expect_product(what + " dw", dw, c.weight_gradient(), m);
    }
  }
}

// As BF16 products are computed on CPUs with AMX, here wherever there are BF16 instructions.
DUOKV_TEST(onednn_bf16_products_match) {
  if (!cpu::onednn_has_native_bf16()) return;
  for (const Shape& shape : {Shape{65, 40, 97}, Shape{300, 70, 33}, Shape{530, 769, 48}}) {
    const auto& [m, k, n] = shape;
    const Case c(shape, Mode::BF16, 910);
    const auto kernel = cpu::ProductKernel::OneDnn;
    const auto memory = [](int64_t bytes) {
      return Array<float>(device(), Floats(static_cast<size_t>(bytes / 4 + 1)));
    };
    const Array<float> prepared = memory(cpu::prepared_bytes(kernel, k, n, Mode::BF16));
    const cpu::RightOperand w =
        cpu::prepare(*device(), kernel, {c.w.data(), k, true}, k, n, Mode::BF16, prepared.data());
    const auto run = [&](bool accumulate, bool round) {
      const int64_t bytes = cpu::workspace_bytes(*device(), kernel, m, k, n, round);
      const Array<float> workspace = memory(bytes);
      Floats y = c.y;
      cpu::multiply(*device(), {m, {c.x.data(), k, false}, w, y.data(), accumulate, round},
                    std::span(reinterpret_cast<char*>(workspace.data()), static_cast<size_t>(bytes)));
      return y;
    };
    const Floats plain = run(false, false);
    expect_product(name(shape), plain, c.forward(false), k);
    expect_product(name(shape) + " accumulate", run(true, false), c.forward(true), k);
    Floats rounded = to_bf16(plain);
    expect_bitwise(name(shape) + " rounded", run(false, true), rounded);
    for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = c.y[i] + rounded[i];
    expect_bitwise(name(shape) + " rounded, added", run(true, true), rounded);
  }
}

}  // namespace

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
