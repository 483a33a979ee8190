// Attention forward on tensor cores: TF32x3 and BF16.
//
// A warp owns kRowTiles * 16 rows. A lane, with g = lane / 4 and t = lane % 4, holds of every 16 x 8 tile of
// scores rows g and g + 8 at entries 2t and 2t + 1. With two tiles of rows every fragment of K and V, which
// costs more to bring and to split than to multiply with, is used twice.
#pragma once

#include "cuda/attention_block.cuh"

namespace duokv::cuda::attention {

// Rows of a block and of a warp.
template <int HeadDim>
struct MmaShape {
  static constexpr int kRowTiles = HeadDim > 64 ? 1 : 2, kWarpRows = 16 * kRowTiles,
                       kBlockRows = kWarps * kWarpRows;
};

// Of both products: the layout of tiles in shared memory, and what a lane of a warp does with them. The
// queries come as `query(row)`, the vector of one of the block's rows, null past the last.

template <int HeadDim>
struct Tf32x3Products : MmaShape<HeadDim> {
  using MmaShape<HeadDim>::kRowTiles, MmaShape<HeadDim>::kWarpRows, MmaShape<HeadDim>::kBlockRows;
  using Element = float;
  static constexpr int kKeys = 32, kKeyStride = HeadDim + 16, kValueStride = HeadDim + 4,
                       kVector = HeadDim < 32 ? HeadDim / 8 : 4;
  static constexpr bool kAsynchronous = true;
  static constexpr float kLimit = kTf32Limit;
  // [warp][tile of rows][step of 8 columns][big, small][lane] fragments of 16 bytes
  static constexpr size_t kQueryBytes = kBlockRows * HeadDim * 2 * sizeof(float);
  static constexpr int kFragment = kWarpSize * 4, kRowTileFloats = 16 * HeadDim * 2;

  float* fragments;  // of this lane
  int g, t;

  template <class Query>
  DUOKV_DEVICE Tf32x3Products(void* shared, Query query) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
              warp = static_cast<int>(threadIdx.x) / kWarpSize;
    g = lane / 4, t = lane % 4;
    fragments = static_cast<float*>(shared) + warp * kRowTiles * kRowTileFloats + lane * 4;
#pragma unroll 1
    for (int m = 0; m < kRowTiles; ++m) {
      const float* const low = query(warp * kWarpRows + m * 16 + g);
      const float* const high = query(warp * kWarpRows + m * 16 + g + 8);
#pragma unroll 1
      for (int c = 0; c < HeadDim / 16; ++c) {
        const float4 zero = make_float4(0, 0, 0, 0), a = low ? load4(low + c * 16 + 4 * t) : zero,
                     b = high ? load4(high + c * 16 + 4 * t) : zero;
        put(m, 2 * c, split_tf32<4>({a.x, b.x, a.y, b.y}));
        put(m, 2 * c + 1, split_tf32<4>({a.z, b.z, a.w, b.w}));
      }
    }
  }

  // scores [rows, kKeys] += q k^T. Of 16 columns, K index t of step s is column 4t + 2s, and t + 4 the next.
  DUOKV_DEVICE void score(const float* keys, float (&scores)[kRowTiles][kKeys / 8][4]) const {
    // 16 entries at a time: the independent products of all would need more registers than there are.
#pragma unroll
    for (int first = 0; first < kKeys / 8; first += 2) {
#pragma unroll 1
      for (int c = 0; c < HeadDim / 16; ++c) {
        Split<4> a[kRowTiles][2];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) a[m][0] = get(m, 2 * c), a[m][1] = get(m, 2 * c + 1);
#pragma unroll
        for (int n = first; n < first + 2; ++n) {
          const float4 k = load4(keys + (8 * n + g) * kKeyStride + c * 16 + 4 * t);
          const Split<2> b[2] = {split_tf32<2>({k.x, k.y}), split_tf32<2>({k.z, k.w})};
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) mma_tf32x3_m16n8k16(scores[m][n], a[m], b);
        }
      }
    }
  }

  // out [rows, HeadDim] += weights v. Of 8 entries, K index t is entry 2t and t + 4 the next, as the scores
  // lie. Column g of output tile (c, j) is column 8 c + kVector g + j.
  DUOKV_DEVICE void apply(const float (&weights)[kRowTiles][kKeys / 8][4], const float* values,
                          float (&out)[kRowTiles][HeadDim / 8][4]) const {
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      Split<4> a[kRowTiles][2];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const float(&w)[4] = weights[m][n + s];
          a[m][s] = split_tf32<4>({w[0], w[2], w[1], w[3]});
        }
      }
