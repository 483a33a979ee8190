#include "cpu/bf16.h"
#include "test/attention_reference.h"
#include "test/bf16_routes.h"
#include "test/instruction_sets.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Ranges {
  int64_t max_batch = 4, max_queries = 80;
  int32_t longest_document = 60;
  int32_t head_dim = 0;   // 0: some even one
  bool backward = false;  // FP32 banks with the same count in every row
};

template <class T, size_t N>
T pick(Rng& rng, const T (&values)[N]) {
  return values[rng.integer(0, N - 1)];
}

// Anything the interface allows: both or one of the banks, holding all, the end or nothing of what could be
// seen.
Problem random_problem(Rng& rng, const Ranges& ranges) {
  Problem p;
  p.batch = rng.integer(1, static_cast<int32_t>(ranges.max_batch));
  const int64_t lengths[] = {1, 2, 3, 4, 5, 7, 13, 31, 37, 61, 79};
  p.queries = std::min<int64_t>(pick(rng, lengths), ranges.max_queries);
  p.kv_heads = rng.integer(1, 3);
  const int32_t groups[] = {1, 2, 3, 4, 5, 7};
  p.query_heads = p.kv_heads * pick(rng, groups);
  const int32_t dims[] = {10, 16, 30, 32, 64, 80, 128};
  p.head_dim = ranges.head_dim ? ranges.head_dim : pick(rng, dims);
  const int32_t history = pick(rng, {0, 0, 1, 17, 200, 311});
  for (int64_t row = 0; row < p.batch; ++row) {
    p.positions.push_back(rng.integer(0, 1) ? history : rng.integer(0, history));
  }
  const int32_t longest = pick(rng, {1, 5, ranges.longest_document, 1000});
  random_documents(rng, p, longest);
  random_queries(rng, p);

  const int32_t bank_count = rng.integer(1, 2);
  for (int32_t index = 0; index < bank_count; ++index) {
    BankEntries bank;
    bank.window = pick(rng, {0, 0, 1, 3, 32, 500});
    bank.head_major = rng.integer(0, 1);
    if (!ranges.backward && rng.integer(0, 2) == 0) bank.dtype = ops::DType::BF16;
    const int32_t shared_count = rng.integer(0, history + static_cast<int32_t>(p.queries));
    for (int64_t row = 0; row < p.batch; ++row) {
      const int32_t length = p.positions[row] + static_cast<int32_t>(p.queries);
      int32_t count = std::min(length, pick(rng, {length, length, length / 2, 1, 0}));
      if (ranges.backward) count = std::min(shared_count, p.positions[0]);
      // Mostly the last entries, as a ring holds them; sometimes entries that end before the queries, or go
      // on after.
      const int32_t first = std::max(0, length - count + pick(rng, {0, 0, 0, -9, 4}));
      bank.rows.push_back(random_entries(rng, p, first, count));
    }
    if (rng.integer(0, 2) == 0) bank.bias = rng.normals(p.batch * p.queries, 3);
    p.banks.push_back(std::move(bank));
  }
  return p;
}

// Calls body(mode, what) for FP32 products and for both of these.
template <class Body>
void by_each_route(Body&& body) {
  body(ops::ProductMode::FP32, "FP32");
  by_each_bf16_route([&](const char* what) { body(ops::ProductMode::BF16, what); });
}

