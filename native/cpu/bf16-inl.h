// BF16 conversion of Highway vectors; the rules are those of bf16.h. Include inside a file that
// foreach_target.h compiles, after highway.h.

#if defined(DUOKV_CPU_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUOKV_CPU_BF16_INL_H_
#undef DUOKV_CPU_BF16_INL_H_
#else
#define DUOKV_CPU_BF16_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The bits of v (FP32 lanes) with the BF16 value in the upper half; the lower half is whatever rounding left
// there.
template <class DF, class V>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DF>> bf16_in_upper_half(DF df, V v) {
  const hn::RebindToUnsigned<DF> du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu)));
  const auto quieted = hn::Or(bits, hn::Set(du, 0x400000u));
  return hn::IfThenElse(hn::MaskFromVec(hn::BitCast(du, hn::VecFromMask(df, hn::IsNaN(v)))), quieted,
                        rounded);
}

// v rounded to BF16, as FP32 lanes.
template <class DF, class V>
HWY_INLINE V round_to_bf16(DF df, V v) {
  const hn::RebindToUnsigned<DF> du;
  return hn::BitCast(df, hn::And(bf16_in_upper_half(df, v), hn::Set(du, 0xFFFF0000u)));
}

// Stores the lanes of v (FP32) as BF16 at p, unaligned.
template <class DF, class V>
HWY_INLINE void store_bf16(V v, DF df, uint16_t* p) {
  const hn::Rebind<uint16_t, DF> d16;
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(bf16_in_upper_half(df, v))), d16, p);
}

// Loads BF16 values at p, unaligned, into FP32 lanes.
template <class DF>
HWY_INLINE hn::Vec<DF> load_bf16(DF df, const uint16_t* p) {
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<uint16_t, DF> d16;
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, p))));
}

}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#endif
