// Device primitives: the one header that knows which compiler reads it, and the one place with inline PTX.
// Under nvcc these are the machine's instructions; under g++ their emulated twins (emulator/README.md).
// Kernel files contain neither, and launch through DUOKV_LAUNCH.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#else
#include "cuda/emulator/emulator.h"
#endif

#ifdef __CUDACC__
#define DUOKV_DEVICE __device__ __forceinline__
// A static shared array of the block, 16-byte aligned: DUOKV_SHARED(float, tile, [32][33]);
#define DUOKV_SHARED(type, name, extents) __shared__ __align__(16) type name extents
// The block's dynamic shared memory, 16-byte aligned: DUOKV_DYNAMIC_SHARED(float, rows);
#define DUOKV_DYNAMIC_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char duokv_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(duokv_dynamic_shared)
#else
#define DUOKV_DEVICE inline
#define DUOKV_SHARED(type, name, extents)    \
  static const char name##_declaration = 0;  \
  using name##_shared = type extents;        \
  auto& name = *static_cast<name##_shared*>( \
      ::duokv::simt::shared_array(&name##_declaration, sizeof(name##_shared), 16))
#define DUOKV_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::duokv::simt::dynamic_shared())
#endif

// In the emulator a collective knows where it was called, so that lanes that meet at different places are
// told apart. A primitive takes its caller's place as a defaulted last argument and hands it on.
#ifdef __CUDACC__
#define DUOKV_CALLER
#define DUOKV_FORWARD
#define DUOKV_ONLY_FORWARD
#else
#define DUOKV_CALLER , DUOKV_SITE
#define DUOKV_FORWARD , file, line
#define DUOKV_ONLY_FORWARD file, line
#endif

// Launches `kernel` (in parentheses when it is a template with a comma) with its arguments converted to its
// own parameter types. The value is a cudaError_t; what goes wrong while the kernel runs shows at a later
// synchronise.
#define DUOKV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (::duokv::cuda::only_plans(stream)                                 \
       ? cudaSuccess                                                 \
       : ::duokv::cuda::launch(#kernel, kernel, grid, block, shared_bytes, stream, __VA_ARGS__))

namespace duokv::cuda {

using bf16 = __nv_bfloat16;

constexpr unsigned kFullMask = 0xFFFFFFFFu;
constexpr int kWarpSize = 32;

// The stream of a planning device: what is queued on it does not happen.
inline cudaStream_t planning_stream() { return reinterpret_cast<cudaStream_t>(~uintptr_t{0}); }
inline bool only_plans(cudaStream_t stream) { return stream == planning_stream(); }

#ifdef __CUDACC__
inline constexpr bool kEmulated = false;

template <class... P, class... A>
cudaError_t launch(const char*, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, A&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}
#else
inline constexpr bool kEmulated = true;
using simt::launch;
#endif

// ---------------------------------------------------------------- vector loads and stores

// 16 bytes at once; the address must be a multiple of 16.
DUOKV_DEVICE float4 load4(const float* address) {
#ifndef __CUDACC__
  simt::note_access(address, 16, 16, simt::Access::kRead);
#endif
  return *reinterpret_cast<const float4*>(address);
}

DUOKV_DEVICE void store4(float* address, float4 value) {
#ifndef __CUDACC__
  simt::note_access(address, 16, 16, simt::Access::kWrite);
#endif
  *reinterpret_cast<float4*>(address) = value;
}

// As load4, of what no thread writes while the kernel runs and hardly any other reads: passes by L1.
DUOKV_DEVICE float4 load4_streaming(const float* address) {
#ifdef __CUDACC__
  float4 value;
  asm("ld.global.nc.L1::no_allocate.v4.f32 {%0,%1,%2,%3}, [%4];"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "l"(__cvta_generic_to_global(address)));
  return value;
#else
  return load4(address);
#endif
}

// 8 bytes at once; the address must be a multiple of 8.
DUOKV_DEVICE float2 load2(const float* address) {
#ifndef __CUDACC__
  simt::note_access(address, 8, 8, simt::Access::kRead);
#endif
  return *reinterpret_cast<const float2*>(address);
}

DUOKV_DEVICE void store2(float* address, float2 value) {
#ifndef __CUDACC__
  simt::note_access(address, 8, 8, simt::Access::kWrite);
#endif
  *reinterpret_cast<float2*>(address) = value;
}

// ---------------------------------------------------------------- warp and block reductions, in an order
// fixed by the block's shape

template <class T>
DUOKV_DEVICE T warp_sum(T value DUOKV_CALLER) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kFullMask, value, offset, kWarpSize DUOKV_FORWARD);
  return value;
}

DUOKV_DEVICE float warp_max(float value DUOKV_CALLER) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, offset, kWarpSize DUOKV_FORWARD));
  return value;
}