template <class T>
void append(std::vector<T>& all, const std::vector<T>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

void expect_forward_matches(const std::string& what, const std::vector<Problem>& problems, double tolerance) {
  std::vector<float> out, lse;
  std::vector<double> out_ref, lse_ref;
  for (const Problem& p : problems) {
    const Result got = run_forward(p);
    const Reference ref = reference(p);
    append(out, got.out), append(lse, got.lse);
    append(out_ref, ref.out), append(lse_ref, ref.lse);
  }
  expect_close(what + ": out", out, out_ref, tolerance, tolerance);
  expect_close(what + ": lse", lse, lse_ref, tolerance, tolerance);
}

// Over each tensor of each problem: relative L2 error at most `limit`, and exact zeros where the reference
// has only zeros. A tensor that is all but cancelled is measured by an eighth of what cancels.
void expect_gradients_match(const std::string& what, const std::vector<Problem>& problems, double limit) {
  double worst = 0;
  for (const Problem& p : problems) {
    const Result got = run_backward(p);
    const Reference ref = reference(p);
    const auto compare = [&](const std::vector<float>& x, const std::vector<double>& y,
                             const std::vector<double>& terms) {
      double error = 0, norm = 0, cancels = 0;
      for (size_t i = 0; i < y.size(); ++i) {
        error += (x[i] - y[i]) * (x[i] - y[i]), norm += y[i] * y[i];
        cancels += terms[i] * terms[i] / 64;
      }
      const double relative = norm > 0    ? std::sqrt(error / std::max(norm, cancels))
                              : error > 0 ? kInfinity
                                          : 0;
      worst = std::isnan(relative) ? relative : std::max(worst, relative);
    };
    compare(got.dq, ref.dq, ref.dq_terms);
    for (size_t bank = 0; bank < p.banks.size(); ++bank) {
      compare(got.dk[bank], ref.dk[bank], ref.dk_terms[bank]);
      compare(got.dv[bank], ref.dv[bank], ref.dv[bank]);
    }
  }
  std::printf("    %-44s worst relative L2 error %.3g, limit %.3g\n", what.c_str(), worst, limit);
  expect(worst <= limit, "%s: relative L2 error %g is past %g", what.c_str(), worst, limit);
}

// Causal self-attention over a bank with everything and, when window > 0, a second bank with a window.
Problem causal_problem(Rng& rng, int64_t batch, int32_t length, int32_t query_heads, int32_t kv_heads,
                       int32_t head_dim, int32_t window) {
  Problem p;
  p.batch = batch, p.queries = length;
  p.query_heads = query_heads, p.kv_heads = kv_heads, p.head_dim = head_dim;
  p.positions.assign(static_cast<size_t>(batch), 0);
  p.document_start.assign(static_cast<size_t>(batch * length), 0);
  random_queries(rng, p);
  p.banks.resize(window > 0 ? 2 : 1);
  for (BankEntries& bank : p.banks) {
    for (int64_t row = 0; row < batch; ++row) bank.rows.push_back(random_entries(rng, p, 0, length));
  }
  if (window > 0) p.banks[1].window = window;
  return p;
}

DUOKV_TEST(random_cases) {
  Rng rng(1);
  std::vector<Problem> problems;
  for (int i = 0; i < trials(400); ++i) problems.push_back(random_problem(rng, {.max_batch = i % 8 ? 3 : 9}));
  expect_forward_matches("FP32 and TF32x3", problems, 5e-6);
}

DUOKV_TEST(random_cases_bf16) {
  Rng rng(2);
  std::vector<Problem> problems;
  for (int i = 0; i < trials(150); ++i) {
    problems.push_back(random_problem(rng, {}));
    problems.back().mode = ops::ProductMode::BF16;
  }
  // The reference rounds what the products read, except the weights: 2^-9 of a value is left.
  by_each_bf16_route([&](const char* what) { expect_forward_matches(what, problems, 2e-2); });
}

DUOKV_TEST(random_gradients) {
  Rng rng(3);
  std::vector<Problem> problems;
  for (int i = 0; i < trials(250); ++i)
    problems.push_back(random_problem(rng, {.max_batch = 3, .backward = true}));
  expect_gradients_match("FP32", problems, 1e-5);
}

DUOKV_TEST(random_gradients_bf16) {
  Rng rng(4);
  std::vector<Problem> problems;
  for (int i = 0; i < trials(100); ++i) {
    problems.push_back(random_problem(rng, {.max_batch = 3, .backward = true}));
    problems.back().mode = ops::ProductMode::BF16;
  }
  by_each_bf16_route([&](const char* what) { expect_gradients_match(what, problems, 2e-2); });
}

// Outputs and gradients, by every way to multiply.
void expect_both_match_by_each_route(std::vector<Problem>& problems) {
  expect_forward_matches("FP32", problems, 5e-6);
  expect_gradients_match("FP32", problems, 1e-5);
  for (Problem& p : problems) p.mode = ops::ProductMode::BF16;
  by_each_bf16_route([&](const char* what) {
    expect_forward_matches(what, problems, 2e-2);
    expect_gradients_match(what, problems, 2e-2);
  });
}

// Where products run along pairs, the last element of a head has a partner that is none.
DUOKV_TEST(odd_head_dimensions) {
  Rng rng(20);
  std::vector<Problem> problems;
  for (int32_t head_dim : {7, 33, 65}) {
    for (int i = 0; i < trials(15); ++i)
      problems.push_back(random_problem(rng, {.max_batch = 2, .head_dim = head_dim, .backward = true}));
  }
  expect_both_match_by_each_route(problems);
}

// The real window and head size, with documents that end at multiples of tile sizes and one position to
// either side.
DUOKV_TEST(documents_at_tile_edges) {
  Rng rng(5);
  std::vector<Problem> problems;
  for (int32_t edge : {64, 96, 128, 192, 256, 288}) {
    for (int32_t offset : {-1, 0, 1}) {
      Problem p = causal_problem(rng, 1, 331, 3, 1, 64, 128);
      for (int32_t t = edge + offset; t < p.queries; ++t) p.document_start[t] = edge + offset;
      problems.push_back(std::move(p));
    }
  }
  problems.resize(static_cast<size_t>(trials(static_cast<int>(problems.size()))));
  expect_both_match_by_each_route(problems);
}

DUOKV_TEST(the_reference_gradient_is_the_derivative) {
  Rng rng(6);
  Problem p = causal_problem(rng, 2, 9, 4, 2, 10, 3);
  p.banks[1].bias = rng.normals(p.batch * p.queries);
  const Reference ref = reference(p);
  const auto loss = [&] {
    double sum = 0;
    const Reference at = reference(p);
    for (size_t i = 0; i < p.dout.size(); ++i) sum += p.dout[i] * at.out[i];
    return sum;
  };
  std::vector<float> numeric;
  std::vector<double> analytic;
  const auto probe = [&](float& x, double gradient) {
    const float before = x;
    const double step = std::ldexp(1, -12);  // exact in FP32 for these values
    x = before + static_cast<float>(step);
    const double up = x, loss_up = loss();
    x = before - static_cast<float>(step);
    const double down = x, loss_down = loss();
    x = before;
    numeric.push_back(static_cast<float>((loss_up - loss_down) / (up - down)));
    analytic.push_back(gradient);
  };
  for (int i = 0; i < trials(40); ++i) {
    const auto at = static_cast<size_t>(rng.integer(0, static_cast<int32_t>(p.q.size()) - 1));
    probe(p.q[at], ref.dq[at]);
    for (size_t bank = 0; bank < 2; ++bank) {
      const int32_t row = rng.integer(0, 1);
      std::vector<float>& k = p.banks[bank].rows[row].k;
      std::vector<float>& v = p.banks[bank].rows[row].v;
      const auto entry = static_cast<size_t>(rng.integer(0, static_cast<int32_t>(k.size()) - 1));
      probe(k[entry], ref.dk[bank][row * k.size() + entry]);
      probe(v[entry], ref.dv[bank][row * v.size() + entry]);
    }
  }
  expect_close("central differences", numeric, analytic, 1e-6, 1e-5);
}

DUOKV_TEST(gradients_accumulate) {
  Rng rng(7);
  const Problem p = causal_problem(rng, 2, 23, 4, 2, 16, 5);
  Laid laid(device(), p);
  const Result zero = laid.backward(), half = laid.backward(0.5f);
  expect_bitwise("dq", half.dq, zero.dq);
  for (size_t bank = 0; bank < 2; ++bank) {
    std::vector<float> expected;
    for (float x : zero.dk[bank]) expected.push_back(0.5f + x);
    expect_close("dk from 0.5", half.dk[bank], expected, 1e-6, 1e-6);
    expected.clear();
    for (float x : zero.dv[bank]) expected.push_back(0.5f + x);
    expect_close("dv from 0.5", half.dv[bank], expected, 1e-6, 1e-6);
  }
}

// exp, seen through the weight e^x / (1 + e^x) of one of two entries.
DUOKV_TEST(exp_is_accurate) {
  Problem p;
  p.queries = 20000;
  p.head_dim = 16;
  p.positions = {1};
  p.document_start.assign(static_cast<size_t>(p.queries), 0);
  p.q.assign(static_cast<size_t>(p.queries * 16), 0.0f);
  Rng rng(8);
  std::vector<double> expected;
  for (int64_t t = 0; t < p.queries; ++t) {
    const float x = t == 0 ? 0.0f : rng.uniform(-85, 0);
    p.q[t * 16] = 4 * x;  // scale is 1/4
    expected.push_back(std::exp(static_cast<double>(x)) / (1 + std::exp(static_cast<double>(x))));
  }
  p.banks.resize(1);
  RowEntries entries;
  entries.count = entries.capacity = 2;
  entries.k.assign(32, 0.0f), entries.v.assign(32, 0.0f);
  entries.k[16] = 1, entries.v[16] = 1;
  p.banks[0].rows = {entries};
  const Result got = run_forward(p);
  std::vector<float> weights;
  for (int64_t t = 0; t < p.queries; ++t) weights.push_back(got.out[t * 16]);
  // 2 ulp of exp, then a sum, a reciprocal and a product.
  expect_close("weights", weights, expected, 0, 3.5 * std::ldexp(1, -23));
}

// The forward pass and the backward one round a score alike: else the weight of one that is far ahead, which
// is 1, would be off by what its last bits are worth. (A few queries alone sum their products in another
// order.) Two of such scores that are close by chance differ by little more than their rounding: without
// their queries.
DUOKV_TEST(the_largest_of_large_scores_weighs_one) {
  Rng rng(17);
  for (int32_t length : {5, 40, 300}) {
    Problem p = causal_problem(rng, 1, length, 4, 2, 32, 0);
    for (float& x : p.q) x *= 1e5f;
    p.banks[0].bias = rng.normals(length, 30);
    const std::vector<double> largest = reference(p).largest;
    for (size_t query = 0; query < largest.size(); ++query) {
      if (largest[query] >= 1 - 1e-6) continue;
      std::fill_n(p.dout.begin() + static_cast<int64_t>(query) * p.head_dim, p.head_dim, 0.0f);
    }
    const Reference ref = reference(p);
    const Result got = run_backward(p);
    expect_relative_l2("dv of " + std::to_string(length), got.dv[0], ref.dv[0], 1e-6);
  }
}

// ---- what a query's bits may depend on: nothing but what it sees

DUOKV_TEST(batch_and_slot_change_no_bits) {
  Rng rng(9);
  for (int64_t queries : {1, 3, 29}) {
    for (int32_t history : {11, 700}) {
      Problem p;
      p.batch = 5, p.queries = queries;
      p.query_heads = 6, p.kv_heads = 2, p.head_dim = 64;
      for (int64_t row = 0; row < p.batch; ++row) p.positions.push_back(history - static_cast<int32_t>(row));
      random_documents(rng, p, 1000);
      random_queries(rng, p);
      p.banks.resize(2);
      p.banks[1].window = 128;
      for (int64_t row = 0; row < p.batch; ++row) {
        const int32_t length = p.positions[row] + static_cast<int32_t>(queries);
        p.banks[0].rows.push_back(random_entries(rng, p, 0, length));
        const int32_t kept = std::min(length, 128 + static_cast<int32_t>(queries) - 1);
        p.banks[1].rows.push_back(random_entries(rng, p, length - kept, kept));
      }
      by_each_route([&](ops::ProductMode mode, const std::string& what) {
        p.mode = mode;
        const Result all = run_forward(p);
        const int64_t width = queries * p.query_width();
        for (int64_t row : {0, 3}) {
          Problem alone = one_row(p, row);
          for (BankEntries& bank : alone.banks) {
            bank.rows[0].capacity += 5;
            bank.rows[0].slot = rng.integer(0, bank.rows[0].capacity - 1);
            bank.head_major = !bank.head_major;
          }
          expect_bitwise(what + ": alone, in other slots", run_forward(alone).out,
                         {all.out.begin() + row * width, all.out.begin() + (row + 1) * width});
        }
      });
    }
  }
}

DUOKV_TEST(other_queries_change_no_bits) {
  Rng rng(10);
  // So many rows that the CPU backend cuts all of them into larger units of work than it does a part.
  Problem p = causal_problem(rng, 4, 611, 6, 2, 64, 128);
  random_documents(rng, p, 400);
  by_each_route([&](ops::ProductMode mode, const std::string& what) {
    p.mode = mode;
    const Result all = run_forward(p);
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 300}, {7, 5}, {299, 101}, {510, 101}}) {
      Problem part = some_queries(p, first, count);
      // The entries after the last query, which a shorter prefill would not hold.
      for (BankEntries& bank : part.banks) {
        for (RowEntries& r : bank.rows) {
          r.count = static_cast<int32_t>(first + count);
          r.k.resize(r.count * p.kv_width()), r.v.resize(r.count * p.kv_width());
        }
      }
      const Result got = run_forward(part);
      std::vector<float> expected;
      for (int64_t row = 0; row < p.batch; ++row) {
        const auto begin = all.out.begin() + (row * p.queries + first) * p.query_width();
        expected.insert(expected.end(), begin, begin + count * p.query_width());
      }
      expect_bitwise(what + ": queries " + std::to_string(first) + " + " + std::to_string(count), got.out,
                     expected);
    }
    // The route for a few queries has its own bits, the same for one query as for several.
    const Result four = run_forward(some_queries(p, 600, 4));
    for (int64_t t = 0; t < 4; ++t) {
      std::vector<float> expected;
      for (int64_t row = 0; row < p.batch; ++row) {
        const auto begin = four.out.begin() + (row * 4 + t) * p.query_width();
        expected.insert(expected.end(), begin, begin + p.query_width());
      }
      expect_bitwise(what + ": one of four queries", run_forward(some_queries(p, 600 + t, 1)).out, expected);
    }
  });
}

