// Attention over the two banks at the shapes of training, prefill and decoding. FLOPs count visible pairs
// only: 4 * head_dim per query head forward, 2.5 times that backward. Bytes are what the banks hold, read
// once.
#include <cstdio>

#include "tools/kernel_timing.h"

namespace duokv::tools {
namespace {

using ops::OpTable;
using ops::ProductMode;

struct Shape {
  const char* name;
  int64_t batch, queries, length;  // the queries are the last of `length` positions
  int64_t document;                // length of every document; 0: one
  bool global;
  int64_t window;  // of the local bank; 0: none
  bool backward;
};

// `copies` problems of one shape, whose banks lie in different memory.
class Problem {
 public:
  Problem(const std::shared_ptr<Device>& device, const ModelConfig& config, const Shape& shape,
          ProductMode mode, int copies)
      : device_(device), c_(config), shape_(shape), mode_(mode) {
    const int64_t queries = shape.batch * shape.queries;
    q_ = floats(queries * c_.query_width()), dout_ = floats(queries * c_.query_width());
    out_ = floats(queries * c_.query_width()), dq_ = floats(queries * c_.query_width());
    lse_ = floats(2 * queries * c_.query_heads);
    const int64_t first = shape.length - shape.queries;
    positions_ =
        integers(std::vector<int32_t>(static_cast<size_t>(shape.batch), static_cast<int32_t>(first)));
    std::vector<int32_t> starts;
    for (int64_t b = 0; b < shape.batch; ++b)
      for (int64_t p = first; p < shape.length; ++p) starts.push_back(static_cast<int32_t>(start_of(p)));
    starts_ = integers(starts);
    for (int copy = 0; copy < copies; ++copy) {
      ops::AttentionArgs args{};
      args.batch = shape.batch, args.queries = shape.queries;
      args.query_heads = static_cast<int32_t>(c_.query_heads),
      args.kv_heads = static_cast<int32_t>(c_.kv_heads);
      args.head_dim = static_cast<int32_t>(c_.head_dim), args.scale = 0.125f;
      args.q = q_->data(), args.out = out_->data(), args.lse = shape.backward ? lse_->data() : nullptr;
      args.positions = positions_->data(), args.document_start = starts_->data(), args.mode = mode;
      if (shape.global) args.banks[args.bank_count++] = bank(shape.length, 0);
      if (shape.window > 0)
        args.banks[args.bank_count++] =
            bank(std::min(shape.length, shape.window + shape.queries - 1), shape.window);
      args_.push_back(args);
    }
    if (!shape.backward) return;
    for (int b = 0; b < args_[0].bank_count; ++b) {
      const int64_t elements = counts_[static_cast<size_t>(b)] * shape.batch * c_.kv_width();
      gradients_.push_back({floats(elements), floats(elements)});
    }
  }

  Work forward_work() const {
    double pairs = 0;
    for (int64_t p = shape_.length - shape_.queries; p < shape_.length; ++p) {
      const auto seen = static_cast<double>(p - start_of(p) + 1);
      if (shape_.global) pairs += seen;
      if (shape_.window > 0) pairs += std::min(seen, static_cast<double>(shape_.window));
    }
    double bytes = 2.0 * 4 * static_cast<double>(shape_.batch * shape_.queries * c_.query_width());
    for (int b = 0; b < args_[0].bank_count; ++b)
      bytes += 2.0 * element() *
               static_cast<double>(counts_[static_cast<size_t>(b)] * shape_.batch * c_.kv_width());
    return {pairs * static_cast<double>(shape_.batch) * 4 * static_cast<double>(c_.head_dim * c_.query_heads),
            bytes};
  }
  Work backward_work() const {
    const Work forward = forward_work();
    return {2.5 * forward.flops, 2 * forward.bytes};
  }

  void forward(int i) const {
    device_->run(&OpTable::attention_forward, args_[static_cast<size_t>(i) % args_.size()]);
  }
  void backward() const {
    ops::AttentionBackwardArgs args{args_[0], dout_->data(), dq_->data(), {}};
    for (size_t b = 0; b < gradients_.size(); ++b)
      args.grads[b] = {gradients_[b][0]->data(), gradients_[b][1]->data()};
    device_->run(&OpTable::attention_backward, args);
  }

 private:
  using Floats = std::shared_ptr<Values<float>>;
  using Integers = std::shared_ptr<Values<int32_t>>;
  Floats floats(int64_t count) { return std::make_shared<Values<float>>(random_array(device_, count)); }
  Integers integers(const std::vector<int32_t>& host) {
    return std::make_shared<Values<int32_t>>(device_, host);
  }

  int64_t start_of(int64_t position) const {
    return shape_.document == 0 ? 0 : position / shape_.document * shape_.document;
  }
  // Serving keeps a BF16 cache under the policy whose products are BF16; training banks are FP32.
  bool bf16_cache() const { return mode_ == ProductMode::BF16 && !shape_.backward; }
  double element() const { return bf16_cache() ? 2 : 4; }

