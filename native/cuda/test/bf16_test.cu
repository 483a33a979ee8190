// Casts between FP32 and BF16.
#include <limits>

#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

// To nearest, ties to even, on the bits.
uint16_t nearest(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

uint16_t bits_of(bf16 value) {
  uint16_t bits;
  std::memcpy(&bits, &value, 2);
  return bits;
}

std::vector<float> values(size_t n) {
  std::vector<float> x = normals(n, 1, 100);
  const float special[] = {0.0f,
                           -0.0f,
                           std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN(),
                           1.00390625f,
                           1.01171875f,
                           3.4e38f,
                           1e-40f};
  for (size_t i = 0; i < std::size(special) && i < n; ++i) x[n - 1 - i] = special[i];
  return x;
}

DUOKV_CASE(rounds_to_nearest_even) {
  for (const size_t n : {1, 7, 8, 97, 1024, 2056}) {
    const std::vector<float> x = values(n);
    Array<float> from(x);
    Array<bf16> to(n);
    check(to_bf16(from.data(), static_cast<int64_t>(n), to.data(), stream()));
    const std::vector<bf16> got = to.get();
    for (size_t i = 0; i < n; ++i) {
      const bool right =
          std::isnan(x[i]) ? std::isnan(__bfloat162float(got[i])) : bits_of(got[i]) == nearest(x[i]);
      expect(right, "element %zu of %zu: %g became %#x", i, n, static_cast<double>(x[i]), bits_of(got[i]));
    }
  }
}

DUOKV_CASE(widens_and_adds) {
  for (const size_t n : {1, 7, 8, 97, 1024, 2056}) {
    std::vector<bf16> x;
    for (const float value : normals(n, 2)) x.push_back(__float2bfloat16_rn(value));
    const std::vector<float> residual = normals(n, 3);
    Array<bf16> from(x);
    Array<float> added(residual), plain(n), apart(n);
    const auto count = static_cast<int64_t>(n);
    check(from_bf16(from.data(), count, nullptr, plain.data(), stream()));
    check(from_bf16(from.data(), count, added.data(), apart.data(), stream()));
    check(from_bf16(from.data(), count, added.data(), added.data(), stream()));
    std::vector<float> wide, sum;
    for (size_t i = 0; i < n; ++i) {
      wide.push_back(__bfloat162float(x[i]));
      sum.push_back(residual[i] + wide.back());
    }
    expect_equal("widened", plain.get(), wide);
    expect_equal("added", apart.get(), sum);
    expect_equal("added in place", added.get(), sum);
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
