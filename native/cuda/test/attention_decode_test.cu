// Attention forward, one query per row, against FP64.
#include <array>

#include "cuda/test/attention_reference.h"

namespace duokv::cuda::test {
namespace {

using duokv::test::one_row;
using duokv::test::random_documents;
using duokv::test::random_entries;
using duokv::test::random_queries;
using ops::DType;
using ops::ProductMode;

std::vector<float> launch(DeviceProblem& device) {
  Array<char> workspace(std::max<size_t>(attention_decode_workspace(device.args), 1));
  check(attention_decode(device.args, workspace.data(), stream()));
  return device.out();
}

struct Shape {
  int64_t batch;
  int32_t query_heads, kv_heads, head_dim, history, longest_document, windows[2];  // window -1: no such bank
};

// One query per row at the end of `history` stored positions (fewer in other rows), over rings.
Problem problem_of(const Shape& s, Rng& rng, DType dtype = DType::F32) {
  Problem p;
  p.batch = s.batch, p.queries = 1;
  p.query_heads = s.query_heads, p.kv_heads = s.kv_heads, p.head_dim = s.head_dim;
  for (int64_t row = 0; row < s.batch; ++row)
    p.positions.push_back(row == 0 ? s.history : rng.integer(0, s.history));
  random_documents(rng, p, s.longest_document);
  random_queries(rng, p);
  for (const int32_t window : s.windows) {
    if (window < 0) continue;
    BankEntries bank;
    bank.window = window;
    bank.dtype = dtype;
    bank.head_major = rng.integer(0, 1);
    for (int64_t row = 0; row < s.batch; ++row) {
      const int32_t length = p.positions[static_cast<size_t>(row)] + 1;
      const int32_t count = window > 0 ? std::min(length, window + 1) : length;
      bank.rows.push_back(random_entries(rng, p, length - count, count));
    }
    if (window > 0) bank.bias = rng.normals(s.batch, 2);
    p.banks.push_back(std::move(bank));
  }
  return p;
}

const Shape kShapes[] = {
    {1, 1, 1, 16, 0, 9, {0, -1}},         // the first position
    {9, 2, 1, 32, 40, 5, {0, 1}},         // current-only beside everything
    {2, 6, 2, 16, 300, 400, {0, 3}},      // several chunks
    {3, 3, 3, 64, 61, 1, {500, -1}},      // one-token documents
    {1, 12, 4, 64, 257, 1000, {0, 128}},  // the real window
    {2, 7, 1, 128, 97, 60, {0, 16}},      // a group of seven
    {5, 16, 1, 128, 40, 60, {64, 8}},     // a group that needs more shared memory than is given unasked
    {1, 2, 1, 128, 700, 99999, {0, -1}},  // more chunks than are added up at once
};

// In one of the modes for each choice, with limits of its own.
void compare_modes(const std::string& what, Problem p, size_t first_mode) {
  for_each_choice([&](size_t choice) {
    p.mode = std::array{ProductMode::FP32, ProductMode::TF32x3, ProductMode::BF16}[(choice + first_mode) % 3];
    const Reference expected = reference(p);
    DeviceProblem device(p);
    const std::string name = what + ", mode " + std::to_string(static_cast<int>(p.mode));
    const double limit = p.mode == ProductMode::BF16 ? 2e-2 : 1e-5;
    expect_relative(name + ": out", launch(device), expected.out, limit);
    expect_lse(name + ": lse", device.lse(), expected.lse, limit);
  });
}

DUOKV_CASE(odd_shapes) {
  for (size_t i = 0; i < std::size(kShapes); ++i) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      Rng rng(100 + i);
      compare_modes("shape " + std::to_string(i), problem_of(kShapes[i], rng, dtype), i);
    }
  }
}

DUOKV_CASE(every_batch) {
  for (size_t batch = 1; batch <= 9; ++batch) {
    Rng rng(400 + batch);
    const Problem p = problem_of({static_cast<int64_t>(batch), 2, 1, 16, 40, 30, {0, 4}}, rng);
    compare_modes("batch " + std::to_string(batch), p, batch);
  }
}

