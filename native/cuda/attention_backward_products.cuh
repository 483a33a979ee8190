// Products of attention's backward pass, in FP32 and on tensor cores.
//
// Two products of a warp, whose left operands have its 16 rows:
//   scores      [16, 32] += own rows [16, D] · tile [32, D]ᵀ
//   accumulate  sums [16, Columns] += scores [16, 32] · tile [32, Columns]
// A lane holds 16 scores, the i-th at (row(i), column(i)), and the sums in groups of four columns, group v at
// (row(v), sum_column(v)). In shared memory rows lie D + kPadding floats apart.
#pragma once

#include "cuda/attention.cuh"

namespace duokv::cuda {

constexpr int kTileRows = 32, kWarpRows = 16;

// The order in which the eight rows of a fragment take rows of a tile. With rows 8 banks apart (mod 32), the
// 16-byte loads of rows, where lanes 4i … 4i+7 hold two, and those of columns, where they hold rows in order
// of their k index, then meet every bank once.
DUOKV_DEVICE int spread(int index) { return index % 2 == 0 ? index / 2 : 4 + (index / 2 ^ 2); }

// Left operands [16, 16] and right operands [16, 8]: a lane's four values of a row or column are any four of
// the 16 steps, the same on both sides.
struct Tf32x3 {
  static constexpr float kLimit = kTf32Limit;
  struct Left {
    Split<4> steps[2];
  };
  DUOKV_DEVICE static Left left(const float (&low)[4], const float (&high)[4]) {
    return {{split_tf32<4>({low[0], high[0], low[1], high[1]}),
             split_tf32<4>({low[2], high[2], low[3], high[3]})}};
  }
  DUOKV_DEVICE static void multiply(float (&sums)[2][4], const Left& a, const float (&b)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Split<2> right[2] = {split_tf32<2>({b[n][0], b[n][1]}), split_tf32<2>({b[n][2], b[n][3]})};
      mma_tf32x3_m16n8k16(sums[n], a.steps, right);
    }
  }
};

struct Bf16 {
  static constexpr float kLimit = kBf16Limit;
  struct Left {
    uint32_t values[4];
  };
  DUOKV_DEVICE static Left left(const float (&low)[4], const float (&high)[4]) {
    return {{pack_bf16(low[0], low[1]), pack_bf16(high[0], high[1]), pack_bf16(low[2], low[3]),
             pack_bf16(high[2], high[3])}};
  }
  DUOKV_DEVICE static void multiply(float (&sums)[2][4], const Left& a, const float (&b)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t right[2] = {pack_bf16(b[n][0], b[n][1]), pack_bf16(b[n][2], b[n][3])};
      mma_bf16_m16n8k16(sums[n], a.values, right, sums[n]);
    }
  }
};

// On tensor cores: a lane's scores are fragments of accumulators, four to eight columns.
template <class Precision>
struct TensorCoreProducts {
  static constexpr int kPadding = 8, kScratch = 0;
  static constexpr float kLimit = Precision::kLimit;
  int g, t;

  DUOKV_DEVICE TensorCoreProducts(int lane, float*) : g(lane / 4), t(lane % 4) {}
  DUOKV_DEVICE int row(int i) const { return spread(g) + i % 4 / 2 * 8; }
  DUOKV_DEVICE int column(int i) const { return i / 4 * 8 + spread(2 * t + i % 2); }
  DUOKV_DEVICE int sum_column(int v) const { return v / 4 * 32 + 8 * t + v % 2 * 4; }

  template <int D>
  DUOKV_DEVICE void scores(const float* own, const float* tile, float (&s)[16]) const {
    constexpr int kStride = D + kPadding;
    own += spread(g) * kStride + 4 * t;
    tile += spread(g) * kStride + 4 * t;
    float sums[2][2][4] = {};
#pragma unroll 2
    for (int d = 0; d < D; d += 16) {
      const float4 low = load4(own + d), high = load4(own + 8 * kStride + d);
      const auto a = Precision::left({low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w});
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float4 b0 = load4(tile + 16 * pair * kStride + d),
                     b1 = load4(tile + (16 * pair + 8) * kStride + d);
        Precision::multiply(sums[pair], a, {{b0.x, b0.y, b0.z, b0.w}, {b1.x, b1.y, b1.z, b1.w}});
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i] = sums[i / 8][i / 4 % 2][i % 4];
  }