#pragma unroll
      for (int c = 0; c < HeadDim / 8; c += kVector) {
        float v[4][kVector];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int entry = 8 * (n + i / 2) + 2 * t + i % 2;
          load_vector<kVector>(values + entry * kValueStride + 8 * c + kVector * g, v[i]);
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const Split<2> b[2] = {split_tf32<2>({v[0][j], v[1][j]}), split_tf32<2>({v[2][j], v[3][j]})};
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) mma_tf32x3_m16n8k16(out[m][c + j], a[m], b);
        }
      }
    }
  }

  // Column of out[m][c][odd] and out[m][c][2 + odd].
  DUOKV_DEVICE int column(int c, int odd) const {
    return c / kVector * kVector * 8 + kVector * (2 * t + odd) + c % kVector;
  }

  // Row g (half 0) or g + 8 of a tile of outputs, times factor.
  DUOKV_DEVICE void store(const float (&out)[HeadDim / 8][4], int half, float factor, float* row) const {
#pragma unroll
    for (int c = 0; c < HeadDim / 8; c += kVector) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float x[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) x[j] = out[c + j][2 * half + odd] * factor;
        store_vector<kVector>(row + 8 * c + kVector * (2 * t + odd), x);
      }
    }
  }

 private:
  DUOKV_DEVICE float* place(int m, int step) const {
    return fragments + m * kRowTileFloats + step * 2 * kFragment;
  }
  DUOKV_DEVICE void put(int m, int step, const Split<4>& split) {
    const auto pack = [](const uint32_t(&x)[4]) {
      return make_float4(__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                         __uint_as_float(x[3]));
    };
    store4(place(m, step), pack(split.big));
    store4(place(m, step) + kFragment, pack(split.small));
  }
  DUOKV_DEVICE Split<4> get(int m, int step) const {
    const float4 big = load4(place(m, step)), small = load4(place(m, step) + kFragment);
    return {{__float_as_uint(big.x), __float_as_uint(big.y), __float_as_uint(big.z), __float_as_uint(big.w)},
            {__float_as_uint(small.x), __float_as_uint(small.y), __float_as_uint(small.z),
             __float_as_uint(small.w)}};
  }
};

// Bf16Banks: every bank is BF16. FP32 banks pass through registers, which leaves room for smaller tiles only.
template <int HeadDim, bool Bf16Banks>
struct Bf16Products : MmaShape<HeadDim> {
  using MmaShape<HeadDim>::kRowTiles, MmaShape<HeadDim>::kWarpRows, MmaShape<HeadDim>::kBlockRows;
  using Element = bf16;
  static constexpr int kKeys = Bf16Banks ? 64 : 32, kKeyStride = HeadDim + 8, kValueStride = HeadDim + 8;
  static constexpr bool kAsynchronous = Bf16Banks;
  static constexpr float kLimit = kBf16Limit;
  static constexpr size_t kQueryBytes = 0;

  uint32_t queries[kRowTiles][HeadDim / 16][4];
  int lane;

  template <class Query>
  DUOKV_DEVICE Bf16Products(void*, Query query) {
    lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int first_row = static_cast<int>(threadIdx.x) / kWarpSize * kWarpRows + lane / 4;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const row = query(first_row + m * 16 + half * 8);
#pragma unroll
        for (int i = 0; i < HeadDim / 8; ++i) {
          const float2 x = row ? load2(row + i * 8 + lane % 4 * 2) : make_float2(0, 0);
          queries[m][i / 2][i % 2 * 2 + half] = pack_bf16(x.x, x.y);
        }
      }
    }
  }

  DUOKV_DEVICE void score(const bf16* keys, float (&scores)[kRowTiles][kKeys / 8][4]) const {
    // Matrices of a load: 8 entries by 8 columns, both halves of 16 columns, then the next 8 entries.
    const bf16* source = keys + (lane % 8 + lane / 16 * 8) * kKeyStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int c = 0; c < HeadDim / 16; ++c) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t b[4];
        load_matrix4(b, source + n * 8 * kKeyStride + c * 16);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_bf16_m16n8k16(scores[m][n], queries[m][c], {b[0], b[1]}, scores[m][n]);
          mma_bf16_m16n8k16(scores[m][n + 1], queries[m][c], {b[2], b[3]}, scores[m][n + 1]);
        }
      }
    }
  }

  DUOKV_DEVICE void apply(const float (&weights)[kRowTiles][kKeys / 8][4], const bf16* values,
                          float (&out)[kRowTiles][HeadDim / 8][4]) const {
    // Matrices of a load, transposed: both halves of 16 entries, then the same of the next 8 columns.
    const bf16* source = values + (lane % 16) * kValueStride + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = weights[m][n + i / 2] + i % 2 * 2;
          a[m][i] = pack_bf16(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int c = 0; c < HeadDim / 8; c += 2) {
        uint32_t b[4];
        load_matrix4<true>(b, source + n * 8 * kValueStride + c * 8);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_bf16_m16n8k16(out[m][c], a[m], {b[0], b[1]}, out[m][c]);
          mma_bf16_m16n8k16(out[m][c + 1], a[m], {b[2], b[3]}, out[m][c + 1]);
        }
      }
    }
  }

  DUOKV_DEVICE int column(int c, int odd) const { return c * 8 + lane % 4 * 2 + odd; }

  DUOKV_DEVICE void store(const float (&out)[HeadDim / 8][4], int half, float factor, float* row) const {
#pragma unroll
    for (int c = 0; c < HeadDim / 8; ++c) {
      store2(row + column(c, 0), make_float2(out[c][2 * half] * factor, out[c][2 * half + 1] * factor));
    }
  }
};