DUOKV_TEST(threads_change_no_bits) {
  Rng rng(11);
  Problem prefill = causal_problem(rng, 2, 331, 6, 2, 32, 50);
  random_documents(rng, prefill, 300);
  by_each_route([&](ops::ProductMode mode, const std::string& what) {
    prefill.mode = mode;
    const Problem decode = some_queries(prefill, 330, 1);
    for (const Problem* p : {static_cast<const Problem*>(&prefill), &decode}) {
      expect_same_for_any_threads(what + ", forward", [&](ops::Device* on) {
        Result r = run_forward(*p, on);
        append(r.out, r.lse);
        return r.out;
      });
    }
    expect_same_for_any_threads(what + ", backward", [&](ops::Device* on) {
      Result r = run_backward(prefill, on);
      for (size_t bank = 0; bank < 2; ++bank) append(r.dq, r.dk[bank]), append(r.dq, r.dv[bank]);
      return r.dq;
    });
  });
}

// ---- rules of the joint softmax

// A current entry with bias log m stands for m copies of it (paper eq. 3).
DUOKV_TEST(bias_log_m_equals_m_duplicates) {
  Rng rng(12);
  const int32_t length = 37;
  Problem biased = causal_problem(rng, 1, length, 6, 2, 64, 1);
  biased.banks[1].bias.resize(static_cast<size_t>(length));
  const auto copies = [](int32_t t) { return std::min(t + 1, 16); };
  for (int32_t t = 0; t < length; ++t) biased.banks[1].bias[t] = std::log(static_cast<float>(copies(t)));
  const Result got = run_backward(biased);
  const int64_t width = biased.kv_width();
  std::vector<float> out, lse, dq, dk, dv;
  for (int32_t t = 0; t < length; ++t) {
    Problem literal = some_queries(biased, t, 1);
    const RowEntries& current = biased.banks[1].rows[0];
    RowEntries repeated;
    repeated.first = t + 1 - copies(t);
    repeated.count = repeated.capacity = copies(t);
    for (int32_t i = 0; i < copies(t); ++i) {
      repeated.k.insert(repeated.k.end(), current.k.begin() + t * width, current.k.begin() + (t + 1) * width);
      repeated.v.insert(repeated.v.end(), current.v.begin() + t * width, current.v.begin() + (t + 1) * width);
    }
    literal.banks[1].window = 16;
    literal.banks[1].bias.clear();
    literal.banks[1].rows = {repeated};
    const Result one = run_backward(literal);
    append(out, one.out), append(dq, one.dq);
    lse.insert(lse.end(), one.lse.begin() + 6, one.lse.end());
    for (int64_t i = 0; i < width; ++i) {
      float key = 0, value = 0;
      for (int32_t c = 0; c < copies(t); ++c)
        key += one.dk[1][c * width + i], value += one.dv[1][c * width + i];
      dk.push_back(key), dv.push_back(value);
    }
  }
  expect_close("out", got.out, out, 2e-6, 2e-6);
  expect_close("lse of the local bank", {got.lse.begin() + length * 6, got.lse.end()}, lse, 2e-6, 2e-6);
  expect_close("dq", got.dq, dq, 5e-6, 5e-6);
  expect_close("dk of the local bank", got.dk[1], dk, 5e-6, 5e-6);
  expect_close("dv of the local bank", got.dv[1], dv, 5e-6, 5e-6);
}

