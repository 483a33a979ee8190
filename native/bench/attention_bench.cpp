// Attention at the 126M shapes beside what the processor can do: fused multiply-adds, a matrix product,
// reading memory. GFLOP/s of attention count visible pairs only: 4 · head_dim per query head forward, 2.5
// times that backward.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "bench/ceilings.h"
#include "cpu/cpu.h"
#include "cpu/device.h"

namespace duokv::bench {
namespace {

const ops::OpTable& table() { return cpu::op_table(); }

void check(ops::Status status) {
  if (status != ops::kOk) throw std::runtime_error(table().last_error());
}

// The best of several runs, in seconds.
template <class Body>
double best(Body&& body, int runs = 7) {
  double least = 1e30;
  for (int i = 0; i <= runs; ++i) {  // the first warms up
    const auto start = std::chrono::steady_clock::now();
    body();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (i > 0) least = std::min(least, seconds);
  }
  return least;
}

std::vector<float> normals(int64_t n) {
  static std::mt19937 engine(1);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = distribution(engine);
  return values;
}

double product_rate(ops::Device* device) {
  const int64_t m = 2048, n = 768, k = 768;
  const std::vector<float> x = normals(m * k), w = normals(n * k);
  std::vector<float> y(static_cast<size_t>(m * n));
  const ops::LinearArgs args = {.x = x.data(),
                                .m = m,
                                .per_row = m,
                                .norm = {},
                                .count = 1,
                                .w = {{w.data(), n, k, 1, nullptr}},
                                .y = {y.data()},
                                .residual = nullptr,
                                .round_output = false,
                                .mode = ops::ProductMode::FP32};
  return 2.0 * m * n * k / best([&] { check(table().linear_forward(device, &args)); });
}

struct Shape {
  const char* name;
  int64_t batch, queries;
  int32_t length;  // entries of the global bank; queries are the last positions
  bool global;
  int32_t window;  // 0: no local bank
  ops::ProductMode mode;
};

constexpr int32_t kQueryHeads = 12, kKvHeads = 4, kHeadDim = 64;
constexpr int64_t kKvWidth = kKvHeads * kHeadDim, kQueryWidth = kQueryHeads * kHeadDim;

// `copies` problems of one shape, so that decoding reads memory as a model's layers do.
class Problem {
 public:
  Problem(const Shape& shape, int copies) : shape_(shape) {
    const int64_t queries = shape.batch * shape.queries;
    q_ = normals(queries * kQueryWidth), dout_ = normals(queries * kQueryWidth);
    out_.resize(q_.size()), dq_.resize(q_.size());
    positions_.assign(static_cast<size_t>(shape.batch), shape.length - static_cast<int32_t>(shape.queries));
    document_start_.assign(static_cast<size_t>(queries), 0);
    lse_.resize(static_cast<size_t>(2 * queries * kQueryHeads));
    for (int copy = 0; copy < copies; ++copy) {
      ops::AttentionArgs args = {.batch = shape.batch,
                                 .queries = shape.queries,
                                 .query_heads = kQueryHeads,
                                 .kv_heads = kKvHeads,
                                 .head_dim = kHeadDim,
                                 .scale = 0.125f,
                                 .q = q_.data(),
                                 .positions = positions_.data(),
                                 .document_start = document_start_.data(),
                                 .bank_count = 0,
                                 .banks = {},
                                 .out = out_.data(),
                                 .lse = lse_.data(),
                                 .mode = shape.mode};
      if (shape.global) args.banks[args.bank_count++] = add_bank(shape.length, 0);
      const auto kept =
          static_cast<int32_t>(std::min<int64_t>(shape.length, shape.window + shape.queries - 1));
      if (shape.window > 0) args.banks[args.bank_count++] = add_bank(kept, shape.window);
      args_.push_back(args);
    }
  }

  // Visible pairs of one query head, all rows.
  double pairs() const {
    double sum = 0;
    for (int64_t t = shape_.length - shape_.queries; t < shape_.length; ++t) {
      if (shape_.global) sum += static_cast<double>(t + 1);
      if (shape_.window > 0) sum += static_cast<double>(std::min<int64_t>(t + 1, shape_.window));
    }
    return sum * static_cast<double>(shape_.batch);
  }
  double bytes() const { return bytes_; }

  void forward(ops::Device* device) const {
    for (const ops::AttentionArgs& args : args_) check(table().attention_forward(device, &args));
  }

  void backward(ops::Device* device) {
    ops::AttentionBackwardArgs backward = {
        .forward = args_[0], .dout = dout_.data(), .dq = dq_.data(), .grads = {}};
    for (int32_t bank = 0; bank < args_[0].bank_count; ++bank) {
      gradients_[bank].resize(
          static_cast<size_t>(2 * args_[0].banks[bank].rows[0].count * shape_.batch * kKvWidth));
      backward.grads[bank] = {gradients_[bank].data(), gradients_[bank].data() + gradients_[bank].size() / 2};
    }
    check(table().attention_backward(device, &backward));
  }

