#include <string>

#include "test/harness.h"
#include "test/threads.h"

namespace {

using namespace duokv;
using namespace duokv::test;
using Mode = ops::ProductMode;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

struct Shape {
  int64_t m, d, vocabulary;
};

std::string name(const Shape& s) {
  return std::to_string(s.m) + "x" + std::to_string(s.d) + "->" + std::to_string(s.vocabulary);
}

struct Results {
  Floats nll, dx, dembedding;
};

struct Expected {
  Doubles nll, dx, dembedding;
};

struct Problem {
  Problem(const Shape& shape, Mode product_mode, uint64_t stream) : s(shape), mode(product_mode) {
    Rng rng(stream);
    x = rng.normals(s.m * s.d);
    e = rng.normals(s.vocabulary * s.d, 2 / std::sqrt(static_cast<float>(s.d)));
    dembedding = rng.normals(s.vocabulary * s.d, 0.01f);
    for (int64_t i = 0; i < s.m; ++i) {
      targets.push_back(rng.integer(0, static_cast<int32_t>(s.vocabulary - 1)));
      scale.push_back(i % 5 == 2 ? 0.0f : rng.uniform(0.1f, 1.0f) / static_cast<float>(s.m));
    }
  }

  // FP64, with the operands of products rounded as the mode says; dlogits are an operand of the backward
  // products.
  Expected expected() const {
    const bool bf16 = mode == Mode::BF16;
    const Floats a = bf16 ? to_bf16(x) : x, b = bf16 ? to_bf16(e) : e;
    Expected r{Doubles(static_cast<size_t>(s.m)), Doubles(x.size()),
               Doubles(dembedding.begin(), dembedding.end())};
    Doubles logits(static_cast<size_t>(s.vocabulary));
    for (int64_t i = 0; i < s.m; ++i) {
      const float* row = a.data() + i * s.d;
      double max = -1e300, others = 0;
      for (int64_t v = 0; v < s.vocabulary; ++v) {
        double logit = 0;
        for (int64_t j = 0; j < s.d; ++j)
          logit += static_cast<double>(row[j]) * b[static_cast<size_t>(v * s.d + j)];
        logits[static_cast<size_t>(v)] = logit;
        max = std::max(max, logit);
      }
      const int32_t target = targets[static_cast<size_t>(i)];
      for (int64_t v = 0; v < s.vocabulary; ++v)
        others += v == target ? 0 : std::exp(logits[static_cast<size_t>(v)] - max);
      const double below = logits[static_cast<size_t>(target)] - max, sum = others + std::exp(below);
      r.nll[static_cast<size_t>(i)] = std::log1p(others + std::expm1(below)) - below;
      for (int64_t v = 0; v < s.vocabulary; ++v) {
        double dlogit = scale[static_cast<size_t>(i)] *
                        (v == target ? -others : std::exp(logits[static_cast<size_t>(v)] - max)) / sum;
        if (bf16) dlogit = to_bf16(static_cast<float>(dlogit));
        for (int64_t j = 0; j < s.d; ++j) {
          r.dx[static_cast<size_t>(i * s.d + j)] += dlogit * b[static_cast<size_t>(v * s.d + j)];
          r.dembedding[static_cast<size_t>(v * s.d + j)] += dlogit * row[j];
        }
      }
    }
    return r;
  }

  Results run(ops::Device* device) const {
    Array<float> xs(device, x), es(device, e), scales(device, scale), dxs(device, s.m * s.d),
        des(device, dembedding);
    Array<float> nlls(device, s.m);
    Array<int32_t> ids(device, targets);
    const ops::LinearCrossEntropyArgs args{
        xs.data(),  s.m,           {es.data(), s.vocabulary, s.d, 1, nullptr},
        ids.data(), scales.data(), nlls.data(),
        dxs.data(), des.data(),    mode};
    check(table().linear_cross_entropy(device, &args));
    return {nlls.get(), dxs.get(), des.get()};
  }

