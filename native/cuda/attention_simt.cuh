// Attention forward in FP32: products by FFMA.
#pragma once

#include "cuda/attention_block.cuh"

namespace duokv::cuda::attention {

template <int HeadDim>
struct SimtShape {
  // Lanes are 4 groups of rows by 8 groups of entries or columns; a thread has every 4th row of its warp's.
  static constexpr int kThreadRows = HeadDim > 64 ? 4 : 8, kWarpRows = 4 * kThreadRows,
                       kRows = kWarps * kWarpRows, kKeys = HeadDim > 64 ? 32 : 64, kThreadKeys = kKeys / 8,
                       kThreadColumns = HeadDim / 8, kVector = kThreadColumns < 4 ? kThreadColumns : 4;
  // Strides in floats that keep 16-byte accesses of a quarter of a warp, and the weights' stores, apart.
  static constexpr int kQueryStride = HeadDim + 4, kKeyStride = HeadDim + 4, kValueStride = HeadDim,
                       kWeightStride = kKeys + 8;
  static constexpr size_t kBytes =
      sizeof(float) * (kRows * (kQueryStride + kWeightStride) + kKeys * (kKeyStride + kValueStride));
};

// Largest or total value over the 8 lanes that share a row.
DUOKV_DEVICE float max_over_8(float value) {
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2)
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, offset));
  return value;
}
DUOKV_DEVICE float sum_over_8(float value) {
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

DUOKV_DEVICE float dot4(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

template <int HeadDim>
__global__ void __launch_bounds__(kThreads, 2)
    attention_simt_kernel(const __grid_constant__ ops::AttentionArgs args,
                          const __grid_constant__ Partition partition) {
  using S = SimtShape<HeadDim>;
  DUOKV_SHARED(Block<S::kRows>, blocks, [1]);
  DUOKV_DYNAMIC_SHARED(float, queries);                         // [kRows][kQueryStride]
  float* const weights = queries + S::kRows * S::kQueryStride;  // [kRows][kWeightStride]
  float* const keys = weights + S::kRows * S::kWeightStride;    // [kKeys][kKeyStride]
  float* const values = keys + S::kKeys * S::kKeyStride;        // [kKeys][kValueStride]
  Block<S::kRows>& block = blocks[0];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize, column_lane = lane % 8,
            first_row = thread / kWarpSize * S::kWarpRows + lane / 8;
  const QueryTile tile = QueryTile::of_block<S::kRows>(args, partition);

  view_block<S::kRows, S::kKeys>(args, partition, tile, block);
  for (int i = thread; i < S::kRows * HeadDim / 4; i += kThreads) {
    const int row = i / (HeadDim / 4), column = i % (HeadDim / 4) * 4;
    const bool exists = tile.exists(row);
    const int64_t vector = exists ? tile.vector(args, tile.batch, row) : 0;
    copy_async16(queries + row * S::kQueryStride + column, args.q + vector * HeadDim + column, exists);
  }
  __syncthreads();
  const int tiles = block.banks[0].tiles + block.banks[1].tiles;
  const auto start_keys = [&](int i) {
    if (i < tiles) {
      const EntryTile entries = entry_tile<S::kRows, S::kKeys>(block, i);
      const BankView& view = block.banks[entries.bank];
      start_floats<HeadDim, S::kKeys, S::kKeyStride>(keys, view.k, view, entries.first);
    }
    copy_async_commit();
  };
  const auto start_values = [&](int i) {
    if (i < tiles) {
      const EntryTile entries = entry_tile<S::kRows, S::kKeys>(block, i);
      const BankView& view = block.banks[entries.bank];
      start_floats<HeadDim, S::kKeys, S::kValueStride>(values, view.v, view, entries.first);
    }
    copy_async_commit();
  };
  start_keys(0);
  start_values(0);

  const float scale = args.scale * kLog2E;
  float out[S::kThreadRows][S::kThreadColumns] = {};
  Running running[S::kThreadRows];
  // Warps past the last row only help to copy.
  const int warp_row = thread / kWarpSize * S::kWarpRows;
  const bool idle = !tile.exists(warp_row);

  for (int n = 0; n < tiles; ++n) {
    const EntryTile entries = entry_tile<S::kRows, S::kKeys>(block, n);
    const bool second = entries.bank == 1;
    if (second && n == block.banks[0].tiles) {
#pragma unroll
      for (int i = 0; i < S::kThreadRows; ++i) {
        const float sum = sum_over_8(running[i].sum);
        if (column_lane == 0) block.first[first_row + 4 * i] = make_float2(running[i].max, sum);
        running[i] = Running{};
      }
    }
    const RowsSee see = rows_see(block, entries.bank, warp_row, S::kWarpRows);
    const bool works = !idle && see.some.begin < entries.first + S::kKeys && see.some.end > entries.first;
    copy_async_wait<1>();
    __syncthreads();
    float scores[S::kThreadRows][S::kThreadKeys] = {};
    if (works) {
#pragma unroll 2
      for (int c = 0; c < HeadDim; c += 4) {
        float4 k[S::kThreadKeys];
#pragma unroll
        for (int j = 0; j < S::kThreadKeys; ++j)
          k[j] = load4(keys + (column_lane + 8 * j) * S::kKeyStride + c);
#pragma unroll
        for (int i = 0; i < S::kThreadRows; ++i) {
          const float4 q = load4(queries + (first_row + 4 * i) * S::kQueryStride + c);
#pragma unroll
          for (int j = 0; j < S::kThreadKeys; ++j) scores[i][j] = dot4(q, k[j], scores[i][j]);
        }
      }
    }
    __syncthreads();
    start_keys(n + 1);

    if (works) {
      if (!see.all.covers(entries.first, S::kKeys)) {
#pragma unroll
        for (int i = 0; i < S::kThreadRows; ++i) {
          const Span seen = block.seen[entries.bank][first_row + 4 * i];
#pragma unroll
          for (int j = 0; j < S::kThreadKeys; ++j) {
            if (!seen.contains(entries.first + column_lane + 8 * j)) scores[i][j] = kMinusInfinity;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < S::kThreadRows; ++i) {
        const float bias = block.bias[entries.bank][first_row + 4 * i];
        float top = scores[i][0];
#pragma unroll
        for (int j = 1; j < S::kThreadKeys; ++j) top = fmaxf(top, scores[i][j]);
        const float earlier = second ? block.first[first_row + 4 * i].x : kMinusInfinity;
        const Step step = admit(running[i], earlier, fmaf(max_over_8(top), scale, bias));
#pragma unroll
        for (int j = 0; j < S::kThreadKeys; ++j) {
          const float weight = exp2_approximate(fmaf(scores[i][j], scale, bias - step.base));
          running[i].sum += weight;
          weights[(first_row + 4 * i) * S::kWeightStride + column_lane + 8 * j] = weight * step.factor;
        }
#pragma unroll
        for (int c = 0; c < S::kThreadColumns; ++c) out[i][c] *= step.shrink;
      }
    }
    copy_async_wait<1>();
    __syncthreads();
    const bool unbounded =
        !rows_see(block, entries.bank, 0, S::kRows).all.covers(entries.first, S::kKeys) &&
        block_any<kThreads>(
            find_unbounded<true, S::kKeys, HeadDim, S::kValueStride, kThreads>(values, kFp32Limit));
    if (works) {
#pragma unroll 1
      for (int key = 0; key < S::kKeys; key += 4) {
        float4 w[S::kThreadRows];
#pragma unroll
        for (int i = 0; i < S::kThreadRows; ++i)
          w[i] = load4(weights + (first_row + 4 * i) * S::kWeightStride + key);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float v[S::kThreadColumns];
#pragma unroll
          for (int c = 0; c < S::kThreadColumns; c += S::kVector)
            load_vector<S::kVector>(values + (key + j) * S::kValueStride + c * 8 + column_lane * S::kVector,
                                    v + c);
#pragma unroll
          for (int i = 0; i < S::kThreadRows; ++i) {
            const float weight = j == 0 ? w[i].x : j == 1 ? w[i].y : j == 2 ? w[i].z : w[i].w;
#pragma unroll
            for (int c = 0; c < S::kThreadColumns; ++c) out[i][c] = fmaf(weight, v[c], out[i][c]);
          }
        }
      }
      if (unbounded) {
        const BankView& view = block.banks[entries.bank];
#pragma unroll 1
        for (int position = max(entries.first, view.seen.begin);
             position < min(entries.first + S::kKeys, view.seen.end); ++position) {
#pragma unroll
          for (int c = 0; c < S::kThreadColumns; ++c) {
            const int column = c / S::kVector * S::kVector * 8 + column_lane * S::kVector + c % S::kVector;
            const float x = entry_value(view.v, view, position, column);
            if (fabsf(x) < kFp32Limit) continue;
#pragma unroll
            for (int i = 0; i < S::kThreadRows; ++i) {
              if (block.seen[entries.bank][first_row + 4 * i].contains(position)) out[i][c] += x * INFINITY;
            }
          }
        }
      }
    }
    __syncthreads();
    start_values(n + 1);
  }
  copy_async_wait<0>();  // the queries, where there was nothing to see

  const bool two = block.banks[1].tiles > 0;
  const QueryTile own = block.tile;
#pragma unroll
  for (int i = 0; i < S::kThreadRows; ++i) {
    const int row = first_row + 4 * i;
    Running last = {running[i].max, sum_over_8(running[i].sum)}, first;
    if (two) first = {block.first[row].x, block.first[row].y};
    if (!two) first = last, last = Running{};
    if (!own.exists(row)) continue;
    const float factor = finish_row(args, partition, own, row, first, last, column_lane == 0);
    if (partition.part > 0 && tiles == 0) continue;
    float* destination = output_row<HeadDim>(args, partition, own, row) + column_lane * S::kVector;
#pragma unroll
    for (int c = 0; c < S::kThreadColumns; ++c) out[i][c] *= factor;
#pragma unroll
    for (int c = 0; c < S::kThreadColumns; c += S::kVector)
      store_vector<S::kVector>(destination + c * 8, out[i] + c);
  }
}

}  // namespace duokv::cuda::attention
