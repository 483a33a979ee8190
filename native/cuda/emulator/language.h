// The parts of the CUDA C++ language that a kernel file uses, for g++: qualifiers, built-in variables and
// types, and the arithmetic intrinsics that need no other thread. Names are CUDA's own, so they live in the
// global namespace.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

// The upper half of an IEEE binary32.
struct __nv_bfloat16 {
  uint16_t bits;
};

// Round to nearest, ties to even; every NaN becomes the canonical one, as cvt.rn.bf16.f32 does.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return {0x7FFF};
  bits += 0x7FFF + ((bits >> 16) & 1);
  return {static_cast<uint16_t>(bits >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 value) {
  return std::bit_cast<float>(uint32_t{value.bits} << 16);
}

namespace duokv::simt {

// What the running thread sees as its built-in variables; the scheduler rewrites it at every switch.
struct Builtins {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
extern Builtins builtins;
inline const Builtins& current_builtins() { return builtins; }

}  // namespace duokv::simt

#define threadIdx (::duokv::simt::current_builtins().thread)
#define blockIdx (::duokv::simt::current_builtins().block)
#define blockDim (::duokv::simt::current_builtins().block_size)
#define gridDim (::duokv::simt::current_builtins().grid_size)

using std::max;
using std::min;

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