// Documents that start at a multiple of a chunk and one position to either side.
DUOKV_CASE(documents_at_chunk_edges) {
  for (const int32_t start : {31, 32, 33, 63, 64, 65, 127, 128, 129}) {
    Rng rng(static_cast<uint64_t>(start));
    Problem p = problem_of({1, 3, 1, 64, 140, 1000, {0, 128}}, rng);
    p.document_start = {start};
    const Reference expected = reference(p);
    DeviceProblem device(p);
    expect_relative("out from " + std::to_string(start), launch(device), expected.out, 1e-5);
  }
}

// A row's bits are those it has alone, and a launch sized for more entries changes nothing.
DUOKV_CASE(rows_do_not_depend_on_their_batch) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    Rng rng(13);
    const Problem p = problem_of({6, 6, 2, 64, 150, 100, {0, 16}}, rng, dtype);
    DeviceProblem device(p);
    const std::vector<float> out = launch(device);
    for (ops::Bank& bank : device.args.banks) bank.longest = bank.longest * 3 + 200;
    expect_equal("longer banks", launch(device), out);
    const auto width = static_cast<ptrdiff_t>(p.query_width());
    for (int64_t row = 0; row < p.batch; ++row) {
      const Problem single = one_row(p, row);
      DeviceProblem alone(single);
      expect_equal("a row alone", launch(alone),
                   std::vector<float>(out.begin() + row * width, out.begin() + (row + 1) * width));
    }
  }
}

DUOKV_CASE(nothing_to_see_gives_zeros) {
  Rng rng(10);
  Problem p = problem_of({2, 4, 2, 32, 90, 1000, {0, 8}}, rng);
  p.positions = {90, 90};
  p.document_start = {90, 90};
  for (BankEntries& bank : p.banks)
    for (RowEntries& row : bank.rows) row = random_entries(rng, p, 3, 50);
  DeviceProblem device(p);
  const std::vector<float> out = launch(device);
  expect_equal("out", out, std::vector<float>(out.size(), 0.0f));
  expect_equal("lse", device.lse(), std::vector<float>(2 * 2 * 4, -kInf));
}

// Scores hundreds apart between the banks: the smaller bank's log-sum-exp must not underflow.
DUOKV_CASE(each_bank_has_its_own_scale) {
  for (const float shift : {-300.0f, 300.0f}) {
    Rng rng(9);
    Problem p = problem_of({2, 2, 1, 32, 70, 1000, {0, 8}}, rng);
    p.banks[1].bias.assign(2, shift);
    const Reference expected = reference(p);
    DeviceProblem device(p);
    expect_relative("out", launch(device), expected.out, 5e-5);
    expect_lse("lse", device.lse(), expected.lse, 5e-5);
  }
}

DUOKV_CASE(nonfinite_values_surface) {
  constexpr int32_t kDim = 32, kAt = 40;
  Rng rng(11);
  const Problem clean = problem_of({1, 4, 2, kDim, 80, 1000, {0, 16}}, rng);
  DeviceProblem untouched(clean);
  const std::vector<float> expected = launch(untouched);
  const auto heads = [&](const char* what, const Problem& p, bool sees) {
    DeviceProblem device(p);
    const std::vector<float> out = launch(device);
    for (size_t i = 0; i < out.size(); ++i) {
      const bool poisoned = sees && i < out.size() / 2;
      expect(poisoned ? !std::isfinite(out[i]) : out[i] == expected[i], "%s: element %zu is %g", what, i,
             static_cast<double>(out[i]));
    }
  };
  for (const float poison : {kNan, kInf}) {
    Problem p = clean;
    std::fill_n(p.banks[0].rows[0].v.begin() + kAt * p.kv_width(), kDim, poison);
    heads("value", p, true);
    p.document_start = {kAt + 1};  // now nobody sees it
    Problem hidden = clean;
    hidden.document_start = p.document_start;
    DeviceProblem a(p), b(hidden);
    expect_equal("a value that is not seen", launch(a), launch(b));
    p = clean;
    std::fill_n(p.q.begin(), 2 * kDim, poison);
    heads("query", p, true);
  }
  Problem p = clean;
  std::fill_n(p.banks[0].rows[0].k.begin() + kAt * p.kv_width(), kDim, kNan);
  heads("key", p, true);
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
