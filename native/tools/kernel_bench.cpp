// Products, row-wise operations, the loss and the optimiser at the shapes of the 126M model, beside what the
// device copies.
#include <random>

#include "tools/kernel_timing.h"

namespace duokv::tools {

using ops::OpTable;
using ops::ProductMode;

const char* mode_name(ProductMode mode) {
  return mode == ProductMode::FP32 ? "fp32" : mode == ProductMode::BF16 ? "bf16" : "tf32x3";
}

std::vector<float> random_values(int64_t count, float scale, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 0xD1B54A32D192ED03ULL;
  const float width = scale * 3.4641016f;
  for (float& value : values) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    value = width * (static_cast<float>(state >> 40) * 0x1p-24f - 0.5f);
  }
  return values;
}

KernelBench::KernelBench(Campaign& campaign, const char* section)
    : campaign_(campaign), section_(section), flag_(campaign.device, {0.0f}) {}

void KernelBench::synchronize() {
  float flag;
  campaign_.device->download(&flag, flag_.data(), sizeof flag);
}

void KernelBench::run(const std::string& op, Json shape, const Work& work, int distinct,
                      const std::function<void(int)>& call) {
  time(op, std::move(shape), work, std::max(distinct, tiny() ? 2 : 8), Graph::available(*device()), call);
}

void KernelBench::run_unrecorded(const std::string& op, Json shape, const Work& work,
                                 const std::function<void(int)>& call) {
  time(op, std::move(shape), work, 1, false, call);
}

void KernelBench::time(const std::string& op, Json shape, const Work& work, int calls, bool recorded,
                       const std::function<void(int)>& call) {
  Json row{{"op", op}};
  row.update(shape);
  try {
    const auto all = [&] {
      for (int i = 0; i < calls; ++i) call(i);
    };
    all();  // brings scratch memory and packed weights to where they stay
    synchronize();
    Graph graph;
    if (recorded) graph = Graph::record(device(), all);
    const auto launch = [&] {
      if (recorded)
        graph.launch();
      else
        all();
    };
    launch();
    synchronize();
    const double once = milliseconds([&] { launch(), synchronize(); });
    const double wanted = tiny() ? 1 : 10;  // milliseconds of work between two looks at the clock
    const int launches = static_cast<int>(std::clamp(wanted / std::max(once, 1e-3), 1.0, 1000.0));
    std::vector<double> ms;
    for (int i = 0; i < campaign_.repeats; ++i) {
      const double taken = milliseconds([&] {
        for (int l = 0; l < launches; ++l) launch();
        synchronize();
      });
      ms.push_back(taken / launches / calls);
    }
    const double taken = median(ms);
    row["recorded"] = recorded;
    row["flops"] = work.flops, row["bytes"] = work.bytes;
    row["gflops"] = work.flops / taken * 1e-6;
    row["gbytes"] = work.bytes / taken * 1e-6;
    campaign_.add(section_, std::move(row), ms);
  } catch (const Error& error) {
    std::printf("%s failed: %s\n", row.dump().c_str(), error.what());
    row["section"] = section_, row["error"] = error.what();
    campaign_.record["failures"].push_back(std::move(row));
  }
}

