// Attention over up to two banks, forward: many queries. One query per row goes to attention_decode.
//
// A block owns a tile of one KV head's stacked query rows and goes through the tiles of entries that any of
// them sees, first bank first, with an online softmax in base 2. Each bank keeps its own maximum and sum, so
// that its log-sum-exp is exact however far the banks' scores are apart; the output accumulates relative to
// the larger maximum. Masks are applied only in tiles that some row does not see whole.
//
// Few queries leave most of the GPU idle. Then the entries are cut into parts at fixed multiples of absolute
// position, blocks go through one part each, and a second kernel adds the parts in order. Whether and where
// to cut depends on the number of queries and the mode only, so that a query's bits do not depend on its
// batch.
//
//   FP32     FFMA: each thread holds 8 x 8 scores and 8 x head_dim / 8 outputs; K, V, Q and the weights in
//            shared memory, K of the next tile arriving while the weights are applied, V while scores are
//            computed.
//   TF32x3   mma m16n8k8, a warp per 16 rows, tiles of 32 entries in two buffers. Q is split once and kept in
//            shared memory in the order of fragments. K indices are permuted within 16 columns so that
//            fragments of Q and K are 16-byte loads and the scores are the next product's left operand as
//            they stand; V columns likewise.
//   BF16     mma m16n8k16, Q in registers, tiles of 64 entries in two buffers. FP32 banks go through
//            registers, where they are rounded; BF16 banks are copied asynchronously.
//
// Roofline: 4 head_dim FLOPs per query row and entry seen. At head_dim 64, 12 heads over 4 KV heads, batch 1,
// 1,792 queries (19.3 M pairs): 4.9 GFLOP; H100: FP32 at 67 TFLOP/s 74 µs, TF32x3 at a third of 495 TFLOP/s
// 30 µs, BF16 at 990 TFLOP/s 5 µs. mma.sync reaches about 60 % of these tensor core rates. Training, 64 x
// 2,048 in documents of 600 with a window of 128 beside (650 M pairs): 167 GFLOP, TF32x3 1.0 ms, BF16 0.2 ms
// against 0.24 ms for its 0.8 GB of Q, K, V and output.
#include <algorithm>

#include "cuda/attention.cuh"
#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize, kBanks = 2;
constexpr float kMinusInfinity = -INFINITY;
constexpr int kPartAlignment = 64;  // a multiple of every tile of entries

// How the entries are cut into parts, and what a launch works on.
struct Partition {
  int part;             // entries; 0: not cut
  int parts;            // 1 where it is not cut
  int64_t first_batch;  // of batch rows first_batch … first_batch + gridDim.z - 1
  float* out;           // [parts, batch rows, queries, query_heads, head_dim], before division by the sum
  float4* sums;         // [parts, batch rows, queries, query_heads]: maximum and sum of each bank
};

// Largest score so far, in base 2, and the sum of 2^(score - max).
struct Running {
  float max = kMinusInfinity, sum = 0;
};

// Powers of two are taken relative to this, which must be finite where nothing has been seen yet.
DUOKV_DEVICE float base_of(float max) { return max == kMinusInfinity ? 0.0f : max; }

// ---------------------------------------------------------------- what a block works on

// A block's view of a bank, in shared memory.
struct BankView {
  const void *k, *v;  // of the block's KV head
  ops::BankRow row;
  int64_t position_stride;
  bool bf16;
  Span seen;         // by some row of the block
  Span common;       // by every row
  int first, tiles;  // tiles of entries from position `first`
};

template <int Rows>
struct Block {
  BankView banks[kBanks];
  Span seen[kBanks][Rows];
  float bias[kBanks][Rows];  // in base 2
};

struct QueryTile {
  int kv_head, part, group, first_row, rows;  // rows: of the whole KV head, queries * group
  int64_t batch;

  template <int Rows>
  DUOKV_DEVICE static QueryTile of_block(const ops::AttentionArgs& args, const Partition& partition) {
    const int group = args.query_heads / args.kv_heads;
    // The last rows see most, so they start first.
    return {static_cast<int>(blockIdx.x) / partition.parts,
            static_cast<int>(blockIdx.x) % partition.parts,
            group,
            static_cast<int>(gridDim.y - 1 - blockIdx.y) * Rows,
            static_cast<int>(args.queries) * group,
            partition.first_batch + blockIdx.z};
  }
  // Query of a row; rows past the end repeat the last.
  DUOKV_DEVICE int query(int row) const { return min(first_row + row, rows - 1) / group; }
  DUOKV_DEVICE bool exists(int row) const { return first_row + row < rows; }
  // Index of a row's vector in [batch, queries, query_heads].
  DUOKV_DEVICE int64_t vector(const ops::AttentionArgs& args, int64_t batch_row, int row) const {
    const int index = first_row + row, t = index / group;
    return (batch_row * args.queries + t) * args.query_heads + kv_head * group + index % group;
  }
};

DUOKV_DEVICE Span query_sees(const ops::AttentionArgs& args, int bank, int64_t batch, int t) {
  const int position = args.positions[batch] + t;
  return visible_span(args.banks[bank].rows[batch], args.banks[bank].window,
                      args.document_start[batch * args.queries + t], position, position);
}

