#include "cpu/bf16.h"

#include <atomic>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/bf16.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

void from_floats(const float* x, uint16_t* bf16, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store_bf16(hn::LoadU(d, x + i), d, bf16 + i);
  for (; i < n; ++i) bf16[i] = bf16_from_float(x[i]);
}

void to_floats(const uint16_t* bf16, float* x, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(load_bf16(d, bf16 + i), d, x + i);
  for (; i < n; ++i) x[i] = float_from_bf16(bf16[i]);
}

void round_floats(const float* x, float* rounded, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(round_to_bf16(d, hn::LoadU(d, x + i)), d, rounded + i);
  for (; i < n; ++i) rounded[i] = cpu::round_to_bf16(x[i]);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(from_floats);
HWY_EXPORT(to_floats);
HWY_EXPORT(round_floats);

void bf16_from_floats(const float* x, uint16_t* bf16, int64_t n) {
  HWY_DYNAMIC_DISPATCH(from_floats)(x, bf16, n);
}
void floats_from_bf16(const uint16_t* bf16, float* x, int64_t n) {
  HWY_DYNAMIC_DISPATCH(to_floats)(bf16, x, n);
}
void round_to_bf16(const float* x, float* rounded, int64_t n) {
  HWY_DYNAMIC_DISPATCH(round_floats)(x, rounded, n);
}

namespace {

std::atomic<bool> bf16_dot_allowed{true};

bool processor_has_bf16_dot() {
#if HWY_ARCH_X86_64
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace

bool has_bf16_dot() {
  static const bool has = processor_has_bf16_dot();
  return has && bf16_dot_allowed;
}

void allow_bf16_dot_for_test(bool allowed) { bf16_dot_allowed = allowed; }

}  // namespace duokv::cpu
#endif
