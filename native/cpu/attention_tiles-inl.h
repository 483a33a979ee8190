// The pieces attention kernels are made of: register-blocked products, exp, softmax of a block of scores.
// Include inside a file that foreach_target.h compiles, after highway.h.

#if defined(DUOKV_CPU_ATTENTION_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUOKV_CPU_ATTENTION_TILES_INL_H_
#undef DUOKV_CPU_ATTENTION_TILES_INL_H_
#else
#define DUOKV_CPU_ATTENTION_TILES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/attention.h"
#include "cpu/attention_operands-inl.h"
#include "cpu/bf16-inl.h"
#include "cpu/bf16_dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------- products

// The left operand: element (row, step) at data[row * row_stride + step * step_stride]. Transposing swaps the
// strides.
template <class T>
struct Left {
  const T* data;
  int64_t row_stride, step_stride;
};

// A right operand in panels of panel_width columns (fewer in the last), each [depth, its width] without gaps;
// the product starts at row `first`.
template <class T>
struct Panels {
  const T* data;
  int64_t depth, first = 0;
  HWY_INLINE const T* at(int64_t column, int64_t width) const {
    return data + column * depth + first * width;
  }
  HWY_INLINE int64_t stride(int64_t width) const { return width; }
  HWY_INLINE Panels from(int64_t step) const { return {data, depth, first + step}; }
};

// A right operand that is an ordinary matrix.
template <class T>
struct Matrix {
  const T* data;
  int64_t row_stride;
  HWY_INLINE const T* at(int64_t column, int64_t) const { return data + column; }
  HWY_INLINE int64_t stride(int64_t) const { return row_stride; }
  HWY_INLINE Matrix from(int64_t step) const { return {data + step * row_stride, row_stride}; }
};

// What an accumulator starts from: zero, C, or C times the row's factor.
enum class Start { kZero, kAdd, kScale };

// C [kRows, kVectors·lanes] = start + Σ over steps of left(row, step) · right[step · right_stride + column]:
// one chain of multiply-adds per element, in the order of the steps.
template <Start kStart, int kRows, int kVectors, class T>
HWY_INLINE void multiply_block(Left<T> left, const T* HWY_RESTRICT right, int64_t right_stride, int64_t steps,
                               float* HWY_RESTRICT c, int64_t c_stride, const float* HWY_RESTRICT factors) {
  const F f;
  const hn::ScalableTag<T> operands;
  const int64_t lanes = lane_count();
  V sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kStart == Start::kZero) {
        sums[r][v] = hn::Zero(f);
      } else {
        sums[r][v] = hn::LoadU(f, c + r * c_stride + v * lanes);
        if constexpr (kStart == Start::kScale) sums[r][v] = hn::Mul(sums[r][v], hn::Set(f, factors[r]));
      }
    }
  }
  const T* HWY_RESTRICT a = left.data;
  for (int64_t step = 0; step < steps; ++step) {
    hn::Vec<hn::ScalableTag<T>> b[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) b[v] = hn::LoadU(operands, right + v * lanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto x = hn::Set(operands, a[r * left.row_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(sums[r][v], x, b[v]);
    }
    a += left.step_stride;
    right += right_stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], f, c + r * c_stride + v * lanes);
  }
}

template <Start kStart, int kRows, class T, class Right>
HWY_INLINE void multiply_rows(Left<T> left, const Right& right, int64_t columns, int64_t steps, float* c,
                              int64_t c_stride, const float* factors) {
  const int64_t width = panel_width();
  int64_t column = 0;
  for (; column + width <= columns; column += width) {
    multiply_block<kStart, kRows, kBlockVectors>(left, right.at(column, width), right.stride(width), steps,
                                                 c + column, c_stride, factors);
  }
  const int64_t rest = columns - column;
  const auto last = [&]<int kVectors>() HWY_ATTR {
    multiply_block<kStart, kRows, kVectors>(left, right.at(column, rest), right.stride(rest), steps,
                                            c + column, c_stride, factors);
  };
  switch (rest / lane_count()) {
    case 0:
      return;
    case 1:
      return last.template operator()<1>();
    case 2:
      return last.template operator()<std::min(2, kBlockVectors)>();
    default:
      return last.template operator()<std::min(3, kBlockVectors)>();
  }
}

template <Start kStart, int kRows, class T, class Right>
HWY_INLINE void multiply_up_to(int64_t rows, Left<T> left, const Right& right, int64_t columns, int64_t steps,
                               float* c, int64_t c_stride, const float* factors) {
  if constexpr (kRows > 1) {
    if (rows < kRows)
      return multiply_up_to<kStart, kRows - 1>(rows, left, right, columns, steps, c, c_stride, factors);
  }
  multiply_rows<kStart, kRows>(left, right, columns, steps, c, c_stride, factors);
}