namespace {

struct Layer {
  const char* name;
  std::vector<int64_t> n;  // of the weights that read the same x
  int64_t k;
  bool normalised = false;  // on the way in
};

std::vector<Layer> layers(const ModelConfig& c) {
  return {{"qkv", {c.query_width(), c.kv_width(), c.kv_width()}, c.hidden, true},
          {"out", {c.hidden}, c.query_width()},
          {"gate and up", {c.ffn, c.ffn}, c.hidden},
          {"down", {c.hidden}, c.ffn},
          {"head", {c.vocab}, c.hidden}};
}

// Serving: packed weights, another set each time, as a model's layers are.
void serve(KernelBench& bench, const Layer& layer, ProductMode mode, int64_t m) {
  int64_t n = 0;
  for (const int64_t each : layer.n) n += each;
  const double element = mode == ProductMode::BF16 ? 2 : 4;
  const int copies = copies_of(static_cast<double>(n * layer.k) * element, bench.tiny());
  std::vector<Values<float>> weights;
  for (int i = 0; i < copies; ++i) weights.push_back(random_array(bench.device(), n * layer.k, 0.02f));
  const Values<float> x = random_array(bench.device(), m * layer.k), y = random_array(bench.device(), m * n);
  Device& device = *bench.device();
  const Values<float> norm = random_array(bench.device(), layer.k);
  ops::PackCache* packs = nullptr;
  device.check(device.table().pack_cache_create(device.handle(), &packs));
  const Work work{2.0 * static_cast<double>(m * n * layer.k),
                  element * static_cast<double>(n * layer.k) + 4.0 * static_cast<double>(m * (layer.k + n))};
  bench.run("linear forward",
            {{"layer", layer.name}, {"mode", mode_name(mode)}, {"m", m}, {"n", n}, {"k", layer.k}}, work,
            copies, [&](int i) {
              ops::LinearArgs args{};
              args.x = x.data(), args.m = m, args.per_row = m, args.mode = mode;
              args.round_output = mode == ProductMode::BF16;
              if (layer.normalised) args.norm = {norm.data(), 1e-5f};
              const float* w = weights[static_cast<size_t>(i % copies)].data();
              float* out = y.data();
              for (const int64_t each : layer.n) {
                args.w[args.count] = {w, each, layer.k, 1, packs};
                args.y[args.count++] = out;
                w += each * layer.k, out += m * each;
              }
              device.run(&OpTable::linear_forward, args);
            });
  device.table().pack_cache_destroy(device.handle(), packs);
}

// The feed-forward block in serving.
void serve_feed_forward(KernelBench& bench, const ModelConfig& c, ProductMode mode, int64_t m) {
  const int64_t elements = c.ffn * c.hidden;
  const double element = mode == ProductMode::BF16 ? 2 : 4, n = static_cast<double>(elements);
  const int copies = copies_of(3 * n * element, bench.tiny());
  std::vector<Values<float>> weights;
  for (int i = 0; i < copies; ++i) weights.push_back(random_array(bench.device(), 3 * elements, 0.02f));
  const Values<float> x = random_array(bench.device(), m * c.hidden),
                      y = random_array(bench.device(), m * c.hidden);
  const Values<float> norm = random_array(bench.device(), c.hidden);
  Device& device = *bench.device();
  ops::PackCache* packs = nullptr;
  device.check(device.table().pack_cache_create(device.handle(), &packs));
  bench.run("feed forward", {{"mode", mode_name(mode)}, {"m", m}, {"f", c.ffn}, {"d", c.hidden}},
            {6.0 * static_cast<double>(m) * n, 3 * n * element + 8.0 * static_cast<double>(m * c.hidden)},
            copies, [&](int i) {
              const float* w = weights[static_cast<size_t>(i % copies)].data();
              ops::FeedForwardArgs args{};
              args.x = x.data(), args.y = y.data(), args.m = m, args.per_row = m, args.mode = mode;
              args.norm = {norm.data(), 1e-5f}, args.round_output = mode == ProductMode::BF16;
              args.w_gate = {w, c.ffn, c.hidden, 1, packs};
              args.w_up = {w + elements, c.ffn, c.hidden, 1, packs};
              args.w_down = {w + 2 * elements, c.hidden, c.ffn, 1, packs};
              device.run(&OpTable::feed_forward, args);
            });
  device.table().pack_cache_destroy(device.handle(), packs);
}

// Training: the forward product without packed weights, and both gradients.
void train(KernelBench& bench, const Layer& layer, ProductMode mode, int64_t m) {
  const int64_t n = layer.n[0], k = layer.k;
  const Values<float> x = random_array(bench.device(), m * k), dy = random_array(bench.device(), m * n);
  const Values<float> w = random_array(bench.device(), n * k, 0.02f),
                      dw = random_array(bench.device(), n * k);
  const Values<float> dx = random_array(bench.device(), m * k);
  Device& device = *bench.device();
  const Json shape{{"layer", layer.name}, {"mode", mode_name(mode)}, {"m", m}, {"n", n}, {"k", k}};
  const double flops = 2.0 * static_cast<double>(m * n * k);
  const double bytes = 4.0 * static_cast<double>(m * k + m * n + n * k);
  const ops::Weight weight{w.data(), n, k, 1, nullptr};
  bench.run("linear forward, training", shape, {flops, bytes}, 1, [&](int) {
    ops::LinearArgs args{};
    args.x = x.data(), args.m = m, args.per_row = m, args.count = 1, args.mode = mode;
    args.w[0] = weight, args.y[0] = dy.data();
    device.run(&OpTable::linear_forward, args);
  });
  bench.run("linear backward, dx", shape, {flops, bytes}, 1, [&](int) {
    device.run(&OpTable::linear_backward, {x.data(), dy.data(), m, weight, dx.data(), false, nullptr, mode});
  });
  bench.run("linear backward, dw", shape, {flops, bytes + 4.0 * static_cast<double>(n * k)}, 1, [&](int) {
    device.run(&OpTable::linear_backward, {x.data(), dy.data(), m, weight, nullptr, false, dw.data(), mode});
  });
}

void bench_loss(KernelBench& bench, const ModelConfig& c, ProductMode mode, int64_t m) {
  const int64_t d = c.hidden, vocab = c.vocab;
  const Values<float> x = random_array(bench.device(), m * d),
                      e = random_array(bench.device(), vocab * d, 0.02f);
  const Values<float> dx = random_array(bench.device(), m * d), de = random_array(bench.device(), vocab * d);
  const Values<float> nll = random_array(bench.device(), m);
  const Values<float> scale(bench.device(), std::vector<float>(static_cast<size_t>(m), 1e-5f));
  const Values<int32_t> targets(bench.device(), random_tokens(m, vocab, 7));
  for (const bool gradient : {false, true}) {
    const double flops = (gradient ? 6.0 : 2.0) * static_cast<double>(m * d * vocab);
    bench.run(gradient ? "cross-entropy with gradients" : "cross-entropy",
              {{"mode", mode_name(mode)}, {"m", m}, {"n", vocab}, {"k", d}}, {flops, 0}, 1, [&](int) {
                bench.device()->run(&OpTable::linear_cross_entropy, {x.data(),
                                                                     m,
                                                                     {e.data(), vocab, d, 1, nullptr},
                                                                     targets.data(),
                                                                     gradient ? scale.data() : nullptr,
                                                                     nll.data(),
                                                                     gradient ? dx.data() : nullptr,
                                                                     gradient ? de.data() : nullptr,
                                                                     mode});
              });
  }
}

}  // namespace

