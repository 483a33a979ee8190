// The feed-forward block against the operations it is made of.
#include <array>

#include "test/harness.h"
#include "test/packs.h"

namespace duokv::test {
namespace {

using Floats = std::vector<float>;
using Mode = ops::ProductMode;

struct Block {
  Block(ops::Device* device, int64_t m, int64_t d, int64_t f, bool gated, uint64_t stream)
      : device(device), m(m), d(d), f(f), gated(gated) {
    Rng rng(stream);
    x = rng.normals(m * d);
    norm = rng.normals(d);
    gate = rng.normals(f * d);
    up = rng.normals(f * d);
    down = rng.normals(d * f);
  }

  struct Result {
    Floats y, gate, up;
  };

  // `served`: with weights that are kept packed.
  Result fused(Mode mode, bool round, bool keep, bool in_place, bool served = false) const {
    const Packs cache(device);
    ops::PackCache* packs = served ? cache : static_cast<ops::PackCache*>(nullptr);
    const Array<float> xs(device, x), norms(device, norm), gates(device, gate), ups(device, up),
        downs(device, down), ys(device, m * d), kept_gate(device, m * f), kept_up(device, m * f);
    const ops::FeedForwardArgs args{.x = xs.data(),
                                    .y = in_place ? xs.data() : ys.data(),
                                    .m = m,
                                    .per_row = m,
                                    .norm = {norms.data(), 1e-5f},
                                    .w_gate = {gates.data(), f, d, 1, packs},
                                    .w_up = {gated ? ups.data() : nullptr, f, d, 1, packs},
                                    .w_down = {downs.data(), d, f, 1, packs},
                                    .gate = keep ? kept_gate.data() : nullptr,
                                    .up = keep && gated ? kept_up.data() : nullptr,
                                    .round_output = round,
                                    .mode = mode};
    check(table().feed_forward(device, &args));
    if (!in_place) expect_bitwise("x is untouched", xs.get(), x);
    Result result{in_place ? xs.get() : ys.get(), {}, {}};
    if (keep) result.gate = kept_gate.get();
    if (keep && gated) result.up = kept_up.get();
    return result;
  }

  Result apart(Mode mode, bool round) const {
    const Array<float> xs(device, x), norms(device, norm), n(device, m * d), h(device, m * f);
    const ops::RmsNormArgs rms{xs.data(), norms.data(), m, d, 1e-5f, n.data(), nullptr};
    check(table().rms_norm_forward(device, &rms));
    const auto linear = [&](const Array<float>& in, const Floats& weight, int64_t rows, int64_t columns,
                            const Floats* residual) {
      const Array<float> w(device, weight),
          y(device, residual ? *residual : Floats(static_cast<size_t>(m * rows)));
      const ops::LinearArgs args{in.data(),  m,
                                 m,          {},
                                 1,          {{w.data(), rows, columns, 1, nullptr}},
                                 {y.data()}, residual ? y.data() : nullptr,
                                 round,      mode};
      check(table().linear_forward(device, &args));
      return y.get();
    };
    Result result{{}, linear(n, gate, f, d, nullptr), {}};
    if (gated) result.up = linear(n, up, f, d, nullptr);
    const Array<float> gates(device, result.gate), ups(device, gated ? result.up : result.gate);
    const ops::SwigluArgs activation{gates.data(), gated ? ups.data() : nullptr, m * f, h.data()};
    check(table().swiglu_forward(device, &activation));
    result.y = linear(h, down, d, f, &x);
    return result;
  }

  ops::Device* device;
  int64_t m, d, f;
  bool gated;
  Floats x, norm, gate, up, down;
};

DUOKV_TEST(is_its_operations_in_turn) {
  uint64_t stream = 0;
  for (const auto& [m, d, f] : {std::array<int64_t, 3>{1, 24, 40},
                                {2, 300, 200},
                                {3, 40, 17},
                                {8, 520, 260},
                                {37, 64, 130},
                                {130, 96, 256},
                                {530, 40, 90}}) {
    for (bool gated : {true, false}) {
      const Block block(device(), m, d, f, gated, ++stream);
      for (Mode mode : {Mode::FP32, Mode::BF16}) {
        const bool round = mode == Mode::BF16;
        const Block::Result expected = block.apart(mode, round);
        const Block::Result kept = block.fused(mode, round, true, false);
        expect_bitwise("y", kept.y, expected.y);
        expect_bitwise("gate", kept.gate, expected.gate);
        expect_bitwise("up", kept.up, expected.up);
        expect_bitwise("y in place", block.fused(mode, round, false, true).y, expected.y);
        const Block::Result served = block.fused(mode, round, true, false, true);
        expect_bitwise("y, served", served.y, expected.y);
        expect_bitwise("gate, served", served.gate, expected.gate);
        expect_bitwise("up, served", served.up, expected.up);
        expect_bitwise("y in place, served", block.fused(mode, round, false, true, true).y, expected.y);
      }
    }
  }
}

DUOKV_TEST(bad_arguments_are_refused) {
  float memory[64] = {};
  ops::FeedForwardArgs args{memory,
                            memory,
                            1,
                            1,
                            {memory, 1e-5f},
                            {memory, 4, 4, 1, nullptr},
                            {memory, 4, 4, 1, nullptr},
                            {memory, 4, 4, 1, nullptr},
                            nullptr,
                            nullptr,
                            false,
                            Mode::FP32};
  const auto refuse = [&](const char* what, auto change) {
    ops::FeedForwardArgs changed = args;
    change(changed);
    expect_status(table().feed_forward(device(), &changed), ops::kInvalid, what);
  };
  refuse("x null", [](auto& a) { a.x = nullptr; });
  refuse("no norm", [](auto& a) { a.norm.weight = nullptr; });
  refuse("m 0", [](auto& a) { a.m = 0; });
  refuse("w_down of another shape", [](auto& a) { a.w_down.k = 5; });
  refuse("w_up of another shape", [](auto& a) { a.w_up.n = 5; });
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
