// BF16 values are stored as their 16 bits: the upper half of an FP32. Conversion rounds to nearest even,
// keeps infinities, and keeps NaN a NaN with its sign (quieted, so that a payload in the lower half alone
// cannot turn it into an infinity). Vector forms for use inside Highway code are in bf16-inl.h.
#pragma once

#include <bit>
#include <cstdint>

namespace duokv::cpu {

inline uint16_t bf16_from_float(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float float_from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline float round_to_bf16(float x) { return float_from_bf16(bf16_from_float(x)); }

// Arrays of n values, on the calling thread, with the widest vectors of this CPU.
void bf16_from_floats(const float* x, uint16_t* bf16, int64_t n);
void floats_from_bf16(const uint16_t* bf16, float* x, int64_t n);
void round_to_bf16(const float* x, float* rounded, int64_t n);  // may run in place

// Whether the processor multiplies pairs of BF16 values (bf16_dot-inl.h). Code of the target that may have
// such an instruction asks; Highway may have chosen another one.
bool has_bf16_dot();
// Lets a test go without, or as the processor has them again.
void allow_bf16_dot_for_test(bool allowed);

}  // namespace duokv::cpu