template <class Products>
constexpr size_t mma_bytes() {
  return Products::kQueryBytes + 2 * Products::kKeys * (Products::kKeyStride + Products::kValueStride) *
                                     sizeof(typename Products::Element);
}

// Largest or total value over the 4 lanes that share a row.
DUOKV_DEVICE float max_over_4(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullMask, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullMask, value, 2));
}
DUOKV_DEVICE float sum_over_4(float value) {
  value += __shfl_xor_sync(kFullMask, value, 1);
  return value + __shfl_xor_sync(kFullMask, value, 2);
}

template <class P, int HeadDim>
__global__ void __launch_bounds__(kThreads)
    attention_mma_kernel(const __grid_constant__ ops::AttentionArgs args,
                         const __grid_constant__ Partition partition) {
  using Element = typename P::Element;
  constexpr int kKeys = P::kKeys, kRowTiles = P::kRowTiles, kRows = P::kBlockRows, kScoreTiles = kKeys / 8,
                kOutTiles = HeadDim / 8, kKeyTile = kKeys * P::kKeyStride,
                kValueTile = kKeys * P::kValueStride;
  DUOKV_SHARED(Block<kRows>, blocks, [1]);
  DUOKV_DYNAMIC_SHARED(unsigned char, memory);
  Element* const keys = reinterpret_cast<Element*>(memory + P::kQueryBytes);  // [2][kKeys][kKeyStride]
  Element* const values = keys + 2 * kKeyTile;                                // [2][kKeys][kValueStride]
  Block<kRows>& block = blocks[0];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp_row = static_cast<int>(threadIdx.x) / kWarpSize * P::kWarpRows,
            first_row = warp_row + lane / 4;
  const QueryTile tile = QueryTile::of_block<kRows>(args, partition);

  view_block<kRows, kKeys>(args, partition, tile, block);
  const P products(memory, [&](int row) {
    return tile.exists(row) ? args.q + tile.vector(args, tile.batch, row) * HeadDim : nullptr;
  });
  __syncthreads();

  const int tiles = block.banks[0].tiles + block.banks[1].tiles;
  RoundedTile<HeadDim, kKeys, P::kKeyStride> rounded;
  const auto start = [&](bool of_keys, int n) {
    const EntryTile entries = entry_tile<kRows, kKeys>(block, n);
    const BankView& view = block.banks[entries.bank];
    Element* destination = of_keys ? keys + n % 2 * kKeyTile : values + n % 2 * kValueTile;
    const void* source = of_keys ? view.k : view.v;
    if constexpr (!P::kAsynchronous) {
      rounded.start(source, view, entries.first);
    } else if constexpr (sizeof(Element) == 2) {
      copy_entries_async<bf16, HeadDim, kKeys, P::kKeyStride, kThreads>(
          destination, static_cast<const bf16*>(source), view.row, view.position_stride, entries.first,
          view.seen);
    } else if (of_keys) {
      start_floats<HeadDim, kKeys, P::kKeyStride>(destination, source, view, entries.first);
    } else {
      start_floats<HeadDim, kKeys, P::kValueStride>(destination, source, view, entries.first);
    }
  };
  // Through registers one tile at a time is on its way.
  const auto finish = [&](bool of_keys, int n) {
    if constexpr (!P::kAsynchronous)
      rounded.finish(of_keys ? keys + n % 2 * kKeyTile : values + n % 2 * kValueTile);
  };
  if (tiles > 0) {
    start(true, 0);
    finish(true, 0);
    start(false, 0);
    finish(false, 0);
  }

  const float scale = args.scale * kLog2E;
  float out[kRowTiles][kOutTiles][4] = {};
  Running running[kRowTiles][2];             // of rows first_row + 16 m and, second, 8 rows on
  const bool idle = !tile.exists(warp_row);  // warps past the last row only help to copy

  for (int n = 0; n < tiles; ++n) {
    const EntryTile entries = entry_tile<kRows, kKeys>(block, n);
    const bool second = entries.bank == 1;
    if (second && n == block.banks[0].tiles) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float sum = sum_over_4(running[m][half].sum);
          if (lane % 4 == 0)
            block.first[first_row + 16 * m + 8 * half] = make_float2(running[m][half].max, sum);
          running[m][half] = Running{};
        }
      }
    }
    const RowsSee see = rows_see(block, entries.bank, warp_row, P::kWarpRows);
    copy_async_commit();
    copy_async_wait<0>();
    // Tile n is complete, and no warp reads tile n - 1 any more.
    __syncthreads();
    const bool more = n + 1 < tiles;
    if (more) {
      start(true, n + 1);
      if constexpr (P::kAsynchronous) start(false, n + 1);
    }
    // No warp has reached the values yet: the vote is the barrier that ends their clearing.
    const bool unbounded =
        !rows_see(block, entries.bank, 0, kRows).all.covers(entries.first, kKeys) &&
        block_any<kThreads>(find_unbounded<true, kKeys, HeadDim, P::kValueStride, kThreads>(
            values + n % 2 * kValueTile, P::kLimit));
    const bool works = !idle && see.some.begin < entries.first + kKeys && see.some.end > entries.first;
    float scores[kRowTiles][kScoreTiles][4] = {};
    if (works) products.score(keys + n % 2 * kKeyTile, scores);
    if constexpr (!P::kAsynchronous) {
      if (more) {
        finish(true, n + 1);
        start(false, n + 1);
      }
    }
    if (works) {
      if (!see.all.covers(entries.first, kKeys)) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const Span seen = block.seen[entries.bank][first_row + 16 * m + 8 * half];
#pragma unroll
            for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                if (!seen.contains(entries.first + 8 * j + lane % 4 * 2 + e))
                  scores[m][j][2 * half + e] = kMinusInfinity;
              }
            }
          }
        }
      }
      bool shrinks = false;
      Step steps[kRowTiles][2];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + 16 * m + 8 * half;
          const float bias = block.bias[entries.bank][row];
          float top = kMinusInfinity;
