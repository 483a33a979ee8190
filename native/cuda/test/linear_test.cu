// Linear layers and the head's loss against FP64, with operands rounded as the mode says.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>

#include "cuda/linear.h"
#include "cuda/operations.h"
#include "cuda/pack_cache.h"
#include "cuda/test/harness.h"

using namespace duokv;
using namespace duokv::cuda;
using namespace duokv::cuda::test;

namespace {

using ops::ProductMode;

float rounded(float value, ProductMode mode) {
  return mode == ProductMode::BF16 ? __bfloat162float(__float2bfloat16_rn(value)) : value;
}

std::vector<double> operand(const std::vector<float>& values, ProductMode mode) {
  std::vector<double> result;
  for (const float value : values) result.push_back(rounded(value, mode));
  return result;
}

// c [m, n] += op(a) [m, k] · op(b) [k, n]
void add_product(std::vector<double>& c, const std::vector<double>& a, bool a_transposed,
                 const std::vector<double>& b, bool b_transposed, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t x = 0; x < k; ++x)
        c[static_cast<size_t>(i * n + j)] += a[static_cast<size_t>(a_transposed ? x * m + i : i * k + x)] *
                                             b[static_cast<size_t>(b_transposed ? j * k + x : x * n + j)];
    }
  }
}

size_t count(int64_t rows, int64_t columns) { return static_cast<size_t>(rows * columns); }

// The tests' own transfers and the device's work take turns.
void finish(ops::Device& device) { cuda::test::check(cudaStreamSynchronize(device.stream), "device"); }

struct Forward {
  int64_t m, per_row, k;
  std::vector<int64_t> n;
  ProductMode mode;
  bool accumulate, round_output;
};

std::string describe(const Forward& f) {
  std::string text = std::to_string(f.m) + " rows, " + std::to_string(f.per_row) + " a row, k " +
                     std::to_string(f.k) + (f.mode == ProductMode::BF16 ? ", BF16" : ", FP32");
  for (const int64_t n : f.n) text += ", n " + std::to_string(n);
  return text + (f.accumulate ? ", accumulated" : "") + (f.round_output ? ", rounded" : "");
}

void check_forward(ops::Device& device, const Forward& f, ops::PackCache* packs) {
  const std::vector<float> x = normals(count(f.m, f.k), 1);
  const Array<float> x_device(x);
  std::vector<std::vector<float>> weights, before;
  std::vector<std::unique_ptr<Array<float>>> weights_device, y_device;
  ops::LinearArgs args = {};
  args.x = x_device.data();
  args.m = f.m;
  args.per_row = f.per_row;
  args.count = static_cast<int32_t>(f.n.size());
  args.round_output = f.round_output;
  args.mode = f.mode;
  for (size_t i = 0; i < f.n.size(); ++i) {
    weights.push_back(normals(count(f.n[i], f.k), 2 + i));
    before.push_back(normals(count(f.m, f.n[i]), 9 + i));
    weights_device.push_back(std::make_unique<Array<float>>(weights[i]));
    y_device.push_back(std::make_unique<Array<float>>(before[i]));
    args.w[i] = {weights_device[i]->data(), f.n[i], f.k, 1, packs};
    args.y[i] = y_device[i]->data();
    if (f.accumulate) args.residual = args.y[i];
  }
  stream().synchronize();
  linear_forward(device, args);
  finish(device);
  for (size_t i = 0; i < f.n.size(); ++i) {
    std::vector<double> reference(count(f.m, f.n[i]));
    add_product(reference, operand(x, f.mode), false, operand(weights[i], f.mode), true, f.m, f.n[i], f.k);
    if (f.accumulate) {
      for (size_t e = 0; e < reference.size(); ++e) reference[e] += before[i][e];
    }
    expect_relative(describe(f), y_device[i]->get(), reference, f.round_output ? 3e-3 : 1e-6);
  }
}

}  // namespace

DUOKV_CASE(forward_of_every_kind) {
  ops::Device device(0, false);
  for (const auto& [m, per_row] : {std::pair<int64_t, int64_t>{1, 1}, {9, 3}, {7, 7}, {34, 17}}) {
    for (const ProductMode mode : {ProductMode::FP32, ProductMode::BF16}) {
      for (const bool accumulate : {false, true}) {
        for (const bool round_output : {false, true}) {
          if (round_output && mode == ProductMode::FP32) continue;
          check_forward(device, {m, per_row, 24, {40}, mode, accumulate, round_output}, nullptr);
          ops::PackCache packs(device);
          if (accumulate) {
            check_forward(device, {m, per_row, 72, {17}, mode, true, round_output}, &packs);
          } else {
            check_forward(device, {m, per_row, 72, {48, 17, 16}, mode, false, round_output}, &packs);
          }
        }
      }
    }
  }
}

