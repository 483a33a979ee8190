// Loops over FP32 arrays and the logistic function, for Highway code. Include inside a file that
// foreach_target.h compiles, after highway.h.

#if defined(DUOKV_CPU_VECTOR_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUOKV_CPU_VECTOR_MATH_INL_H_
#undef DUOKV_CPU_VECTOR_MATH_INL_H_
#else
#define DUOKV_CPU_VECTOR_MATH_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// What one step of a loop covers: a whole vector, or the first `count` lanes of the last one. Both run the
// same arithmetic, so an element's result does not depend on where in an array it lies.
struct Whole {};
struct Part {
  int64_t count;
};

// Calls body(i, span) for i = 0, lanes, 2·lanes, … below n.
template <class D, class Body>
HWY_INLINE void for_each_vector(D d, int64_t n, Body&& body) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, Whole{});
  if (i < n) body(i, Part{n - i});
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const hn::TFromD<D>* p, Whole) {
  return hn::LoadU(d, p);
}

// Lanes past the count are zero.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const hn::TFromD<D>* p, Part part) {
  HWY_ALIGN hn::TFromD<D> lanes[HWY_MAX_BYTES / sizeof(hn::TFromD<D>)] = {};
  std::memcpy(lanes, p, static_cast<size_t>(part.count) * sizeof(lanes[0]));
  return hn::Load(d, lanes);
}

template <class D, class V>
HWY_INLINE void store(V v, D d, hn::TFromD<D>* p, Whole) {
  hn::StoreU(v, d, p);
}

template <class D, class V>
HWY_INLINE void store(V v, D d, hn::TFromD<D>* p, Part part) {
  HWY_ALIGN hn::TFromD<D> lanes[HWY_MAX_BYTES / sizeof(hn::TFromD<D>)];
  hn::Store(v, d, lanes);
  std::memcpy(p, lanes, static_cast<size_t>(part.count) * sizeof(lanes[0]));
}

// exp(-|x|) in two forms. `value` is zero where exp(-|x|) is subnormal. fraction · power1 · power2, whose
// powers are normal powers of two, lets a product be rounded once, at the end, also there; from |x| > 112 on,
// where even x · exp(-|x|) is zero, power2 is zero. Of NaN both are undefined.
template <class V>
struct ExpOfMinusAbs {
  V value, fraction, power1, power2;
};

template <class D, class V = hn::Vec<D>>
HWY_INLINE ExpOfMinusAbs<V> exp_of_minus_abs(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V magnitude = hn::Abs(x), limit = hn::Set(d, 112.0f);
  const V a = hn::Neg(hn::Min(magnitude, limit));
  // Adding 1.5 · 2^23 rounds to an integer, which is then read from the low mantissa bits.
  const V magic = hn::Set(d, 12582912.0f);
  const V shifted = hn::MulAdd(a, hn::Set(d, 1.44269504f), magic);
  const V n = hn::Sub(shifted, magic);
  const auto exponent = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic));
  // ln 2 in two parts, the first short enough for n · part to be exact.
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), a);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  // Minimax polynomial of (exp(r) - 1 - r) / r² on |r| <= ln(2)/2, from Cephes' expf, in pairs: the chain of
  // dependent operations is what this loop waits for.
  const V r2 = hn::Mul(r, r);
  const V q01 = hn::MulAdd(hn::Set(d, 1.6666665459e-1f), r, hn::Set(d, 5.0000001201e-1f));
  const V q23 = hn::MulAdd(hn::Set(d, 8.3334519073e-3f), r, hn::Set(d, 4.1665795894e-2f));
  const V q45 = hn::MulAdd(hn::Set(d, 1.9875691500e-4f), r, hn::Set(d, 1.3981999507e-3f));
  const V q = hn::MulAdd(hn::MulAdd(q45, r2, q23), r2, q01);
  const V fraction = hn::Add(hn::MulAdd(r2, q, r), hn::Set(d, 1.0f));
  const V value = hn::BitCast(d, hn::Add(hn::BitCast(di, fraction), hn::ShiftLeft<23>(exponent)));
  const auto half = hn::ShiftRight<1>(exponent);
  const auto bias = hn::Set(di, 127);
  const V power1 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V power2 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(exponent, half), bias)));
  return {hn::IfThenZeroElse(hn::Lt(n, hn::Set(d, -125.0f)), value), fraction, power1,
          hn::IfThenZeroElse(hn::Gt(magnitude, limit), power2)};
}

// x · sigmoid(x), within 3 ulp for every x.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V silu(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const auto e = exp_of_minus_abs(d, x);
  const auto positive = hn::Ge(x, hn::Zero(d));
  // power1 comes first: x · fraction may overflow.
  const V numerator = hn::IfThenElse(positive, x, hn::Mul(hn::Mul(x, e.power1), e.fraction));
  return hn::Mul(hn::Div(numerator, hn::Add(one, e.value)), hn::IfThenElse(positive, one, e.power2));
}

// silu(x) and its derivative, sigmoid(x) · (1 + x · sigmoid(-x)).
template <class V>
struct SiluAndDerivative {
  V value, derivative;
};

template <class D, class V = hn::Vec<D>>
HWY_INLINE SiluAndDerivative<V> silu_and_derivative(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V e = exp_of_minus_abs(d, x).value;
  const V larger = hn::Div(one, hn::Add(one, e));
  const V smaller = hn::Mul(e, larger);
  const auto positive = hn::Ge(x, hn::Zero(d));
  const V sigmoid = hn::IfThenElse(positive, larger, smaller);
  const V complement = hn::IfThenElse(positive, smaller, larger);
  return {hn::Mul(x, sigmoid), hn::Mul(sigmoid, hn::MulAdd(x, complement, one))};
}

}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#endif