template <int Rows, int Keys>
DUOKV_DEVICE void view_bank(const ops::AttentionArgs& args, const Partition& partition, const QueryTile& tile,
                            int bank, BankView& view) {
  view.tiles = 0;
  if (bank >= args.bank_count) return;
  const ops::Bank& source = args.banks[bank];
  const int first = tile.query(0), last = tile.query(Rows - 1), position = args.positions[tile.batch];
  view.row = source.rows[tile.batch];
  view.position_stride = source.position_stride;
  view.bf16 = source.dtype == ops::DType::BF16;
  const int64_t offset = tile.kv_head * source.head_stride * (view.bf16 ? 2 : 4);
  view.k = static_cast<const char*>(view.row.k) + offset;
  view.v = static_cast<const char*>(view.row.v) + offset;
  view.seen = visible_span(view.row, source.window, args.document_start[tile.batch * args.queries + first],
                           position + first, position + last);
  if (partition.part > 0) {
    const int begin = view.row.first / kPartAlignment * kPartAlignment + tile.part * partition.part;
    view.seen = {max(view.seen.begin, begin), min(view.seen.end, begin + partition.part)};
  }
  view.common = {query_sees(args, bank, tile.batch, last).begin,
                 query_sees(args, bank, tile.batch, first).end};
  view.first = view.seen.begin / Keys * Keys;
  if (!view.seen.empty()) view.tiles = (view.seen.end - view.first + Keys - 1) / Keys;
}

// Fills the block's view. A barrier must follow.
template <int Rows, int Keys>
DUOKV_DEVICE void view_block(const ops::AttentionArgs& args, const Partition& partition,
                             const QueryTile& tile, Block<Rows>& block) {
  for (int i = static_cast<int>(threadIdx.x); i < kBanks * Rows; i += kThreads) {
    const int bank = i / Rows, row = i % Rows, t = tile.query(row);
    if (row == 0) view_bank<Rows, Keys>(args, partition, tile, bank, block.banks[bank]);
    if (bank >= args.bank_count) continue;
    const float* bias = args.banks[bank].bias;
    block.seen[bank][row] = query_sees(args, bank, tile.batch, t);
    block.bias[bank][row] = bias ? bias[tile.batch * args.queries + t] * kLog2E : 0.0f;
  }
}

// A tile of entries: the block's i-th.
struct EntryTile {
  int bank, first;
};

template <int Rows, int Keys>
DUOKV_DEVICE EntryTile entry_tile(const Block<Rows>& block, int i) {
  const int of_first = block.banks[0].tiles;
  return i < of_first ? EntryTile{0, block.banks[0].first + i * Keys}
                      : EntryTile{1, block.banks[1].first + (i - of_first) * Keys};
}

// What the output of query t must be multiplied with, which is relative to the larger maximum. `writes` is
// true in the one thread that saves the log-sum-exp, at `vector` of [batch, queries, query_heads].
DUOKV_DEVICE float finish(const ops::AttentionArgs& args, int64_t batch, int t, int64_t vector, Running first,
                          Running second, bool writes) {
  if (writes && args.lse) {
    args.lse[vector] = (first.max + log2f(first.sum)) * kLn2;
    if (args.bank_count > 1) {
      args.lse[args.batch * args.queries * args.query_heads + vector] =
          (second.max + log2f(second.sum)) * kLn2;
    }
  }
  const float base = base_of(fmaxf(first.max, second.max));
  const float sum =
      fmaf(first.sum, exp2_approximate(first.max - base), second.sum * exp2_approximate(second.max - base));
  if (sum != 0) return 1.0f / sum;
  // Nothing to see, or only scores of -inf.
  const bool sees = !query_sees(args, 0, batch, t).empty() ||
                    (args.bank_count > 1 && !query_sees(args, 1, batch, t).empty());
  return sees ? NAN : 0.0f;
}

// Ends a row of a block: as above, or saves the sums of its part, whose output stays as it is.
DUOKV_DEVICE float finish_row(const ops::AttentionArgs& args, const Partition& partition,
                              const QueryTile& tile, int row, Running first, Running second, bool writes) {
  if (partition.part == 0) {
    return finish(args, tile.batch, tile.query(row), tile.vector(args, tile.batch, row), first, second,
                  writes);
  }
  if (writes) {
    partition.sums[tile.vector(args, int64_t{tile.part} * gridDim.z + blockIdx.z, row)] =
        make_float4(first.max, first.sum, second.max, second.sum);
  }
  return 1;
}

template <int HeadDim>
DUOKV_DEVICE float* output_row(const ops::AttentionArgs& args, const Partition& partition,
                               const QueryTile& tile, int row) {
  if (partition.part > 0) {
    return partition.out + tile.vector(args, int64_t{tile.part} * gridDim.z + blockIdx.z, row) * HeadDim;
  }
  return args.out + tile.vector(args, tile.batch, row) * HeadDim;
}

// ---------------------------------------------------------------- tiles of entries

