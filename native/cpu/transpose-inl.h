// Transposing rows of elements of 32 bits. Include inside a file that foreach_target.h compiles,
// after highway.h.

#if defined(DUOKV_CPU_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUOKV_CPU_TRANSPOSE_INL_H_
#undef DUOKV_CPU_TRANSPOSE_INL_H_
#else
#define DUOKV_CPU_TRANSPOSE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// out(j, i) = in(i, j) for 4 × 4 elements, rows a stride apart.
template <class T>
HWY_INLINE void transpose_4x4(const T* in, int64_t in_stride, T* out, int64_t out_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 4; ++j) out[j * out_stride + i] = in[i * in_stride + j];
  }
#else
  const hn::FixedTag<T, 4> d;
  const hn::RepartitionToWide<decltype(d)> pairs;
  const auto row0 = hn::LoadU(d, in), row1 = hn::LoadU(d, in + in_stride);
  const auto row2 = hn::LoadU(d, in + 2 * in_stride), row3 = hn::LoadU(d, in + 3 * in_stride);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, row0, row1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, row2, row3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, row0, row1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, row2, row3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, out);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, out + out_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, out + 2 * out_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, out + 3 * out_stride);
#endif
}

// out [depth, rows], a row of which starts every out_stride, = the transpose of in [rows, depth].
template <class T>
inline void transpose_rows(const T* in, int64_t in_stride, int64_t rows, int64_t depth, T* out,
                           int64_t out_stride) {
  int64_t d = 0;
  if (rows >= 4) {
    // Four rows at a time, and the last four: what lies in two of them is written twice.
    for (; d + 4 <= depth; d += 4) {
      for (int64_t r = 0; r + 4 < rows; r += 4)
        transpose_4x4(in + r * in_stride + d, in_stride, out + d * out_stride + r, out_stride);
      transpose_4x4(in + (rows - 4) * in_stride + d, in_stride, out + d * out_stride + rows - 4, out_stride);
    }
  }
  for (; d < depth; ++d) {
    for (int64_t r = 0; r < rows; ++r) out[d * out_stride + r] = in[r * in_stride + d];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#endif