// Sum over the block, returned to every thread. `Threads` is the block's size, a multiple of 32. Safe to call
// again at once.
template <int Threads, class T>
DUOKV_DEVICE T block_sum(T value DUOKV_CALLER) {
  constexpr int kWarps = Threads / kWarpSize;
  DUOKV_SHARED(T, partial, [kWarps]);
  value = warp_sum(value DUOKV_FORWARD);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
            lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (lane == 0) partial[warp] = value;
  __syncthreads(DUOKV_ONLY_FORWARD);
  T total = 0;
  for (int i = 0; i < kWarps; ++i) total += partial[i];
  __syncthreads(DUOKV_ONLY_FORWARD);
  return total;
}

// Whether `value` is true in some thread of the block, told to every thread; a barrier. `Threads` is the
// block's size, a multiple of 32.
template <int Threads>
DUOKV_DEVICE bool block_any(bool value DUOKV_CALLER) {
#ifdef __CUDACC__
  return __syncthreads_or(value) != 0;
#else
  return block_sum<Threads>(value ? 1 : 0 DUOKV_FORWARD) != 0;
#endif
}

// ---------------------------------------------------------------- arithmetic

// 2^x to within 2^-22 of it; results below the normal range become zero.
DUOKV_DEVICE float exp2_approximate(float x) {
#ifdef __CUDACC__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const float result = std::exp2(x);
  return result < 0x1p-126f ? 0.0f : result;
#endif
}

// ---------------------------------------------------------------- named barriers (id 1 to 15, count a
// multiple of 32)

DUOKV_DEVICE void barrier_sync(int id, int count DUOKV_CALLER) {
#ifdef __CUDACC__
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
#else
  simt::meet_block(static_cast<uint32_t>(id), static_cast<uint32_t>(count), true, {file, line});
#endif
}

DUOKV_DEVICE void barrier_arrive(int id, int count DUOKV_CALLER) {
#ifdef __CUDACC__
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
#else
  simt::meet_block(static_cast<uint32_t>(id), static_cast<uint32_t>(count), false, {file, line});
#endif
}

// ---------------------------------------------------------------- asynchronous copies, global to shared

#ifdef __CUDACC__
DUOKV_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
#endif

// 16 bytes, both addresses multiples of 16. Where `valid` is false zeros are written and the source is not
// read.
DUOKV_DEVICE void copy_async16(void* shared, const void* global, bool valid = true) {
#ifdef __CUDACC__
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
#else
  simt::issue_copy(shared, global, 16, valid ? 16 : 0);
#endif
}

// Closes the group of the thread's copies issued since the last one.
DUOKV_DEVICE void copy_async_commit() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  simt::commit_copies();
#endif
}

// Waits until at most `Pending` of the thread's latest groups are in flight. Other threads' copies need a
// barrier after it.
template <int Pending>
DUOKV_DEVICE void copy_async_wait() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#else
  simt::wait_copies(Pending);
#endif
}

// ---------------------------------------------------------------- tensor cores
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix Fragments for mma.m16n8k8" and "...
// m16n8k16"):
//   m16n8k8 TF32    a0..a3: (g, t) (g+8, t) (g, t+4) (g+8, t+4)    b0 b1: (k, n) = (t, g) (t+4, g)
//   m16n8k16 BF16   a0..a3: columns 2t, 2t+1 of rows g, g+8, then columns 2t+8, 2t+9 of the same; low half
//   first
//                   b0 b1: rows 2t, 2t+1, then 2t+8, 2t+9 of column g
//   c0..c3, both    (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)

