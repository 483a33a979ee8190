// What attention's kernels share: which entries a query sees, where they lie, how they get into shared
// memory, and products on tensor cores in TF32x3.
//
// The queries of a KV head's group are stacked as rows, row = t * group + head, so that they share its tiles.
// Tiles of entries start at multiples of their size in absolute position. What a query sees therefore falls
// into the same tiles whatever slots its entries lie in and whatever other queries are computed beside it; a
// tile that shows it nothing leaves its sums as they are.
#pragma once

#include "cuda/primitives.cuh"
#include "ops/ops.h"

namespace duokv::cuda {

constexpr float kLog2E = 1.44269504088896f, kLn2 = 0.693147180559945f;

// Absolute positions begin … end-1; empty when end <= begin.
struct Span {
  int begin, end;
  DUOKV_DEVICE bool empty() const { return end <= begin; }
  DUOKV_DEVICE bool contains(int position) const { return position >= begin && position < end; }
  DUOKV_DEVICE bool covers(int first, int count) const { return first >= begin && first + count <= end; }
};

// The entries of a bank that queries at positions first … last see. document_start, the first query's, bounds
// them all, because document starts do not decrease along a row.
DUOKV_DEVICE Span visible_span(const ops::BankRow& row, int window, int document_start, int first, int last) {
  int begin = max(row.first, document_start);
  if (window > 0) begin = max(begin, first - window + 1);
  return {begin, min(row.first + row.count, last + 1)};
}

// Where the entry at `position`, which the row stores, lies in the ring.
DUOKV_DEVICE int entry_slot(const ops::BankRow& row, int position) {
  const int slot = row.slot + (position - row.first);
  return slot < row.capacity ? slot : slot - row.capacity;
}

// Starts copying the entries first … first+Keys-1 of one KV head, `base` in a bank of T, into a tile
// [Keys, Stride] in shared memory. Entries outside `valid` become zeros and are not read. Every thread of the
// block calls it and commits.
template <class T, int HeadDim, int Keys, int Stride, int Threads>
DUOKV_DEVICE void copy_entries_async(T* tile, const T* base, const ops::BankRow& row, int64_t position_stride,
                                     int first, Span valid) {
  constexpr int kWidth = 16 / static_cast<int>(sizeof(T)), kChunks = HeadDim / kWidth,
                kStep = Threads / kChunks;
  static_assert(Threads % kChunks == 0);
  const int key = static_cast<int>(threadIdx.x) / kChunks,
            column = static_cast<int>(threadIdx.x) % kChunks * kWidth;
#pragma unroll
  for (int i = 0; i < Keys; i += kStep) {
    if (kStep > Keys && key >= Keys) break;
    const int position = first + key + i;
    const bool seen = valid.contains(position);
    const T* source = seen ? base + entry_slot(row, position) * position_stride + column : base;
    copy_async16(tile + (key + i) * Stride + column, source, seen);
  }
}

// ---------------------------------------------------------------- values that are not finite
//
// A hidden entry has the weight 0, and 0 times what is not finite is NaN. So where rows of a tile differ in
// what they see, such values are taken out of the tile in shared memory and then added, one by one and from
// where they came, to the sums of the rows that see them. A test of the tile finds them, which costs little
// and is due at the edges of what is seen only; the rest never happens to a sound model.

// Values below these in magnitude stay finite in a product's precision.
constexpr float kFp32Limit = INFINITY, kTf32Limit = 0x1p114f, kBf16Limit = 0x1.ffp127f;

DUOKV_DEVICE bool bounded(float4 x, float limit) {
  return fabsf(x.x) < limit && fabsf(x.y) < limit && fabsf(x.z) < limit && fabsf(x.w) < limit;
}
DUOKV_DEVICE float4 keep_bounded(float4 x, float limit) {
  return make_float4(fabsf(x.x) < limit ? x.x : 0.0f, fabsf(x.y) < limit ? x.y : 0.0f,
                     fabsf(x.z) < limit ? x.z : 0.0f, fabsf(x.w) < limit ? x.w : 0.0f);
}

// Whether this thread's share of a tile [Rows, Columns], rows Stride apart, holds a value that is not bounded
// by `limit`; with Clear it becomes 0. Every thread of the block calls it.
template <bool Clear, int Rows, int Columns, int Stride, int Threads>
DUOKV_DEVICE bool find_unbounded(float* tile, float limit) {
  bool found = false;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < Rows * Columns / 4; i += Threads) {
    float* const at = tile + i / (Columns / 4) * Stride + i % (Columns / 4) * 4;
    const float4 x = load4(at);
    if (bounded(x, limit)) continue;
    found = true;
    if constexpr (Clear) store4(at, keep_bounded(x, limit));
  }
  return found;
}
template <bool Clear, int Rows, int Columns, int Stride, int Threads>
DUOKV_DEVICE bool find_unbounded(bf16* tile, float limit) {
  bool found = false;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < Rows * Columns / 4; i += Threads) {
    float* const at = reinterpret_cast<float*>(tile + i / (Columns / 4) * Stride + i % (Columns / 4) * 4);
    const float4 x = unpack_bf16x4(load2(at));
    if (bounded(x, limit)) continue;
    found = true;
    if constexpr (Clear) {
      const float4 kept = keep_bounded(x, limit);
      store2(at, make_float2(__uint_as_float(pack_bf16(kept.x, kept.y)),
                             __uint_as_float(pack_bf16(kept.z, kept.w))));
    }
  }
  return found;
}

// ---------------------------------------------------------------- TF32x3

// N values as sums of two TF32 values each, both rounded to nearest.
template <int N>
struct Split {
  uint32_t big[N], small[N];
};

// The nearest TF32 value for |x| < 2^114, else Inf or NaN; NaN stays NaN. Within 2^-12 below a power of two
// it may be that power's other neighbour, still no more than 2^-11 |x| away. A multiplication and an FMA,
// where cvt.rna is several integer instructions that run at half the rate: 8193 x, rounded to 24 bits, is a
// multiple of 2^13 units of x's last place, and so is 8192 x.
DUOKV_DEVICE float nearest_tf32(float x) { return fmaf(x, -8192.0f, x * 8193.0f); }

template <int N>
DUOKV_DEVICE Split<N> split_tf32(const float (&x)[N]) {
  Split<N> split;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float big = nearest_tf32(x[i]);
    split.big[i] = __float_as_uint(big);
    split.small[i] = __float_as_uint(nearest_tf32(x[i] - big));
  }
  return split;
}

// d [16, 8] += a [16, 16] * b [16, 8] in two steps along K of 8 each, small terms first. Tensor cores
// truncate while they accumulate, so the products start from zero and are added by ordinary FP32 additions.
DUOKV_DEVICE void mma_tf32x3_m16n8k16(float (&d)[4], const Split<4> (&a)[2],
                                      const Split<2> (&b)[2] DUOKV_CALLER) {
  float product[4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) mma_tf32_m16n8k8(product, a[i].small, b[i].big, product DUOKV_FORWARD);
#pragma unroll
  for (int i = 0; i < 2; ++i) mma_tf32_m16n8k8(product, a[i].big, b[i].small, product DUOKV_FORWARD);
#pragma unroll
  for (int i = 0; i < 2; ++i) mma_tf32_m16n8k8(product, a[i].big, b[i].big, product DUOKV_FORWARD);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] += product[i];
}

}  // namespace duokv::cuda
