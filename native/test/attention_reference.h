// Attention problems for the tests: random ones, their layout in ring banks, and their answers in FP64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "test/harness.h"

namespace duokv::test {

// One row's entries in a bank. Values by position, [count, kv_heads, head_dim].
struct RowEntries {
  int32_t first = 0, count = 0, slot = 0, capacity = 0;
  std::vector<float> k, v;
};

struct BankEntries {
  int32_t window = 0;
  ops::DType dtype = ops::DType::F32;
  bool head_major = false;  // [kv_heads, capacity, head_dim] in memory, else [capacity, kv_heads, head_dim]
  std::vector<RowEntries> rows;
  std::vector<float> bias;  // [batch, queries] or empty
};

struct Problem {
  int64_t batch = 1, queries = 1;
  int32_t query_heads = 1, kv_heads = 1, head_dim = 1;
  ops::ProductMode mode = ops::ProductMode::FP32;
  std::vector<int32_t> positions;       // [batch]
  std::vector<int32_t> document_start;  // [batch, queries]
  std::vector<float> q, dout;           // [batch, queries, query_heads, head_dim]
  std::vector<BankEntries> banks;

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  int64_t kv_width() const { return int64_t{kv_heads} * head_dim; }
  int64_t query_width() const { return int64_t{query_heads} * head_dim; }
};

struct Result {
  std::vector<float> out, lse, dq;
  std::vector<std::vector<float>> dk, dv;  // by bank, [batch, count, kv_heads, head_dim]
};

struct Reference {
  std::vector<double> out, lse, dq;
  std::vector<std::vector<double>> dk, dv;
  std::vector<double> largest;  // [batch, queries, query_heads] the largest weight
  // dq and dk with |dP| + |delta| for dP - delta and all terms positive: where weights are close to 0 or 1
  // the differences are small, and rounding is not.
  std::vector<double> dq_terms;
  std::vector<std::vector<double>> dk_terms;
};

// ---- FP64

// The entry indices a query sees: first … last-1.
struct Seen {
  int32_t first, last;
};

inline Seen seen(const Problem& p, size_t bank, int64_t row, int64_t t) {
  const BankEntries& entries = p.banks[bank];
  const RowEntries& r = entries.rows[row];
  const int32_t position = p.positions[row] + static_cast<int32_t>(t);
  int32_t begin = std::max(p.document_start[row * p.queries + t], r.first);
  if (entries.window > 0) begin = std::max(begin, position - entries.window + 1);
  const int32_t end = std::min(position + 1, r.first + r.count);
  return {begin - r.first, std::max(begin, end) - r.first};
}

// Under ProductMode::BF16 the reference rounds q, k, v and dout, not the weights.
inline Reference reference(const Problem& p) {
  const bool round = p.mode == ops::ProductMode::BF16;
  const auto operand = [&](float x, bool stored_bf16 = false) {
    return round || stored_bf16 ? to_bf16(x) : x;
  };
  const size_t banks = p.banks.size();
  const int64_t d = p.head_dim, group = p.query_heads / p.kv_heads;
  Reference ref;
  ref.out.assign(p.q.size(), 0);
  ref.dq.assign(p.q.size(), 0);
  ref.dq_terms.assign(p.q.size(), 0);
  ref.lse.assign(banks * p.batch * p.queries * p.query_heads, -std::numeric_limits<double>::infinity());
  for (const BankEntries& bank : p.banks) {
    size_t entries = 0;
    for (const RowEntries& r : bank.rows) entries += static_cast<size_t>(r.count);
    ref.dk.emplace_back(entries * p.kv_width(), 0.0);
    ref.dk_terms.emplace_back(entries * p.kv_width(), 0.0);
    ref.dv.emplace_back(entries * p.kv_width(), 0.0);
  }
  std::vector<int64_t> base(banks, 0);  // of the row's gradients
  for (int64_t row = 0; row < p.batch; ++row) {
    for (int64_t t = 0; t < p.queries; ++t) {
      for (int64_t h = 0; h < p.query_heads; ++h) {
        const int64_t at = ((row * p.queries + t) * p.query_heads + h) * d, kv = h / group * d;
        std::vector<double> scores;
        std::vector<std::pair<size_t, int64_t>> entries;  // bank, offset in the row's k and v
        double max = -std::numeric_limits<double>::infinity();
        for (size_t bank = 0; bank < banks; ++bank) {
          const RowEntries& r = p.banks[bank].rows[row];
          const bool stored_bf16 = p.banks[bank].dtype == ops::DType::BF16;
          const Seen s = seen(p, bank, row, t);
          double bank_max = -std::numeric_limits<double>::infinity(), bank_sum = 0;
          const size_t from = scores.size();
          for (int64_t e = s.first; e < s.last; ++e) {
            double score = 0;
            for (int64_t i = 0; i < d; ++i) {
              score += static_cast<double>(operand(p.q[at + i])) *
                       operand(r.k[e * p.kv_width() + kv + i], stored_bf16);
            }
            score *= static_cast<double>(p.scale());
            if (!p.banks[bank].bias.empty()) score += p.banks[bank].bias[row * p.queries + t];
            scores.push_back(score);
            entries.emplace_back(bank, e * p.kv_width() + kv);
            bank_max = std::max(bank_max, score);
          }
          if (from == scores.size()) continue;
          for (size_t i = from; i < scores.size(); ++i) bank_sum += std::exp(scores[i] - bank_max);
          ref.lse[((bank * p.batch + row) * p.queries + t) * p.query_heads + h] =
              bank_max + std::log(bank_sum);
          max = std::max(max, bank_max);
        }
        double sum = 0;
        for (double& score : scores) sum += score = std::exp(score - max);
        const auto value = [&](size_t i, int64_t j) {
          const auto [bank, offset] = entries[i];
          return operand(p.banks[bank].rows[row].v[offset + j], p.banks[bank].dtype == ops::DType::BF16);
        };
        const auto key = [&](size_t i, int64_t j) {
          const auto [bank, offset] = entries[i];
          return operand(p.banks[bank].rows[row].k[offset + j], p.banks[bank].dtype == ops::DType::BF16);
        };
        for (size_t i = 0; i < scores.size(); ++i) {
          scores[i] /= sum;
          for (int64_t j = 0; j < d; ++j) ref.out[at + j] += scores[i] * value(i, j);
        }
        ref.largest.push_back(scores.empty() ? 0 : *std::max_element(scores.begin(), scores.end()));
        if (p.dout.empty()) continue;
        double delta = 0;
        std::vector<double> dp(scores.size(), 0.0);
        for (size_t i = 0; i < scores.size(); ++i) {
          for (int64_t j = 0; j < d; ++j) dp[i] += static_cast<double>(operand(p.dout[at + j])) * value(i, j);
          delta += scores[i] * dp[i];
        }
        for (size_t i = 0; i < scores.size(); ++i) {
          const double ds =
              scores.size() == 1 ? 0 : scores[i] * (dp[i] - delta) * static_cast<double>(p.scale());
          const double terms =
              scores[i] * (std::abs(dp[i]) + std::abs(delta)) * static_cast<double>(p.scale());
          const auto [bank, offset] = entries[i];
          const int64_t gradient = base[bank] + offset;
          for (int64_t j = 0; j < d; ++j) {
            ref.dv[bank][gradient + j] += scores[i] * operand(p.dout[at + j]);
            ref.dk[bank][gradient + j] += ds * operand(p.q[at + j]);
            ref.dq[at + j] += ds * key(i, j);
            ref.dk_terms[bank][gradient + j] += terms * std::abs(operand(p.q[at + j]));
            ref.dq_terms[at + j] += terms * std::abs(key(i, j));
          }
        }
      }
    }
    for (size_t bank = 0; bank < banks; ++bank) base[bank] += p.banks[bank].rows[row].count * p.kv_width();
  }
  return ref;
}

// ---- running

// How a bank's rows lie in memory. Head-major strides need one capacity for all rows.
struct BankLayout {
  int32_t capacity = 0, longest = 0;
  int64_t head_stride, position_stride;