// Starts bringing a tile of FP32 values into shared memory. BF16 banks, which no policy combines with FP32
// tiles, are widened here and now.
template <int HeadDim, int Keys, int Stride>
DUOKV_DEVICE void start_floats(float* tile, const void* entries, const BankView& view, int first) {
  if (!view.bf16) {
    copy_entries_async<float, HeadDim, Keys, Stride, kThreads>(
        tile, static_cast<const float*>(entries), view.row, view.position_stride, first, view.seen);
    return;
  }
  const auto* base = static_cast<const bf16*>(entries);
  for (int i = static_cast<int>(threadIdx.x); i < Keys * HeadDim / 4; i += kThreads) {
    const int key = i / (HeadDim / 4), column = i % (HeadDim / 4) * 4, position = first + key;
    float2 raw = {};
    if (view.seen.contains(position)) {
      raw = load2(reinterpret_cast<const float*>(
          base + entry_slot(view.row, position) * view.position_stride + column));
    }
    const uint32_t low = __float_as_uint(raw.x), high = __float_as_uint(raw.y);
    store4(tile + key * Stride + column,
           make_float4(__uint_as_float(low << 16), __uint_as_float(low & 0xFFFF0000u),
                       __uint_as_float(high << 16), __uint_as_float(high & 0xFFFF0000u)));
  }
}

// A tile on its way through registers into shared memory, where it is BF16.
template <int HeadDim, int Keys, int Stride>
struct RoundedTile {
  static constexpr int kChunks = HeadDim / 8, kCount = Keys * kChunks,
                       kPerThread = (kCount + kThreads - 1) / kThreads;
  float4 values[kPerThread][2];
  bool bf16_bank;

  DUOKV_DEVICE void start(const void* entries, const BankView& view, int first) {
    bf16_bank = view.bf16;
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const int i = n * kThreads + static_cast<int>(threadIdx.x), position = first + i / kChunks;
      values[n][0] = values[n][1] = make_float4(0, 0, 0, 0);
      if (i >= kCount || !view.seen.contains(position)) continue;
      const int64_t offset = entry_slot(view.row, position) * view.position_stride + i % kChunks * 8;
      if (bf16_bank) {
        values[n][0] = load4(reinterpret_cast<const float*>(static_cast<const bf16*>(entries) + offset));
      } else {
        values[n][0] = load4(static_cast<const float*>(entries) + offset);
        values[n][1] = load4(static_cast<const float*>(entries) + offset + 4);
      }
    }
  }
  DUOKV_DEVICE void finish(bf16* tile) const {
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const int i = n * kThreads + static_cast<int>(threadIdx.x);
      if (i >= kCount) continue;
      float4 packed = values[n][0];
      if (!bf16_bank) {
        const float4 a = values[n][0], b = values[n][1];
        packed = make_float4(__uint_as_float(pack_bf16(a.x, a.y)), __uint_as_float(pack_bf16(a.z, a.w)),
                             __uint_as_float(pack_bf16(b.x, b.y)), __uint_as_float(pack_bf16(b.z, b.w)));
      }
      store4(reinterpret_cast<float*>(tile + i / kChunks * Stride + i % kChunks * 8), packed);
    }
  }
};

// ---------------------------------------------------------------- FP32

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
  DUOKV_SHARED(float2, first_bank, [S::kRows]);                 // maximum and sum
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
  float largest[S::kThreadRows];  // over both banks
#pragma unroll
  for (int i = 0; i < S::kThreadRows; ++i) largest[i] = kMinusInfinity;

  for (int n = 0; n < tiles; ++n) {
    const EntryTile entries = entry_tile<S::kRows, S::kKeys>(block, n);
    if (entries.bank == 1 && n == block.banks[0].tiles) {
#pragma unroll
      for (int i = 0; i < S::kThreadRows; ++i) {
        const float sum = sum_over_8(running[i].sum);
        if (column_lane == 0) first_bank[first_row + 4 * i] = make_float2(running[i].max, sum);
        running[i] = Running{};
      }
    }
    copy_async_wait<1>();
    __syncthreads();
    float scores[S::kThreadRows][S::kThreadKeys] = {};
#pragma unroll 2
    for (int c = 0; c < HeadDim; c += 4) {
      float4 k[S::kThreadKeys];
#pragma unroll
      for (int j = 0; j < S::kThreadKeys; ++j) k[j] = load4(keys + (column_lane + 8 * j) * S::kKeyStride + c);
#pragma unroll
      for (int i = 0; i < S::kThreadRows; ++i) {
        const float4 q = load4(queries + (first_row + 4 * i) * S::kQueryStride + c);
#pragma unroll
        for (int j = 0; j < S::kThreadKeys; ++j) scores[i][j] = dot4(q, k[j], scores[i][j]);
      }
    }
    __syncthreads();
    start_keys(n + 1);

    const Span common = block.banks[entries.bank].common;
    if (entries.first < common.begin || entries.first + S::kKeys > common.end) {
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
      const float max = fmaxf(running[i].max, fmaf(max_over_8(top), scale, bias)), base = base_of(max);
      const float over_both = fmaxf(largest[i], max), factor = exp2_approximate(max - base_of(over_both));
      const float shrink = exp2_approximate(largest[i] - base_of(over_both));
      running[i].sum *= exp2_approximate(running[i].max - base);
      running[i].max = max;
      largest[i] = over_both;
#pragma unroll
      for (int j = 0; j < S::kThreadKeys; ++j) {
        const float weight = exp2_approximate(fmaf(scores[i][j], scale, bias - base));
        running[i].sum += weight;
        weights[(first_row + 4 * i) * S::kWeightStride + column_lane + 8 * j] = weight * factor;
      }
#pragma unroll
      for (int c = 0; c < S::kThreadColumns; ++c) out[i][c] *= shrink;
    }
    copy_async_wait<1>();
    __syncthreads();
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
        for (int c = 0; c < S::kThreadColumns; c += S::kVector) {
          const float* source = values + (key + j) * S::kValueStride + c * 8 + column_lane * S::kVector;
          if constexpr (S::kVector == 4) {
            const float4 four = load4(source);
            v[c] = four.x, v[c + 1] = four.y, v[c + 2] = four.z, v[c + 3] = four.w;
          } else {
            const float2 two = load2(source);
            v[c] = two.x, v[c + 1] = two.y;
          }
        }
#pragma unroll
        for (int i = 0; i < S::kThreadRows; ++i) {
          const float weight = j == 0 ? w[i].x : j == 1 ? w[i].y : j == 2 ? w[i].z : w[i].w;
#pragma unroll
          for (int c = 0; c < S::kThreadColumns; ++c) out[i][c] = fmaf(weight, v[c], out[i][c]);
        }
      }
    }
    __syncthreads();
    start_values(n + 1);
  }
  copy_async_wait<0>();  // the queries, where there was nothing to see

  const bool two = block.banks[1].tiles > 0;
