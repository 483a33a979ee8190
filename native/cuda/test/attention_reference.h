// Attention problems in CUDA device memory. The problems and their answers in FP64 are those of the CPU's
// tests; nothing of the CPU backend is linked.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/operations.h"
#include "cuda/test/harness.h"
#include "test/attention_reference.h"

namespace duokv::cuda::test {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

using duokv::test::BankEntries;
using duokv::test::Problem;
using duokv::test::Reference;
using duokv::test::reference;
using duokv::test::Rng;
using duokv::test::RowEntries;

// A problem laid out for the launchers. Every row of a bank is its own allocation of exactly its capacity,
// and slots that hold nothing are NaN. The problem must outlive it.
class DeviceProblem {
 public:
  explicit DeviceProblem(const Problem& p)
      : p_(p),
        q_(p.q),
        positions_(p.positions),
        document_start_(p.document_start),
        out_(std::vector<float>(p.q.size(), std::numeric_limits<float>::quiet_NaN())),
        lse_(std::vector<float>(p.banks.size() * static_cast<size_t>(p.batch * p.queries * p.query_heads),
                                std::numeric_limits<float>::quiet_NaN())) {
    args.batch = p.batch;
    args.queries = p.queries;
    args.query_heads = p.query_heads;
    args.kv_heads = p.kv_heads;
    args.head_dim = p.head_dim;
    args.scale = p.scale();
    args.q = q_.data();
    args.positions = positions_.data();
    args.document_start = document_start_.data();
    args.bank_count = static_cast<int32_t>(p.banks.size());
    for (size_t bank = 0; bank < p.banks.size(); ++bank) args.banks[bank] = lay(bank);
    args.out = out_.data();
    args.lse = lse_.data();
    args.mode = p.mode;
  }

  std::vector<float> out() const { return out_.get(); }
  std::vector<float> lse() const { return lse_.get(); }

  // Arguments of the backward pass, whose gradients of entries start from `start`. Call once.
  ops::AttentionBackwardArgs backward(float start = 0) {
    dout_ = keep(p_.dout);
    dq_ = keep(std::vector<float>(p_.q.size(), std::numeric_limits<float>::quiet_NaN()));
    ops::AttentionBackwardArgs backward = {};
    backward.forward = args;
    backward.dout = dout_->data();
    backward.dq = dq_->data();
    for (size_t bank = 0; bank < p_.banks.size(); ++bank) {
      size_t entries = 0;
      for (const RowEntries& r : p_.banks[bank].rows) entries += static_cast<size_t>(r.count);
      const std::vector<float> initial(entries * static_cast<size_t>(p_.kv_width()), start);
      dk_[bank] = keep(initial);
      dv_[bank] = keep(initial);
      backward.grads[bank] = {dk_[bank]->data(), dv_[bank]->data()};
    }
    return backward;
  }
  std::vector<float> dq() const { return dq_->get(); }
  std::vector<float> dk(size_t bank) const { return dk_[bank]->get(); }
  std::vector<float> dv(size_t bank) const { return dv_[bank]->get(); }

  ops::AttentionArgs args = {};

 private:
  Array<float>* keep(const std::vector<float>& values) {
    floats_.push_back(std::make_unique<Array<float>>(values));
    return floats_.back().get();
  }

  ops::Bank lay(size_t index) {
    const BankEntries& bank = p_.banks[index];
    const duokv::test::BankLayout layout(p_, bank);
    std::vector<ops::BankRow> rows;
    for (const RowEntries& r : bank.rows) {
      const void* k = store(lay_row(p_, bank, layout, r, r.k), bank.dtype);
      rows.push_back(
          {k, store(lay_row(p_, bank, layout, r, r.v), bank.dtype), r.first, r.count, r.slot, r.capacity});
    }
    rows_.push_back(std::make_unique<Array<ops::BankRow>>(rows));
    ops::Bank laid = {};
    laid.rows = rows_.back()->data();
    laid.longest = layout.longest;
    laid.dtype = bank.dtype;
    laid.head_stride = layout.head_stride;
    laid.position_stride = layout.position_stride;
    laid.window = bank.window;
    laid.bias = bank.bias.empty() ? nullptr : keep(bank.bias)->data();
    return laid;
  }

  const void* store(const std::vector<float>& values, ops::DType dtype) {
    if (dtype == ops::DType::F32) return keep(values)->data();
    halves_.push_back(std::make_unique<Array<uint16_t>>(duokv::test::bf16_bits(values)));
    return halves_.back()->data();
  }

  const Problem& p_;
  Array<float> q_;
  Array<int32_t> positions_, document_start_;
  Array<float> out_, lse_;
  Array<float>*dout_ = nullptr, *dq_ = nullptr, *dk_[2] = {}, *dv_[2] = {};
  std::vector<std::unique_ptr<Array<ops::BankRow>>> rows_;
  std::vector<std::unique_ptr<Array<float>>> floats_;
  std::vector<std::unique_ptr<Array<uint16_t>>> halves_;
};

// Banks that show nothing have -inf, exactly; the others are compared as expect_relative does.
inline bool expect_lse(const std::string& what, const std::vector<float>& got,
                       const std::vector<double>& reference, double limit) {
  std::vector<float> finite_got;
  std::vector<double> finite_reference;
  for (size_t i = 0; i < reference.size() && i < got.size(); ++i) {
    if (std::isinf(reference[i])) {
      if (expect(std::isinf(got[i]) && got[i] < 0, "%s: element %zu is %g, not -inf", what.c_str(), i,
                 static_cast<double>(got[i])))
        continue;
      return false;
    }
    finite_got.push_back(got[i]);
    finite_reference.push_back(reference[i]);
  }
  return expect_relative(what, finite_got, finite_reference, limit);
}

// Causal self-attention of `length` positions over a bank with everything and, when window > 0, a second one
// with a window: the shape of training. One document; entries at random places of rings.
inline Problem causal_problem(Rng& rng, int64_t batch, int32_t length, int32_t query_heads, int32_t kv_heads,
                              int32_t head_dim, int32_t window) {
  Problem p;
  p.batch = batch, p.queries = length;
  p.query_heads = query_heads, p.kv_heads = kv_heads, p.head_dim = head_dim;
  p.positions.assign(static_cast<size_t>(batch), 0);
  p.document_start.assign(static_cast<size_t>(batch * length), 0);
  duokv::test::random_queries(rng, p);
  p.banks.resize(window > 0 ? 2 : 1);
  for (BankEntries& bank : p.banks) {
    for (int64_t row = 0; row < batch; ++row)
      bank.rows.push_back(duokv::test::random_entries(rng, p, 0, length));
  }
  if (window > 0) p.banks[1].window = window;
  return p;
}

}  // namespace duokv::cuda::test