  BankLayout(const Problem& p, const BankEntries& bank) {
    for (const RowEntries& r : bank.rows) {
      capacity = std::max(capacity, r.capacity);
      longest = std::max(longest, r.count);
    }
    head_stride = bank.head_major ? int64_t{capacity} * p.head_dim : p.head_dim;
    position_stride = bank.head_major ? p.head_dim : p.kv_width();
  }
};

// The memory of one row's K or V, NaN in slots that hold nothing.
inline std::vector<float> lay_row(const Problem& p, const BankEntries& bank, const BankLayout& layout,
                                  const RowEntries& r, const std::vector<float>& values) {
  const int64_t elements = (bank.head_major ? layout.capacity : r.capacity) * p.kv_width();
  std::vector<float> memory(static_cast<size_t>(elements), std::numeric_limits<float>::quiet_NaN());
  for (int32_t e = 0; e < r.count; ++e) {
    const int64_t slot = (r.slot + e) % r.capacity;
    for (int32_t h = 0; h < p.kv_heads; ++h) {
      std::copy_n(values.begin() + e * p.kv_width() + h * p.head_dim, p.head_dim,
                  memory.begin() + h * layout.head_stride + slot * layout.position_stride);
    }
  }
  return memory;
}

// The values' BF16 bits.
inline std::vector<uint16_t> bf16_bits(const std::vector<float>& values) {
  std::vector<uint16_t> halves;
  for (float value : values) {
    const float rounded = std::isfinite(value) ? to_bf16(value) : value;
    uint32_t bits;
    std::memcpy(&bits, &rounded, 4);
    halves.push_back(static_cast<uint16_t>(bits >> 16));
  }
  return halves;
}

// A problem in device memory. Every row of a bank is its own allocation of exactly its capacity, and slots
// that hold nothing are NaN.
class Laid {
 public:
  Laid(ops::Device* device, const Problem& p)
      : p_(p),
        device_(device),
        q_(device, p.q),
        positions_(device, p.positions),
        document_start_(device, p.document_start),
        out_(device, static_cast<int64_t>(p.q.size())),
        lse_(device, static_cast<int64_t>(p.banks.size()) * p.batch * p.queries * p.query_heads) {
    args = {.batch = p.batch,
            .queries = p.queries,
            .query_heads = p.query_heads,
            .kv_heads = p.kv_heads,
            .head_dim = p.head_dim,
            .scale = p.scale(),
            .q = q_.data(),
            .positions = positions_.data(),
            .document_start = document_start_.data(),
            .bank_count = static_cast<int32_t>(p.banks.size()),
            .banks = {},
            .out = out_.data(),
            .lse = lse_.data(),
            .mode = p.mode};
    for (size_t bank = 0; bank < p.banks.size(); ++bank) args.banks[bank] = lay(bank);
  }