#pragma unroll
  for (int i = 0; i < S::kThreadRows; ++i) {
    const int row = first_row + 4 * i;
    Running last = {running[i].max, sum_over_8(running[i].sum)}, first;
    if (two) first = {first_bank[row].x, first_bank[row].y};
    if (!two) first = last, last = Running{};
    if (!tile.exists(row)) continue;
    const float factor = finish_row(args, partition, tile, row, first, last, column_lane == 0);
    if (partition.part > 0 && tiles == 0) continue;
    float* destination = output_row<HeadDim>(args, partition, tile, row) + column_lane * S::kVector;
#pragma unroll
    for (int c = 0; c < S::kThreadColumns; c += S::kVector) {
      if constexpr (S::kVector == 4) {
        store4(destination + c * 8, make_float4(out[i][c] * factor, out[i][c + 1] * factor,
                                                out[i][c + 2] * factor, out[i][c + 3] * factor));
      } else {
        store2(destination + c * 8, make_float2(out[i][c] * factor, out[i][c + 1] * factor));
      }
    }
  }
}

// ---------------------------------------------------------------- tensor cores
//
// A warp owns 16 rows; a lane, with g = lane / 4 and t = lane % 4, holds of every 16 x 8 tile of scores rows
// g and g + 8 at entries 2t and 2t + 1. A Products class has the shared tiles' layout, and of each kind of
// operand what one warp needs.

constexpr int kWarpRows = 16, kBlockRows = kWarps * kWarpRows;

template <int HeadDim>
struct Tf32x3Products {
  using Element = float;
  static constexpr int kKeys = 32, kKeyStride = HeadDim + 16, kValueStride = HeadDim + 4,
                       kVector = HeadDim < 32 ? HeadDim / 8 : 4;
  static constexpr bool kAsynchronous = true;
  // [warp][16 columns][step of 8][big, small][lane] fragments of 16 bytes
  static constexpr size_t kQueryBytes = kBlockRows * HeadDim * 2 * sizeof(float);

  float* fragments;  // of this lane
  int g, t;

  // q0, q1: the vectors of rows g and g + 8, null past the last row.
  DUOKV_DEVICE Tf32x3Products(void* shared, const float* q0, const float* q1) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
              warp = static_cast<int>(threadIdx.x) / kWarpSize;
    g = lane / 4, t = lane % 4;
    fragments = static_cast<float*>(shared) + warp * kWarpRows * HeadDim * 2 + lane * 4;
#pragma unroll 1
    for (int c = 0; c < HeadDim / 16; ++c) {
      const float4 zero = make_float4(0, 0, 0, 0);
      const float4 a = q0 ? load4(q0 + c * 16 + 4 * t) : zero, b = q1 ? load4(q1 + c * 16 + 4 * t) : zero;
      put(2 * c, split_tf32<4>({a.x, b.x, a.y, b.y}));
      put(2 * c + 1, split_tf32<4>({a.z, b.z, a.w, b.w}));
    }
  }

  // scores [16, kKeys] = q k^T. Of 16 columns, K index t of step s is column 4t + 2s, and t + 4 the next.
  DUOKV_DEVICE void score(const float* keys, float (&scores)[kKeys / 8][4]) const {
#pragma unroll 1
    for (int c = 0; c < HeadDim / 16; ++c) {
      const Split<4> a[2] = {get(2 * c), get(2 * c + 1)};
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const float4 k = load4(keys + (8 * n + g) * kKeyStride + c * 16 + 4 * t);
        const Split<2> b[2] = {split_tf32<2>({k.x, k.y}), split_tf32<2>({k.z, k.w})};
        mma_tf32x3_m16n8k16(scores[n], a, b);
      }
    }
  }

  // out [16, HeadDim] += weights v. Of 8 entries, K index t is entry 2t and t + 4 the next, as the scores
  // lie. Column g of output tile (c, j) is column 8 kVector c + kVector g + j.
  DUOKV_DEVICE void apply(const float (&weights)[kKeys / 8][4], const float* values,
                          float (&out)[HeadDim / 8][4]) const {
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      Split<4> a[2];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const float(&w)[4] = weights[n + s];
        a[s] = split_tf32<4>({w[0], w[2], w[1], w[3]});
      }