// C [rows, columns] = start + left · right, for 1 … kBlockRows rows and a multiple of the vector length of
// columns.
template <Start kStart, class T, class Right>
HWY_NOINLINE void multiply(int64_t rows, Left<T> left, Right right, int64_t columns, int64_t steps, float* c,
                           int64_t c_stride, const float* factors = nullptr) {
  multiply_up_to<kStart, kBlockRows>(rows, left, right, columns, steps, c, c_stride, factors);
}

#ifdef DUOKV_BF16_DOT
// C [columns] += left · the first row of `right`, of whose pairs only the half in `mask` counts.
template <class Right>
void multiply_half(Bf16Pair left, Right right, int64_t columns, Bf16Pair mask, float* c) {
  const F f;
  const hn::ScalableTag<Bf16Pair> pairs;
  const auto x = hn::Set(pairs, left), half = hn::Set(pairs, mask);
  for (int64_t column = 0; column < columns; column += lane_count()) {
    const int64_t panel = column / panel_width() * panel_width();
    const Bf16Pair* row = right.at(panel, std::min(panel_width(), columns - panel)) + column - panel;
    hn::StoreU(multiply_add(hn::LoadU(f, c + column), x, hn::And(hn::LoadU(pairs, row), half)), f,
               c + column);
  }
}
#endif

// C [columns] += left · right, one row, along values begin … end-1 and no other, with the bits of `multiply`.
// Of a pair that the range cuts in half the left operand's other value is zero; the right one's may be
// anything.
template <class T, class Right>
void multiply_some(Left<T> left, Right right, int64_t columns, int64_t begin, int64_t end, float* c) {
  const auto from = [&](int64_t step) {
    return Left<T>{left.data + step * left.step_stride, left.row_stride, left.step_stride};
  };
  const auto add = [&](int64_t step, int64_t steps) HWY_ATTR {
    multiply<Start::kAdd>(1, from(step), right.from(step), columns, steps, c, columns);
  };
  if constexpr (kStepValues<T> == 1) {
    add(begin, end - begin);
  } else {
    const int64_t first = ceil_div(begin, 2), last = end / 2;
    if (begin % 2 != 0) multiply_half(*from(begin / 2).data, right.from(begin / 2), columns, 0xFFFF0000u, c);
    if (first < last) add(first, last - first);
    if (end % 2 != 0) multiply_half(*from(last).data, right.from(last), columns, 0x0000FFFFu, c);
  }
}

// ---------------------------------------------------------------- softmax

// Vectors whose exp is computed at a time. It is a chain of dependent instructions: where the registers
// suffice, several chains side by side keep the processor from waiting for each.
#if HWY_TARGET <= HWY_AVX3
inline constexpr int kExpVectors = 4;
#else
inline constexpr int kExpVectors = 1;
#endif

// e^(scale · x) as 2^(x · factor): the factor, scale / ln 2, in two parts whose sum is exact enough for every
// x, and the x whose power is zero. scale is above 0.
struct ExpScale {
  explicit HWY_INLINE ExpScale(float scale) {
    const F f;
    const double factor = static_cast<double>(scale) * 1.4426950408889634;
    const auto first = static_cast<float>(factor);
    high = hn::Set(f, first);
    low = hn::Set(f, static_cast<float>(factor - static_cast<double>(first)));
    least = hn::Set(f, -127.0f / first);
  }
  V high, low, least;
};

// The larger of x and `limit`, and NaN if x is.
HWY_INLINE V no_less_than(V limit, V x) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  return hn::Max(limit, x);
#else
  return hn::IfThenElse(hn::Lt(x, limit), limit, x);
#endif
}