#pragma unroll
          for (int j = 0; j < kScoreTiles; ++j)
            top = fmaxf(top, fmaxf(scores[m][j][2 * half], scores[m][j][2 * half + 1]));
          const float earlier = second ? block.first[row].x : kMinusInfinity;
          const Step step = admit(running[m][half], earlier, fmaf(max_over_4(top), scale, bias));
          steps[m][half] = step;
          shrinks = shrinks || step.shrink != 1;
#pragma unroll
          for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
              scores[m][j][e] = exp2_approximate(fmaf(scores[m][j][e], scale, bias - step.base));
              running[m][half].sum += scores[m][j][e];
              if (second) scores[m][j][e] *= step.factor;
            }
          }
        }
      }
      // Mostly the largest score stays.
      if (__any_sync(kFullMask, shrinks)) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int c = 0; c < kOutTiles; ++c) {
#pragma unroll
            for (int e = 0; e < 4; ++e) out[m][c][e] *= steps[m][e / 2].shrink;
          }
        }
      }
      products.apply(scores, values + n % 2 * kValueTile, out);
      if (unbounded) {
        const BankView& view = block.banks[entries.bank];
#pragma unroll 1
        for (int position = max(entries.first, view.seen.begin);
             position < min(entries.first + kKeys, view.seen.end); ++position) {
#pragma unroll
          for (int c = 0; c < kOutTiles; ++c) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
              const float x = entry_value(view.v, view, position, products.column(c, odd));
              if (fabsf(x) < P::kLimit) continue;
#pragma unroll
              for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  if (block.seen[entries.bank][first_row + 16 * m + 8 * half].contains(position))
                    out[m][c][2 * half + odd] += x * INFINITY;
                }
              }
            }
          }
        }
      }
    }
    if (more) finish(false, n + 1);
  }

  const bool two = block.banks[1].tiles > 0;
  const QueryTile own = block.tile;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half;
      const Running last = {running[m][half].max, sum_over_4(running[m][half].sum)};
      Running first;
      if (two) first = {block.first[row].x, block.first[row].y};
      if (!own.exists(row)) continue;
      const float factor =
          finish_row(args, partition, own, row, two ? first : last, two ? last : Running{}, lane % 4 == 0);
      if (partition.part > 0 && tiles == 0) continue;
      products.store(out[m], half, factor, output_row<HeadDim>(args, partition, own, row));
    }
  }
}

}  // namespace duokv::cuda::attention