#pragma unroll
      for (int c = 0; c < HeadDim / 8; c += kVector) {
        float v[4][kVector];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* source =
              values + (8 * n + i / 2 * 8 + 2 * t + i % 2) * kValueStride + 8 * c + kVector * g;
          if constexpr (kVector == 4) {
            const float4 four = load4(source);
            v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
          } else {
            const float2 two = load2(source);
            v[i][0] = two.x, v[i][1] = two.y;
          }
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const Split<2> b[2] = {split_tf32<2>({v[0][j], v[1][j]}), split_tf32<2>({v[2][j], v[3][j]})};
          mma_tf32x3_m16n8k16(out[c + j], a, b);
        }
      }
    }
  }

  // Row g (half 0) or g + 8 of the output, times factor.
  DUOKV_DEVICE void store(const float (&out)[HeadDim / 8][4], int half, float factor, float* row) const {
#pragma unroll
    for (int c = 0; c < HeadDim / 8; c += kVector) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float* destination = row + 8 * c + kVector * (2 * t + odd);
        const int e = 2 * half + odd;
        if constexpr (kVector == 4) {
          store4(destination, make_float4(out[c][e] * factor, out[c + 1][e] * factor, out[c + 2][e] * factor,
                                          out[c + 3][e] * factor));
        } else {
          store2(destination, make_float2(out[c][e] * factor, out[c + 1][e] * factor));
        }
      }
    }
  }

 private:
  DUOKV_DEVICE void put(int step, const Split<4>& split) {
    float* p = fragments + step * 2 * kWarpSize * 4;
    const auto pack = [](const uint32_t(&x)[4]) {
      return make_float4(__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                         __uint_as_float(x[3]));
    };
    store4(p, pack(split.big));
    store4(p + kWarpSize * 4, pack(split.small));
  }
  DUOKV_DEVICE Split<4> get(int step) const {
    const float* p = fragments + step * 2 * kWarpSize * 4;
    const float4 big = load4(p), small = load4(p + kWarpSize * 4);
    return {{__float_as_uint(big.x), __float_as_uint(big.y), __float_as_uint(big.z), __float_as_uint(big.w)},
            {__float_as_uint(small.x), __float_as_uint(small.y), __float_as_uint(small.z),
             __float_as_uint(small.w)}};
  }
};

// Bf16Banks: every bank is BF16.
template <int HeadDim, bool Bf16Banks>
struct Bf16Products {
  using Element = bf16;
  static constexpr int kKeys = 64, kKeyStride = HeadDim + 8, kValueStride = HeadDim + 8;
  static constexpr bool kAsynchronous = Bf16Banks;
  static constexpr size_t kQueryBytes = 0;

  uint32_t queries[HeadDim / 16][4];
  int lane;

  DUOKV_DEVICE Bf16Products(void*, const float* q0, const float* q1) {
    lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const auto pair = [&](const float* row, int column) {
      const float2 x = row ? load2(row + column) : make_float2(0, 0);
      return pack_bf16(x.x, x.y);
    };
#pragma unroll
    for (int c = 0; c < HeadDim / 16; ++c) {
      const int column = c * 16 + lane % 4 * 2;
      queries[c][0] = pair(q0, column), queries[c][1] = pair(q1, column);
      queries[c][2] = pair(q0, column + 8), queries[c][3] = pair(q1, column + 8);
    }
  }