// The weight of a lone entry does not depend on its key: no gradient, not even rounding noise.
DUOKV_TEST(a_lone_entry_has_no_score_gradient) {
  Rng rng(13);
  for (ops::ProductMode mode : {ops::ProductMode::FP32, ops::ProductMode::BF16}) {
    Problem p = causal_problem(rng, 2, 130, 6, 2, 64, 0);
    p.mode = mode;
    p.banks[0].window = 1;
    const Result got = run_backward(p);
    expect_bitwise("dq", got.dq, std::vector<float>(got.dq.size(), 0.0f));
    expect_bitwise("dk", got.dk[0], std::vector<float>(got.dk[0].size(), 0.0f));
    if (mode == ops::ProductMode::FP32) {
      for (int64_t i = 0; i < 64; ++i) {
        expect(got.out[i] == p.banks[0].rows[0].v[i], "a lone entry's value is returned as it is");
      }
    }
  }
  // Both banks, of which the global one holds nothing for these queries.
  Problem p = causal_problem(rng, 1, 50, 3, 1, 32, 1);
  p.banks[0].rows[0] = random_entries(rng, p, 0, 0);
  const Result got = run_backward(p);
  expect_bitwise("dq, the other bank empty", got.dq, std::vector<float>(got.dq.size(), 0.0f));
  expect_bitwise("dk, the other bank empty", got.dk[1], std::vector<float>(got.dk[1].size(), 0.0f));
}