// A norm on the way in and a residual elsewhere are the operations one after the other.
DUOKV_CASE(norm_and_residual) {
  ops::Device device(0, false);
  constexpr int64_t kK = 72, kN = 24;
  for (const int64_t m : {1, 3, 21}) {
    for (const ProductMode mode : {ProductMode::FP32, ProductMode::BF16}) {
      const std::vector<float> residual = normals(count(m, kN), 4);
      const Array<float> x(normals(count(m, kK), 1)), w(normals(count(kN, kK), 2)),
          norm(normals(count(1, kK), 3)), added(residual), normalised(count(m, kK)), fused(count(m, kN)),
          apart(residual);
      ops::LinearArgs args = {};
      args.x = x.data();
      args.m = args.per_row = m;
      args.norm = {norm.data(), 1e-5f};
      args.count = 1;
      args.w[0] = {w.data(), kN, kK, 1, nullptr};
      args.y[0] = fused.data();
      args.residual = added.data();
      args.round_output = mode == ProductMode::BF16;
      args.mode = mode;
      stream().synchronize();
      linear_forward(device, args);
      cuda::test::check(
          rms_norm_forward({x.data(), norm.data(), m, kK, 1e-5f, normalised.data(), nullptr}, device.stream));
      args.x = normalised.data();
      args.norm = {};
      args.y[0] = apart.data();
      args.residual = apart.data();
      linear_forward(device, args);
      finish(device);
      expect_equal("y", fused.get(), apart.get());
      expect_equal("residual", added.get(), residual);
    }
  }
}

// The block is its operations in turn, but for h, which is rounded once either way.
DUOKV_CASE(feed_forward_is_its_operations) {
  ops::Device device(0, false);
  constexpr int64_t kD = 40, kF = 72;
  for (const int64_t m : {1, 3, 21}) {
    for (const ProductMode mode : {ProductMode::FP32, ProductMode::BF16}) {
      for (const bool gated : {true, false}) {
        for (const bool kept : {true, false}) {
          const Array<float> x(normals(count(m, kD), 1)), norm(normals(count(1, kD), 2)),
              gate_weight(normals(count(kF, kD), 3)), up_weight(normals(count(kF, kD), 4)),
              down_weight(normals(count(kD, kF), 5)), y(count(m, kD)), kept_gate(count(m, kF)),
              kept_up(count(m, kF)), gate(count(m, kF)), up(count(m, kF)), h(count(m, kF)),
              apart(count(m, kD));
          const bool round = mode == ProductMode::BF16;
          stream().synchronize();
          feed_forward(device, {x.data(),
                                y.data(),
                                m,
                                m,
                                {norm.data(), 1e-5f},
                                {gate_weight.data(), kF, kD, 1, nullptr},
                                {gated ? up_weight.data() : nullptr, kF, kD, 1, nullptr},
                                {down_weight.data(), kD, kF, 1, nullptr},
                                kept ? kept_gate.data() : nullptr,
                                kept && gated ? kept_up.data() : nullptr,
                                round,
                                mode});
          ops::LinearArgs in = {};
          in.x = x.data();
          in.m = in.per_row = m;
          in.norm = {norm.data(), 1e-5f};
          in.count = gated ? 2 : 1;
          in.w[0] = {gate_weight.data(), kF, kD, 1, nullptr};
          in.w[1] = {up_weight.data(), kF, kD, 1, nullptr};
          in.y[0] = gate.data();
          in.y[1] = up.data();
          in.round_output = round;
          in.mode = mode;
          linear_forward(device, in);
          cuda::test::check(
              swiglu_forward({gate.data(), gated ? up.data() : nullptr, m * kF, h.data()}, device.stream));
          ops::LinearArgs out = {};
          out.x = h.data();
          out.m = out.per_row = m;
          out.count = 1;
          out.w[0] = {down_weight.data(), kD, kF, 1, nullptr};
          out.y[0] = apart.data();
          out.residual = x.data();
          out.round_output = round;
          out.mode = mode;
          linear_forward(device, out);
          finish(device);
          expect_equal("y", y.get(), apart.get());
          if (kept) expect_equal("gate", kept_gate.get(), gate.get());
          if (kept && gated) expect_equal("up", kept_up.get(), up.get());
        }
      }
    }
  }
}