  DUOKV_DEVICE void score(const bf16* keys, float (&scores)[kKeys / 8][4]) const {
    // Matrices of a load: 8 entries by 8 columns, both halves of 16 columns, then the next 8 entries.
    const bf16* source = keys + (lane % 8 + lane / 16 * 8) * kKeyStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int c = 0; c < HeadDim / 16; ++c) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t b[4];
        load_matrix4(b, source + n * 8 * kKeyStride + c * 16);
        mma_bf16_m16n8k16(scores[n], queries[c], {b[0], b[1]}, scores[n]);
        mma_bf16_m16n8k16(scores[n + 1], queries[c], {b[2], b[3]}, scores[n + 1]);
      }
    }
  }

  DUOKV_DEVICE void apply(const float (&weights)[kKeys / 8][4], const bf16* values,
                          float (&out)[HeadDim / 8][4]) const {
    // Matrices of a load, transposed: both halves of 16 entries, then the same of the next 8 columns.
    const bf16* source = values + (lane % 16) * kValueStride + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      const float(&first)[4] = weights[n];
      const float(&second)[4] = weights[n + 1];
      const uint32_t a[4] = {pack_bf16(first[0], first[1]), pack_bf16(first[2], first[3]),
                             pack_bf16(second[0], second[1]), pack_bf16(second[2], second[3])};
#pragma unroll
      for (int c = 0; c < HeadDim / 8; c += 2) {
        uint32_t b[4];
        load_matrix4<true>(b, source + n * 8 * kValueStride + c * 8);
        mma_bf16_m16n8k16(out[c], a, {b[0], b[1]}, out[c]);
        mma_bf16_m16n8k16(out[c + 1], a, {b[2], b[3]}, out[c + 1]);
      }
    }
  }

  DUOKV_DEVICE void store(const float (&out)[HeadDim / 8][4], int half, float factor, float* row) const {
#pragma unroll
    for (int c = 0; c < HeadDim / 8; ++c) {
      store2(row + c * 8 + lane % 4 * 2,
             make_float2(out[c][2 * half] * factor, out[c][2 * half + 1] * factor));
    }
  }
};

template <class Products, int HeadDim>
constexpr size_t tensor_core_bytes() {
  return Products::kQueryBytes + 2 * Products::kKeys * (Products::kKeyStride + Products::kValueStride) *
                                     sizeof(typename Products::Element);
}

DUOKV_DEVICE float max_over_4(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullMask, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullMask, value, 2));
}
DUOKV_DEVICE float sum_over_4(float value) {
  value += __shfl_xor_sync(kFullMask, value, 1);
  return value + __shfl_xor_sync(kFullMask, value, 2);
}

template <class Products, int HeadDim>
__global__ void __launch_bounds__(kThreads)
    attention_mma_kernel(const __grid_constant__ ops::AttentionArgs args,
                         const __grid_constant__ Partition partition) {
  using P = Products;
  using Element = typename P::Element;
  constexpr int kKeys = P::kKeys, kScoreTiles = kKeys / 8, kOutTiles = HeadDim / 8,
                kKeyTile = kKeys * P::kKeyStride, kValueTile = kKeys * P::kValueStride;
  DUOKV_SHARED(Block<kBlockRows>, blocks, [1]);
  DUOKV_DYNAMIC_SHARED(unsigned char, memory);
  Element* const keys = reinterpret_cast<Element*>(memory + P::kQueryBytes);  // [2][kKeys][kKeyStride]
  Element* const values = keys + 2 * kKeyTile;                                // [2][kKeys][kValueStride]
  Block<kBlockRows>& block = blocks[0];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            first_row = static_cast<int>(threadIdx.x) / kWarpSize * kWarpRows + lane / 4;
  const QueryTile tile = QueryTile::of_block<kBlockRows>(args, partition);

  view_block<kBlockRows, kKeys>(args, partition, tile, block);
  const auto query = [&](int row) {
    return tile.exists(row) ? args.q + tile.vector(args, tile.batch, row) * HeadDim : nullptr;
  };
  const P products(memory, query(first_row), query(first_row + 8));
  __syncthreads();

  const int tiles = block.banks[0].tiles + block.banks[1].tiles;
  RoundedTile<HeadDim, kKeys, P::kKeyStride> rounded;
  const auto start = [&](bool of_keys, int n) {
    const EntryTile entries = entry_tile<kBlockRows, kKeys>(block, n);
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
  float out[kOutTiles][4] = {};
  Running first_bank[2], running[2];  // rows first_row and first_row + 8
  float largest[2] = {kMinusInfinity, kMinusInfinity}, bias[2] = {};
  Span seen[2] = {};

  for (int n = 0; n < tiles; ++n) {
    const EntryTile entries = entry_tile<kBlockRows, kKeys>(block, n);
    const bool second = entries.bank == 1;
    if (n == 0 || (second && n == block.banks[0].tiles)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        first_bank[r] = running[r];
        running[r] = Running{};
        seen[r] = block.seen[entries.bank][first_row + 8 * r];
        bias[r] = block.bias[entries.bank][first_row + 8 * r];
      }
    }
    copy_async_commit();
    copy_async_wait<0>();
    // Tile n is complete, and no warp reads tile n - 1 any more.
    __syncthreads();
    const bool more = n + 1 < tiles;
    if (more) {
      start(true, n + 1);
      if constexpr (P::kAsynchronous) start(false, n + 1);
    }
    float scores[kScoreTiles][4] = {};
    products.score(keys + n % 2 * kKeyTile, scores);
    if constexpr (!P::kAsynchronous) {
      if (more) {
        finish(true, n + 1);
        start(false, n + 1);
      }
    }

    const Span common = block.banks[entries.bank].common;
    if (entries.first < common.begin || entries.first + kKeys > common.end) {
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!seen[e / 2].contains(entries.first + 8 * j + lane % 4 * 2 + e % 2))
            scores[j][e] = kMinusInfinity;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = kMinusInfinity;
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) top = fmaxf(top, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
      const float max = fmaxf(running[r].max, fmaf(max_over_4(top), scale, bias[r])), base = base_of(max);
      const float over_both = fmaxf(largest[r], max), factor = exp2_approximate(max - base_of(over_both));
      const float shrink = exp2_approximate(largest[r] - base_of(over_both));
      running[r].sum *= exp2_approximate(running[r].max - base);
      running[r].max = max;
      largest[r] = over_both;
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          scores[j][e] = exp2_approximate(fmaf(scores[j][e], scale, bias[r] - base));
          running[r].sum += scores[j][e];
          if (second) scores[j][e] *= factor;
        }
      }