 private:
  ops::Bank add_bank(int32_t count, int32_t window) {
    std::vector<ops::BankRow> rows;
    const bool bf16 = shape_.mode == ops::ProductMode::BF16 && shape_.queries == 1;
    for (int64_t row = 0; row < shape_.batch; ++row) {
      // BF16 banks use half of this memory, and their values do not matter.
      memory_.push_back(normals(2 * count * kKvWidth));
      if (bf16) std::fill(memory_.back().begin(), memory_.back().end(), 0.5f);
      bytes_ += 2.0 * count * kKvWidth * (bf16 ? 2 : 4);
      const float* k = memory_.back().data();
      rows.push_back({k, k + count * kKvWidth / (bf16 ? 2 : 1), shape_.length - count, count, 0, count});
    }
    rows_.push_back(std::make_unique<std::vector<ops::BankRow>>(std::move(rows)));
    return {rows_.back()->data(),
            count,
            bf16 ? ops::DType::BF16 : ops::DType::F32,
            int64_t{count} * kHeadDim,
            kHeadDim,
            window,
            nullptr};
  }

  Shape shape_;
  std::vector<float> q_, dout_, out_, dq_, lse_;
  std::vector<int32_t> positions_, document_start_;
  std::vector<std::vector<float>> memory_;
  std::vector<std::unique_ptr<std::vector<ops::BankRow>>> rows_;
  std::vector<ops::AttentionArgs> args_;
  std::vector<float> gradients_[2];
  double bytes_ = 0;
};

void run(int32_t threads) {
  ops::Device* device = nullptr;
  check(table().open("", threads, &device));
  Ceilings ceilings(device);
  double fma = 0, memory = 0;
  for (int sample = 0; sample < 7; ++sample)
    fma = std::max(fma, ceilings.flops()), memory = std::max(memory, ceilings.read());
  const double product = product_rate(device);
  std::printf(
      "%d threads: multiply-adds %.1f GFLOP/s, product 2048 x 768 x 768 %.1f GFLOP/s, reading %.1f GB/s\n",
      device->pool.threads(), fma / 1e9, product / 1e9, memory / 1e9);

  const auto fp32 = ops::ProductMode::FP32, bf16 = ops::ProductMode::BF16;
  const Shape shapes[] = {{"causal 1792", 1, 1792, 1792, true, 0, fp32},
                          {"causal 1792, BF16", 1, 1792, 1792, true, 0, bf16},
                          {"causal 512, batch 8", 8, 512, 512, true, 0, fp32},
                          {"global + window 128, 1792", 1, 1792, 1792, true, 128, fp32},
                          {"window 128, 1792", 1, 1792, 1792, false, 128, fp32},
                          {"last 128 of 1792, both banks", 1, 128, 1792, true, 128, fp32}};
  for (const Shape& shape : shapes) {
    Problem problem(shape, 1);
    const double operations = problem.pairs() * 4 * kHeadDim * kQueryHeads;
    const double forward = best([&] { problem.forward(device); });
    const double backward = best([&] { problem.backward(device); });
    std::printf(
        "  %-32s forward %8.2f ms %6.1f GFLOP/s %3.0f %%   backward %8.2f ms %6.1f GFLOP/s %3.0f %%\n",
        shape.name, forward * 1e3, operations / forward / 1e9, 100 * operations / forward / product,
        backward * 1e3, 2.5 * operations / backward / 1e9, 250 * operations / backward / product);
  }
  const Shape decodes[] = {{"decode at 1792, both banks", 1, 1, 1792, true, 128, fp32},
                           {"the same, BF16 banks", 1, 1, 1792, true, 128, bf16},
                           {"decode at 1792, batch 8", 8, 1, 1792, true, 128, fp32},
                           {"decode at 64", 1, 1, 64, true, 64, fp32}};
  for (const Shape& shape : decodes) {
    const int copies = 16;
    const Problem problem(shape, copies);
    const double seconds = best([&] { problem.forward(device); }, 15);
    std::printf("  %-32s %8.1f us a layer %6.1f GB/s %3.0f %% of reading\n", shape.name,
                seconds / copies * 1e6, problem.bytes() / seconds / 1e9,
                100 * problem.bytes() / seconds / memory);
  }
  table().close(device);
}

}  // namespace
}  // namespace duokv::bench

// Arguments: numbers of threads, else 1 and all.
int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) duokv::bench::run(std::atoi(argv[i]));
  if (argc < 2) duokv::bench::run(1), duokv::bench::run(0);
}
