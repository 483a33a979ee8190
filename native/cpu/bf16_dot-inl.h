// Products of pairs of BF16 values, added in FP32 by one instruction (AVX512_BF16: Cooper Lake, Sapphire
// Rapids, Zen 4 and later), which Highway 1.0.3 does not offer. DUOKV_BF16_DOT is defined while
// foreach_target.h compiles the target that may have them; has_bf16_dot() of bf16.h says whether this
// processor does. Every function and lambda between that question and the instruction carries
// DUOKV_BF16_DOT_ATTR. Include after highway.h.
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

#undef DUOKV_BF16_DOT
#undef DUOKV_BF16_DOT_ATTR
#if HWY_TARGET == HWY_AVX3
#define DUOKV_BF16_DOT
#define DUOKV_BF16_DOT_ATTR __attribute__((target(HWY_TARGET_STR ",avx512bf16")))

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 16 pairs of BF16 values, as the 32 bits each pair has in memory.
using Bf16Pairs = hn::Vec<hn::ScalableTag<uint32_t>>;
using Bf16Sums = hn::Vec<hn::ScalableTag<float>>;

// sums + a0 · b0 + a1 · b1, lane by lane.
DUOKV_BF16_DOT_ATTR HWY_INLINE Bf16Sums dot_bf16(Bf16Sums sums, Bf16Pairs a, Bf16Pairs b) {
  return Bf16Sums{_mm512_dpbf16_ps(sums.raw, (__m512bh)a.raw, (__m512bh)b.raw)};
}

// The lanes of `even` and `odd` rounded to BF16, lane i of both in pair i.
DUOKV_BF16_DOT_ATTR HWY_INLINE Bf16Pairs pair_bf16(Bf16Sums even, Bf16Sums odd) {
  const hn::ScalableTag<uint32_t> du;
  const __m256i low = (__m256i)_mm512_cvtneps_pbh(even.raw), high = (__m256i)_mm512_cvtneps_pbh(odd.raw);
  const Bf16Pairs lower{_mm512_cvtepu16_epi32(low)}, upper{_mm512_cvtepu16_epi32(high)};
  return hn::Or(lower, hn::ShiftLeft<16>(upper));
}

}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();
#endif

#endif