DUOKV_TEST(nothing_to_see_gives_zeros) {
  Rng rng(14);
  for (int64_t queries : {1, 21}) {
    Problem p = some_queries(causal_problem(rng, 1, 61, 6, 2, 64, 8), 40, queries);
    for (BankEntries& bank : p.banks) bank.rows[0] = random_entries(rng, p, 3, 10);
    p.document_start.assign(static_cast<size_t>(queries), 40);
    const Result got = run_backward(p);
    expect_bitwise("out", got.out, std::vector<float>(got.out.size(), 0.0f));
    expect_bitwise("lse", got.lse, std::vector<float>(got.lse.size(), -kInfinity));
    expect_bitwise("dq", got.dq, std::vector<float>(got.dq.size(), 0.0f));
    for (size_t bank = 0; bank < 2; ++bank) {
      expect_bitwise("dk", got.dk[bank], std::vector<float>(got.dk[bank].size(), 0.0f));
      expect_bitwise("dv", got.dv[bank], std::vector<float>(got.dv[bank].size(), 0.0f));
    }
  }
}

// Scores hundreds apart between the banks: the smaller bank's log-sum-exp must not underflow. An FP32 score
// of 300 is known to 1.5e-5, and so is its weight.
DUOKV_TEST(each_bank_has_its_own_scale) {
  Rng rng(15);
  for (int64_t queries : {1, 33}) {
    for (float shift : {-300.0f, 300.0f}) {
      Problem p = some_queries(causal_problem(rng, 1, 77, 6, 2, 64, 8), 44, queries);
      p.banks[1].bias.assign(static_cast<size_t>(queries), shift);
      expect_forward_matches(shift < 0 ? "bias -300" : "bias 300", {p}, 3e-5);
    }
  }
}