void bench_linear(Campaign& campaign) {
  KernelBench bench(campaign, "linear");
  const ModelConfig config = preset(campaign.shape, Design::LocalHistory);
  const std::vector<int64_t> rows =
      campaign.tiny() ? std::vector<int64_t>{1, 48} : std::vector<int64_t>{1, 8, 32, 1792, 14336};
  const int64_t tokens = campaign.tiny() ? 64 : 32768;
  for (const ProductMode mode : {ProductMode::FP32, ProductMode::BF16}) {
    for (const Layer& layer : layers(config)) {
      const bool head = layer.k == config.hidden && layer.n[0] == config.vocab;
      for (const int64_t m : rows)
        if (!head || m <= 32) serve(bench, layer, mode, m);
      if (!head) train(bench, layer, mode, tokens);
    }
    for (const int64_t m : rows) serve_feed_forward(bench, config, mode, m);
    bench_loss(bench, config, mode, tokens);
  }
}

void bench_rows(Campaign& campaign) {
  KernelBench bench(campaign, "rows");
  const std::shared_ptr<Device>& device = campaign.device;
  const ModelConfig c = preset(campaign.shape, Design::LocalHistory);
  const int64_t d = c.hidden;
  for (const int64_t m :
       campaign.tiny() ? std::vector<int64_t>{1, 64} : std::vector<int64_t>{1, 1792, 32768}) {
    const double n = static_cast<double>(m * d), f = static_cast<double>(m * c.ffn);
    const Values<float> x = random_array(device, m * d), y = random_array(device, m * d),
                        z = random_array(device, m * d);
    const Values<float> w = random_array(device, d), dw = random_array(device, d),
                        rstd(device, std::vector<float>(static_cast<size_t>(m), 1.0f));
    const Json shape{{"m", m}, {"d", d}};
    bench.run("rms_norm forward", shape, {0, 8 * n}, 1, [&](int) {
      device->run(&OpTable::rms_norm_forward, {x.data(), w.data(), m, d, 1e-5f, y.data(), rstd.data()});
    });
    bench.run("rms_norm backward", shape, {0, 12 * n}, 1, [&](int) {
      device->run(&OpTable::rms_norm_backward,
                  {x.data(), w.data(), rstd.data(), y.data(), m, d, z.data(), false, dw.data()});
    });
    bench.run("add", shape, {0, 12 * n}, 1, [&](int) {
      device->run(&OpTable::add, {x.data(), m * d, z.data()});
    });
    const Values<float> table = random_array(device, c.vocab * d, 0.02f);
    const Values<int32_t> tokens(device, random_tokens(m, c.vocab, 8));
    bench.run("embedding forward", shape, {0, 8 * n}, 1, [&](int) {
      device->run(&OpTable::embedding_forward, {tokens.data(), m, d, table.data(), y.data()});
    });
    bench.run("embedding backward", shape, {0, 12 * n}, 1, [&](int) {
      device->run(&OpTable::embedding_backward, {tokens.data(), m, d, c.vocab, x.data(), table.data()});
    });
    const Values<float> gate = random_array(device, m * c.ffn), up = random_array(device, m * c.ffn);
    const Values<float> h = random_array(device, m * c.ffn), dgate = random_array(device, m * c.ffn),
                        dup = random_array(device, m * c.ffn);
    const Json wide{{"m", m}, {"d", c.ffn}};
    bench.run("swiglu forward", wide, {0, 12 * f}, 1, [&](int) {
      device->run(&OpTable::swiglu_forward, {gate.data(), up.data(), m * c.ffn, h.data()});
    });
    bench.run("swiglu backward", wide, {0, 20 * f}, 1, [&](int) {
      device->run(&OpTable::swiglu_backward,
                  {gate.data(), up.data(), h.data(), m * c.ffn, dgate.data(), dup.data()});
    });
    std::vector<int32_t> at(static_cast<size_t>(m));
    for (size_t i = 0; i < at.size(); ++i) at[i] = static_cast<int32_t>(i % 2048);
    const Values<int32_t> positions(device, at);
    const Values<float> angles = random_array(device, 2048 * c.head_dim);
    bench.run("rotary", {{"m", m}, {"heads", c.query_heads}, {"head_dim", c.head_dim}},
              {0, 8 * static_cast<double>(m * c.query_width())}, 1, [&](int) {
                device->run(&OpTable::rotary,
                            {x.data(), m, static_cast<int32_t>(c.query_heads),
                             static_cast<int32_t>(c.head_dim), positions.data(), angles.data(), false});
              });
  }
  const int64_t parameters = make_plan(c).arena_elements;
  const Values<float> p = random_array(device, parameters, 0.02f),
                      g = random_array(device, parameters, 1e-3f);
  const Values<float> m(device, std::vector<float>(static_cast<size_t>(parameters), 0.0f)),
      v(device, std::vector<float>(static_cast<size_t>(parameters), 1e-6f));
  const double n = static_cast<double>(parameters);
  bench.run("adamw", {{"n", parameters}}, {0, 28 * n}, 1, [&](int) {
    device->run(&OpTable::adamw,
                {p.data(), g.data(), m.data(), v.data(), parameters, 1e-6, 0.9, 0.95, 1e-8, 0.1, 1.0, 10});
  });
  bench.run_unrecorded("sum_squares", {{"n", parameters}}, {0, 4 * n}, [&](int) {
    double sum;
    device->run(&OpTable::sum_squares, {g.data(), parameters, &sum});
  });
}

