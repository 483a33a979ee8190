// SwiGLU against FP64.
#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

const size_t kSizes[] = {1, 3, 4, 97, 256, 1023, 1024, 1028, 5000};

struct Reference {
  std::vector<double> h, dgate, dup;
};

Reference reference(const std::vector<float>& gate, const std::vector<float>& up,
                    const std::vector<float>& dh) {
  const size_t n = gate.size();
  Reference r{std::vector<double>(n), std::vector<double>(n), std::vector<double>(n)};
  for (size_t i = 0; i < n; ++i) {
    const double z = gate[i], u = up.empty() ? 1.0 : double{up[i]}, s = 1 / (1 + std::exp(-z));
    r.h[i] = z * s * u;
    r.dgate[i] = dh[i] * u * s * (1 + z * (1 - s));
    r.dup[i] = dh[i] * z * s;
  }
  return r;
}

// `offset` elements into each array, so that odd offsets are not aligned for vector loads.
void compare(size_t n, size_t offset, bool gated, bool aliased) {
  const std::string name = std::to_string(n) + (gated ? " gated" : " plain") + (aliased ? " in place" : "") +
                           " at " + std::to_string(offset);
  const std::vector<float> gate = normals(n + offset, 1, 3), dh = normals(n + offset, 3);
  const std::vector<float> up = gated ? normals(n + offset, 2) : std::vector<float>();
  const Reference expected = reference(gate, up, dh);
  const auto tail = [&](const Array<float>& array) {
    const std::vector<float> all = array.get();
    return std::vector<float>(all.begin() + static_cast<ptrdiff_t>(offset), all.end());
  };
  const auto reference_tail = [&](const std::vector<double>& all) {
    return std::vector<double>(all.begin() + static_cast<ptrdiff_t>(offset), all.end());
  };
  const std::vector<float> zeros(n + offset, 0.0f);
  Array<float> dev_gate(gate), dev_up(gated ? up : zeros), dev_dh(dh), dev_h(zeros), dev_dgate(zeros),
      dev_dup(zeros);
  const float* up_pointer = gated ? dev_up.data() + offset : nullptr;
  const auto count = static_cast<int64_t>(n);

  float* dgate = (aliased ? dev_dh : dev_dgate).data() + offset;
  check(swiglu_backward({dev_gate.data() + offset, up_pointer, dev_dh.data() + offset, count, dgate,
                         gated ? dev_dup.data() + offset : nullptr},
                        stream()));
  expect_relative("dgate " + name, tail(aliased ? dev_dh : dev_dgate), reference_tail(expected.dgate), 1e-6);
  if (gated) expect_relative("dup " + name, tail(dev_dup), reference_tail(expected.dup), 1e-6);

  float* h = (aliased ? dev_gate : dev_h).data() + offset;
  check(swiglu_forward({dev_gate.data() + offset, up_pointer, count, h}, stream()));
  expect_relative("h " + name, tail(aliased ? dev_gate : dev_h), reference_tail(expected.h), 1e-6);
}

DUOKV_CASE(matches_fp64) {
  for (const size_t n : kSizes) {
    for (const bool gated : {false, true}) compare(n, 0, gated, false);
  }
}

DUOKV_CASE(works_in_place) {
  for (const size_t n : {4, 97, 1028}) compare(n, 0, true, true);
}

DUOKV_CASE(accepts_unaligned_arrays) {
  for (const size_t offset : {1, 2, 4}) compare(1024, offset, true, false);
}

// Between BF16 products: the FP32 operation on widened inputs, its result rounded.
DUOKV_CASE(stands_between_bf16_products) {
  for (const size_t n : kSizes) {
    for (const bool gated : {false, true}) {
      for (const bool kept : {false, true}) {
        const auto round = [&](const std::vector<float>& values) {
          std::vector<bf16> rounded;
          for (const float value : values) rounded.push_back(__float2bfloat16_rn(value));
          return rounded;
        };
        const auto widen = [](const std::vector<bf16>& values) {
          std::vector<float> wide;
          for (const bf16 value : values) wide.push_back(__bfloat162float(value));
          return wide;
        };
        const std::vector<bf16> gate = round(normals(n, 1, 3)), up = round(normals(n, 2));
        Array<bf16> dev_gate(gate), dev_up(up), h(n);
        Array<float> wide_gate(widen(gate)), wide_up(widen(up)), wide_h(n), kept_gate(n), kept_up(n);
        const auto count = static_cast<int64_t>(n);
        check(swiglu_forward_bf16(dev_gate.data(), gated ? dev_up.data() : nullptr, count,
                                  kept ? kept_gate.data() : nullptr, kept && gated ? kept_up.data() : nullptr,
                                  h.data(), stream()));
        check(swiglu_forward({wide_gate.data(), gated ? wide_up.data() : nullptr, count, wide_h.data()},
                             stream()));
        expect_equal("h", widen(h.get()), widen(round(wide_h.get())));
        if (kept) expect_equal("gate", kept_gate.get(), widen(gate));
        if (kept && gated) expect_equal("up", kept_up.get(), widen(up));
      }
    }
  }
}

DUOKV_CASE(saturates_without_overflow) {
  const std::vector<float> gate = {-200, -88, 0, 88, 200, -1e30f, 1e30f, 1}, ones(gate.size(), 1.0f);
  Array<float> dev_gate(gate), dev_ones(ones), dev_h(gate.size()), dev_dgate(gate.size());
  const auto n = static_cast<int64_t>(gate.size());
  check(swiglu_forward({dev_gate.data(), dev_ones.data(), n, dev_h.data()}, stream()));
  check(swiglu_backward({dev_gate.data(), nullptr, dev_ones.data(), n, dev_dgate.data(), nullptr}, stream()));
  expect_relative("h", dev_h.get(), reference(gate, ones, ones).h, 1e-6);
  for (const float g : dev_dgate.get())
    expect(std::isfinite(g) && std::abs(g) <= 1.1f, "gradient %g of a saturated gate", g);
}

DUOKV_CASE(what_is_not_finite_stays_so) {
  constexpr size_t kCount = 9, kBad = 5;
  for (const float bad : {NAN, INFINITY}) {
    for (const bool of_gate : {false, true}) {
      std::vector<float> gate = normals(kCount, 1), up = normals(kCount, 2);
      (of_gate ? gate : up)[kBad] = bad;
      Array<float> dev_gate(gate), dev_up(up), dh(normals(kCount, 3)), h(kCount), dgate(kCount), dup(kCount);
      check(swiglu_forward({dev_gate.data(), dev_up.data(), kCount, h.data()}, stream()));
      check(swiglu_backward({dev_gate.data(), dev_up.data(), dh.data(), kCount, dgate.data(), dup.data()},
                            stream()));
      const std::vector<float> got_h = h.get(), got_dgate = dgate.get(), got_dup = dup.get();
      for (size_t i = 0; i < kCount; ++i) {
        expect(std::isfinite(got_h[i]) == (i != kBad), "h[%zu] is %g", i, static_cast<double>(got_h[i]));
        if (i != kBad)
          expect(std::isfinite(got_dgate[i]) && std::isfinite(got_dup[i]), "gradients at %zu", i);
      }
      expect(!std::isfinite((of_gate ? got_dup : got_dgate)[kBad]), "a gradient beside %g is finite",
             static_cast<double>(bad));
    }
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
