// Attention forward, many queries, against FP64.
#include <algorithm>
#include <map>

#include "cuda/test/attention_reference.h"

namespace duokv::cuda::test {
namespace {

using duokv::test::misplaced_outputs;
using duokv::test::one_row;
using duokv::test::Poison;
using duokv::test::random_documents;
using duokv::test::random_entries;
using duokv::test::random_queries;
using duokv::test::some_queries;
using ops::DType;
using ops::ProductMode;

constexpr ProductMode kModes[] = {ProductMode::FP32, ProductMode::TF32x3, ProductMode::BF16};

const char* name_of(ProductMode mode) {
  return mode == ProductMode::FP32 ? "FP32" : mode == ProductMode::TF32x3 ? "TF32x3" : "BF16";
}
double limit_of(ProductMode mode) { return mode == ProductMode::BF16 ? 2e-2 : 1e-5; }

struct Forward {
  std::vector<float> out, lse;
};

Forward run(const Problem& p) {
  DeviceProblem device(p);
  Array<char> workspace(std::max<size_t>(attention_forward_workspace(device.args), 1));
  check(attention_forward(device.args, workspace.data(), stream()));
  return {device.out(), device.lse()};
}

// Answers do not depend on the scheduling seed.
const Reference& reference_of(const std::string& name, const Problem& p) {
  static std::map<std::string, Reference> known;
  const auto found = known.find(name);
  return found != known.end() ? found->second : known.emplace(name, reference(p)).first->second;
}

void compare(const std::string& what, Problem p, ProductMode mode) {
  p.mode = mode;
  // FP32 and TF32x3 round nothing.
  const Reference expected = reference_of(what + (mode == ProductMode::BF16 ? " rounded" : ""), p);
  const Forward got = run(p);
  const std::string name = what + ", " + name_of(mode);
  expect_relative(name + ": out", got.out, expected.out, limit_of(mode));
  expect_lse(name + ": lse", got.lse, expected.lse, limit_of(mode));
}

struct Shape {
  int64_t batch, queries;
  int32_t query_heads, kv_heads, head_dim, history, longest_document, windows[2];  // window -1: no such bank
};

// Queries after `history` stored positions, in random documents, over banks that hold everything or the end.
Problem problem_of(const Shape& s, Rng& rng) {
  Problem p;
  p.batch = s.batch, p.queries = s.queries;
  p.query_heads = s.query_heads, p.kv_heads = s.kv_heads, p.head_dim = s.head_dim;
  for (int64_t row = 0; row < s.batch; ++row)
    p.positions.push_back(row == 0 ? s.history : rng.integer(0, s.history));
  random_documents(rng, p, s.longest_document);
  random_queries(rng, p);
  for (const int32_t window : s.windows) {
    if (window < 0) continue;
    BankEntries bank;
    bank.window = window;
    bank.head_major = rng.integer(0, 1);
    for (int64_t row = 0; row < s.batch; ++row) {
      const int32_t length = p.positions[static_cast<size_t>(row)] + static_cast<int32_t>(s.queries);
      const int32_t count = row % 3 == 2 ? length / 2 : std::min(length, 512);
      bank.rows.push_back(random_entries(rng, p, length - count, count));
    }
    if (window > 0) bank.bias = rng.normals(s.batch * s.queries, 2);
    p.banks.push_back(std::move(bank));
  }
  return p;
}

const Shape kShapes[] = {{1, 2, 1, 1, 16, 0, 9, {0, -1}},          // fewer queries than anything
                         {9, 3, 2, 1, 32, 17, 5, {0, 1}},          // current-only beside everything
                         {2, 37, 6, 2, 16, 30, 1, {0, 3}},         // one-token documents
                         {2, 31, 2, 2, 64, 0, 40, {500, -1}},      // a window longer than the row
                         {1, 53, 3, 1, 64, 31, 1000, {0, 32}},     // one document, a group of three
                         {1, 23, 7, 1, 128, 43, 30, {0, 16}},      // a group that divides no tile
                         {1, 43, 4, 2, 32, 90, 50, {64, 8}},       // two windows
                         {1, 11, 2, 1, 64, 541, 1000, {0, 128}}};  // 512 entries in three parts

DUOKV_CASE(odd_shapes) {
  for (size_t i = 0; i < std::size(kShapes); ++i) {
    Rng rng(100 + i);
    const Problem p = problem_of(kShapes[i], rng);
    for_each_choice(
        [&](size_t choice) { compare("shape " + std::to_string(i), p, kModes[(choice + i) % 3]); });
  }
}

DUOKV_CASE(every_batch) {
  for (int64_t batch = 1; batch <= 9; ++batch) {
    const auto number = static_cast<size_t>(batch);
    Rng rng(400 + number);
    const Problem p = problem_of({batch, 3, 2, 1, 16, 11, 5, {0, 4}}, rng);
    for_each_choice(
        [&](size_t choice) { compare("batch " + std::to_string(batch), p, kModes[(choice + number) % 3]); });
  }
}

// What is seen goes on from one part to the next.
DUOKV_CASE(one_document_in_three_parts) {
  Rng rng(300);
  Problem p = problem_of(kShapes[std::size(kShapes) - 1], rng);
  std::fill(p.document_start.begin(), p.document_start.end(), 0);
  for (const ProductMode mode : kModes) compare("one document", p, mode);
}

// The real window and head size, with documents that end at multiples of tiles and one position to either
// side.
DUOKV_CASE(documents_at_tile_edges) {
  for (const int32_t edge : {63, 64, 65}) {
    Rng rng(static_cast<uint64_t>(edge));
    // The longer one is cut into parts.
    const int32_t length = edge == 64 ? 200 : 193;
    Problem p = some_queries(causal_problem(rng, 1, length, 1, 1, 64, 128), 62, length - 62);
    for (int32_t t = edge - 62; t < p.queries; ++t) p.document_start[static_cast<size_t>(t)] = edge;
    for_each_choice([&](size_t choice) {
      compare("edge " + std::to_string(edge), p, kModes[(choice + static_cast<size_t>(edge)) % 3]);
    });
  }
}

DUOKV_CASE(bf16_banks_and_mixed_banks) {
  for (const int32_t head_dim : {16, 32, 64, 128}) {
    Rng rng(static_cast<uint64_t>(head_dim));
    Problem p = problem_of({2, 11, 3, 1, head_dim, 30, 20, {0, 16}}, rng);
    for (BankEntries& bank : p.banks) bank.dtype = DType::BF16;
    for (const ProductMode mode : kModes) compare("BF16 banks " + std::to_string(head_dim), p, mode);
    p.banks[0].dtype = DType::F32;
    for (const ProductMode mode : kModes) compare("a BF16 bank " + std::to_string(head_dim), p, mode);
  }
}

// Equal entries in both banks count twice: the same output and log-sum-exps, but for the last bit: a compiler
// may contract the two banks' arithmetic differently.
DUOKV_CASE(both_banks_the_same) {
  Rng rng(7);
  Problem p = causal_problem(rng, 1, 45, 3, 1, 64, 0), twice = p;
  twice.banks.push_back(p.banks[0]);
  for (const ProductMode mode : kModes) {
    p.mode = twice.mode = mode;
    const Forward one = run(p), two = run(twice);
    expect_relative("out", two.out, {one.out.begin(), one.out.end()},
                    mode == ProductMode::BF16 ? 1e-2 : 1e-6);
    std::vector<float> lse = one.lse;
    lse.insert(lse.end(), one.lse.begin(), one.lse.end());
    expect_relative("lse", two.lse, {lse.begin(), lse.end()}, 1e-6);
  }
}

double rms(const std::vector<float>& got, const std::vector<double>& reference) {
  double sum = 0;
  for (size_t i = 0; i < got.size(); ++i) sum += (got[i] - reference[i]) * (got[i] - reference[i]);
  return std::sqrt(sum / static_cast<double>(got.size()));
}

// TF32x3 has at most twice the RMS error of FP32, whatever the scale of its operands.
DUOKV_CASE(tf32x3_is_as_accurate_as_fp32) {
  for (const float scale : {1.0f, 1e-15f, 1e15f}) {
    Rng rng(8);
    Problem p = causal_problem(rng, 1, 130, 1, 1, 64, 0);
    for (float& x : p.q) x *= scale;
    for (float& x : p.banks[0].rows[0].k) x /= scale;
    for (float& x : p.banks[0].rows[0].v) x = x * scale + scale;
    const Reference expected = reference_of("scale " + std::to_string(std::log10(scale)), p);
    p.mode = ProductMode::FP32;
    const double fp32 = rms(run(p).out, expected.out);
    p.mode = ProductMode::TF32x3;
    for_each_architecture([&] {
      const double tf32x3 = rms(run(p).out, expected.out);
      expect(tf32x3 <= 2 * fp32, "scale %g: RMS error %.3g, FP32 has %.3g", static_cast<double>(scale),
             tf32x3, fp32);
    });
  }
}

// Scores hundreds apart between the banks: the smaller bank's log-sum-exp must not underflow. An FP32 score
// of 300 is known to 1.5e-5.
DUOKV_CASE(each_bank_has_its_own_scale) {
  for (const float shift : {-300.0f, 300.0f}) {
    Rng rng(9);
    Problem p = causal_problem(rng, 1, 40, 2, 1, 32, 8);
    p.banks[1].bias.assign(static_cast<size_t>(p.queries), shift);
    for (const ProductMode mode : kModes) {
      p.mode = mode;
      const Reference expected = reference(p);
      const Forward got = run(p);
      const double limit = mode == ProductMode::BF16 ? 2e-2 : 5e-5;
      expect_relative("out", got.out, expected.out, limit);
      const auto half = static_cast<ptrdiff_t>(got.lse.size() / 2);
      for (const ptrdiff_t bank : {0, 1}) {
        expect_lse("lse", {got.lse.begin() + bank * half, got.lse.begin() + (bank + 1) * half},
                   {expected.lse.begin() + bank * half, expected.lse.begin() + (bank + 1) * half}, limit);
      }
    }
  }
}

DUOKV_CASE(nothing_to_see_gives_zeros) {
  for (const int32_t count : {0, 10, 300}) {
    Rng rng(10);
    Problem p = some_queries(causal_problem(rng, 1, 341, 6, 2, 64, 8), 320, 21);
    for (BankEntries& bank : p.banks) bank.rows[0] = random_entries(rng, p, 3, count);
    p.document_start.assign(21, 320);
    for (const ProductMode mode : kModes) {
      p.mode = mode;
      const Forward got = run(p);
      expect_equal("out", got.out, std::vector<float>(got.out.size(), 0.0f));
      expect_equal("lse", got.lse, std::vector<float>(got.lse.size(), -kInf));
    }
  }
}

// What a query sees surfaces when it is not finite; what it does not see, of a tile that it sees, changes no
// bit: the future, another document, what is before the window. 2^120 is too large for TF32x3 only. Of the
// first 64 entries, the first queries see some and the last queries of their block all; query 64, the first
// of a later block, sees all and the block's last queries some, for their window or their document.
DUOKV_CASE(nonfinite_values_surface) {
  constexpr int32_t kLength = 84, kDocument = 77, kWindow = 70;
  Rng rng(11);
  const auto try_all = [&](int32_t head_dim, DType dtype, ProductMode mode,
                           const std::vector<Poison>& poisons) {
    Problem clean = causal_problem(rng, 1, kLength, 2, 1, head_dim, kWindow);
    for (size_t t = kDocument; t < kLength; ++t) clean.document_start[t] = kDocument;
    for (BankEntries& bank : clean.banks) bank.dtype = dtype;
    clean.mode = mode;
    const std::vector<float> expected = run(clean).out;
    for (const Poison& poison : poisons) {
      const std::string wrong = misplaced_outputs(clean, poison, expected, run(poison.in(clean)).out);
      expect(wrong.empty(), "%s, %s: %s", name_of(mode), poison.name().c_str(), wrong.c_str());
    }
  };
  const std::vector<Poison> poisons = {{Poison::kValue, 0, 20, kNan}, {Poison::kValue, 0, 70, 0x1p120f},
                                       {Poison::kValue, 1, 2, -kInf}, {Poison::kKey, 0, 20, kInf},
                                       {Poison::kKey, 1, 2, kNan},    {Poison::kQuery, 0, 20, kInf}};
  for_each_choice([&](size_t choice) {
    try_all(32, DType::F32, kModes[choice], poisons);
    try_all(128, DType::F32, kModes[choice], {poisons[0], poisons[2]});
  });
  try_all(64, DType::BF16, ProductMode::BF16, poisons);
}

// Entry t is not finite in column t alone, and query t sees the entries up to t: so it is in its columns up
// to t, and in no other, that its output is not finite.
DUOKV_CASE(each_column_of_a_value_surfaces_in_its_own) {
  for (const int32_t columns : {16, 32}) {
    Rng rng(17);
    Problem p = causal_problem(rng, 1, columns, 1, 1, columns, 0);
    std::vector<size_t> where;
    for (size_t t = 0, width = static_cast<size_t>(columns); t < width; ++t) {
      p.banks[0].rows[0].v[t * width + t] = kInf;
      for (size_t column = 0; column <= t; ++column) where.push_back(t * width + column);
    }
    for (const ProductMode mode : kModes) {
      p.mode = mode;
      expect_non_finite_at(name_of(mode), run(p).out, where);
    }
  }
}

// A query that sees only keys of -inf score is no query that sees nothing.
DUOKV_CASE(scores_of_minus_infinity_are_not_nothing) {
  Rng rng(12);
  Problem p = causal_problem(rng, 1, 5, 1, 1, 16, 0);
  for (float& x : p.q) x = 1;
  for (float& x : p.banks[0].rows[0].k) x = -kInf;
  for (const ProductMode mode : kModes) {
    p.mode = mode;
    for (const float x : run(p).out)
      expect(!std::isfinite(x), "%s: %g", name_of(mode), static_cast<double>(x));
  }
}

// A row's bits are those it has alone, and more room in the banks changes nothing.
DUOKV_CASE(rows_do_not_depend_on_their_batch) {
  for (const Shape& shape :
       {Shape{3, 13, 6, 2, 64, 50, 30, {0, 16}}, Shape{2, 9, 3, 1, 32, 400, 300, {0, 300}}}) {
    for (const ProductMode mode : kModes) {
      Rng rng(13);
      Problem p = problem_of(shape, rng);
      p.mode = mode;
      DeviceProblem device(p);
      const auto launch = [&] {
        Array<char> workspace(std::max<size_t>(attention_forward_workspace(device.args), 1));
        check(attention_forward(device.args, workspace.data(), stream()));
        return device.out();
      };
      const std::vector<float> out = launch();
      for (ops::Bank& bank : device.args.banks) bank.longest = bank.longest * 3 + 200;
      expect_equal("longer banks", launch(), out);
      const auto width = static_cast<ptrdiff_t>(p.queries * p.query_width());
      for (int64_t row = 0; row < p.batch; ++row) {
        expect_equal("a row alone", run(one_row(p, row)).out,
                     std::vector<float>(out.begin() + row * width, out.begin() + (row + 1) * width));
      }
    }
  }
}

// A batch too large for one workspace is worked on piece by piece. Too slow to emulate.
DUOKV_CASE(large_batches_are_cut) {
  if constexpr (!kEmulated) {
    Rng rng(14);
    Problem p = problem_of({80, 300, 12, 4, 64, 700, 500, {0, 128}}, rng);
    DeviceProblem device(p);
    Array<char> workspace(attention_forward_workspace(device.args));
    check(attention_forward(device.args, workspace.data(), stream()));
    const std::vector<float> out = device.out();
    const auto width = static_cast<ptrdiff_t>(p.queries * p.query_width());
    for (const int64_t row : {0, 41, 79}) {
      expect_equal("a row alone", run(one_row(p, row)).out,
                   std::vector<float>(out.begin() + row * width, out.begin() + (row + 1) * width));
    }
  }
}

// One query per row is handed to decode, which has tests of its own.
DUOKV_CASE(one_query_is_decoded) {
  Rng rng(16);
  const Problem p = problem_of({3, 1, 6, 2, 64, 70, 50, {0, 16}}, rng);
  for (const ProductMode mode : kModes) compare("one query", p, mode);
}

DUOKV_CASE(unsupported_arguments_are_refused) {
  Rng rng(15);
  const Problem p = causal_problem(rng, 1, 3, 4, 2, 16, 2);
  DeviceProblem device(p);
  const auto refused = [&](const char* what, auto change) {
    ops::AttentionArgs args = device.args;
    change(args);
    expect(attention_forward(args, nullptr, stream()) == cudaErrorInvalidValue, "%s was accepted", what);
  };
  refused("head_dim 24", [](ops::AttentionArgs& args) { args.head_dim = 24; });
  refused("3 heads over 2", [](ops::AttentionArgs& args) { args.query_heads = 3; });
  refused("no bank", [](ops::AttentionArgs& args) { args.bank_count = 0; });
  refused("an unaligned q", [](ops::AttentionArgs& args) { args.q += 1; });
  refused("an unaligned bank", [](ops::AttentionArgs& args) { args.banks[1].position_stride += 1; });
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