void bench_ceilings(Campaign& campaign) {
  KernelBench bench(campaign, "ceilings");
  const int64_t bytes = campaign.tiny() ? 1 << 20 : int64_t{1} << 30;
  const Values<float> from = random_array(campaign.device, bytes / 4),
                      to = random_array(campaign.device, bytes / 4);
  bench.run("copy", {{"bytesCopied", bytes}}, {0, 2.0 * static_cast<double>(bytes)}, 1,
            [&](int) { campaign.device->copy(to.data(), from.data(), bytes); });
  bench.run("zero", {{"bytesWritten", bytes}}, {0, static_cast<double>(bytes)}, 1,
            [&](int) { campaign.device->zero(to.data(), bytes); });
  // Large products, whose rate is what the device's library reaches.
  const int64_t size = campaign.tiny() ? 64 : 8192;
  for (const ProductMode mode : {ProductMode::FP32, ProductMode::BF16})
    serve(bench, {"square", {size}, size}, mode, size);
  // What a call costs that has nothing to do: the launch within a graph, and without.
  const Values<float> one = random_array(campaign.device, 64);
  bench.run("smallest add", {{"n", 64}}, {}, 256, [&](int) {
    campaign.device->run(&OpTable::add, {one.data(), 64, to.data()});
  });
  bench.run_unrecorded("smallest add, not recorded", {{"n", 64}}, {}, [&](int) {
    campaign.device->run(&OpTable::add, {one.data(), 64, to.data()});
  });
}

}  // namespace duokv::tools
