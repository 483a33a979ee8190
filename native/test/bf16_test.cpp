#include "cpu/bf16.h"

#include <bit>

#include "test/harness.h"

namespace duokv::test {
namespace {

float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }

// Nearest even by comparing distances to the two BF16 neighbours, in FP64; past the largest finite value the
// next step of the exponent stands for infinity.
uint16_t nearest_even(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7FFFFFFF, sign = bits >> 31 << 15;
  const uint32_t below = magnitude >> 16;
  const auto value = [](uint32_t bf16) {
    return bf16 == 0x7F80 ? 0x1p128 : static_cast<double>(from_bits(bf16 << 16));
  };
  const double x = from_bits(magnitude), low = x - value(below), high = value(below + 1) - x;
  const bool up = high < low || (high == low && below % 2 == 1);
  return static_cast<uint16_t>(sign | (below + up));
}

DUOKV_TEST(rounds_to_nearest_even) {
  // Every upper half with lower halves at, around and away from the tie.
  int64_t wrong = 0;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    if ((upper & 0x7F80) == 0x7F80) continue;
    for (uint32_t lower : {0x0000u, 0x0001u, 0x1234u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const uint32_t bits = upper << 16 | lower;
      wrong += cpu::bf16_from_float(from_bits(bits)) != nearest_even(bits);
    }
  }
  expect(wrong == 0, "%lld values round wrongly", static_cast<long long>(wrong));
}

DUOKV_TEST(known_values) {
  const struct {
    uint32_t bits;
    uint16_t bf16;
  } values[] = {
      {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x3F800000, 0x3F80},  // 0, -0, 1
      {0x3F808000, 0x3F80}, {0x3F818000, 0x3F82},                        // ties go to the even neighbour
      {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80},                        // infinities
      {0x7F7FFFFF, 0x7F80}, {0x7F7F7FFF, 0x7F7F},                        // past and below the last tie
      {0x00000001, 0x0000}, {0x00008000, 0x0000}, {0x00008001, 0x0001}, {0x00018000, 0x0002},  // subnormals
      {0x007FFFFF, 0x0080},                                                                    // to a normal
      {0x7F800001, 0x7FC0}, {0xFFC00000, 0xFFC0}, {0x7FFFFFFF, 0x7FFF},                        // NaN
  };
  for (const auto& value : values) {
    const uint16_t got = cpu::bf16_from_float(from_bits(value.bits));
    expect(got == value.bf16, "%08x becomes %04x, expected %04x", value.bits, got, value.bf16);
  }
}

DUOKV_TEST(widening_is_exact) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = cpu::float_from_bf16(static_cast<uint16_t>(bits));
    expect(std::bit_cast<uint32_t>(x) == bits << 16, "%04x widens to %08x", bits, std::bit_cast<uint32_t>(x));
  }
}

DUOKV_TEST(arrays_match_single_values) {
  // A step that is coprime to 2^32 visits all exponents, signs and NaN payloads at every lane.
  std::vector<float> x;
  for (uint32_t i = 0, bits = 0; i < 1000003; ++i, bits += 0x9E3779B1u) x.push_back(from_bits(bits));
  for (size_t n : {size_t{0}, size_t{1}, size_t{7}, size_t{16}, size_t{31}, x.size()}) {
    const std::vector<float> values(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(n));
    std::vector<uint16_t> narrow(n), expected_narrow(n);
    std::vector<float> rounded(n), expected_rounded(n), wide(n);
    for (size_t i = 0; i < n; ++i) {
      expected_narrow[i] = cpu::bf16_from_float(values[i]);
      expected_rounded[i] = cpu::round_to_bf16(values[i]);
    }
    cpu::bf16_from_floats(values.data(), narrow.data(), static_cast<int64_t>(n));
    cpu::round_to_bf16(values.data(), rounded.data(), static_cast<int64_t>(n));
    cpu::floats_from_bf16(narrow.data(), wide.data(), static_cast<int64_t>(n));
    expect_bitwise("bf16_from_floats", narrow, expected_narrow);
    expect_bitwise("round_to_bf16", rounded, expected_rounded);
    expect_bitwise("floats_from_bf16", wide, expected_rounded);
  }
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