  // Head-major rows in serving, token-major ones in training.
  ops::Bank bank(int64_t count, int64_t window) {
    const int64_t elements = shape_.batch * count * c_.kv_width();
    const Floats k = floats(bf16_cache() ? (elements + 1) / 2 : elements),
                 v = floats(bf16_cache() ? (elements + 1) / 2 : elements);
    if (bf16_cache()) {
      // Two values near one in every word; what they are does not matter.
      const std::vector<uint32_t> words(static_cast<size_t>((elements + 1) / 2), 0x3F7F3F11u);
      for (const Floats& each : {k, v})
        device_->upload(each->data(), words.data(), static_cast<int64_t>(words.size() * 4));
    }
    std::vector<ops::BankRow> rows;
    const int64_t stride = static_cast<int64_t>(element()) * count * c_.kv_width();
    for (int64_t row = 0; row < shape_.batch; ++row)
      rows.push_back({reinterpret_cast<const char*>(k->data()) + row * stride,
                      reinterpret_cast<const char*>(v->data()) + row * stride,
                      static_cast<int32_t>(shape_.length - count), static_cast<int32_t>(count), 0,
                      static_cast<int32_t>(count)});
    memory_.push_back(k), memory_.push_back(v);
    rows_.push_back(std::make_shared<Values<ops::BankRow>>(device_, rows));
    if (counts_.size() < 2) counts_.push_back(count);
    return {rows_.back()->data(),
            static_cast<int32_t>(count),
            bf16_cache() ? ops::DType::BF16 : ops::DType::F32,
            shape_.backward ? c_.head_dim : count * c_.head_dim,
            shape_.backward ? c_.kv_width() : c_.head_dim,
            static_cast<int32_t>(window),
            nullptr};
  }

  std::shared_ptr<Device> device_;
  ModelConfig c_;
  Shape shape_;
  ProductMode mode_;
  Floats q_, dout_, out_, dq_, lse_;
  Integers positions_, starts_;
  std::vector<Floats> memory_;
  std::vector<std::shared_ptr<Values<ops::BankRow>>> rows_;
  std::vector<int64_t> counts_;  // of the first problem's banks
  std::vector<std::vector<Floats>> gradients_;
  std::vector<ops::AttentionArgs> args_;
};

}  // namespace

void bench_attention(Campaign& campaign) {
  KernelBench bench(campaign, "attention");
  const ModelConfig config = preset(campaign.shape, Design::LocalHistory);
  const std::vector<Shape> full = {{"training, both banks", 16, 2048, 2048, 600, true, 128, true},
                                   {"training, global bank", 16, 2048, 2048, 600, true, 0, true},
                                   {"training, local bank", 16, 2048, 2048, 600, false, 128, true},
                                   {"one document, global bank", 8, 2048, 2048, 0, true, 0, true},
                                   {"prefill, both banks", 1, 1792, 1792, 0, true, 128, false},
                                   {"prefill, global bank", 1, 1792, 1792, 0, true, 0, false},
                                   {"prefill, both banks", 8, 1792, 1792, 0, true, 128, false},
                                   {"suffix, both banks", 1, 128, 1792, 0, true, 128, false},
                                   {"decode, both banks", 1, 1, 1792, 0, true, 128, false},
                                   {"decode, global bank", 1, 1, 1792, 0, true, 0, false},
                                   {"decode, both banks", 8, 1, 1792, 0, true, 128, false},
                                   {"decode, both banks", 32, 1, 1792, 0, true, 128, false}};
  const std::vector<Shape> tiny = {{"training, both banks", 2, 40, 40, 17, true, 8, true},
                                   {"prefill, both banks", 1, 40, 40, 0, true, 8, false},
                                   {"decode, both banks", 2, 1, 40, 0, true, 8, false}};
  for (const Shape& shape : campaign.tiny() ? tiny : full)
    for (const ProductMode mode : {ProductMode::FP32, ProductMode::TF32x3, ProductMode::BF16}) {
      const double bank = 8.0 * static_cast<double>(shape.batch * shape.length * config.kv_width());
      const int copies = shape.queries == 1 ? copies_of(bank, campaign.tiny()) : 1;
      const Problem problem(campaign.device, config, shape, mode, copies);
      const Json row{{"shape", shape.name},      {"mode", mode_name(mode)}, {"batch", shape.batch},
                     {"queries", shape.queries}, {"length", shape.length},  {"document", shape.document}};
      bench.run("attention forward", row, problem.forward_work(), copies, [&](int i) { problem.forward(i); });
      if (shape.backward)
        bench.run("attention backward", row, problem.backward_work(), 1, [&](int) { problem.backward(); });
    }
}

}  // namespace duokv::tools