#pragma unroll
      for (int c = 0; c < kOutTiles; ++c) out[c][2 * r] *= shrink, out[c][2 * r + 1] *= shrink;
    }
    products.apply(scores, values + n % 2 * kValueTile, out);
    if (more) finish(false, n + 1);
  }

  const bool two = block.banks[1].tiles > 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + 8 * r;
    const Running last = {running[r].max, sum_over_4(running[r].sum)};
    const Running earlier = {first_bank[r].max, sum_over_4(first_bank[r].sum)};
    if (!tile.exists(row)) continue;
    const float factor =
        finish_row(args, partition, tile, row, two ? earlier : last, two ? last : Running{}, lane % 4 == 0);
    if (partition.part > 0 && tiles == 0) continue;
    products.store(out, r, factor, output_row<HeadDim>(args, partition, tile, row));
  }
}

// ---------------------------------------------------------------- adding parts

// A thread has four columns of one query's head; the parts are added in order.
__global__ void __launch_bounds__(kThreads)
    attention_combine_kernel(const __grid_constant__ ops::AttentionArgs args,
                             const __grid_constant__ Partition partition, int64_t batch_rows) {
  const int chunks = args.head_dim / 4;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x, vector = index / chunks,
                vectors = batch_rows * args.queries * args.query_heads;
  if (vector >= vectors) return;
  const int column = static_cast<int>(index % chunks) * 4;
  Running banks[kBanks];
  for (int part = 0; part < partition.parts; ++part) {
    const float4 sums = partition.sums[part * vectors + vector];
    banks[0].max = fmaxf(banks[0].max, sums.x);
    banks[1].max = fmaxf(banks[1].max, sums.z);
  }
  const float base[kBanks] = {base_of(banks[0].max), base_of(banks[1].max)},
              over_both = base_of(fmaxf(banks[0].max, banks[1].max));
  float4 out = make_float4(0, 0, 0, 0);
  for (int part = 0; part < partition.parts; ++part) {
    const float4 sums = partition.sums[part * vectors + vector];
    const float largest = fmaxf(sums.x, sums.z);
    banks[0].sum = fmaf(sums.y, exp2_approximate(sums.x - base[0]), banks[0].sum);
    banks[1].sum = fmaf(sums.w, exp2_approximate(sums.z - base[1]), banks[1].sum);
    if (sums.y == 0 && sums.w == 0) continue;  // sees nothing in this part
    const float weight = exp2_approximate(largest - over_both);
    const float4 x = load4(partition.out + (part * vectors + vector) * args.head_dim + column);
    out = make_float4(fmaf(x.x, weight, out.x), fmaf(x.y, weight, out.y), fmaf(x.z, weight, out.z),
                      fmaf(x.w, weight, out.w));
  }
  const int64_t row = vector / args.query_heads, first_row = partition.first_batch * args.queries;
  const float factor =
      finish(args, partition.first_batch + row / args.queries, static_cast<int>(row % args.queries),
             first_row * args.query_heads + vector, banks[0], banks[1], column == 0);
  store4(args.out + (first_row * args.query_heads + vector) * args.head_dim + column,
         make_float4(out.x * factor, out.y * factor, out.z * factor, out.w * factor));
}

// ---------------------------------------------------------------- launching

// Few queries are cut finely. The tensor cores' many queries are not cut: they fill the GPU, and parts would
// cost them more than they take. FP32 products take longer than their parts.
int part_size(const ops::AttentionArgs& args) {
  if (args.queries <= 256) return 256;
  return args.mode == ops::ProductMode::FP32 || args.queries <= 1024 ? 512 : 0;
}

struct Plan {
  int part, parts;
  int64_t batch_rows;  // in one launch
  size_t out_bytes, bytes;
};

Plan plan_of(const ops::AttentionArgs& args) {
  constexpr int64_t kWorkspaceLimit = int64_t{64} << 20, kMostBatchRows = 32768;
  int64_t longest = 0;
  for (int bank = 0; bank < args.bank_count; ++bank)
    longest = std::max<int64_t>(longest, args.banks[bank].longest);
  const int part = part_size(args);
  // One part gives the bits of no partition at all.
  const int64_t parts = part > 0 ? ceil_div(longest + kPartAlignment - 1, part) : 1;
  if (parts <= 1) return {0, 1, std::min(args.batch, kMostBatchRows), 0, 0};
  const int64_t vectors = parts * args.queries * args.query_heads,
                row_bytes = vectors * (args.head_dim * 4 + static_cast<int64_t>(sizeof(float4)));
  const int64_t batch_rows = std::clamp<int64_t>(kWorkspaceLimit / row_bytes, 1, args.batch);
  return {part, static_cast<int>(parts), batch_rows,
          static_cast<size_t>(batch_rows * vectors * args.head_dim * 4),
          static_cast<size_t>(batch_rows * row_bytes)};
}

