#include <cstdint>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/rotary.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Rotates the pairs (x[i], x[i + half]) of every head by the angles of one position; table [half, 2] holds
// (cos, sin).
void rotate_row(float* x, int64_t heads, int64_t half, const float* table, float direction) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto rotate = [&](auto tag, int64_t i, auto cosine, auto sine) HWY_ATTR {
    for (int64_t head = 0; head < heads; ++head) {
      float* low = x + head * 2 * half + i;
      float* high = low + half;
      const auto a = hn::LoadU(tag, low), b = hn::LoadU(tag, high);
      hn::StoreU(hn::NegMulAdd(b, sine, hn::Mul(a, cosine)), tag, low);
      hn::StoreU(hn::MulAdd(a, sine, hn::Mul(b, cosine)), tag, high);
    }
  };
  int64_t i = 0;
  for (; i + lanes <= half; i += lanes) {
    hn::Vec<decltype(d)> cosine, sine;
    hn::LoadInterleaved2(d, table + 2 * i, cosine, sine);
    rotate(d, i, cosine, hn::Mul(sine, hn::Set(d, direction)));
  }
  const hn::CappedTag<float, 1> single;
  for (; i < half; ++i) {
    rotate(single, i, hn::Set(single, table[2 * i]), hn::Set(single, table[2 * i + 1] * direction));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {

HWY_EXPORT(rotate_row);

void rotate_values(float* x, int64_t heads, int64_t head_dim, const float* table) {
  HWY_DYNAMIC_DISPATCH(rotate_row)(x, heads, head_dim / 2, table, 1.0f);
}

Status rotary(Device* device, const ops::RotaryArgs* args) {
  return guarded([&] {
    require(args->m >= 0 && args->heads >= 1, "rotary: m is negative or heads is not positive");
    require(args->head_dim >= 2 && args->head_dim % 2 == 0, "rotary: head_dim is not a positive even number");
    const int64_t width = int64_t{args->heads} * args->head_dim, half = args->head_dim / 2;
    const float direction = args->inverse ? -1.0f : 1.0f;
    for_rows(device->pool, args->m, width, [&](int64_t first, int64_t count) {
      for (int64_t row = first; row < first + count; ++row) {
        const float* table = args->table + int64_t{args->positions[row]} * args->head_dim;
        HWY_DYNAMIC_DISPATCH(rotate_row)(args->x + row * width, args->heads, half, table, direction);
      }
    });
  });
}

}  // namespace duokv::cpu
#endif
