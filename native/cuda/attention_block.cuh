// What the kernels of attention forward share: what a block works on, a row's online softmax, tiles of
// entries on their way to shared memory.
#pragma once

#include "cuda/attention.cuh"

namespace duokv::cuda::attention {

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

// ---------------------------------------------------------------- a row's online softmax

// Largest score so far, in base 2, and the sum of 2^(score - max).
struct Running {
  float max = kMinusInfinity, sum = 0;
};

// Powers of two are taken relative to this, which must be finite where nothing has been seen yet.
DUOKV_DEVICE float base_of(float max) { return max == kMinusInfinity ? 0.0f : max; }

// What one more tile does: its weights are 2^(score - base) in the bank's sum, times `factor` in the output,
// which shrinks first.
struct Step {
  float base, factor, shrink;
};

// Admits a tile whose largest score is `top` to the bank that is being gone through. `earlier` is the largest
// score of the bank before; the output is relative to the larger of the two.
DUOKV_DEVICE Step admit(Running& bank, float earlier, float top) {
  const float max = fmaxf(bank.max, top), base = base_of(max), both_base = base_of(fmaxf(earlier, max));
  const Step step = {base, exp2_approximate(max - both_base),
                     exp2_approximate(fmaxf(earlier, bank.max) - both_base)};
  bank.sum *= exp2_approximate(bank.max - base);
  bank.max = max;
  return step;
}

// ---------------------------------------------------------------- what a block works on

// A block's view of a bank.
struct BankView {
  const void *k, *v;  // of the block's KV head
  ops::BankRow row;
  int64_t position_stride;
  bool bf16;
  Span seen;         // by some row of the block
  int first, tiles;  // tiles of entries from position `first`
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

// What a block works on, in shared memory, where it takes no registers from the products.
template <int Rows>
struct Block {
  QueryTile tile;
  BankView banks[kBanks];
  Span seen[kBanks][Rows];
  float bias[kBanks][Rows];  // in base 2
  // Maximum and sum of the first bank, or of nothing, once the second has begun. Of a row's own lanes.
  float2 first[Rows];
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
  view.first = view.seen.begin / Keys * Keys;
  if (!view.seen.empty()) view.tiles = (view.seen.end - view.first + Keys - 1) / Keys;
}

// Fills the block's view. A barrier must follow.
template <int Rows, int Keys>
DUOKV_DEVICE void view_block(const ops::AttentionArgs& args, const Partition& partition,
                             const QueryTile& tile, Block<Rows>& block) {
  for (int i = static_cast<int>(threadIdx.x); i < kBanks * Rows; i += kThreads) {
    const int bank = i / Rows, row = i % Rows, t = tile.query(row);
    if (i == 0) block.tile = tile;
    if (row == 0) view_bank<Rows, Keys>(args, partition, tile, bank, block.banks[bank]);
    if (bank >= args.bank_count) continue;
    const float* bias = args.banks[bank].bias;
    block.seen[bank][row] = query_sees(args, bank, tile.batch, t);
    block.bias[bank][row] = bias ? bias[tile.batch * args.queries + t] * kLog2E : 0.0f;
  }
}

// What consecutive rows see of a bank: some of them, and all of them.
struct RowsSee {
  Span some, all;
};

template <int Rows>
DUOKV_DEVICE RowsSee rows_see(const Block<Rows>& block, int bank, int first, int count) {
  const Span a = block.seen[bank][first], b = block.seen[bank][first + count - 1];
  return {{a.begin, b.end}, {b.begin, a.end}};
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

// 4 or 2 values next to each other.
template <int Width>
DUOKV_DEVICE void load_vector(const float* source, float* x) {
  if constexpr (Width == 4) {
    const float4 four = load4(source);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    const float2 two = load2(source);
    x[0] = two.x, x[1] = two.y;
  }
}
template <int Width>
DUOKV_DEVICE void store_vector(float* destination, const float* x) {
  if constexpr (Width == 4) {
    store4(destination, make_float4(x[0], x[1], x[2], x[3]));
  } else {
    store2(destination, make_float2(x[0], x[1]));
  }
}

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
    store4(tile + key * Stride + column, unpack_bf16x4(raw));
  }
}

// A value of the entry at `position`.
DUOKV_DEVICE float entry_value(const void* entries, const BankView& view, int position, int column) {
  const int64_t at = entry_slot(view.row, position) * view.position_stride + column;
  return view.bf16 ? __bfloat162float(static_cast<const bf16*>(entries)[at])
                   : static_cast<const float*>(entries)[at];
}

// A tile on its way through registers into shared memory, where it is BF16.
template <int HeadDim, int Keys, int Stride>
struct RoundedTile {
  static constexpr int kChunks = HeadDim / 8, kStep = kThreads / kChunks,
                       kPerThread = (Keys + kStep - 1) / kStep;
  float4 values[kPerThread][2];
  bool bf16_bank;

  DUOKV_DEVICE void start(const void* entries, const BankView& view, int first) {
    const int key = static_cast<int>(threadIdx.x) / kChunks,
              column = static_cast<int>(threadIdx.x) % kChunks * 8;
    bf16_bank = view.bf16;
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const int position = first + key + n * kStep;
      values[n][0] = values[n][1] = make_float4(0, 0, 0, 0);
      if ((kStep > Keys && key >= Keys) || !view.seen.contains(position)) continue;
      const int64_t offset = entry_slot(view.row, position) * view.position_stride + column;
      if (bf16_bank) {
        values[n][0] = load4(reinterpret_cast<const float*>(static_cast<const bf16*>(entries) + offset));
      } else {
        values[n][0] = load4(static_cast<const float*>(entries) + offset);
        values[n][1] = load4(static_cast<const float*>(entries) + offset + 4);
      }
    }
  }
  DUOKV_DEVICE void finish(bf16* tile) const {
    const int key = static_cast<int>(threadIdx.x) / kChunks,
              column = static_cast<int>(threadIdx.x) % kChunks * 8;
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      if (kStep > Keys && key >= Keys) break;
      float4 packed = values[n][0];
      if (!bf16_bank) {
        const float4 a = values[n][0], b = values[n][1];
        packed = make_float4(__uint_as_float(pack_bf16(a.x, a.y)), __uint_as_float(pack_bf16(a.z, a.w)),
                             __uint_as_float(pack_bf16(b.x, b.y)), __uint_as_float(pack_bf16(b.z, b.w)));
      }
      store4(reinterpret_cast<float*>(tile + (key + n * kStep) * Stride + column), packed);
    }
  }
};

}  // namespace duokv::cuda::attention