  Result forward() {
    check(table().attention_forward(device_, &args));
    Result result;
    result.out = out_.get();
    result.lse = lse_.get();
    return result;
  }

  // Forward, then backward into gradients that start from `start`.
  Result backward(float start = 0) {
    Result result = forward();
    const Array<float> dout(device_, p_.dout), dq(device_, static_cast<int64_t>(p_.q.size()));
    ops::AttentionBackwardArgs backward = {
        .forward = args, .dout = dout.data(), .dq = dq.data(), .grads = {}};
    std::vector<std::unique_ptr<Array<float>>> dk, dv;
    for (size_t bank = 0; bank < p_.banks.size(); ++bank) {
      size_t entries = 0;
      for (const RowEntries& r : p_.banks[bank].rows) entries += static_cast<size_t>(r.count);
      const std::vector<float> initial(entries * p_.kv_width(), start);
      dk.push_back(std::make_unique<Array<float>>(device_, initial));
      dv.push_back(std::make_unique<Array<float>>(device_, initial));
      backward.grads[bank] = {dk.back()->data(), dv.back()->data()};
    }
    check(table().attention_backward(device_, &backward));
    result.dq = dq.get();
    for (size_t bank = 0; bank < p_.banks.size(); ++bank) {
      result.dk.push_back(dk[bank]->get());
      result.dv.push_back(dv[bank]->get());
    }
    return result;
  }

  ops::AttentionArgs args;

 private:
  ops::Bank lay(size_t index) {
    const BankEntries& bank = p_.banks[index];
    const BankLayout layout(p_, bank);
    std::vector<ops::BankRow> rows;
    for (const RowEntries& r : bank.rows) {
      const void* k = store(lay_row(p_, bank, layout, r, r.k), bank.dtype);
      rows.push_back(
          {k, store(lay_row(p_, bank, layout, r, r.v), bank.dtype), r.first, r.count, r.slot, r.capacity});
    }
    rows_.push_back(std::make_unique<Array<ops::BankRow>>(device_, rows));
    const float* bias = nullptr;
    if (!bank.bias.empty()) {
      floats_.push_back(std::make_unique<Array<float>>(device_, bank.bias));
      bias = floats_.back()->data();
    }
    return {rows_.back()->data(),   layout.longest, bank.dtype, layout.head_stride,
            layout.position_stride, bank.window,    bias};
  }