// To the nearest TF32 value, ties away from zero.
DUOKV_DEVICE uint32_t to_tf32(float value) {
#ifdef __CUDACC__
  uint32_t result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
#else
  return simt::round_tf32(value);
#endif
}

// low in bits 0-15, high in bits 16-31, each rounded to nearest even.
DUOKV_DEVICE uint32_t pack_bf16(float low, float high) {
#ifdef __CUDACC__
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  return uint32_t{__float2bfloat16_rn(low).bits} | uint32_t{__float2bfloat16_rn(high).bits} << 16;
#endif
}

// The four values of two such pairs, as loaded.
DUOKV_DEVICE float4 unpack_bf16x4(float2 pairs) {
  const uint32_t first = __float_as_uint(pairs.x), second = __float_as_uint(pairs.y), high = 0xFFFF0000u;
  return make_float4(__uint_as_float(first << 16), __uint_as_float(first & high),
                     __uint_as_float(second << 16), __uint_as_float(second & high));
}

// d [16, 8] = a [16, 8] * b [8, 8] + c. The whole warp calls it.
DUOKV_DEVICE void mma_tf32_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                   const float (&c)[4] DUOKV_CALLER) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
#else
  simt::mma_tf32_m16n8k8(d, a, b, c, {file, line});
#endif
}

// d [16, 8] += a [16, 8] * b [8, 8] in TF32x3: operands split into two TF32 values each, small terms first.
// Tensor cores truncate while they accumulate, so the product starts from zero and is added by ordinary FP32
// additions.
DUOKV_DEVICE void mma_tf32x3_m16n8k8(float (&d)[4], const float (&a)[4], const float (&b)[2] DUOKV_CALLER) {
  uint32_t big_a[4], small_a[4], big_b[2], small_b[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    big_a[i] = to_tf32(a[i]);
    small_a[i] = to_tf32(a[i] - __uint_as_float(big_a[i]));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    big_b[i] = to_tf32(b[i]);
    small_b[i] = to_tf32(b[i] - __uint_as_float(big_b[i]));
  }
  float product[4] = {};
  mma_tf32_m16n8k8(product, small_a, big_b, product DUOKV_FORWARD);
  mma_tf32_m16n8k8(product, big_a, small_b, product DUOKV_FORWARD);
  mma_tf32_m16n8k8(product, big_a, big_b, product DUOKV_FORWARD);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] += product[i];
}

// d [16, 8] = a [16, 16] * b [16, 8] + c. The whole warp calls it.
DUOKV_DEVICE void mma_bf16_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    const float (&c)[4] DUOKV_CALLER) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
#else
  simt::mma_bf16_m16n8k16(d, a, b, c, {file, line});
#endif
}

// Four 8x8 matrices of 16-bit elements from shared memory: row r of matrix m is the 16 bytes at `row` of lane
// 8m + r. Register m gets columns 2t, 2t+1 of row g of matrix m; transposed, rows 2t, 2t+1 of column g. The
// whole warp calls it.
template <bool Transposed = false>
DUOKV_DEVICE void load_matrix4(uint32_t (&registers)[4], const void* row DUOKV_CALLER) {
#ifdef __CUDACC__
  if constexpr (Transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
#else
  simt::load_matrix(registers, 4, Transposed, row, {file, line});
#endif
}

// Two matrices; lanes 16 to 31 give no address.
template <bool Transposed = false>
DUOKV_DEVICE void load_matrix2(uint32_t (&registers)[2], const void* row DUOKV_CALLER) {
#ifdef __CUDACC__
  if constexpr (Transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(registers[0]), "=r"(registers[1])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(registers[0]), "=r"(registers[1])
                 : "r"(shared_address(row))
                 : "memory");
  }
#else
  simt::load_matrix(registers, 2, Transposed, row, {file, line});
#endif
}

}  // namespace duokv::cuda
