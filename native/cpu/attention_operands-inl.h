// What attention's products are made of: the types of operands, and entries and rows copied and packed as
// such. Include inside a file that foreach_target.h compiles, after highway.h.

#if defined(DUOKV_CPU_ATTENTION_OPERANDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUOKV_CPU_ATTENTION_OPERANDS_INL_H_
#undef DUOKV_CPU_ATTENTION_OPERANDS_INL_H_
#else
#define DUOKV_CPU_ATTENTION_OPERANDS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/attention.h"
#include "cpu/bf16-inl.h"
#include "cpu/bf16.h"
#include "cpu/bf16_dot-inl.h"
#include "cpu/device.h"
#include "cpu/prefetch.h"
#include "cpu/register_block-inl.h"
#include "cpu/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using I = hn::ScalableTag<int32_t>;
using V = hn::Vec<F>;

HWY_INLINE int64_t panel_width() { return kBlockVectors * lane_count(); }

// A step of a product multiplies one FP32 value of either operand or, where the processor has BF16 dots, a
// pair of BF16 values: operands are arrays of T = float, or of T = Bf16Pair along whose pairs the product
// runs.
using Bf16Pair = uint32_t;
template <class T>
inline constexpr int64_t kStepValues = std::is_same_v<T, float> ? 1 : 2;

// Values of a step of a call's products: 1, or 2 where they are of BF16 pairs.
inline int64_t step_values([[maybe_unused]] const AttentionCall& call) {
#ifdef DUOKV_BF16_DOT
  if (call.bf16 && has_bf16_dot()) return kStepValues<Bf16Pair>;
#endif
  return kStepValues<float>;
}

// Calls run with a T whose steps have so many values.
template <class Run>
HWY_INLINE void with_operands([[maybe_unused]] int64_t values, Run&& run) {
#ifdef DUOKV_BF16_DOT
  if (values == kStepValues<Bf16Pair>) return run(Bf16Pair{});
#endif
  run(float{});
}

// dst [padded] = src [count], zero-filled, rounded to BF16 on request.
HWY_INLINE void copy_padded(const float* src, int64_t count, int64_t padded, bool round, float* dst) {
  const F f;
  const int64_t lanes = lane_count();
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const V x = hn::LoadU(f, src + i);
    hn::StoreU(round ? round_to_bf16(f, x) : x, f, dst + i);
  }
  for (; i < count; ++i) dst[i] = round ? cpu::round_to_bf16(src[i]) : src[i];
  for (; i < padded; ++i) dst[i] = 0;
}

HWY_INLINE void copy_padded(const uint16_t* src, int64_t count, int64_t padded, bool, float* dst) {
  const F f;
  const int64_t lanes = lane_count();
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(load_bf16(f, src + i), f, dst + i);
  for (; i < count; ++i) dst[i] = float_from_bf16(src[i]);
  for (; i < padded; ++i) dst[i] = 0;
}

// One KV head's keys or values in one row of a bank.
struct Entries {
  Entries(const ops::Bank& bank, int64_t row, int64_t kv_head, bool values)
      : r(bank.rows[row]),
        data(values ? r.v : r.k),
        dtype(bank.dtype),
        head_offset(kv_head * bank.head_stride),
        stride(bank.position_stride) {}

  const ops::BankRow& r;
  const void* data;
  ops::DType dtype;
  int64_t head_offset, stride;

  Span stored() const { return {r.first, r.first + r.count}; }
  // The slot of a stored position, and how many positions from it on lie in consecutive slots.
  int64_t slot(int64_t position) const { return (r.slot + position - r.first) % r.capacity; }
  int64_t consecutive(int64_t position) const { return r.capacity - slot(position); }
  template <class T>
  const T* at(int64_t position) const {
    return static_cast<const T*>(data) + head_offset + slot(position) * stride;
  }
};