// What a query sees surfaces when it is not finite; what it does not see changes no bit.
DUOKV_TEST(nonfinite_values) {
  Rng rng(16);
  Problem prefill = causal_problem(rng, 1, 300, 6, 2, 64, 16);
  by_each_route([&](ops::ProductMode mode, const std::string& what) {
    prefill.mode = mode;
    for (const int32_t at : {150, 151}) {  // either of a pair of positions
      // All queries, or two before the entry and two from it on.
      for (const auto& [first, queries] : {std::pair<int32_t, int64_t>{0, 300}, {at - 2, 4}}) {
        const Problem clean = some_queries(prefill, first, queries);
        const Result expected = run_forward(clean);
        std::vector<Poison> poisons{{Poison::kQuery, 0, at - first, kNaN}};
        for (size_t bank = 0; bank < 2; ++bank) {
          poisons.push_back({Poison::kKey, bank, at, kNaN});  // with a key of -inf a weight may be zero
          for (float value : {kNaN, kInfinity, -kInfinity})
            poisons.push_back({Poison::kValue, bank, at, value});
        }
        for (const Poison& poison : poisons) {
          const Result got = run_forward(poison.in(clean));
          const std::string wrong = misplaced_outputs(clean, poison, expected.out, got.out);
          expect(wrong.empty(), "%s: %s: %s", what.c_str(), poison.name().c_str(), wrong.c_str());
        }
      }
    }
  });
}