  const void* store(const std::vector<float>& values, ops::DType dtype) {
    if (dtype == ops::DType::F32) {
      floats_.push_back(std::make_unique<Array<float>>(device_, values));
      return floats_.back()->data();
    }
    halves_.push_back(std::make_unique<Array<uint16_t>>(device_, bf16_bits(values)));
    return halves_.back()->data();
  }

  const Problem& p_;
  ops::Device* device_;
  Array<float> q_;
  Array<int32_t> positions_, document_start_;
  Array<float> out_, lse_;
  std::vector<std::unique_ptr<Array<ops::BankRow>>> rows_;
  std::vector<std::unique_ptr<Array<float>>> floats_;
  std::vector<std::unique_ptr<Array<uint16_t>>> halves_;
};

inline Result run_forward(const Problem& p, ops::Device* on = device()) { return Laid(on, p).forward(); }
inline Result run_backward(const Problem& p, ops::Device* on = device()) { return Laid(on, p).backward(); }

// ---- making problems

// Entries first … first+count-1 of one row with random values, at a random place of a ring with room to
// spare.
inline RowEntries random_entries(Rng& rng, const Problem& p, int32_t first, int32_t count) {
  RowEntries r;
  r.first = first;
  r.count = count;
  r.capacity = std::max(1, count + rng.integer(0, 3));
  r.slot = rng.integer(0, r.capacity - 1);
  r.k = rng.normals(count * p.kv_width());
  r.v = rng.normals(count * p.kv_width());
  return r;
}

// Document starts of queries at positions[row] …: document lengths between 1 and `longest`, the first one may
// have begun earlier.
inline void random_documents(Rng& rng, Problem& p, int32_t longest) {
  p.document_start.clear();
  for (int64_t row = 0; row < p.batch; ++row) {
    int32_t start = 0, length = rng.integer(1, longest);
    for (int32_t position = 0; position < p.positions[row] + p.queries; ++position) {
      if (position >= start + length) start = position, length = rng.integer(1, longest);
      if (position >= p.positions[row]) p.document_start.push_back(start);
    }
  }
}

inline void random_queries(Rng& rng, Problem& p) {
  p.q = rng.normals(p.batch * p.queries * p.query_width());
  p.dout = rng.normals(p.batch * p.queries * p.query_width());
}

// Row `row` of a problem as a problem of its own.
inline Problem one_row(const Problem& p, int64_t row) {
  Problem one = p;
  const auto slice = [&](auto& values, int64_t width) {
    if (!values.empty()) values = {values.begin() + row * width, values.begin() + (row + 1) * width};
  };
  one.batch = 1;
  slice(one.positions, 1);
  slice(one.document_start, p.queries);
  slice(one.q, p.queries * p.query_width());
  slice(one.dout, p.queries * p.query_width());
  for (BankEntries& bank : one.banks) {
    slice(bank.rows, 1);
    slice(bank.bias, p.queries);
  }
  return one;
}

// Queries first … first+count-1 of every row.
inline Problem some_queries(const Problem& p, int64_t first, int64_t count) {
  Problem some = p;
  some.queries = count;
  for (int32_t& position : some.positions) position += static_cast<int32_t>(first);
  const auto slice = [&](auto& values, int64_t width) {
    auto all = std::move(values);
    values.clear();
    if (all.empty()) return;
    for (int64_t row = 0; row < p.batch; ++row) {
      const auto begin = all.begin() + (row * p.queries + first) * width;
      values.insert(values.end(), begin, begin + count * width);
    }
  };
  slice(some.document_start, 1);
  slice(some.q, p.query_width());
  slice(some.dout, p.query_width());
  for (BankEntries& bank : some.banks) slice(bank.bias, 1);
  return some;
}

// ---- values that are not finite

// In KV head 0 of one row: the key or value of an entry, or a query or its output gradient in the first query
// head.
struct Poison {
  enum Place { kKey, kValue, kQuery, kOutputGradient } place;
  size_t bank;  // of a key or value
  int32_t at;   // entry or query
  float value;