// dst [span.size(), padded] = the entries at these positions; zeros where nothing is stored.
template <class T>
inline void copy_entries(const Entries& entries, Span span, int64_t head_dim, int64_t padded, bool round,
                         float* dst) {
  const Span stored = intersect(span, entries.stored());
  for (int64_t p = span.begin; p < span.end; ++p, dst += padded) {
    if (p < stored.begin || p >= stored.end) {
      std::fill_n(dst, padded, 0.0f);
    } else {
      copy_padded(entries.at<T>(p), head_dim, padded, round, dst);
    }
  }
}

inline void copy_entries(const Entries& entries, Span span, int64_t head_dim, int64_t padded, bool round,
                         float* dst) {
  if (entries.dtype == ops::DType::BF16)
    return copy_entries<uint16_t>(entries, span, head_dim, padded, round, dst);
  copy_entries<float>(entries, span, head_dim, padded, round, dst);
}

// Whether all of x [n] are finite; n is a multiple of the vector length.
inline bool all_finite(const float* x, int64_t n) {
  const F f;
  V nonfinite = hn::Zero(f);  // NaN once x - x is
  for (int64_t i = 0; i < n; i += lane_count()) {
    const V value = hn::LoadU(f, x + i);
    nonfinite = hn::Add(nonfinite, hn::Sub(value, value));
  }
  return hn::AllTrue(f, hn::Eq(nonfinite, hn::Zero(f)));
}

// Panels of the transpose: src, of whose rows of `steps` elements one starts every `stride`, becomes one
// [steps, panel_width] block for each panel_width keys, the right operand of a product with queries. `keys`
// is a multiple of panel_width.
template <class T>
inline void pack_transposed(const T* src, int64_t keys, int64_t steps, int64_t stride, T* dst) {
  const int64_t width = panel_width();
  for (int64_t key = 0; key < keys; key += width, src += width * stride, dst += width * steps)
    transpose_rows(src, stride, width, steps, dst, width);
}

// Copies rows [rows, stride] of n values, a multiple of the vector length, as the operand of a product along
// them: dst [rows, n / kStepValues], a row of which starts every dst_stride. dst may be x.
template <class T>
HWY_NOINLINE void pair_columns(const float* x, int64_t rows, int64_t n, int64_t stride, T* dst,
                               int64_t dst_stride) {
  if constexpr (kStepValues<T> == 1) {
    if (dst == x) return;
    for (int64_t r = 0; r < rows; ++r) std::copy_n(x + r * stride, n, dst + r * dst_stride);
  } else {
#ifdef DUOKV_BF16_DOT
    const F f;
    for (int64_t r = 0; r < rows; ++r, x += stride, dst += dst_stride) {
      for (int64_t i = 0; i < n; i += lane_count()) {
        store_narrow(hn::LoadU(f, x + i), reinterpret_cast<uint16_t*>(dst + i / 2));
      }
    }
#endif
  }
}

// One vector of the operand of a product along rows: of the row at x or, in pairs, of it and the next one.
template <class T>
HWY_INLINE hn::Vec<hn::ScalableTag<T>> load_rows(const float* x, [[maybe_unused]] int64_t stride) {
  const F f;
#ifdef DUOKV_BF16_DOT
  if constexpr (kStepValues<T> == 2) return pair_bf16(hn::LoadU(f, x), hn::LoadU(f, x + stride));
#endif
  if constexpr (kStepValues<T> == 1) return hn::LoadU(f, x);
}

// Copies rows [rows, stride] of n values as the operand of a product along them: dst [rows / kStepValues, n],
// a row of which starts every dst_stride.
template <class T>
HWY_NOINLINE void pair_rows(const float* x, int64_t rows, int64_t n, int64_t stride, T* dst,
                            int64_t dst_stride) {
  const hn::ScalableTag<T> operands;
  for (int64_t r = 0; r < rows; r += kStepValues<T>, dst += dst_stride) {
    for (int64_t i = 0; i < n; i += lane_count())
      hn::StoreU(load_rows<T>(x + r * stride + i, stride), operands, dst + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#endif