  Floats score(ops::Device* device, ops::PackCache* packs, int64_t first, int64_t count) const {
    Array<float> xs(device, Floats(x.begin() + first * s.d, x.begin() + (first + count) * s.d)),
        es(device, e);
    Array<float> nlls(device, count);
    Array<int32_t> ids(device,
                       std::vector<int32_t>(targets.begin() + first, targets.begin() + first + count));
    const ops::LinearCrossEntropyArgs args{xs.data(),  count,   {es.data(), s.vocabulary, s.d, 1, packs},
                                           ids.data(), nullptr, nlls.data(),
                                           nullptr,    nullptr, mode};
    check(table().linear_cross_entropy(device, &args));
    return nlls.get();
  }

  Shape s;
  Mode mode;
  Floats x, e, dembedding, scale;
  std::vector<int32_t> targets;
};

// Tiny vocabularies, one token, a chunk of tokens and one more, a vocabulary of several blocks of the sum,
// and a last chunk whose few rows are packed at once where the first chunk's are not.
constexpr Shape kShapes[] = {{1, 40, 97},    {7, 64, 1},     {30, 33, 2},    {130, 64, 97},
                             {513, 24, 101}, {20, 48, 4099}, {608, 512, 640}};

DUOKV_TEST(fp32_matches) {
  uint64_t stream = 0;
  for (const Shape& shape : kShapes) {
    const Problem p(shape, Mode::FP32, ++stream);
    const Results got = p.run(device());
    const Expected expected = p.expected();
    expect_close(name(shape) + " nll", got.nll, expected.nll, 1e-6, 1e-6);
    expect_relative_l2(name(shape) + " dx", got.dx, expected.dx, 2e-6);
    expect_relative_l2(name(shape) + " dembedding", got.dembedding, expected.dembedding, 2e-6);
  }
}

// FP32 and FP64 probabilities on either side of a BF16 midpoint round apart, so gradients agree less closely
// than products.
DUOKV_TEST(bf16_matches) {
  uint64_t stream = 50;
  for (const Shape& shape : kShapes) {
    const Problem p(shape, Mode::BF16, ++stream);
    const Results got = p.run(device());
    const Expected expected = p.expected();
    expect_close(name(shape) + " nll", got.nll, expected.nll, 1e-6, 1e-6);
    expect_relative_l2(name(shape) + " dx", got.dx, expected.dx, 3e-4);
    expect_relative_l2(name(shape) + " dembedding", got.dembedding, expected.dembedding, 3e-4);
  }
}

// Large logits: exp must not overflow, and the smallest probabilities must vanish quietly.
DUOKV_TEST(large_logits_match) {
  Problem p({9, 16, 700}, Mode::FP32, 100);
  for (float& value : p.x) value *= 60;
  const Results got = p.run(device());
  const Expected expected = p.expected();
  expect_close("nll", got.nll, expected.nll, 1e-6, 1e-6);
  expect_relative_l2("dx", got.dx, expected.dx, 2e-5);
}

// What is left of 1 beside a nearly certain target is as accurate as the logits are. Embeddings are unit
// vectors and logits exact, so that rounding elsewhere hides nothing; the target lies in every block of the
// sum.
DUOKV_TEST(nearly_certain_targets_keep_their_gradient) {
  for (const int64_t vocabulary : {2, 37, 700, 2100}) {
    for (const float lead : {5.0f, 12.0f, 30.0f}) {
      Problem p({9, vocabulary, vocabulary}, Mode::FP32, 150);
      p.e.assign(p.e.size(), 0);
      p.dembedding.assign(p.e.size(), 0);
      for (int64_t v = 0; v < vocabulary; ++v) p.e[static_cast<size_t>(v * vocabulary + v)] = 1;
      for (int64_t i = 0; i < 9; ++i) {
        p.targets[static_cast<size_t>(i)] = static_cast<int32_t>(i * (vocabulary - 1) / 8);
        p.scale[static_cast<size_t>(i)] = 1;
        p.x[static_cast<size_t>(i * vocabulary + p.targets[static_cast<size_t>(i)])] += lead;
      }
      const Results got = p.run(device());
      const Expected expected = p.expected();
      const std::string what = std::to_string(vocabulary) + " + " + std::to_string(lead);
      expect_close(what + " nll", got.nll, expected.nll, 0, 2e-6);
      expect_close(what + " dx", got.dx, expected.dx, 0, 2e-6);
    }
  }
}

DUOKV_TEST(scoring_equals_training_and_rows_do_not_depend_on_their_mates) {
  const Problem p({600, 40, 211}, Mode::FP32, 200);
  const Floats nll = p.run(device()).nll;
  ops::PackCache* packs = nullptr;
  check(table().pack_cache_create(device(), &packs));
  expect_bitwise("scored", p.score(device(), nullptr, 0, 600), nll);
  for (int64_t count : {1, 5, 24, 25, 300}) {
    for (int64_t first : {int64_t{0}, 600 - count}) {
      expect_bitwise("tokens " + std::to_string(first) + " to " + std::to_string(first + count),
                     p.score(device(), packs, first, count),
                     Floats(nll.begin() + first, nll.begin() + first + count));
    }
  }
  table().pack_cache_destroy(device(), packs);
}

DUOKV_TEST(bits_do_not_depend_on_threads_or_repetition) {
  for (Mode mode : {Mode::FP32, Mode::BF16}) {
    const Problem p({530, 40, 307}, mode, 300);
    const auto all = [&](ops::Device* device) {
      Results r = p.run(device);
      r.nll.insert(r.nll.end(), r.dx.begin(), r.dx.end());
      r.nll.insert(r.nll.end(), r.dembedding.begin(), r.dembedding.end());
      return r.nll;
    };
    expect_same_for_any_threads(mode == Mode::FP32 ? "FP32" : "BF16", all);
    expect_bitwise("again", all(device()), all(device()));
  }
}

// A token of scale 0 has an nll but no gradient, even if its logits are not finite; any other makes them so.
DUOKV_TEST(ignored_tokens_add_nothing) {
  Problem p({12, 16, 50}, Mode::FP32, 400);
  const Results clean = p.run(device());
  p.x[2 * 16 + 3] = std::numeric_limits<float>::quiet_NaN();  // token 2 has scale 0
  const Results got = p.run(device());
  expect(std::isnan(got.nll[2]), "nll[2] is %g", got.nll[2]);
  expect_bitwise("dx", got.dx, clean.dx);
  p.scale[2] = 1;
  const Results spoilt = p.run(device());
  expect(std::isnan(spoilt.dx[2 * 16]), "dx[2] is %g", spoilt.dx[2 * 16]);
}

DUOKV_TEST(bad_arguments_are_refused_before_anything_is_written) {
  const Problem p({3, 8, 10}, Mode::FP32, 500);
  Array<float> x(device(), p.x), e(device(), p.e), nll(device(), Floats{1, 2, 3}), dx(device(), p.x),
      de(device(), p.e);
  Array<float> scale(device(), p.scale);
  Array<int32_t> targets(device(), p.targets);
  const ops::LinearCrossEntropyArgs good{x.data(),
                                         3,
                                         {e.data(), 10, 8, 1, nullptr},
                                         targets.data(),
                                         scale.data(),
                                         nll.data(),
                                         dx.data(),
                                         de.data(),
                                         Mode::FP32};
  const auto refuse = [&](const char* what, auto change) {
    ops::LinearCrossEntropyArgs args = good;
    change(args);
    expect_status(table().linear_cross_entropy(device(), &args), ops::kInvalid, what);
  };
  refuse("no nll", [](auto& args) { args.nll = nullptr; });
  refuse("no tokens", [](auto& args) { args.m = 0; });
  refuse("dx without dembedding", [](auto& args) { args.dembedding = nullptr; });
  refuse("gradients without scale", [](auto& args) { args.token_scale = nullptr; });
  refuse("TF32x3", [](auto& args) { args.mode = Mode::TF32x3; });
  for (int32_t bad : {-1, 10}) {
    targets.put({0, bad, 1});
    refuse("target out of range", [](auto&) {});
    const std::string message = table().last_error();
    expect(message.find("targets[1] is " + std::to_string(bad)) != std::string::npos, "message: %s",
           message.c_str());
  }
  expect_bitwise("nll is untouched", nll.get(), Floats{1, 2, 3});
  expect_bitwise("dembedding is untouched", de.get(), p.e);
}

}  // namespace

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