bool valid(const ops::AttentionArgs& args) {
  if (args.head_dim != 16 && args.head_dim != 32 && args.head_dim != 64 && args.head_dim != 128) return false;
  if (args.bank_count < 1 || args.bank_count > kBanks || args.query_heads % args.kv_heads != 0) return false;
  if (!vectorizable(args.head_dim, {args.q, args.out})) return false;
  for (int bank = 0; bank < args.bank_count; ++bank) {
    const int64_t width = args.banks[bank].dtype == ops::DType::BF16 ? 8 : 4;
    if (args.banks[bank].head_stride % width != 0 || args.banks[bank].position_stride % width != 0)
      return false;
  }
  return true;
}

template <class Kernel>
cudaError_t launch_tiles(Kernel kernel, int block_rows, size_t shared_bytes, const ops::AttentionArgs& args,
                         const Partition& partition, int64_t batch_rows, cudaStream_t stream) {
  DUOKV_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared_bytes)));
  const int64_t rows = args.queries * (args.query_heads / args.kv_heads);
  const dim3 grid(static_cast<unsigned>(args.kv_heads * partition.parts),
                  static_cast<unsigned>(ceil_div(rows, block_rows)), static_cast<unsigned>(batch_rows));
  return DUOKV_LAUNCH(kernel, grid, kThreads, shared_bytes, stream, args, partition);
}

template <class Products, int HeadDim>
cudaError_t launch_tensor_cores(const ops::AttentionArgs& args, const Partition& partition,
                                int64_t batch_rows, cudaStream_t stream) {
  return launch_tiles(attention_mma_kernel<Products, HeadDim>, kBlockRows,
                      tensor_core_bytes<Products, HeadDim>(), args, partition, batch_rows, stream);
}

template <int HeadDim>
cudaError_t launch_mode(const ops::AttentionArgs& args, const Partition& partition, int64_t batch_rows,
                        cudaStream_t stream) {
  switch (args.mode) {
    case ops::ProductMode::FP32:
      return launch_tiles(attention_simt_kernel<HeadDim>, SimtShape<HeadDim>::kRows,
                          SimtShape<HeadDim>::kBytes, args, partition, batch_rows, stream);
    case ops::ProductMode::TF32x3:
      return launch_tensor_cores<Tf32x3Products<HeadDim>, HeadDim>(args, partition, batch_rows, stream);
    case ops::ProductMode::BF16:
      for (int bank = 0; bank < args.bank_count; ++bank) {
        if (args.banks[bank].dtype == ops::DType::BF16) continue;
        return launch_tensor_cores<Bf16Products<HeadDim, false>, HeadDim>(args, partition, batch_rows,
                                                                          stream);
      }
      return launch_tensor_cores<Bf16Products<HeadDim, true>, HeadDim>(args, partition, batch_rows, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_head_dim(const ops::AttentionArgs& args, const Partition& partition, int64_t batch_rows,
                            cudaStream_t stream) {
  switch (args.head_dim) {
    case 16:
      return launch_mode<16>(args, partition, batch_rows, stream);
    case 32:
      return launch_mode<32>(args, partition, batch_rows, stream);
    case 64:
      return launch_mode<64>(args, partition, batch_rows, stream);
    default:
      return launch_mode<128>(args, partition, batch_rows, stream);
  }
}

}  // namespace

size_t attention_forward_workspace(const ops::AttentionArgs& args) {
  return args.queries == 1 ? attention_decode_workspace(args) : plan_of(args).bytes;
}

cudaError_t attention_forward(const ops::AttentionArgs& args, void* workspace, cudaStream_t stream) {
  if (args.batch == 0 || args.queries == 0) return cudaSuccess;
  if (args.queries == 1) return attention_decode(args, workspace, stream);
  if (!valid(args)) return cudaErrorInvalidValue;
  const Plan plan = plan_of(args);
  for (int64_t first = 0; first < args.batch; first += plan.batch_rows) {
    const int64_t batch_rows = std::min(plan.batch_rows, args.batch - first);
    const Partition partition = {plan.part, plan.parts, first, static_cast<float*>(workspace),
                                 reinterpret_cast<float4*>(static_cast<char*>(workspace) + plan.out_bytes)};
    DUOKV_CUDA_TRY(launch_head_dim(args, partition, batch_rows, stream));
    if (plan.part == 0) continue;
    const int64_t threads = batch_rows * args.queries * args.query_heads * (args.head_dim / 4);
    DUOKV_CUDA_TRY(DUOKV_LAUNCH(attention_combine_kernel,
                                dim3(static_cast<unsigned>(ceil_div(threads, kThreads))), kThreads, 0, stream,
                                args, partition, batch_rows));
  }
  return cudaSuccess;
}

}  // namespace duokv::cuda
