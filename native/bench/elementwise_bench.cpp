// Row-wise, cache and optimiser operations at the shapes of the 126M model (2048 tokens), against a copy of
// as many bytes. GB/s counts what an operation must read and write once; the ratio compares it with the
// copy's.
#include <chrono>
#include <functional>

#include "test/harness.h"

namespace duokv::test {
namespace {

constexpr int64_t kTokens = 2048, kWidth = 768, kFfn = 2048, kVocab = 32768, kParameters = 126248448;
constexpr int32_t kHeads = 12, kKvHeads = 4, kHeadDim = 64;
constexpr int kRepeats = 15;

double milliseconds(const std::function<void()>& call) {
  double best = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    call();
    best = std::min(
        best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

class Bench {
 public:
  explicit Bench(ops::Device* device) : device_(device) {
    std::printf("%-34s %10s %10s %8s %8s\n", "operation", "MB", "ms", "GB/s", "of copy");
  }

  // `bytes` are read and written in all; `call` returns a status.
  void run(const char* name, int64_t bytes, const std::function<ops::Status()>& call) {
    const Array<char> src(device_, bytes / 2), dst(device_, bytes / 2);
    check(table().zero(device_, src.data(), bytes / 2));
    check(table().zero(device_, dst.data(), bytes / 2));
    // Alternated, so that a busy moment of the machine meets both.
    double copied = std::numeric_limits<double>::infinity(), taken = copied;
    for (int round = 0; round < 3; ++round) {
      copied = std::min(
          copied, milliseconds([&] { check(table().copy(device_, dst.data(), src.data(), bytes / 2)); }));
      taken = std::min(taken, milliseconds([&] { check(call()); }));
    }
    const double total = static_cast<double>(bytes);
    std::printf("%-34s %10.1f %10.3f %8.1f %8.2f\n", name, total / 1e6, taken, total / taken / 1e6,
                copied / taken);
    std::fflush(stdout);
  }

 private:
  ops::Device* device_;
};

void row_wise(Bench& bench, ops::Device* device) {
  Rng rng;
  const int64_t n = kTokens * kWidth;
  const Array<float> x(device, rng.normals(n)), y(device, rng.normals(n)), z(device, rng.normals(n));
  const Array<float> w(device, rng.normals(kWidth)), dw(device, rng.normals(kWidth)), rstd(device, kTokens);

  const ops::AddArgs add = {.x = x.data(), .n = n, .y = y.data()};
  bench.run("add", 12 * n, [&] { return table().add(device, &add); });

  const ops::RmsNormArgs norm = {.x = x.data(),
                                 .w = w.data(),
                                 .m = kTokens,
                                 .d = kWidth,
                                 .eps = 1e-5f,
                                 .y = y.data(),
                                 .rstd = rstd.data()};
  bench.run("rms_norm_forward", 8 * n, [&] { return table().rms_norm_forward(device, &norm); });
  const ops::RmsNormBackwardArgs norm_backward = {.x = x.data(),
                                                  .w = w.data(),
                                                  .rstd = rstd.data(),
                                                  .dy = y.data(),
                                                  .m = kTokens,
                                                  .d = kWidth,
                                                  .dx = z.data(),
                                                  .accumulate = true,
                                                  .dw = dw.data()};
  bench.run("rms_norm_backward, accumulating", 16 * n,
            [&] { return table().rms_norm_backward(device, &norm_backward); });

  const ops::SuffixRowsArgs gather = {.src = x.data(),
                                      .batch = 2,
                                      .count = 1024,
                                      .keep = 512,
                                      .d = kWidth,
                                      .scatter_add = false,
                                      .dst = y.data()};
  bench.run("suffix_rows, gather", 4 * n, [&] { return table().suffix_rows(device, &gather); });
  const ops::SuffixRowsArgs scatter = {.src = x.data(),
                                       .batch = 2,
                                       .count = 1024,
                                       .keep = 512,
                                       .d = kWidth,
                                       .scatter_add = true,
                                       .dst = y.data()};
  bench.run("suffix_rows, scatter-add", 6 * n, [&] { return table().suffix_rows(device, &scatter); });

  std::vector<int32_t> positions(kTokens);
  for (int32_t t = 0; t < kTokens; ++t) positions[static_cast<size_t>(t)] = t;
  const Array<int32_t> at(device, positions);
  const Array<float> angles(device, rng.normals(kTokens * kHeadDim));
  const ops::RotaryArgs rotary = {.x = x.data(),
                                  .m = kTokens,
                                  .heads = kHeads,
                                  .head_dim = kHeadDim,
                                  .positions = at.data(),
                                  .table = angles.data(),
                                  .inverse = false};
  bench.run("rotary", 8 * n + 4 * angles.size(), [&] { return table().rotary(device, &rotary); });
}

void embedding(Bench& bench, ops::Device* device) {
  Rng rng;
  const int64_t n = kTokens * kWidth;
  const Array<float> weights(device, kVocab * kWidth), x(device, rng.normals(n));
  check(table().zero(device, weights.data(), weights.size() * 4));
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < kTokens; ++i) {
    const double u = rng.uniform(0, 1);  // few ids are frequent, as in text
    tokens.push_back(static_cast<int32_t>(u * u * u * (kVocab - 1)));
  }
  const Array<int32_t> ids(device, tokens);
  const ops::EmbeddingArgs forward = {
      .tokens = ids.data(), .m = kTokens, .d = kWidth, .table = weights.data(), .x = x.data()};
  bench.run("embedding_forward", 8 * n, [&] { return table().embedding_forward(device, &forward); });
  const ops::EmbeddingBackwardArgs backward = {.tokens = ids.data(),
                                               .m = kTokens,
                                               .d = kWidth,
                                               .vocab = kVocab,
                                               .dx = x.data(),
                                               .dtable = weights.data()};
  bench.run("embedding_backward", 12 * n, [&] { return table().embedding_backward(device, &backward); });
}

void swiglu(Bench& bench, ops::Device* device) {
  Rng rng;
  const int64_t n = kTokens * kFfn;
  const Array<float> gate(device, rng.normals(n, 3)), up(device, rng.normals(n)), h(device, rng.normals(n));
  const Array<float> dgate(device, rng.normals(n)), dup(device, rng.normals(n));
  const ops::SwigluArgs forward = {.gate = gate.data(), .up = up.data(), .n = n, .h = h.data()};
  bench.run("swiglu_forward", 12 * n, [&] { return table().swiglu_forward(device, &forward); });
  const ops::SwigluBackwardArgs backward = {
      .gate = gate.data(), .up = up.data(), .dh = h.data(), .n = n, .dgate = dgate.data(), .dup = dup.data()};
  bench.run("swiglu_backward", 20 * n, [&] { return table().swiglu_backward(device, &backward); });
}

void cache(Bench& bench, ops::Device* device) {
  Rng rng;
  const int64_t n = kTokens * kKvHeads * kHeadDim, head_stride = kTokens * kHeadDim;
  const Array<float> src(device, rng.normals(n)), bank(device, rng.normals(n)), other(device, rng.normals(n));
  const Array<float> angles(device, rng.normals(kHeadDim));
  const Array<int32_t> positions(device, std::vector<int32_t>(kTokens, 0));
  for (const ops::DType dtype : {ops::DType::F32, ops::DType::BF16}) {
    const bool narrow = dtype == ops::DType::BF16;
    const int64_t stored = narrow ? 2 : 4;
    const ops::BankSlot row = {bank.data(), other.data(), 1000, kTokens};
    const ops::CacheWriteArgs write = {.k = src.data(),
                                       .v = src.data(),
                                       .batch = 1,
                                       .count = kTokens,
                                       .kv_heads = kKvHeads,
                                       .head_dim = kHeadDim,
                                       .positions = positions.data(),
                                       .table = angles.data(),
                                       .dtype = dtype,
                                       .head_stride = head_stride,
                                       .position_stride = kHeadDim,
                                       .rows = &row};
    bench.run(narrow ? "cache_write, BF16" : "cache_write, FP32", 2 * (4 + stored) * n,
              [&] { return table().cache_write(device, &write); });
    const ops::CacheReadArgs read = {.bank = bank.data(),
                                     .count = kTokens,
                                     .slot = 1000,
                                     .capacity = kTokens,
                                     .kv_heads = kKvHeads,
                                     .head_dim = kHeadDim,
                                     .dtype = dtype,
                                     .head_stride = head_stride,
                                     .position_stride = kHeadDim,
                                     .dst = other.data()};
    bench.run(narrow ? "cache_read, BF16" : "cache_read, FP32", (4 + stored) * n,
              [&] { return table().cache_read(device, &read); });
    const ops::CacheCopyArgs copy = {.src = bank.data(),
                                     .src_slot = 1000,
                                     .src_capacity = kTokens,
                                     .src_head_stride = head_stride,
                                     .dst = other.data(),
                                     .dst_slot = 0,
                                     .dst_capacity = kTokens,
                                     .dst_head_stride = head_stride,
                                     .count = kTokens,
                                     .position_stride = kHeadDim,
                                     .kv_heads = kKvHeads,
                                     .head_dim = kHeadDim,
                                     .dtype = dtype};
    bench.run(narrow ? "cache_copy, BF16" : "cache_copy, FP32", 2 * stored * n,
              [&] { return table().cache_copy(device, &copy); });
  }
}

void parameter_sized(Bench& bench, ops::Device* device) {
  const int64_t n = kParameters;
  const Array<float> p(device, n), g(device, n), m(device, n), v(device, n);
  for (const Array<float>* array : {&p, &g, &m, &v}) check(table().zero(device, array->data(), 4 * n));
  double norm = 0;
  const ops::SumSquaresArgs squares = {.x = g.data(), .n = n, .result = &norm};
  bench.run("sum_squares, 126M", 4 * n, [&] { return table().sum_squares(device, &squares); });
  const ops::AdamWArgs adamw = {.p = p.data(),
                                .g = g.data(),
                                .m = m.data(),
                                .v = v.data(),
                                .n = n,
                                .lr = 3e-4,
                                .beta1 = 0.9,
                                .beta2 = 0.95,
                                .eps = 1e-8,
                                .weight_decay = 0.1,
                                .clip = 1,
                                .update = 1};
  bench.run("adamw, 126M", 28 * n, [&] { return table().adamw(device, &adamw); });
}

}  // namespace
}  // namespace duokv::test

int main() {
  using namespace duokv::test;
  Bench bench(device());
  row_wise(bench, device());
  embedding(bench, device());
  swiglu(bench, device());
  cache(bench, device());
  parameter_sized(bench, device());
}
