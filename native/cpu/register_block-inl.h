// The shape in which matrix products keep their sums in registers. Include inside a file that
// foreach_target.h compiles, after highway.h.

#if defined(DUOKV_CPU_REGISTER_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUOKV_CPU_REGISTER_BLOCK_INL_H_
#undef DUOKV_CPU_REGISTER_BLOCK_INL_H_
#else
#define DUOKV_CPU_REGISTER_BLOCK_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#ifndef DUOKV_CPU_REGISTER_BLOCK_ONCE
#define DUOKV_CPU_REGISTER_BLOCK_ONCE
namespace duokv::cpu {

// Rows of the largest register block of any target.
inline constexpr int64_t kMostBlockRows = 12;

}  // namespace duokv::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {

// A register block is kBlockRows rows of kBlockVectors sums: 12 of 16 registers, or 24 of 32; a row of the
// right operand and a broadcast value of the left one fill the others. On AVX-512 it is tall: twice as many
// rows use what of the right operand passes through the first-level cache.
#if HWY_TARGET <= HWY_AVX3
inline constexpr int kBlockRows = 12, kBlockVectors = 2;
#elif HWY_ARCH_ARM_A64
inline constexpr int kBlockRows = 6, kBlockVectors = 4;
#else
inline constexpr int kBlockRows = 6, kBlockVectors = 2;
#endif

static_assert(kBlockRows <= kMostBlockRows);

HWY_INLINE int64_t lane_count() {
  return static_cast<int64_t>(hwy::HWY_NAMESPACE::Lanes(hwy::HWY_NAMESPACE::ScalableTag<float>()));
}

}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#endif