DUOKV_CASE(served_rows_do_not_depend_on_their_batch) {
  ops::Device device(0, false);
  constexpr int64_t kBatch = 5, kK = 64, kN = 48;
  for (const ProductMode mode : {ProductMode::FP32, ProductMode::BF16}) {
    for (const int64_t per_row : {1, 4, 5, 19}) {
      const int64_t m = kBatch * per_row;
      const Array<float> x(normals(count(m, kK), 1)), w(normals(count(kN, kK), 2)), y(count(m, kN));
      ops::PackCache packs(device);
      const auto run = [&](int64_t first, int64_t rows) {
        ops::LinearArgs args = {};
        args.x = x.data() + first * per_row * kK;
        args.m = rows * per_row;
        args.per_row = per_row;
        args.count = 1;
        args.w[0] = {w.data(), kN, kK, 1, &packs};
        args.y[0] = y.data() + first * per_row * kN;
        args.mode = mode;
        stream().synchronize();
        linear_forward(device, args);
        finish(device);
        return y.get();
      };
      const std::vector<float> all = run(0, kBatch);
      for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 1}, {2, 1}, {3, 2}})
        expect_equal("row " + std::to_string(first) + " of " + std::to_string(per_row), run(first, rows),
                     all);
    }
  }
}

DUOKV_CASE(packed_copies_follow_their_weight) {
  ops::Device device(0, false);
  const Array<float> x(normals(6 * 32, 1)), y(6 * 16);
  Array<float> w(normals(16 * 32, 2));
  ops::LinearArgs args = {};
  args.x = x.data();
  args.m = args.per_row = 6;
  args.count = 1;
  args.y[0] = y.data();
  args.mode = ProductMode::BF16;
  ops::PackCache packs(device);
  const auto run = [&](uint64_t version, ops::PackCache* cache) {
    args.w[0] = {w.data(), 16, 32, version, cache};
    stream().synchronize();
    linear_forward(device, args);
    finish(device);
    return y.get();
  };
  const std::vector<float> first = run(1, &packs);
  expect(packs.bytes() == 16 * 32 * 2, "the copy has %lld bytes", static_cast<long long>(packs.bytes()));
  w.put(normals(16 * 32, 3));
  expect_equal("the same version", run(1, &packs), first);
  const std::vector<float> second = run(2, &packs);
  expect(second != first, "a new version changes nothing");
  expect_equal("the new version", second, run(0, nullptr));
  expect(packs.bytes() == 16 * 32 * 2, "a copy is made anew in place");

  cuda::test::check(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal), "capture");
  device.recording = true;
  linear_forward(device, args);  // the copy of version 2 exists
  bool refused = false;
  try {
    args.w[0] = {w.data(), 16, 32, 3, &packs};
    linear_forward(device, args);
  } catch (const InvalidArgument&) {
    refused = true;
  }
  expect(refused, "a copy was made in a graph");
  cudaGraph_t graph = nullptr;
  cuda::test::check(cudaStreamEndCapture(device.stream, &graph), "capture");
  device.recording = false;
  cudaGraphDestroy(graph);
}

DUOKV_CASE(backward_of_every_kind) {
  ops::Device device(0, false);
  for (const auto& [m, n, k] :
       {std::array<int64_t, 3>{1, 16, 24}, {37, 40, 24}, {50, 17, 33}, {129, 24, 40}}) {
    for (const ProductMode mode : {ProductMode::FP32, ProductMode::BF16}) {
      for (const bool accumulate : {false, true}) {
        const std::vector<float> x = normals(count(m, k), 1), dy = normals(count(m, n), 2),
                                 w = normals(count(n, k), 3), dx = normals(count(m, k), 4),
                                 dw = normals(count(n, k), 5);
        const Array<float> x_device(x), dy_device(dy), w_device(w), dx_device(dx), dw_device(dw);
        stream().synchronize();
        ops::LinearBackwardArgs args = {
            x_device.data(), dy_device.data(), m,   {w_device.data(), n, k, 0, nullptr}, dx_device.data(),
            accumulate,      dw_device.data(), mode};
        linear_backward(device, args);
        finish(device);
        const std::string what = std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k);
        std::vector<double> reference(dx.begin(), dx.end());
        if (!accumulate) std::fill(reference.begin(), reference.end(), 0);
        add_product(reference, operand(dy, mode), false, operand(w, mode), false, m, k, n);
        expect_relative("dx " + what, dx_device.get(), reference, 1e-6);
        reference.assign(dw.begin(), dw.end());
        add_product(reference, operand(dy, mode), true, operand(x, mode), false, n, k, m);
        expect_relative("dw " + what, dw_device.get(), reference, 1e-6);

        args.dx = nullptr;  // either alone
        linear_backward(device, args);
        args.dx = dx_device.data();
        args.dw = nullptr;
        args.accumulate_dx = true;
        linear_backward(device, args);
        finish(device);
        add_product(reference, operand(dy, mode), true, operand(x, mode), false, n, k, m);
        expect_relative("dw alone " + what, dw_device.get(), reference, 1e-6);
        reference.assign(dx.begin(), dx.end());
        if (!accumulate) std::fill(reference.begin(), reference.end(), 0);
        for (int i = 0; i < 2; ++i)
          add_product(reference, operand(dy, mode), false, operand(w, mode), false, m, k, n);
        expect_relative("dx alone " + what, dx_device.get(), reference, 1e-6);
      }
    }
  }
}