// e^(scale · x) of kCount vectors for scale · x <= 0, or a little above: within 2 ulp, 1 at 0, 0 below -87.7
// and NaN for NaN.
template <int kCount>
HWY_INLINE void exp_of_scaled(const ExpScale& scale, V (&x)[kCount]) {
  const F f;
  const I i;
  // Minimax polynomial of (2^r - 1) / r on |r| <= 1/2; relative error of 2^r 3.0e-9.
  constexpr float kPolynomial[] = {1.3390806e-3f, 9.618506e-3f, 5.55036e-2f,
                                   2.4022648e-1f, 6.931472e-1f, 1.0f};
  // Adding 1.5 · 2^23 rounds to an integer, which is then read from the low mantissa bits, here with the bias
  // of an exponent.
  const V magic = hn::Set(f, 12582912.0f + 127.0f);
  V shifted[kCount], r[kCount], q[kCount];
#pragma GCC unroll 8
  for (int v = 0; v < kCount; ++v) {
    x[v] = no_less_than(scale.least, x[v]);
    shifted[v] = hn::MulAdd(x[v], scale.high, magic);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kCount; ++v) {
    const V n = hn::Sub(shifted[v], magic);
    r[v] = hn::MulAdd(x[v], scale.low, hn::MulSub(x[v], scale.high, n));
    q[v] = hn::Set(f, 1.5326476e-4f);
  }
#pragma GCC unroll 8
  for (const float coefficient : kPolynomial) {
#pragma GCC unroll 8
    for (int v = 0; v < kCount; ++v) q[v] = hn::MulAdd(q[v], r[v], hn::Set(f, coefficient));
  }
#pragma GCC unroll 8
  for (int v = 0; v < kCount; ++v)
    x[v] = hn::Mul(q[v], hn::BitCast(f, hn::ShiftLeft<23>(hn::BitCast(i, shifted[v]))));
}

HWY_INLINE V exp_of_scaled(const ExpScale& scale, V x) {
  V one[1] = {x};
  exp_of_scaled(scale, one);
  return one[0];
}

HWY_INLINE float exp_of_score(float x) { return hn::GetLane(exp_of_scaled(ExpScale(1.0f), hn::Set(F(), x))); }

// Calls step(column, vectors, keep) for the vectors that cover columns [begin, end) of a row, which are
// multiples of the vector length so that a column's lane never depends on the range: `vectors`, an
// integral_constant, are kVectors of them or one. keep(x, other) is x in columns [first, last) and `other`
// elsewhere.
template <int kVectors, class Step>
HWY_INLINE void for_column_groups(int64_t begin, int64_t end, int64_t first, int64_t last, Step&& step) {
  const F f;
  const I i;
  const int64_t lanes = lane_count();
  const auto iota = hn::Iota(i, 0);
  const std::integral_constant<int, 1> one;
  const auto edge = [&](int64_t c) HWY_ATTR {
    const auto before = hn::Lt(iota, hn::Set(i, static_cast<int32_t>(first - c)));
    const auto after = hn::Gt(iota, hn::Set(i, static_cast<int32_t>(last - 1 - c)));
    const auto outside =
        hn::RebindMask(f, hn::MaskFromVec(hn::Or(hn::VecFromMask(i, before), hn::VecFromMask(i, after))));
    step(c, one, [&](V x, V other) HWY_ATTR { return hn::IfThenElse(outside, other, x); });
  };
  const auto all = [](V x, V) HWY_ATTR { return x; };
  const int64_t inner_begin = std::clamp(round_up(first, lanes), begin, end);
  const int64_t inner_end = std::max(inner_begin, std::min(last / lanes * lanes, end));
  for (int64_t c = begin; c < inner_begin; c += lanes) edge(c);
  int64_t c = inner_begin;
  if constexpr (kVectors > 1) {
    for (; c + kVectors * lanes <= inner_end; c += kVectors * lanes)
      step(c, std::integral_constant<int, kVectors>(), all);
  }
  for (; c < inner_end; c += lanes) step(c, one, all);
  for (c = inner_end; c < end; c += lanes) edge(c);
}

// Values of a block's rows, up to a multiple of every vector length.
inline constexpr int64_t kRowLanes = round_up(kMostBlockRows, 16);

// Stores weights of columns c … in a row of T: FP32 values, on request rounded to BF16, or pairs of BF16.
template <class T, bool kRound>
HWY_INLINE void store_weights(V p, T* row, int64_t c) {
  const F f;
  if constexpr (kStepValues<T> == 1) {
    hn::StoreU(kRound ? round_to_bf16(f, p) : p, f, row + c);
  } else {
#ifdef DUOKV_BF16_DOT
    store_narrow(p, reinterpret_cast<uint16_t*>(row) + c);
#endif
  }
}

