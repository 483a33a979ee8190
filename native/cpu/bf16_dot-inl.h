// Products of pairs of BF16 values, added in FP32 by one instruction (AVX512_BF16: Cooper Lake, Sapphire
// Rapids, Zen 4 and later), which Highway 1.0.3 does not offer. DUOKV_BF16_DOT is defined while
// foreach_target.h compiles the target that may have it; has_bf16_dot() of bf16.h says whether this processor
// does. Include after highway.h.
//
// The instruction reads subnormal BF16 values as zeros and keeps no subnormal sum.

#if defined(DUOKV_CPU_BF16_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUOKV_CPU_BF16_DOT_INL_H_
#undef DUOKV_CPU_BF16_DOT_INL_H_
#else
#define DUOKV_CPU_BF16_DOT_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatLanes = hn::Vec<hn::ScalableTag<float>>;

HWY_INLINE FloatLanes multiply_add(FloatLanes sums, FloatLanes a, FloatLanes b) {
  return hn::MulAdd(a, b, sums);
}

#undef DUOKV_BF16_DOT
#if HWY_TARGET == HWY_AVX3
#define DUOKV_BF16_DOT

// 16 pairs of BF16 values, as the 32 bits each pair has in memory.
using Bf16Pairs = hn::Vec<hn::ScalableTag<uint32_t>>;

// Assembly, as a compiler inlines the intrinsics only into functions that are compiled for AVX512_BF16.

// sums + a0 · b0 + a1 · b1, lane by lane.
HWY_INLINE FloatLanes multiply_add(FloatLanes sums, Bf16Pairs a, Bf16Pairs b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums.raw) : "v"(a.raw), "v"(b.raw));
  return sums;
}

HWY_INLINE __m256i narrow_bf16(FloatLanes x) {
  __m256i narrow;
  asm("vcvtneps2bf16 %1, %0" : "=v"(narrow) : "v"(x.raw));
  return narrow;
}

// Stores the lanes of x, rounded to BF16, at p, unaligned.
HWY_INLINE void store_narrow(FloatLanes x, uint16_t* p) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x));
}

// The lanes of `even` and `odd` rounded to BF16, lane i of both in pair i.
HWY_INLINE Bf16Pairs pair_bf16(FloatLanes even, FloatLanes odd) {
  const Bf16Pairs lower{_mm512_cvtepu16_epi32(narrow_bf16(even))};
  const Bf16Pairs upper{_mm512_cvtepu16_epi32(narrow_bf16(odd))};
  return hn::Or(lower, hn::ShiftLeft<16>(upper));
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#endif
