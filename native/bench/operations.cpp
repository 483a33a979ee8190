#include "bench/operations.h"

#include <algorithm>
#include <memory>

#include "ops/rounding.h"
#include "test/harness.h"

namespace duokv::bench {
namespace {

using test::Array;
using test::check;
using test::table;
using Mode = ops::ProductMode;
using Call = std::function<void(int64_t)>;

constexpr int64_t kWidth = 768, kFfn = 2048, kQkv = 1280, kHeadDim = 64, kHeads = 12, kKvHeads = 4;
constexpr int64_t kWindow = 128;

const char* name_of(Mode mode) { return mode == Mode::BF16 ? "bf16" : "fp32"; }

// Values in [-1, 1) that repeat after a while, made fast enough for an emulated processor.
std::vector<float> values(int64_t count) {
  std::vector<float> x(static_cast<size_t>(count));
  const size_t period = std::min<size_t>(x.size(), 4099);
  uint32_t state = 1;
  for (size_t i = 0; i < period; ++i) {
    state = state * 1664525u + 1013904223u;
    x[i] = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
  for (size_t i = period; i < x.size(); i += period)
    std::copy_n(x.begin(), std::min(period, x.size() - i), x.begin() + static_cast<int64_t>(i));
  return x;
}

using Floats = std::shared_ptr<Array<float>>;
Floats floats(ops::Device* device, int64_t count) {
  return std::make_shared<Array<float>>(device, values(count));
}

// Weights as a session serves them, packed.
class Packed {
 public:
  Packed(ops::Device* device, int64_t n, int64_t k, int64_t copies) : device_(device), n_(n), k_(k) {
    check(table().pack_cache_create(device, &packs_));
    for (int64_t i = 0; i < copies; ++i) data_.push_back(floats(device, n * k));
  }
  ~Packed() { table().pack_cache_destroy(device_, packs_); }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  ops::Weight at(int64_t i) const {
    return {data_[static_cast<size_t>(i) % data_.size()]->data(), n_, k_, 1, packs_};
  }

 private:
  ops::Device* device_;
  int64_t n_, k_;
  ops::PackCache* packs_ = nullptr;
  std::vector<Floats> data_;
};

Operation served(ops::Device* device, const std::string& name, Mode mode, int64_t m, int64_t n, int64_t k,
                 int64_t uncached) {
  const int64_t weights = n * k * (mode == Mode::BF16 ? 2 : 4), copies = ceil_div(uncached, weights);
  // Many rows use each weight often enough for the caches.
  const double bytes = m <= 8 ? static_cast<double>(weights) : 0;
  return {name, name_of(mode), 2.0 * static_cast<double>(m * n * k), bytes, [=]() -> Call {
            auto w = std::make_shared<Packed>(device, n, k, copies);
            const Floats x = floats(device, m * k), y = floats(device, m * n);
            const Call call = [=](int64_t i) {
              const ops::LinearArgs args = {.x = x->data(),
                                            .m = m,
                                            .per_row = m,
                                            .norm = {},
                                            .count = 1,
                                            .w = {w->at(i)},
                                            .y = {y->data()},
                                            .residual = nullptr,
                                            .round_output = mode == Mode::BF16,
                                            .mode = mode};
              check(table().linear_forward(device, &args));
            };
            for (int64_t i = 0; i < copies; ++i) call(i);
            return call;
          }};
}

Operation backward_product(ops::Device* device, Mode mode, int64_t m, bool of_weight) {
  const int64_t n = kFfn, k = kWidth;
  return {of_weight ? "linear backward, dW of gate" : "linear backward, dx of gate", name_of(mode),
          2.0 * static_cast<double>(m * n * k), 0, [=]() -> Call {
            const Floats x = floats(device, m * k), dy = floats(device, m * n), w = floats(device, n * k);
            const Floats dx = floats(device, m * k), dw = floats(device, n * k);
            return [=](int64_t) {
              const ops::LinearBackwardArgs args = {.x = x->data(),
                                                    .dy = dy->data(),
                                                    .m = m,
                                                    .w = {w->data(), n, k, 1, nullptr},
                                                    .dx = of_weight ? nullptr : dx->data(),
                                                    .accumulate_dx = false,
                                                    .dw = of_weight ? dw->data() : nullptr,
                                                    .mode = mode};
              check(table().linear_backward(device, &args));
            };
          }};
}

Operation loss(ops::Device* device, Mode mode, int64_t m, int64_t vocabulary) {
  const double product = 2.0 * static_cast<double>(m * kWidth * vocabulary);
  return {"cross-entropy with gradients", name_of(mode), 3 * product, 0, [=]() -> Call {
            const Floats x = floats(device, m * kWidth), e = floats(device, vocabulary * kWidth);
            const Floats dx = floats(device, m * kWidth), de = floats(device, vocabulary * kWidth);
            const Floats nll = floats(device, m), scale = floats(device, m);
            std::vector<int32_t> ids(static_cast<size_t>(m));
            for (size_t i = 0; i < ids.size(); ++i)
              ids[i] = static_cast<int32_t>(static_cast<int64_t>(i) * 7919 % vocabulary);
            const auto targets = std::make_shared<Array<int32_t>>(device, ids);
            return [=](int64_t) {
              const ops::LinearCrossEntropyArgs args = {
                  .x = x->data(),
                  .m = m,
                  .embedding = {e->data(), vocabulary, kWidth, 1, nullptr},
                  .targets = targets->data(),
                  .token_scale = scale->data(),
                  .nll = nll->data(),
                  .dx = dx->data(),
                  .dembedding = de->data(),
                  .mode = mode};
              check(table().linear_cross_entropy(device, &args));
            };
          }};
}

// Rows whose last `queries` positions read a global bank of `length` entries and a window of it.
struct AttentionShape {
  int64_t rows, queries, length, copies;
  ops::DType stored;
  Mode mode;

  int64_t kept() const { return std::min(length, kWindow + queries - 1); }
  int64_t bank_bytes() const {
    const int64_t entry = 2 * kKvHeads * kHeadDim * (stored == ops::DType::BF16 ? 2 : 4);
    return rows * (length + kept()) * entry;
  }
  double pairs() const {
    double sum = 0;
    for (int64_t t = length - queries; t < length; ++t)
      sum += static_cast<double>(t + 1 + std::min(t + 1, kWindow));
    return static_cast<double>(rows) * sum;
  }
};

class Attention {
 public:
  Attention(ops::Device* device, const AttentionShape& shape)
      : device_(device),
        shape_(shape),
        q_(floats(device, shape.rows * shape.queries * kHeads * kHeadDim)),
        dout_(floats(device, shape.rows * shape.queries * kHeads * kHeadDim)),
        out_(floats(device, shape.rows * shape.queries * kHeads * kHeadDim)),
        dq_(floats(device, shape.rows * shape.queries * kHeads * kHeadDim)),
        lse_(floats(device, 2 * shape.rows * shape.queries * kHeads)),
        positions_(device, std::vector<int32_t>(static_cast<size_t>(shape.rows),
                                                static_cast<int32_t>(shape.length - shape.queries))),
        document_start_(device, std::vector<int32_t>(static_cast<size_t>(shape.rows * shape.queries), 0)) {
    for (int64_t i = 0; i < shape.copies * 2 * shape.rows; ++i) {
      const int64_t count = i / shape.rows % 2 == 0 ? shape.length : shape.kept();
      const int64_t elements = count * kKvHeads * kHeadDim;
      // A BF16 bank takes half of this memory; as BF16 these values are finite.
      const Floats k = bank_values(elements), v = bank_values(elements);
      rows_.push_back({k->data(), v->data(), static_cast<int32_t>(shape.length - count),
                       static_cast<int32_t>(count), 0, static_cast<int32_t>(count)});
      memory_.push_back(k), memory_.push_back(v);
    }
    for (int64_t count : {shape.length, shape.kept()}) {
      const int64_t elements = shape.rows * count * kKvHeads * kHeadDim;
      gradients_.push_back({floats(device, elements), floats(device, elements)});
    }
  }

  void forward(int64_t i) const {
    const ops::AttentionArgs args = arguments(i);
    check(table().attention_forward(device_, &args));
  }

  void backward(int64_t i) const {
    ops::AttentionBackwardArgs args = {
        .forward = arguments(i), .dout = dout_->data(), .dq = dq_->data(), .grads = {}};
    for (size_t bank = 0; bank < 2; ++bank)
      args.grads[bank] = {gradients_[bank][0]->data(), gradients_[bank][1]->data()};
    check(table().attention_backward(device_, &args));
  }

 private:
  Floats bank_values(int64_t count) const {
    if (shape_.stored == ops::DType::F32) return floats(device_, count);
    return std::make_shared<Array<float>>(device_, std::vector<float>(static_cast<size_t>(count), 0.5f));
  }

  ops::AttentionArgs arguments(int64_t i) const {
    ops::AttentionArgs args = {.batch = shape_.rows,
                               .queries = shape_.queries,
                               .query_heads = kHeads,
                               .kv_heads = kKvHeads,
                               .head_dim = kHeadDim,
                               .scale = 0.125f,
                               .q = q_->data(),
                               .positions = positions_.data(),
                               .document_start = document_start_.data(),
                               .bank_count = 2,
                               .banks = {},
                               .out = out_->data(),
                               .lse = lse_->data(),
                               .mode = shape_.mode};
    for (int64_t bank = 0; bank < 2; ++bank) {
      const auto first = static_cast<size_t>((i % shape_.copies * 2 + bank) * shape_.rows);
      const ops::BankRow& row = rows_[first];
      const auto window = static_cast<int32_t>(bank == 0 ? 0 : kWindow);
      args.banks[bank] = {&row, row.count, shape_.stored, row.count * kHeadDim, kHeadDim, window, nullptr};
    }
    return args;
  }

  ops::Device* device_;
  AttentionShape shape_;
  Floats q_, dout_, out_, dq_, lse_;
  Array<int32_t> positions_, document_start_;
  std::vector<ops::BankRow> rows_;  // [copy, bank, row]
  std::vector<std::vector<Floats>> gradients_;
  std::vector<Floats> memory_;
};

Operation attention(ops::Device* device, const std::string& name, const AttentionShape& shape,
                    bool backward) {
  const double flops = shape.pairs() * 4 * kHeadDim * kHeads * (backward ? 2.5 : 1);
  const double bytes = shape.queries == 1 ? static_cast<double>(shape.bank_bytes()) : 0;
  return {name, name_of(shape.mode), flops, bytes, [=]() -> Call {
            auto problem = std::make_shared<Attention>(device, shape);
            problem->forward(0);
            if (backward) return [=](int64_t i) { problem->backward(i); };
            return [=](int64_t i) { problem->forward(i); };
          }};
}

// One token by temperature and top-p; `bytes` are the logits, read once.
Operation sampling(ops::Device* device, int64_t vocabulary) {
  return {"sample, 1 row", "fp32", 0, 4.0 * static_cast<double>(vocabulary), [=]() -> Call {
            std::vector<float> spread = values(vocabulary);
            for (float& x : spread) x *= 10;
            const auto logits = std::make_shared<Array<float>>(device, spread);
            const auto options = std::make_shared<Array<ops::SampleRow>>(
                device, std::vector<ops::SampleRow>{{0.8f, static_cast<int32_t>(vocabulary), 0.95, 0.5}});
            const auto token = std::make_shared<Array<int32_t>>(device, 1);
            const Floats logprob = floats(device, 1);
            return [=](int64_t) {
              const ops::SampleArgs args = {logits->data(), 1, vocabulary, options->data(), token->data(),
                                            logprob->data()};
              check(table().sample(device, &args));
            };
          }};
}

// Operations that memory bounds; `bytes` are read and written.
void row_wise(ops::Device* device, int64_t m, std::vector<Operation>& all) {
  const auto add = [&](const char* name, double bytes, std::function<Call()> prepare) {
    all.push_back({name, "fp32", 0, bytes, std::move(prepare)});
  };
  const int64_t n = m * kWidth, f = m * kFfn;
  add("RMSNorm forward", 8.0 * static_cast<double>(n), [=]() -> Call {
    const Floats x = floats(device, n), w = floats(device, kWidth), y = floats(device, n);
    const Floats rstd = floats(device, m);
    return [=](int64_t) {
      const ops::RmsNormArgs args = {x->data(), w->data(), m, kWidth, 1e-5f, y->data(), rstd->data()};
      check(table().rms_norm_forward(device, &args));
    };
  });
  add("RMSNorm backward", 16.0 * static_cast<double>(n), [=]() -> Call {
    const Floats x = floats(device, n), w = floats(device, kWidth), dy = floats(device, n);
    const Floats rstd = floats(device, m), dx = floats(device, n), dw = floats(device, kWidth);
    return [=](int64_t) {
      const ops::RmsNormBackwardArgs args = {x->data(), w->data(),  rstd->data(), dy->data(), m,
                                             kWidth,    dx->data(), true,         dw->data()};
      check(table().rms_norm_backward(device, &args));
    };
  });
  add("SwiGLU forward", 12.0 * static_cast<double>(f), [=]() -> Call {
    const Floats gate = floats(device, f), up = floats(device, f), h = floats(device, f);
    return [=](int64_t) {
      const ops::SwigluArgs args = {gate->data(), up->data(), f, h->data()};
      check(table().swiglu_forward(device, &args));
    };
  });
  add("SwiGLU backward", 20.0 * static_cast<double>(f), [=]() -> Call {
    const Floats gate = floats(device, f), up = floats(device, f), dh = floats(device, f);
    const Floats dgate = floats(device, f), dup = floats(device, f);
    return [=](int64_t) {
      const ops::SwigluBackwardArgs args = {gate->data(),  up->data(), dh->data(), f,
                                            dgate->data(), dup->data()};
      check(table().swiglu_backward(device, &args));
    };
  });
  add("rotary", 8.0 * static_cast<double>(n) + 4.0 * static_cast<double>(m * kHeadDim), [=]() -> Call {
    const Floats x = floats(device, n), angles = floats(device, m * kHeadDim);
    std::vector<int32_t> at(static_cast<size_t>(m));
    for (size_t i = 0; i < at.size(); ++i) at[i] = static_cast<int32_t>(i);
    const auto positions = std::make_shared<Array<int32_t>>(device, at);
    return [=](int64_t) {
      const ops::RotaryArgs args = {x->data(), m, kHeads, kHeadDim, positions->data(), angles->data(), false};
      check(table().rotary(device, &args));
    };
  });
  add("AdamW", 28.0 * static_cast<double>(f), [=]() -> Call {
    const Floats p = floats(device, f), g = floats(device, f);
    const auto m1 = std::make_shared<Array<float>>(device, f), v = std::make_shared<Array<float>>(device, f);
    check(table().zero(device, m1->data(), 4 * f));
    check(table().zero(device, v->data(), 4 * f));
    return [=](int64_t) {
      const ops::AdamWArgs args = {p->data(), g->data(), m1->data(), v->data(), f, 1e-4,
                                   0.9,       0.95,      1e-8,       0.1,       1, 1};
      check(table().adamw(device, &args));
    };
  });
}

}  // namespace

std::vector<Operation> operations(ops::Device* device, const Sizes& sizes) {
  const auto& [m, vocabulary, uncached] = sizes;
  std::vector<Operation> all;
  for (Mode mode : {Mode::FP32, Mode::BF16}) {
    for (int64_t rows : {int64_t{1}, int64_t{8}, int64_t{32}}) {
      const std::string of = ", " + std::to_string(rows) + (rows == 1 ? " row" : " rows");
      all.push_back(served(device, "linear qkv" + of, mode, rows, kQkv, kWidth, uncached));
      all.push_back(served(device, "linear gate" + of, mode, rows, kFfn, kWidth, uncached));
      all.push_back(served(device, "linear down" + of, mode, rows, kWidth, kFfn, uncached));
      all.push_back(served(device, "linear head" + of, mode, rows, vocabulary, kWidth, uncached));
    }
    all.push_back(served(device, "linear qkv, many rows", mode, m, kQkv, kWidth, 1));
    all.push_back(served(device, "linear gate, many rows", mode, m, kFfn, kWidth, 1));
    all.push_back(served(device, "linear down, many rows", mode, m, kWidth, kFfn, 1));
    all.push_back(backward_product(device, mode, m, false));
    all.push_back(backward_product(device, mode, m, true));
    all.push_back(loss(device, mode, m, vocabulary));
    const auto f32 = ops::DType::F32;
    all.push_back(attention(device, "attention forward, both banks", {1, m, m, 1, f32, mode}, false));
    all.push_back(attention(device, "attention backward, both banks", {1, m, m, 1, f32, mode}, true));
    const ops::DType stored = mode == Mode::BF16 ? ops::DType::BF16 : f32;
    const auto decode = [&](const char* name, int64_t rows, int64_t length) {
      AttentionShape shape{rows, 1, length, 1, stored, mode};
      shape.copies = ceil_div(uncached, shape.bank_bytes());
      all.push_back(attention(device, name, shape, false));
    };
    decode("attention decode, both banks", 1, m);
    decode("attention decode, both banks, 8 rows", 8, ceil_div(m, 4));
  }
  all.push_back(sampling(device, vocabulary));
  // Enough rows that no cache holds them.
  row_wise(device, 4 * m, all);
  return all;
}

}  // namespace duokv::bench
