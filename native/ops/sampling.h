// The arithmetic of sampling, which both backends compute to the same bits, so that they draw the same
// tokens.
//
// A token's weight exp((logit - peak) / temperature) is an integer multiple of 2^-weight_bits. Sums of
// weights are exact, so they do not depend on an order or on the number of threads.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define DUOKV_EVERYWHERE __host__ __device__ __forceinline__
#else
#define DUOKV_EVERYWHERE inline __attribute__((always_inline))
#endif

namespace duokv::ops::sampling {

template <class To, class From>
DUOKV_EVERYWHERE To bits_of(From value) {
  return __builtin_bit_cast(To, value);
}

// So that the sum of a vocabulary's weights fits into 63 bits.
DUOKV_EVERYWHERE int weight_bits(int64_t vocab) {
  int bits = 62;
  for (int64_t rest = vocab - 1; rest > 0; rest /= 2) --bits;
  return bits;
}

// Grows with the logit. 0 and -0 are equal.
DUOKV_EVERYWHERE uint32_t order_of(float logit) {
  const uint32_t bits = bits_of<uint32_t>(logit + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DUOKV_EVERYWHERE float logit_of(uint32_t order) {
  return bits_of<float>(order >> 31 ? order & 0x7fffffffu : ~order);
}

// What logits are multiplied with. Temperatures too small for FP32 leave the likeliest tokens.
DUOKV_EVERYWHERE float inverse_of(float temperature) { return fminf(1.0f / temperature, 0x1.fffffep127f); }

// exp((logit - peak) · inverse), within 2 ulp and the rounding of its argument, in units of 2^-bits.
// logit <= peak, peak is finite.
DUOKV_EVERYWHERE uint64_t weight_of(float logit, float peak, float inverse, int bits) {
  const float x = (logit - peak) * inverse;
  if (!(x > -87.0f)) return 0;
  // Adding 1.5 · 2^23 rounds to an integer; ln 2 in two parts, the first short enough for a product to be
  // exact. Every step is one rounding, which no compiler may fuse with another.
  const float n = fmaf(x, 1.44269504f, 12582912.0f) - 12582912.0f;
  const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
  // Minimax polynomial of (exp(r) - 1 - r) / r² on |r| <= ln(2)/2; relative error of exp 3.1e-9.
  float q = fmaf(1.3814466849e-3f, r, 8.3687804183e-3f);
  q = fmaf(q, r, 4.1668394215e-2f);
  q = fmaf(q, r, 1.6666520108e-1f);
  q = fmaf(q, r, 4.9999993412e-1f);
  q = fmaf(q, r, 1.0f);
  q = fmaf(q, r, 1.0f);
  // q · 2^(n + bits): never below the normal range where it is at least 1.
  const int exponent = static_cast<int>(n) + bits;
  if (exponent < -1) return 0;
  return static_cast<uint64_t>(q * bits_of<float>(static_cast<uint32_t>(exponent + 127) << 23));
}

// The mass that the kept tokens must reach, of `total`.
DUOKV_EVERYWHERE uint64_t target_of(double top_p, uint64_t total) {
  const double target = ceil(top_p * static_cast<double>(total));
  return target < 1 ? 1 : target < static_cast<double>(total) ? static_cast<uint64_t>(target) : total;
}

// Which unit of `total` is drawn, draw in [0, 1).
DUOKV_EVERYWHERE uint64_t drawn_of(double draw, uint64_t total) {
  const double unit = draw * static_cast<double>(total);
  return unit < static_cast<double>(total) ? static_cast<uint64_t>(unit) : total - 1;
}

// log(exp(logit - peak) / (sum · 2^-bits)).
DUOKV_EVERYWHERE float log_probability(float logit, float peak, uint64_t sum, int bits) {
  return static_cast<float>(static_cast<double>(logit) - static_cast<double>(peak) -
                            log(ldexp(static_cast<double>(sum), -bits)));
}

}  // namespace duokv::ops::sampling