  std::string name() const {
    const char* const names[] = {"key", "value", "query", "output gradient"};
    return std::string(names[place]) + " " + std::to_string(value) + " in bank " + std::to_string(bank);
  }
  Problem in(Problem p) const {
    RowEntries& r = p.banks[bank].rows[0];
    const int64_t stride = place <= kValue ? p.kv_width() : p.query_width();
    std::vector<float>& values = place == kKey ? r.k : place == kValue ? r.v : place == kQuery ? p.q : p.dout;
    std::fill_n(values.begin() + at * stride, p.head_dim, value);
    return p;
  }
  // Whether query t, in the first query head, has to do with it.
  bool reaches(const Problem& p, int64_t t) const { return place <= kValue ? sees(p, bank, t, at) : t == at; }
  static bool sees(const Problem& p, size_t bank, int64_t t, int32_t entry) {
    const Seen s = seen(p, bank, 0, t);
    return s.first <= entry && entry < s.last;
  }
};

// Compares vectors that a poison has and has not reached, and says what is wrong with them: those that it has
// not must have the bits they have without it, and those that it has, if `surfaces`, no finite element.
inline std::string misplaced(const std::string& what, const std::vector<float>& clean,
                             const std::vector<float>& got, int64_t width, bool surfaces,
                             const std::vector<bool>& reached) {
  int64_t changed = 0, finite = 0;
  for (size_t vector = 0; vector < reached.size(); ++vector) {
    for (int64_t i = 0; i < width; ++i) {
      const size_t at = vector * static_cast<size_t>(width) + static_cast<size_t>(i);
      changed += !reached[vector] && std::memcmp(&got[at], &clean[at], 4) != 0;
      finite += reached[vector] && surfaces && std::isfinite(got[at]);
    }
  }
  if (changed == 0 && finite == 0) return "";
  return what + ": " + std::to_string(changed) + " elements changed and " + std::to_string(finite) +
         " stayed finite; ";
}

// The same of outputs, and of gradients. Problems of one row.
inline std::string misplaced_outputs(const Problem& p, const Poison& poison, const std::vector<float>& clean,
                                     const std::vector<float>& got) {
  const int64_t group = p.query_heads / p.kv_heads;
  std::vector<bool> reached;
  for (int64_t t = 0; t < p.queries; ++t) {
    for (int64_t h = 0; h < p.query_heads; ++h)
      reached.push_back(poison.reaches(p, t) && h < (poison.place == Poison::kQuery ? 1 : group));
  }
  return misplaced("out", clean, got, p.head_dim, !(std::abs(poison.value) <= 0x1p127f), reached);
}
template <class Gradients>
std::string misplaced_gradients(const Problem& p, const Poison& poison, const Gradients& clean,
                                const Gradients& got) {
  const bool surfaces = !(std::abs(poison.value) <= 0x1p127f);
  const int64_t group = p.query_heads / p.kv_heads;
  std::vector<bool> queries;
  for (int64_t t = 0; t < p.queries; ++t) {
    for (int64_t h = 0; h < p.query_heads; ++h)
      queries.push_back(poison.reaches(p, t) && h < (poison.place >= Poison::kQuery ? 1 : group));
  }
  std::string wrong = misplaced("dq", clean.dq, got.dq, p.head_dim, surfaces, queries);
  for (size_t bank = 0; bank < p.banks.size(); ++bank) {
    std::vector<bool> entries;
    for (int32_t e = 0; e < p.banks[bank].rows[0].count; ++e) {
      bool reached = false;
      for (int64_t t = 0; t < p.queries; ++t)
        reached = reached || (poison.reaches(p, t) && Poison::sees(p, bank, t, e));
      for (int32_t h = 0; h < p.kv_heads; ++h) entries.push_back(reached && h == 0);
    }
    const std::string of_bank = " of bank " + std::to_string(bank);
    wrong += misplaced("dk" + of_bank, clean.dk[bank], got.dk[bank], p.head_dim, surfaces, entries);
    // Weights do not depend on values.
    wrong += misplaced("dv" + of_bank, clean.dv[bank], got.dv[bank], p.head_dim,
                       surfaces && poison.place != Poison::kValue, entries);
  }
  return wrong;
}

}  // namespace duokv::test