// The same of gradients.
DUOKV_TEST(nonfinite_gradients) {
  Rng rng(19);
  Problem clean = causal_problem(rng, 1, 70, 6, 2, 64, 5);
  for (size_t t = 29; t < 70; ++t) clean.document_start[t] = 29;
  by_each_route([&](ops::ProductMode mode, const std::string& what) {
    clean.mode = mode;
    const Result expected = run_backward(clean);
    for (const float value : {kNaN, kInfinity, -kInfinity}) {
      for (const int32_t at : {20, 21}) {
        for (const Poison& poison :
             {Poison{Poison::kKey, 0, at, value}, Poison{Poison::kKey, 1, at, value},
              Poison{Poison::kValue, 0, at, value}, Poison{Poison::kValue, 1, at, value},
              Poison{Poison::kQuery, 0, at, value}, Poison{Poison::kOutputGradient, 0, at, value}}) {
          const Problem p = poison.in(clean);
          const std::string wrong = misplaced_gradients(p, poison, expected, run_backward(p));
          expect(wrong.empty(), "%s: %s: %s", what.c_str(), poison.name().c_str(), wrong.c_str());
        }
      }
    }
  });
}

DUOKV_TEST(every_instruction_set) {
  for_each_instruction_set([](const std::string& name) {
    Rng rng(17);
    std::vector<Problem> problems, gradients;
    for (int i = 0; i < trials(60); ++i)
      problems.push_back(random_problem(rng, {.max_batch = 2, .max_queries = 40}));
    for (int i = 0; i < trials(40); ++i) {
      gradients.push_back(random_problem(rng, {.max_batch = 2, .max_queries = 40, .backward = true}));
    }
    expect_forward_matches(name, problems, 5e-6);
    expect_gradients_match(name, gradients, 1e-5);
  });
}

DUOKV_TEST(arguments_are_checked) {
  Rng rng(18);
  const Problem p = causal_problem(rng, 2, 9, 4, 2, 16, 3);
  Laid laid(device(), p);
  const auto forward = [&](const char* what, auto&& change) {
    ops::AttentionArgs args = laid.args;
    change(args);
    expect_status(table().attention_forward(device(), &args), ops::kInvalid, what);
  };
  forward("query heads", [](ops::AttentionArgs& a) { a.query_heads = 5; });
  for (float scale : {0.0f, -1.0f, kInfinity, kNaN})
    forward("scale", [&](ops::AttentionArgs& a) { a.scale = scale; });
  forward("bank count", [](ops::AttentionArgs& a) { a.bank_count = 3; });
  forward("window", [](ops::AttentionArgs& a) { a.banks[1].window = -1; });
  ops::BankRow rows[2] = {laid.args.banks[0].rows[0], laid.args.banks[0].rows[1]};
  rows[1].slot = rows[1].capacity;
  forward("slot", [&](ops::AttentionArgs& a) { a.banks[0].rows = rows; });
  rows[1].slot = 0, rows[1].count = rows[1].capacity + 1;
  forward("capacity", [&](ops::AttentionArgs& a) { a.banks[0].rows = rows; });
  rows[1].count = 3;
  ops::AttentionBackwardArgs backward = {.forward = laid.args, .dout = nullptr, .dq = nullptr, .grads = {}};
  backward.forward.banks[0].rows = rows;
  expect_status(table().attention_backward(device(), &backward), ops::kInvalid, "unequal counts");
  backward.forward = laid.args;
  backward.forward.lse = nullptr;
  expect_status(table().attention_backward(device(), &backward), ops::kInvalid, "no lse");
  backward.forward = laid.args;
  backward.forward.banks[1].dtype = ops::DType::BF16;
  expect_status(table().attention_backward(device(), &backward), ops::kInvalid, "BF16 bank");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
