// Backward of attention against FP64. What the forward pass would have left comes from the reference.
#include "cuda/test/attention_reference.h"

namespace duokv::cuda::test {
namespace {

using duokv::test::misplaced_gradients;
using duokv::test::Poison;
using ops::ProductMode;

constexpr ProductMode kModes[] = {ProductMode::FP32, ProductMode::TF32x3, ProductMode::BF16};

double limit(ProductMode mode) { return mode == ProductMode::BF16 ? 2e-2 : 1e-5; }

const char* name(ProductMode mode) {
  return mode == ProductMode::BF16 ? "BF16" : mode == ProductMode::TF32x3 ? "TF32x3" : "FP32";
}

struct Gradients {
  std::vector<float> dq;
  std::vector<std::vector<float>> dk, dv;  // by bank
};

std::vector<float> narrow(const std::vector<double>& values) { return {values.begin(), values.end()}; }

// With `shared`, the second bank's dk is the first one's dv, and its dv the first one's dk.
Gradients differentiate(const Problem& p, const Reference& r, float start = 0, bool shared = false) {
  DeviceProblem device(p);
  const Array<float> out(narrow(r.out)), lse(narrow(r.lse));
  ops::AttentionBackwardArgs args = device.backward(start);
  args.forward.out = out.data();
  args.forward.lse = lse.data();
  if (shared) args.grads[1] = {args.grads[0].dv, args.grads[0].dk};
  const Array<char> workspace(attention_backward_workspace(args));
  check(attention_backward(args, workspace.data(), stream()));
  Gradients got;
  got.dq = device.dq();
  for (size_t bank = 0; bank < p.banks.size(); ++bank) {
    got.dk.push_back(device.dk(bank));
    got.dv.push_back(device.dv(bank));
  }
  return got;
}

// Also exact zeros where the reference has nothing else.
void expect_gradient(const std::string& what, const std::vector<float>& got,
                     const std::vector<double>& reference, double tolerance) {
  const bool zero = std::all_of(reference.begin(), reference.end(), [](double x) { return x == 0; });
  expect_relative(what, got, reference, zero ? 0 : tolerance);
}

void compare(const std::string& what, const Problem& p) {
  const Reference r = reference(p);
  const Gradients got = differentiate(p, r);
  const std::string full = std::string(name(p.mode)) + " " + what;
  expect_gradient(full + ": dq", got.dq, r.dq, limit(p.mode));
  for (size_t bank = 0; bank < p.banks.size(); ++bank) {
    const std::string of_bank = " of bank " + std::to_string(bank);
    expect_gradient(full + ": dk" + of_bank, got.dk[bank], r.dk[bank], limit(p.mode));
    expect_gradient(full + ": dv" + of_bank, got.dv[bank], r.dv[bank], limit(p.mode));
  }
}

// ---------------------------------------------------------------- against FP64

struct Shape {
  int64_t batch;
  int32_t queries, query_heads, kv_heads, head_dim;
  int32_t history;        // positions of the first query
  int32_t count, before;  // entries of each bank, and how far before the last query's position they end
  int32_t windows[2];     // of the banks; -1: no second bank
  int32_t longest_document;
  bool biased;
};

const Shape kShapes[] = {
    {1, 1, 1, 1, 16, 0, 1, 0, {0, -1}, 5, false},     // one token
    {2, 1, 2, 1, 64, 0, 1, 0, {0, 4}, 5, true},       // one token, stored twice
    {9, 7, 3, 3, 16, 0, 7, 0, {0, 3}, 1, false},      // documents of one token
    {3, 37, 4, 2, 32, 0, 37, 0, {100, 5}, 23, true},  // window longer than everything
    {2, 67, 6, 2, 16, 0, 67, 0, {0, 1}, 31, true},    // current entry with a bias
    {1, 71, 2, 1, 128, 0, 71, 0, {0, 33}, 50, false},
    {1, 61, 3, 1, 64, 31, 53, 0, {0, 17}, 50, true},   // entries from before the queries, not all of them
    {2, 41, 2, 2, 32, 7, 17, 29, {0, 9}, 19, false},   // queries after all entries
    {2, 13, 2, 1, 64, 5, 11, -4, {7, -1}, 40, false},  // entries after the last query
};

Problem make(Rng& rng, const Shape& s) {
  Problem p;
  p.batch = s.batch, p.queries = s.queries;
  p.query_heads = s.query_heads, p.kv_heads = s.kv_heads, p.head_dim = s.head_dim;
  p.positions.assign(static_cast<size_t>(s.batch), s.history);
  duokv::test::random_documents(rng, p, s.longest_document);
  duokv::test::random_queries(rng, p);
  for (int32_t window : s.windows) {
    if (window < 0) continue;
    BankEntries bank;
    bank.window = window;
    bank.head_major = p.banks.size() == 1;
    for (int64_t row = 0; row < s.batch; ++row) {
      const int32_t first = std::max(0, s.history + s.queries - s.before - s.count);
      bank.rows.push_back(duokv::test::random_entries(rng, p, first, s.count));
    }
    if (s.biased) bank.bias = rng.normals(p.batch * p.queries, 2);
    p.banks.push_back(std::move(bank));
  }
  return p;
}

DUOKV_CASE(odd_shapes_match_fp64) {
  Rng rng(1);
  for (const Shape& shape : kShapes) {
    Problem p = make(rng, shape);
    const int64_t number = &shape - kShapes;
    for_each_choice([&](size_t i) {
      p.mode = kModes[(i + static_cast<size_t>(number)) % 3];
      compare("shape " + std::to_string(number), p);
    });
  }
}

DUOKV_CASE(every_batch_matches_fp64) {
  Rng rng(4);
  for (int64_t batch = 1; batch <= 9; ++batch) {
    Problem p = make(rng, {batch, 5, 2, 1, 16, 0, 5, 0, {0, 3}, 4, true});
    for_each_choice([&](size_t i) {
      p.mode = kModes[(i + static_cast<size_t>(batch)) % 3];
      compare("batch " + std::to_string(batch), p);
    });
  }
}

// The real window and head size, with documents that end at multiples of a tile and one position to either
// side; nine seeds meet every end in every mode.
DUOKV_CASE(documents_at_tile_edges) {
  Rng rng(2);
  for (const int32_t edge : {32, 64, 96}) {
    for_each_choice([&](size_t i) {
      const int32_t end = edge + static_cast<int32_t>((i + static_cast<size_t>(edge) / 32) % 3) - 1;
      Problem p = causal_problem(rng, 1, 167, 1, 1, 64, 128);
      for (int32_t t = end; t < p.queries; ++t) p.document_start[static_cast<size_t>(t)] = end;
      p.mode = kModes[(i + static_cast<size_t>(edge) / 16 + current_seed / 3) % 3];
      compare("document of " + std::to_string(end), p);
    });
  }
}

DUOKV_CASE(windows_end_at_tile_edges) {
  Rng rng(3);
  for_each_choice([&](size_t i) {
    for (const int32_t window : {32, 64}) {
      Problem p = causal_problem(rng, 1, 131, 1, 1, 32, window + static_cast<int32_t>(i) - 1);
      p.mode = ProductMode::TF32x3;
      compare("window " + std::to_string(p.banks[1].window), p);
    }
  });
}

// ---------------------------------------------------------------- rules

DUOKV_CASE(gradients_accumulate) {
  Rng rng(4);
  Problem p = causal_problem(rng, 2, 35, 2, 1, 32, 5);
  p.mode = ProductMode::TF32x3;
  const Reference r = reference(p);
  const Gradients zero = differentiate(p, r), half = differentiate(p, r, 0.5f);
  expect_equal("dq", half.dq, zero.dq);
  const auto plus_half = [](std::vector<float> values) {
    for (float& x : values) x += 0.5f;
    return values;
  };
  for (size_t bank = 0; bank < 2; ++bank) {
    expect_equal("dk from 0.5", half.dk[bank], plus_half(zero.dk[bank]));
    expect_equal("dv from 0.5", half.dv[bank], plus_half(zero.dv[bank]));
  }
}

DUOKV_CASE(banks_share_gradients) {
  Rng rng(5);
  for (const ProductMode mode : {ProductMode::FP32, ProductMode::TF32x3}) {
    Problem p = causal_problem(rng, 1, 69, 2, 2, 32, 5);
    p.mode = mode;
    const Reference r = reference(p);
    const Gradients apart = differentiate(p, r), shared = differentiate(p, r, 0, true);
    const auto sum = [](std::vector<float> x, const std::vector<float>& y) {
      for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
      return x;
    };
    expect_equal("dq", shared.dq, apart.dq);
    expect_equal("dk and the other dv", shared.dk[0], sum(apart.dk[0], apart.dv[1]));
    expect_equal("dv and the other dk", shared.dv[0], sum(apart.dv[0], apart.dk[1]));
  }
}

// The weight of a lone entry does not depend on its key: no gradient, not even rounding noise.
DUOKV_CASE(a_lone_entry_has_no_score_gradient) {
  Rng rng(6);
  for (const ProductMode mode : kModes) {
    Problem p = causal_problem(rng, 1, 70, 2, 1, 64, 0);
    p.banks[0].window = 1;
    p.mode = mode;
    const Gradients got = differentiate(p, reference(p));
    expect_equal("dq", got.dq, std::vector<float>(got.dq.size(), 0.0f));
    expect_equal("dk", got.dk[0], std::vector<float>(got.dk[0].size(), 0.0f));
  }
}

DUOKV_CASE(reproducible) {
  Rng rng(7);
  Problem p = causal_problem(rng, 1, 97, 2, 1, 64, 40);
  duokv::test::random_documents(rng, p, 60);
  for (size_t i = 0; i < 3; ++i) {
    static Gradients of_first_seed[3];
    Gradients& first = of_first_seed[i];
    p.mode = kModes[i];
    const Gradients got = differentiate(p, reference(p));
    if (first.dq.empty()) first = got;
    expect_equal("dq", got.dq, first.dq);
    for (size_t bank = 0; bank < 2; ++bank) {
      expect_equal("dk", got.dk[bank], first.dk[bank]);
      expect_equal("dv", got.dv[bank], first.dv[bank]);
    }
  }
}

// ---------------------------------------------------------------- TF32x3

double error(const std::vector<float>& got, const std::vector<double>& reference) {
  double squares = 0;
  for (size_t i = 0; i < got.size(); ++i) squares += (got[i] - reference[i]) * (got[i] - reference[i]);
  return std::sqrt(squares);
}

// Sums of many terms with a common part: an accumulation that truncates would drift.
DUOKV_CASE(tf32x3_is_as_accurate_as_fp32) {
  for_each_choice([](size_t i) {
    constexpr float kScales[] = {1, 1e15f, 1e-15f};
    const float s = kScales[i];
    Rng rng(8);
    Problem p = causal_problem(rng, 1, 165, 1, 1, 64, 0);
    for (float& x : p.q) x = s * x;
    for (float& x : p.banks[0].rows[0].k) x /= s;
    for (float& x : p.banks[0].rows[0].v) x = s * (x + 1);
    for (float& x : p.dout) x = (x + 1) / s;
    const Reference r = reference(p);
    p.mode = ProductMode::FP32;
    const Gradients exact = differentiate(p, r);
    p.mode = ProductMode::TF32x3;
    for_each_architecture([&] {
      const Gradients split = differentiate(p, r);
      const auto expect_at_most_twice = [&](const char* what, const std::vector<float>& tf32x3,
                                            const std::vector<float>& fp32, const std::vector<double>& fp64) {
        const double ratio = error(tf32x3, fp64) / error(fp32, fp64);
        expect(ratio <= 2, "%s scaled by %g: %.3g times the error of FP32", what, static_cast<double>(s),
               ratio);
      };
      expect_at_most_twice("dq", split.dq, exact.dq, r.dq);
      expect_at_most_twice("dk", split.dk[0], exact.dk[0], r.dk[0]);
      expect_at_most_twice("dv", split.dv[0], exact.dv[0], r.dv[0]);
    });
  });
}

// What is not finite reaches the gradients of all that see it, and changes no bit of others in the same
// tiles. 2^120 is too large for TF32x3 only. Of the first 64 entries, the first 63 queries see some; query
// 64, the first of a later tile, sees all and the tile's last queries some, for their window or their
// document.
DUOKV_CASE(what_is_not_finite_stays_where_it_belongs) {
  constexpr int32_t kLength = 84, kDocument = 77, kWindow = 70;
  const auto try_all = [](int32_t head_dim, ProductMode mode, const std::vector<Poison>& poisons) {
    Rng rng(9);
    Problem clean = causal_problem(rng, 1, kLength, 2, 1, head_dim, kWindow);
    for (size_t t = kDocument; t < kLength; ++t) clean.document_start[t] = kDocument;
    clean.mode = mode;
    const Gradients expected = differentiate(clean, reference(clean));
    for (const Poison& poison : poisons) {
      const Problem p = poison.in(clean);
      const std::string wrong = misplaced_gradients(p, poison, expected, differentiate(p, reference(p)));
      expect(wrong.empty(), "%s, %s: %s", name(mode), poison.name().c_str(), wrong.c_str());
    }
  };
  for_each_choice([&](size_t i) {
    try_all(16, kModes[i],
            {{Poison::kKey, 0, 20, kInf},
             {Poison::kKey, 1, 2, kNan},
             {Poison::kKey, 1, 20, 0x1p120f},
             {Poison::kValue, 0, 20, kNan},
             {Poison::kValue, 1, 2, kInf},
             {Poison::kQuery, 0, 40, kNan},
             {Poison::kQuery, 0, 80, 0x1p120f},
             {Poison::kOutputGradient, 0, 80, -kInf}});
    try_all(128, kModes[i], {{Poison::kKey, 0, 20, kNan}, {Poison::kOutputGradient, 0, 80, kNan}});
  });
}

// Entries that no query sees have no gradient, whatever they hold.
DUOKV_CASE(what_nobody_sees_has_no_gradient) {
  Rng rng(10);
  for (const ProductMode mode : kModes) {
    Problem p = causal_problem(rng, 1, 37, 1, 1, 32, 0);
    p.document_start.assign(37, 3);
    p.mode = mode;
    const Gradients expected = differentiate(p, reference(p));
    std::fill_n(p.banks[0].rows[0].k.begin(), 3 * 32, kNan);
    std::fill_n(p.banks[0].rows[0].v.begin(), 3 * 32, kInf);
    const Gradients got = differentiate(p, reference(p));
    expect_equal("dk", got.dk[0], expected.dk[0]);
    expect_equal("dv", got.dv[0], expected.dv[0]);
  }
}

// ---------------------------------------------------------------- arguments

DUOKV_CASE(refuses_what_it_cannot_compute) {
  ops::AttentionBackwardArgs args = {};
  args.forward.batch = args.forward.queries = 1;
  args.forward.query_heads = args.forward.kv_heads = 1;
  args.forward.head_dim = 64;
  args.forward.bank_count = 1;
  const auto refused = [&](const char* what) {
    expect(attention_backward(args, nullptr, stream()) == cudaErrorInvalidValue, "%s was accepted", what);
  };
  args.forward.head_dim = 48;
  refused("a head of 48");
  args.forward.head_dim = 64;
  args.forward.banks[0].dtype = ops::DType::BF16;
  refused("a BF16 bank");
  args.forward.banks[0].dtype = ops::DType::F32;
  args.forward.banks[0].position_stride = 66;
  refused("entries that are not aligned");
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