  template <int D, int Columns>
  DUOKV_DEVICE void accumulate(const float (&s)[16], const float* tile, float (&sums)[Columns / 2]) const {
    constexpr int kStride = D + kPadding;
    tile += 4 * g;
#pragma unroll 1  // or the loads of both halves would take too many registers
    for (int half = 0; half < 2; ++half) {
      float low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = i / 2 * 4 + i % 2;
        low[i] = half ? s[8 + first] : s[first];
        high[i] = half ? s[10 + first] : s[2 + first];
      }
      const auto a = Precision::left(low, high);
      const float* even = tile + (16 * half + spread(2 * t)) * kStride;
      const float* odd = tile + (16 * half + spread(2 * t + 1)) * kStride;
#pragma unroll
      for (int c = 0; c < Columns / 32; ++c) {
        const float4 b0 = load4(even + 32 * c), b1 = load4(odd + 32 * c);
        const float4 b2 = load4(even + 8 * kStride + 32 * c), b3 = load4(odd + 8 * kStride + 32 * c);
        add_columns<0>(a, {{b0.x, b1.x, b2.x, b3.x}, {b0.y, b1.y, b2.y, b3.y}}, sums + 16 * c);
        add_columns<2>(a, {{b0.z, b1.z, b2.z, b3.z}, {b0.w, b1.w, b2.w, b3.w}}, sums + 16 * c);
      }
    }
  }

 private:
  // Columns First and First + 1 of each of four groups of four.
  template <int First>
  DUOKV_DEVICE static void add_columns(const typename Precision::Left& a, const float (&b)[2][4],
                                       float* groups) {
    float columns[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) columns[i / 4][i % 4] = groups[i % 4 * 4 + First + i / 4];
    Precision::multiply(columns, a, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) groups[i % 4 * 4 + First + i / 4] = columns[i / 4][i % 4];
  }
};

// In FP32: a lane computes 4 rows by 4 columns of the scores and 4 rows by Columns / 8 of the sums. Scores
// change lanes through the warp's scratch memory.
struct Fp32Products {
  static constexpr int kPadding = 4, kScratchStride = kWarpRows + 4, kScratch = kTileRows * kScratchStride;
  static constexpr float kLimit = kFp32Limit;
  int r, c;
  float* scratch;  // [kTileRows][kScratchStride], scores transposed

  DUOKV_DEVICE Fp32Products(int lane, float* scratch_of_warp)
      : r(lane / 8), c(lane % 8), scratch(scratch_of_warp) {}
  DUOKV_DEVICE int row(int i) const { return 4 * r + i % 4; }
  DUOKV_DEVICE int column(int i) const { return c + i / 4 * 8; }
  DUOKV_DEVICE int sum_column(int v) const { return v / 4 * 32 + 4 * c; }

  template <int D>
  DUOKV_DEVICE void scores(const float* own, const float* tile, float (&s)[16]) const {
    constexpr int kStride = D + kPadding;
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i] = 0;
#pragma unroll 2
    for (int d = 0; d < D; d += 4) {
      float4 a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = load4(own + (4 * r + i) * kStride + d);
        b[i] = load4(tile + (c + 8 * i) * kStride + d);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float4 x = a[i % 4], y = b[i / 4];
        s[i] = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, s[i]))));
      }
    }
  }

  template <int D, int Columns>
  DUOKV_DEVICE void accumulate(const float (&s)[16], const float* tile, float (&sums)[Columns / 2]) const {
    constexpr int kStride = D + kPadding;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 4)
      store4(scratch + column(i) * kScratchStride + 4 * r, make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]));
    __syncwarp();
#pragma unroll 4
    for (int k = 0; k < kTileRows; ++k) {
      const float4 x = load4(scratch + k * kScratchStride + 4 * r);
      const float a[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int v = 0; v < Columns / 8; ++v) {
        const float4 b = load4(tile + k * kStride + sum_column(v));
        sums[4 * v] = fmaf(a[v % 4], b.x, sums[4 * v]);
        sums[4 * v + 1] = fmaf(a[v % 4], b.y, sums[4 * v + 1]);
        sums[4 * v + 2] = fmaf(a[v % 4], b.z, sums[4 * v + 2]);
        sums[4 * v + 3] = fmaf(a[v % 4], b.w, sums[4 * v + 3]);
      }
    }
  }
};

}  // namespace duokv::cuda