// Turns a block's raw products [rows, stride] into weights exp(scale · (product - max)) in the vectors that
// cover `columns`, zero outside of the row's own ones, and moves `running`, whose `max` is the largest
// product, on. A row of weights, whose type is T, starts where its products did. factors[row] is what the
// row's sums so far have to be multiplied with.
template <class T, bool kRound>
void softmax_rows(float scale, int64_t rows, Span columns, const Span* own, float* HWY_RESTRICT scores,
                  int64_t stride, Running* HWY_RESTRICT running, float* HWY_RESTRICT factors) {
  const F f;
  const int64_t lanes = lane_count();
  const int64_t begin = columns.begin / lanes * lanes, end = round_up(columns.end, lanes);
  const ExpScale scales(scale);
  const V minus_infinity = hn::Set(f, kMinusInfinity), zero = hn::Zero(f);
  float shifts[kMostBlockRows];
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = scores + r * stride;
    V largest = minus_infinity;
    const auto compare = [&](int64_t c, auto vectors, auto keep) HWY_ATTR {
      for (int v = 0; v < vectors; ++v)
        largest = hn::Max(largest, keep(hn::LoadU(f, row + c + v * lanes), minus_infinity));
    };
    for_column_groups<kExpVectors>(begin, end, own[r].begin, own[r].end, compare);
    const float max = std::max(running[r].max, hn::GetLane(hn::MaxOfLanes(f, largest)));
    // Before the first finite score there is nothing to scale, and -inf - -inf would be NaN.
    shifts[r] = max == kMinusInfinity ? 0.0f : max;
    factors[r] = running[r].max - shifts[r];
    running[r].max = max;
  }
  for (int64_t r = 0; r < rows; r += lanes)
    hn::StoreU(exp_of_scaled(scales, hn::LoadU(f, factors + r)), f, factors + r);
  for (int64_t r = 0; r < rows; ++r) {
    const V shift = hn::Set(f, shifts[r]);
    const float* row = scores + r * stride;
    T* weights = reinterpret_cast<T*>(scores) + r * stride;
    V sum = zero;
    const auto weigh = [&](int64_t c, auto vectors, auto keep) HWY_ATTR {
      V p[vectors];
      for (int v = 0; v < vectors; ++v) p[v] = hn::Sub(hn::LoadU(f, row + c + v * lanes), shift);
      exp_of_scaled(scales, p);
      for (int v = 0; v < vectors; ++v) {
        p[v] = keep(p[v], zero);
        sum = hn::Add(sum, p[v]);
        store_weights<T, kRound>(p[v], weights, c + v * lanes);
      }
    };
    for_column_groups<kExpVectors>(begin, end, own[r].begin, own[r].end, weigh);
    running[r].sum = running[r].sum * factors[r] + hn::GetLane(hn::SumOfLanes(f, sum));
  }
}

// The same for a call. BF16 weights are rounded here, unless they are as pairs are made of them.
template <class T>
void softmax_block(const AttentionCall& call, int64_t rows, Span columns, const Span* own, float* scores,
                   int64_t stride, Running* running, float* factors) {
  const auto run = call.bf16 && kStepValues<T> == 1 ? &softmax_rows<T, true> : &softmax_rows<T, false>;
  run(call.args.scale, rows, columns, own, scores, stride, running, factors);
}

// One bank's part of a query's attention: Σ exp(score - max) · v, not yet divided.
struct BankPart {
  bool seen;
  Running running;
  const float* sums;
};

// out [head_dim] = the softmax over the banks' union; lse[bank · lse_stride] = each bank's log-sum-exp,
// unless null.
inline void finish_query(const BankPart* parts, int32_t count, int64_t head_dim, float* out, float* lse,
                         int64_t lse_stride) {
  float max = kMinusInfinity;
  bool seen = false;
  for (int32_t bank = 0; bank < count; ++bank) {
    const BankPart& part = parts[bank];
    if (lse)
      lse[bank * lse_stride] = part.seen ? part.running.max + std::log(part.running.sum) : kMinusInfinity;
    if (!part.seen) continue;
    max = std::max(max, part.running.max);
    seen = true;
  }
  if (!seen) {
    std::fill_n(out, head_dim, 0.0f);
    return;
  }
  // What a bank does not show weighs nothing: its sums are zeros.
  float weights[2] = {0, 0}, sum = 0;
  for (int32_t bank = 0; bank < count; ++bank) {
    if (!parts[bank].seen) continue;
    weights[bank] = exp_of_score(parts[bank].running.max - max);
    sum += weights[bank] * parts[bank].running.sum;
  }
  const F f;
  const V inverse = hn::Set(f, 1.0f / sum), first = hn::Set(f, weights[0]), second = hn::Set(f, weights[1]);
  const int64_t lanes = lane_count();
  for (int64_t i = 0; i < head_dim; i += lanes) {
    V x = hn::Mul(first, hn::LoadU(f, parts[0].sums + i));
    if (count == 2) x = hn::Add(x, hn::Mul(second, hn::LoadU(f, parts[1].sums + i)));
    x = hn::Mul(x, inverse);
    if (i + lanes <= head_dim) {
      hn::StoreU(x, f, out + i);
    } else {
      HWY_ALIGN float last[HWY_MAX_BYTES / sizeof(float)];
      hn::Store(x, f, last);
      std::copy_n(last, head_dim - i, out + i);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#endif