DUOKV_CASE(loss_of_the_head) {
  ops::Device device(0, false);
  for (const auto& [m, vocab, d] : {std::array<int64_t, 3>{1, 5, 8}, {33, 67, 24}, {20, 128, 16}}) {
    for (const ProductMode mode : {ProductMode::FP32, ProductMode::BF16}) {
      const std::vector<float> x = normals(count(m, d), 1), e = normals(count(vocab, d), 2),
                               dembedding = normals(count(vocab, d), 3);
      std::vector<int32_t> targets;
      std::vector<float> scale;
      for (int64_t i = 0; i < m; ++i) {
        targets.push_back(static_cast<int32_t>(i * 31 % vocab));
        scale.push_back(i % 5 == 3 ? 0.0f : 1.0f / static_cast<float>(i + 2));
      }
      std::vector<double> logits(count(m, vocab)), nll, dlogits(count(m, vocab)), dx(count(m, d)),
          de(dembedding.begin(), dembedding.end());
      add_product(logits, operand(x, mode), false, operand(e, mode), true, m, vocab, d);
      for (int64_t i = 0; i < m; ++i) {
        const auto row = logits.begin() + i * vocab;
        const double largest = *std::max_element(row, row + vocab);
        const double sum = std::accumulate(
            row, row + vocab, 0.0, [&](double total, double z) { return total + std::exp(z - largest); });
        const auto target = static_cast<int64_t>(targets[static_cast<size_t>(i)]);
        nll.push_back(largest + std::log(sum) - row[target]);
        for (int64_t v = 0; v < vocab; ++v)
          dlogits[static_cast<size_t>(i * vocab + v)] =
              scale[static_cast<size_t>(i)] * (std::exp(row[v] - largest) / sum - (v == target));
      }
      add_product(dx, dlogits, false, operand(e, mode), false, m, d, vocab);
      add_product(de, dlogits, true, operand(x, mode), false, vocab, d, m);

      const Array<float> x_device(x), e_device(e), scale_device(scale), nll_device(static_cast<size_t>(m)),
          dx_device(count(m, d)), de_device(dembedding);
      const Array<int32_t> targets_device(targets);
      stream().synchronize();
      ops::PackCache packs(device);
      ops::LinearCrossEntropyArgs args = {};
      args.x = x_device.data();
      args.m = m;
      args.embedding = {e_device.data(), vocab, d, 1, &packs};
      args.targets = targets_device.data();
      args.nll = nll_device.data();
      args.mode = mode;
      linear_cross_entropy(device, args);
      finish(device);
      const std::string what = std::to_string(m) + " x " + std::to_string(vocab);
      const std::vector<float> forward_only = nll_device.get();
      expect_relative("nll " + what, forward_only, nll, 1e-6);
      args.embedding.packs = nullptr;
      args.token_scale = scale_device.data();
      args.dx = dx_device.data();
      args.dembedding = de_device.data();
      linear_cross_entropy(device, args);
      finish(device);
      expect_equal("nll with gradients " + what, nll_device.get(), forward_only);
      const double limit = mode == ProductMode::BF16 ? 5e-3 : 2e-6;
      expect_relative("dx " + what, dx_device.get(), dx, limit);
      expect_relative("dE " + what, de_device.get(), de, limit);
    }
  }
}

DUOKV_MAIN
