// Matrix products and the loss at the shapes of the 126M model. One JSON line per case: the best time,
// GFLOP/s, GB/s of operands read from memory, and the share of the machine's roofline, whose two ceilings
// (fused multiply-adds from registers, reading memory) are sampled between the repetitions so that a busy
// machine lowers both alike. `onednn_ms` is oneDNN's time for the same FP32 product, weights in their plain
// layout, through the same thread pool.
//   linear_bench [part of a case's name] …
#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "bench/ceilings.h"
#include "cpu/device.h"
#include "cpu/onednn_product.h"
#include "test/harness.h"

namespace duokv::bench {
namespace {

using test::Array;
using test::check;
using test::table;
using Mode = ops::ProductMode;

constexpr int64_t kSpread = int64_t{192}
                            << 20;  // bytes of weights a decode case goes through, more than any cache

double seconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Bench {
 public:
  Bench(ops::Device* device, int argc, char** argv)
      : device_(device), wanted_(argv + 1, argv + argc), ceilings_(device) {}

  // A case: `call(i)` is the i-th of a series that goes through all copies of its weights.
  void run(const std::string& name, Mode mode, int64_t m, int64_t k, int64_t n, double flops, double bytes,
           const std::function<void(int64_t)>& call, const std::function<void(int64_t)>& onednn = nullptr) {
    const std::string of_mode = mode == Mode::FP32 ? "fp32" : "bf16";
    const double budget = 1.0;  // seconds
    double best = std::numeric_limits<double>::infinity(), best_onednn = best, flops_peak = 0, read_peak = 0;
    call(0);
    if (onednn) onednn(0);
    double spent = 0;
    for (int64_t i = 1; i < 8 || (spent < budget && i < 2000); ++i) {
      const double taken = seconds([&] { call(i); });
      best = std::min(best, taken);
      spent += taken;
      if (onednn) {
        const double other = seconds([&] { onednn(i); });
        best_onednn = std::min(best_onednn, other);
        spent += other;
      }
      if (i % 64 != 0 && i > 7) continue;
      flops_peak = std::max(flops_peak, ceilings_.flops());
      read_peak = std::max(read_peak, ceilings_.read());
    }
    const double roof = std::max(flops / flops_peak, bytes / read_peak);
    std::printf(
        "{\"case\":\"%s\",\"mode\":\"%s\",\"m\":%lld,\"k\":%lld,\"n\":%lld,\"ms\":%.4f,\"gflops\":%.1f,"
        "\"gbytes\":%.1f,"
        "\"ceiling_gflops\":%.1f,\"ceiling_gbytes\":%.1f,\"share\":%.2f",
        name.c_str(), of_mode.c_str(), static_cast<long long>(m), static_cast<long long>(k),
        static_cast<long long>(n), best * 1e3, flops / best * 1e-9, bytes / best * 1e-9, flops_peak * 1e-9,
        read_peak * 1e-9, roof / best);
    if (onednn) std::printf(",\"onednn_ms\":%.4f", best_onednn * 1e3);
    std::printf("}\n");
    std::fflush(stdout);
  }

  bool wants(const std::string& name) const {
    return wanted_.empty() || std::any_of(wanted_.begin(), wanted_.end(), [&](const std::string& part) {
             return name.find(part) != std::string::npos;
           });
  }
  ops::Device* device() const { return device_; }

 private:
  ops::Device* device_;
  std::vector<std::string> wanted_;
  Ceilings ceilings_;
};

struct Layer {
  const char* name;
  int64_t k, n;
};
constexpr Layer kLayers[] = {{"qkv", 768, 1280}, {"out", 768, 768}, {"gate", 768, 2048}, {"down", 2048, 768}};
constexpr Layer kHead = {"head", 768, 32768};

// Serving: packed weights. Few rows read every weight from memory.
void serving(Bench& bench, const Layer& layer, Mode mode, int64_t m) {
  const std::string name = std::string("serve ") + layer.name;
  if (!bench.wants(name)) return;
  const auto& [label, k, n] = layer;
  const int64_t copies = m <= 64 ? std::max<int64_t>(1, kSpread / (4 * k * n)) : 1;
  test::Rng rng(2);
  const std::vector<float> values = rng.normals(n * k);
  std::vector<std::unique_ptr<Array<float>>> weights;
  for (int64_t i = 0; i < copies; ++i)
    weights.push_back(std::make_unique<Array<float>>(bench.device(), values));
  const Array<float> x(bench.device(), rng.normals(m * k)), y(bench.device(), m * n);
  ops::PackCache* packs = nullptr;
  check(table().pack_cache_create(bench.device(), &packs));
  const auto weight = [&](int64_t i) { return weights[static_cast<size_t>(i % copies)]->data(); };
  const auto call = [&](int64_t i) {
    const bool round = mode == Mode::BF16;
    const ops::LinearArgs args{x.data(),   m,       m,     {},  1, {{weight(i), n, k, 1, packs}},
                               {y.data()}, nullptr, round, mode};
    check(table().linear_forward(bench.device(), &args));
  };
  const auto onednn = [&](int64_t i) {
    cpu::onednn_product(
        *bench.device(),
        {m, n, k, {x.data(), k, false}, {weight(i), k, true}, ops::DType::F32, y.data(), false});
  };
  for (int64_t i = 0; i < copies; ++i) call(i);
  const double flops = 2.0 * static_cast<double>(m * n * k), element = mode == Mode::BF16 ? 2 : 4;
  const double bytes = copies > 1 || layer.n == kHead.n ? static_cast<double>(n * k) * element : 0;
  bench.run(name, mode, m, k, n, flops, bytes, call,
            mode == Mode::FP32 ? onednn : std::function<void(int64_t)>());
  table().pack_cache_destroy(bench.device(), packs);
}

void training(Bench& bench, const Layer& layer, Mode mode, int64_t m) {
  const auto& [label, k, n] = layer;
  test::Rng rng(3);
  const Array<float> x(bench.device(), rng.normals(m * k)), w(bench.device(), rng.normals(n * k));
  const Array<float> y(bench.device(), rng.normals(m * n)), dx(bench.device(), m * k),
      dw(bench.device(), n * k);
  check(table().zero(bench.device(), dw.data(), 4 * n * k));
  const ops::Weight weight{w.data(), n, k, 1, nullptr};
  const double flops = 2.0 * static_cast<double>(m * n * k);
  const auto one = [&](const char* part, const std::function<void(int64_t)>& call,
                       const cpu::OneDnnProduct& product) {
    const std::string name = std::string("train ") + part + " " + label;
    if (!bench.wants(name)) return;
    bench.run(name, mode, m, k, n, flops, 0, call,
              mode == Mode::FP32 ? [&](int64_t) { cpu::onednn_product(*bench.device(), product); }
                                 : std::function<void(int64_t)>());
  };
  one("forward",
      [&](int64_t) {
        const ops::LinearArgs args{x.data(), m, m, {}, 1, {weight}, {y.data()}, nullptr, false, mode};
        check(table().linear_forward(bench.device(), &args));
      },
      {m, n, k, {x.data(), k, false}, {w.data(), k, true}, ops::DType::F32, y.data(), false});
  one("dx",
      [&](int64_t) {
        const ops::LinearBackwardArgs args{x.data(), y.data(), m, weight, dx.data(), false, nullptr, mode};
        check(table().linear_backward(bench.device(), &args));
      },
      {m, k, n, {y.data(), n, false}, {w.data(), k, false}, ops::DType::F32, dx.data(), false});
  one("dw",
      [&](int64_t) {
        const ops::LinearBackwardArgs args{x.data(), y.data(), m, weight, nullptr, false, dw.data(), mode};
        check(table().linear_backward(bench.device(), &args));
      },
      {n, k, m, {y.data(), n, true}, {x.data(), k, false}, ops::DType::F32, dw.data(), true});
}

void loss(Bench& bench, Mode mode, int64_t m) {
  const int64_t d = kHead.k, vocabulary = kHead.n;
  test::Rng rng(4);
  const Array<float> x(bench.device(), rng.normals(m * d)),
      e(bench.device(), rng.normals(vocabulary * d, 0.02f));
  const Array<float> dx(bench.device(), m * d), de(bench.device(), vocabulary * d), nll(bench.device(), m);
  const Array<float> scale(bench.device(),
                           std::vector<float>(static_cast<size_t>(m), 1.0f / static_cast<float>(m)));
  std::vector<int32_t> ids(static_cast<size_t>(m));
  for (int32_t& id : ids) id = rng.integer(0, static_cast<int32_t>(vocabulary - 1));
  const Array<int32_t> targets(bench.device(), ids);
  check(table().zero(bench.device(), de.data(), 4 * vocabulary * d));
  for (bool gradient : {false, true}) {
    const std::string name = gradient ? "loss with gradients" : "loss";
    if (!bench.wants(name)) continue;
    const ops::LinearCrossEntropyArgs args{x.data(),
                                           m,
                                           {e.data(), vocabulary, d, 1, nullptr},
                                           targets.data(),
                                           gradient ? scale.data() : nullptr,
                                           nll.data(),
                                           gradient ? dx.data() : nullptr,
                                           gradient ? de.data() : nullptr,
                                           mode};
    bench.run(name, mode, m, d, vocabulary, (gradient ? 6.0 : 2.0) * static_cast<double>(m * d * vocabulary),
              0, [&](int64_t) { check(table().linear_cross_entropy(bench.device(), &args)); });
  }
}

}  // namespace
}  // namespace duokv::bench

int main(int argc, char** argv) {
  using namespace duokv::bench;
  Bench bench(duokv::test::device(), argc, argv);
  for (Mode mode : {Mode::FP32, Mode::BF16}) {
    for (int64_t m : {1, 4, 8}) serving(bench, kHead, mode, m);
    for (int64_t m : {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 512, 2048}) {
      for (const Layer& layer : kLayers) serving(bench, layer, mode, m);
    }
    for (const Layer& layer : kLayers) training(bench, layer, mode, 2048);
    loss(bench, mode, 2048);
  }
}
