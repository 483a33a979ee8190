// Attention over up to two banks, backward: deterministic, without atomics, from the saved log-sum-exp.
//
// With lse joint over the banks and delta = rowsum(dO * O), per query and per bank:
//   P = exp(scale * Q Kᵀ + bias - lse),  dS = scale * P * (dO Vᵀ - delta),
//   dV += Pᵀ dO,  dK += dSᵀ Q,  dQ = dS K summed over the banks.
// Three kernels:
//   query_terms: per query and head, what a score needs: bias - lse, delta, where its visible range starts.
//   key_gradients: a block owns 64 entries of one row and KV head and meets the tiles of 32 queries that see
//     some of them, of one query head of the group after the other. It computes the transposed scores, so
//     that Pᵀ and dSᵀ are left operands as they stand. One launch per bank, in order: banks may share
//     gradients.
//   query_gradients: a block owns 64 queries of one head and meets the tiles of 32 entries that they see,
//     bank after bank.
// Both ranges follow from document starts and window, so other tiles cost nothing; a warp, which owns 16 of
// the 64 rows, also passes over a tile of which its rows see nothing. Tiles arrive by cp.async, one ahead.
//
// Roofline: 7 products of 2 * head_dim FLOPs per visible pair. At 64 x 2048 tokens, documents of 600 tokens,
// 12 query and KV heads of 64, a global bank and a window of 128: 131,072 * 12 * (300 + 114) pairs * 896
// FLOPs = 0.58 TFLOP per layer. H100: 8.7 ms in FP32 (67 TFLOP/s), 4.6 ms in TF32x3 (three products each at
// 380 TFLOP/s), 0.7 ms in BF16 (800 TFLOP/s), where memory takes longer: q, out, dout, dq, and keys, values
// and accumulated gradients of two banks are 6.4 GB, 2.1 ms.
#include <cmath>

#include "cuda/attention_backward_products.cuh"
#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

constexpr int kOwnRows = 64, kRowWarps = kOwnRows / kWarpRows;

constexpr int kNothing = 0x7fffffff;  // no entry has this position

// What the scores of a query in a bank need.
struct alignas(16) QueryTerms {
  float offset;   // bias - lse
  float delta;    // Σ dO * O
  float factor;   // scale; 0 where the query sees one entry in all, whose weight is 1 whatever its score
  int32_t first;  // position of the first entry that it sees; does not decrease with t
};

// ---------------------------------------------------------------- what a query sees

DUOKV_DEVICE float round_bf16(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

constexpr int kTermsThreads = 256, kTermsLanes = 8;

// terms [bank_count, batch, query_heads, queries]; `count` is that of one bank. Eight lanes per query and
// head.
__global__ void __launch_bounds__(kTermsThreads)
    query_terms_kernel(const __grid_constant__ ops::AttentionBackwardArgs args, int64_t count,
                       QueryTerms* terms) {
  const ops::AttentionArgs& a = args.forward;
  const int lane = static_cast<int>(threadIdx.x) % kTermsLanes;
  const int64_t item = (int64_t{blockIdx.x} * kTermsThreads + threadIdx.x) / kTermsLanes;
  const int64_t own = item < count ? item : count - 1;  // all lanes take part in the sum
  const int64_t t = own % a.queries, head = own / a.queries % a.query_heads,
                row = own / a.queries / a.query_heads;
  const int64_t query = row * a.queries + t, vector = (query * a.query_heads + head) * a.head_dim;

  float delta = 0;
  for (int c = 4 * lane; c < a.head_dim; c += 4 * kTermsLanes) {
    const float4 out = load4(a.out + vector + c);
    float4 dout = load4(args.dout + vector + c);
    if (a.mode == ops::ProductMode::BF16) {  // as the products see it
      dout = {round_bf16(dout.x), round_bf16(dout.y), round_bf16(dout.z), round_bf16(dout.w)};
    }
    delta = fmaf(dout.w, out.w, fmaf(dout.z, out.z, fmaf(dout.y, out.y, fmaf(dout.x, out.x, delta))));
  }
#pragma unroll
  for (int offset = kTermsLanes / 2; offset > 0; offset /= 2)
    delta += __shfl_xor_sync(kFullMask, delta, offset);
  if (lane != 0 || item >= count) return;

  float lse = a.lse[query * a.query_heads + head];
  if (a.bank_count == 2) {
    const float other = a.lse[(a.batch * a.queries + query) * a.query_heads + head];
    // Unlike fmaxf these keep NaN.
    const float larger = other > lse ? other : lse, smaller = other > lse ? lse : other;
    lse = smaller == -INFINITY ? larger : larger + log1pf(expf(smaller - larger));
  }
  const int position = a.positions[row] + static_cast<int>(t), document = a.document_start[query];
  const auto span = [&](int b) {
    return visible_span(a.banks[b].rows[row], a.banks[b].window, document, position, position);
  };
  int seen = 0;
  for (int b = 0; b < a.bank_count; ++b) seen += max(0, span(b).end - span(b).begin);
  for (int b = 0; b < a.bank_count; ++b) {
    const float bias = a.banks[b].bias ? a.banks[b].bias[query] : 0;
    terms[b * count + item] = {bias - lse, delta, seen == 1 ? 0 : a.scale, span(b).begin};
  }
}

// The end of the queries in begin … end-1 whose visible range starts at or before `entry`. The whole warp
// calls it.
DUOKV_DEVICE int end_of_readers(const QueryTerms* terms, int begin, int end, int entry) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  while (begin < end) {
    // The last query of each of 32 runs.
    const int run = (end - begin + kWarpSize - 1) / kWarpSize, probe = begin + (lane + 1) * run - 1;
    const int whole_runs = __popc(__ballot_sync(kFullMask, probe < end && terms[probe].first <= entry));
    begin += whole_runs * run;
    end = min(end, begin + run - 1);
  }
  return begin;
}

// ---------------------------------------------------------------- tiles in shared memory

// Where rows of two operands lie that are laid out alike, such as queries and their output gradients.
struct Operands {
  const float *first, *second;
  int head_dim;
};

// Starts copies of `Rows` rows of D floats of both operands: row i < count from `offset(i)` on, zeros after
// the last row and past head_dim.
template <int Rows, int D, int Stride, int Threads, class Offset>
DUOKV_DEVICE void copy_rows(float* first, float* second, const Operands& from, int count, Offset offset) {
  constexpr int kChunks = D / 4;
  static_assert(Threads % kChunks == 0 && Rows % (Threads / kChunks) == 0);
  const int column = static_cast<int>(threadIdx.x) % kChunks * 4;
#pragma unroll 1  // or addresses would take many registers
  for (int row = static_cast<int>(threadIdx.x) / kChunks; row < Rows; row += Threads / kChunks) {
    const bool valid = row < count && column < from.head_dim;
    const int64_t place = valid ? offset(row) + column : 0;
    copy_async16(first + row * Stride + column, from.first + place, valid);
    copy_async16(second + row * Stride + column, from.second + place, valid);
  }
}

// Starts copies of `Rows` queries' terms. Past the last query nothing is seen.
template <int Rows>
DUOKV_DEVICE void copy_terms(QueryTerms* shared, const QueryTerms* terms, int first, int queries) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= Rows) return;
  if (first + i < queries) {
    copy_async16(shared + i, terms + first + i);
  } else {
    store4(&shared[i].offset, make_float4(0, 0, 0, __int_as_float(kNothing)));
  }
}

// Shared memory of both kernels: the block's own rows of two operands, two stages of a tile of the other two,
// two of a tile's terms (or the terms of the block's own queries), the warps' scratch.
template <class Products, int D, int Warps>
struct Shared {
  static constexpr int kStride = D + Products::kPadding;
  static constexpr int kOwn = kOwnRows * kStride, kTile = kTileRows * kStride;
  static constexpr int kTermsStart = 2 * kOwn + 4 * kTile;
  static constexpr int kScratchStart = kTermsStart + 2 * kTileRows * sizeof(QueryTerms) / sizeof(float);
  static constexpr size_t kBytes = (kScratchStart + Warps * Products::kScratch) * sizeof(float);

  float* memory;

  DUOKV_DEVICE float* own(int operand) const { return memory + operand * kOwn; }
  DUOKV_DEVICE float* tile(int stage, int operand) const {
    return memory + 2 * kOwn + (2 * stage + operand) * kTile;
  }
  DUOKV_DEVICE QueryTerms* terms() const { return reinterpret_cast<QueryTerms*>(memory + kTermsStart); }
  DUOKV_DEVICE float* scratch(int warp) const { return memory + kScratchStart + warp * Products::kScratch; }
};

// Keys and values of one KV head.
DUOKV_DEVICE Operands entries_of_head(const ops::Bank& bank, const ops::BankRow& row, int64_t kv_head,
                                      int head_dim) {
  const int64_t offset = kv_head * bank.head_stride;
  return {static_cast<const float*>(row.k) + offset, static_cast<const float*>(row.v) + offset, head_dim};
}

DUOKV_DEVICE QueryTerms load_terms(const QueryTerms* terms) {
  const float4 values = load4(&terms->offset);
  return {values.x, values.y, values.z, __float_as_int(values.w)};
}

// dS, in place of dP, and P, in place of the score; both 0 where the query, at `last`, does not see the
// entry.
DUOKV_DEVICE void differentiate_score(float& score, float& gradient, float scale, const QueryTerms& terms,
                                      int entry, int last) {
  const bool visible = terms.first <= entry && entry <= last;
  const float p = visible ? __expf(fmaf(score, scale, terms.offset)) : 0;
  gradient = visible ? p * (gradient - terms.delta) * terms.factor : 0;
  score = p;
}

// sums += those of four values that are not bounded.
DUOKV_DEVICE void add_unbounded(float* sums, float4 x, float limit) {
  if (!(fabsf(x.x) < limit)) sums[0] += x.x * INFINITY;
  if (!(fabsf(x.y) < limit)) sums[1] += x.y * INFINITY;
  if (!(fabsf(x.z) < limit)) sums[2] += x.z * INFINITY;
  if (!(fabsf(x.w) < limit)) sums[3] += x.w * INFINITY;
}

// ---------------------------------------------------------------- gradients of keys and values

// A warp accumulates at most 64 columns, of keys and of values. Of a wider head two warps share 16 entries,
// and both compute their scores.
template <int D>
struct KeyBlock {
  static constexpr int kColumns = D < 64 ? D : 64, kWarps = kRowWarps * D / kColumns,
                       kThreads = kWarps * kWarpSize;
};

// terms: those of this bank. Grid [blocks of entries, kv_heads, batch].
template <class Products, int D>
__global__ void __launch_bounds__(KeyBlock<D>::kThreads, D > 64 ? 1 : 2)
    key_gradients_kernel(const __grid_constant__ ops::AttentionBackwardArgs args,
                         const __grid_constant__ ops::Bank bank, ops::BankGradient gradient,
                         const QueryTerms* terms) {
  constexpr int kThreads = KeyBlock<D>::kThreads, kColumns = KeyBlock<D>::kColumns;
  using S = Shared<Products, D, KeyBlock<D>::kWarps>;
  DUOKV_DYNAMIC_SHARED(float, memory);
  const S shared{memory};
  const ops::AttentionArgs& a = args.forward;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int queries = static_cast<int>(a.queries), group = a.query_heads / a.kv_heads;
  const int64_t row = blockIdx.z, kv_head = blockIdx.y;
  const ops::BankRow stored = bank.rows[row];
  // Positions of the block's first entry, of the entry after the row's last, and of the first query.
  const int first = stored.first + static_cast<int>(blockIdx.x) * kOwnRows,
            stored_end = stored.first + stored.count, start = a.positions[row];

  copy_rows<kOwnRows, D, S::kStride, kThreads>(
      shared.own(0), shared.own(1), entries_of_head(bank, stored, kv_head, a.head_dim), stored_end - first,
      [&](int i) { return entry_slot(stored, first + i) * bank.position_stride; });
  copy_async_commit();

  // The queries that see some entry of the block.
  const QueryTerms* row_terms = terms + row * a.query_heads * a.queries;
  const int begin = max(0, first - start);
  const int end = end_of_readers(row_terms, begin, queries, min(first + kOwnRows, stored_end) - 1);

  // Tiles: queries t … of one head of the group after the other.
  struct Tile {
    int head, t;
  };
  const auto copy_tile = [&](int stage, const Tile& tile) {
    const int64_t head = kv_head * group + tile.head;
    const int64_t origin = ((row * a.queries + tile.t) * a.query_heads + head) * a.head_dim;
    copy_rows<kTileRows, D, S::kStride, kThreads>(
        shared.tile(stage, 0), shared.tile(stage, 1), {a.q + origin, args.dout + origin, a.head_dim},
        queries - tile.t, [&](int i) { return int64_t{i} * (a.query_heads * a.head_dim); });
    copy_terms<kTileRows>(shared.terms() + stage * kTileRows, row_terms + head * a.queries, tile.t, queries);
    copy_async_commit();
  };

  const Products products(lane, shared.scratch(warp));
  const int own_row = warp % kRowWarps * kWarpRows, columns = warp / kRowWarps * kColumns;
  const int first_entry_of_warp = first + own_row;
  // Adds what was taken out of a tile, of queries or of their gradients, to the entries that they see.
  const auto restore = [&](float(&sums)[kColumns / 2], const float* source, const Tile& tile,
                           const QueryTerms* tile_terms) {
#pragma unroll 1
    for (int t = tile.t; t < min(tile.t + kTileRows, queries); ++t) {
      const int64_t vector = (row * a.queries + t) * a.query_heads + kv_head * group + tile.head;
#pragma unroll
      for (int v = 0; v < kColumns / 8; ++v) {
        const int entry = first_entry_of_warp + products.row(v), column = columns + products.sum_column(v);
        if (entry < tile_terms[t - tile.t].first || entry > start + t || column >= a.head_dim) continue;
        add_unbounded(sums + 4 * v, load4(source + vector * a.head_dim + column), Products::kLimit);
      }
    }
  };
  float dk[kColumns / 2] = {}, dv[kColumns / 2] = {};
  const int heads = begin < end ? group : 0;
  if (heads > 0) copy_tile(0, {0, begin});
  Tile next = {0, begin};
  for (int stage = 0; next.head < heads; stage ^= 1) {
    const auto [tile_head, t] = next;
    next = t + kTileRows < end ? Tile{tile_head, t + kTileRows} : Tile{tile_head + 1, begin};
    copy_async_wait<0>();
    __syncthreads();  // the tile is there, and the other stage is no longer read
    if (next.head < heads) copy_tile(stage ^ 1, next);
    const QueryTerms* tile_terms = shared.terms() + stage * kTileRows;
    float *q = shared.tile(stage, 0), *dout = shared.tile(stage, 1);
    const bool all_see_all =
        start + t >= min(first + kOwnRows, stored_end) - 1 && tile_terms[kTileRows - 1].first <= first;
    const bool unbounded =
        !all_see_all &&
        block_any<kThreads>(
            find_unbounded<false, kTileRows, D, S::kStride, kThreads>(q, Products::kLimit) ||
            find_unbounded<false, kTileRows, D, S::kStride, kThreads>(dout, Products::kLimit));
    // Otherwise none of the warp's entries is seen.
    const bool works = start + t + kTileRows - 1 >= first_entry_of_warp &&
                       tile_terms[0].first < first_entry_of_warp + kWarpRows;
    float p[16] = {}, ds[16] = {};
    if (works) {
      products.template scores<D>(shared.own(0) + own_row * S::kStride, q, p);
      products.template scores<D>(shared.own(1) + own_row * S::kStride, dout, ds);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int query = products.column(i);
        differentiate_score(p[i], ds[i], a.scale, load_terms(tile_terms + query),
                            first_entry_of_warp + products.row(i), start + t + query);
      }
    }
    if (unbounded) {
      __syncthreads();  // the scores needed the values that are not finite
      find_unbounded<true, kTileRows, D, S::kStride, kThreads>(q, Products::kLimit);
      find_unbounded<true, kTileRows, D, S::kStride, kThreads>(dout, Products::kLimit);
      __syncthreads();
    }
    if (!works) continue;
    products.template accumulate<D, kColumns>(p, dout + columns, dv);
    products.template accumulate<D, kColumns>(ds, q + columns, dk);
    if (unbounded) {
      restore(dv, args.dout, {tile_head, t}, tile_terms);
      restore(dk, a.q, {tile_head, t}, tile_terms);
    }
  }
  copy_async_wait<0>();

  const auto add = [&](float* to, const float* sums) {
#pragma unroll
    for (int v = 0; v < kColumns / 8; ++v) {
      const int entry = first_entry_of_warp + products.row(v), column = columns + products.sum_column(v);
      if (entry >= stored_end || column >= a.head_dim) continue;
      float* address =
          to + ((row * bank.longest + entry - stored.first) * a.kv_heads + kv_head) * a.head_dim + column;
      const float4 old = load4(address);
      store4(address, make_float4(old.x + sums[4 * v], old.y + sums[4 * v + 1], old.z + sums[4 * v + 2],
                                  old.w + sums[4 * v + 3]));
    }
  };
  if (heads > 0) {
    add(gradient.dk, dk);
    add(gradient.dv, dv);
  }
}

// ---------------------------------------------------------------- gradients of queries

constexpr int kQueryThreads = kRowWarps * kWarpSize;

// Grid [blocks of queries, query_heads, batch]; the last queries, which see most, start first.
template <class Products, int D>
__global__ void __launch_bounds__(kQueryThreads, D > 64 ? 1 : 2)
    query_gradients_kernel(const __grid_constant__ ops::AttentionBackwardArgs args, const QueryTerms* terms) {
  using S = Shared<Products, D, kRowWarps>;
  DUOKV_DYNAMIC_SHARED(float, memory);
  const S shared{memory};
  const ops::AttentionArgs& a = args.forward;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int64_t row = blockIdx.z, head = blockIdx.y;
  const int queries = static_cast<int>(a.queries), start = a.positions[row];
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kOwnRows;
  const int64_t query_stride = int64_t{a.query_heads} * a.head_dim;
  const int64_t origin = row * a.queries * query_stride + head * a.head_dim;
  const int64_t block = origin + first * query_stride;
  copy_rows<kOwnRows, D, S::kStride, kQueryThreads>(shared.own(0), shared.own(1),
                                                    {a.q + block, args.dout + block, a.head_dim},
                                                    queries - first, [&](int i) { return i * query_stride; });
  copy_async_commit();

  const Products products(lane, shared.scratch(warp));
  const int own_row = warp * kWarpRows;
  float dq[D / 2] = {};
  for (int b = 0; b < a.bank_count; ++b) {
    const ops::Bank& bank = a.banks[b];
    const ops::BankRow stored = bank.rows[row];
    const Operands entries = entries_of_head(bank, stored, head * a.kv_heads / a.query_heads, a.head_dim);
    const QueryTerms* head_terms = terms + ((b * a.batch + row) * a.query_heads + head) * a.queries;
    const Span span = visible_span(stored, bank.window, a.document_start[row * a.queries + first],
                                   start + first, start + min(first + kOwnRows, queries) - 1);
    if (span.empty()) continue;
    const auto copy_tile = [&](int stage, int tile) {
      copy_rows<kTileRows, D, S::kStride, kQueryThreads>(
          shared.tile(stage, 0), shared.tile(stage, 1), entries, stored.first + stored.count - tile,
          [&](int i) { return entry_slot(stored, tile + i) * bank.position_stride; });
      copy_async_commit();
    };

    __syncthreads();  // the bank before is no longer read
    copy_terms<kOwnRows>(shared.terms(), head_terms, first, queries);
    copy_tile(0, span.begin);
    for (int tile = span.begin, stage = 0; tile < span.end; tile += kTileRows, stage ^= 1) {
      copy_async_wait<0>();
      __syncthreads();  // the tile is there, and the other stage is no longer read
      if (tile + kTileRows < span.end) copy_tile(stage ^ 1, tile + kTileRows);
      const QueryTerms* warp_terms = shared.terms() + own_row;
      const int position = start + first + own_row;  // of the warp's first query
      float *k = shared.tile(stage, 0), *v = shared.tile(stage, 1);
      const bool all_see_all =
          start + first >= tile + kTileRows - 1 && shared.terms()[kOwnRows - 1].first <= tile;
      const bool unbounded =
          !all_see_all &&
          block_any<kQueryThreads>(
              find_unbounded<false, kTileRows, D, S::kStride, kQueryThreads>(k, Products::kLimit));
      // Otherwise none of the warp's queries sees the tile.
      const bool works = warp_terms[0].first < tile + kTileRows && position + kWarpRows - 1 >= tile;
      float p[16] = {}, ds[16] = {};
      if (works) {
        products.template scores<D>(shared.own(0) + own_row * S::kStride, k, p);
        products.template scores<D>(shared.own(1) + own_row * S::kStride, v, ds);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int query = products.row(i);
          differentiate_score(p[i], ds[i], a.scale, load_terms(warp_terms + query), tile + products.column(i),
                              min(position + query, stored.first + stored.count - 1));
        }
      }
      if (unbounded) {
        __syncthreads();  // the scores needed the values that are not finite
        find_unbounded<true, kTileRows, D, S::kStride, kQueryThreads>(k, Products::kLimit);
        __syncthreads();
      }
      if (!works) continue;
      products.template accumulate<D, D>(ds, k, dq);
      if (!unbounded) continue;
#pragma unroll 1
      for (int entry = tile; entry < min(tile + kTileRows, stored.first + stored.count); ++entry) {
        const float* source = entries.first + entry_slot(stored, entry) * bank.position_stride;
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
          const int query = products.row(i), column = products.sum_column(i);
          if (entry < warp_terms[query].first || entry > position + query || column >= a.head_dim) continue;
          add_unbounded(dq + 4 * i, load4(source + column), Products::kLimit);
        }
      }
    }
  }
  copy_async_wait<0>();

#pragma unroll
  for (int v = 0; v < D / 8; ++v) {
    const int query = first + own_row + products.row(v), column = products.sum_column(v);
    if (query >= queries || column >= a.head_dim) continue;
    store4(args.dq + origin + query * query_stride + column,
           make_float4(dq[4 * v], dq[4 * v + 1], dq[4 * v + 2], dq[4 * v + 3]));
  }
}

// ---------------------------------------------------------------- launches

template <class Products, int D>
cudaError_t launch_gradients(const ops::AttentionBackwardArgs& args, const QueryTerms* terms,
                             cudaStream_t stream) {
  const ops::AttentionArgs& a = args.forward;
  const auto batch = static_cast<unsigned>(a.batch);
  const auto keys = key_gradients_kernel<Products, D>;
  const size_t keys_bytes = Shared<Products, D, KeyBlock<D>::kWarps>::kBytes;
  DUOKV_CUDA_TRY(
      cudaFuncSetAttribute(keys, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(keys_bytes)));
  for (int b = 0; b < a.bank_count; ++b) {
    if (a.banks[b].longest == 0) continue;
    const dim3 grid(static_cast<unsigned>(ceil_div(a.banks[b].longest, kOwnRows)),
                    static_cast<unsigned>(a.kv_heads), batch);
    DUOKV_CUDA_TRY(DUOKV_LAUNCH(keys, grid, KeyBlock<D>::kThreads, keys_bytes, stream, args, a.banks[b],
                                args.grads[b], terms + b * a.batch * a.query_heads * a.queries));
  }
  const auto gradients = query_gradients_kernel<Products, D>;
  const size_t bytes = Shared<Products, D, kRowWarps>::kBytes;
  DUOKV_CUDA_TRY(
      cudaFuncSetAttribute(gradients, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  const dim3 grid(static_cast<unsigned>(ceil_div(a.queries, kOwnRows)), static_cast<unsigned>(a.query_heads),
                  batch);
  return DUOKV_LAUNCH(gradients, grid, kQueryThreads, bytes, stream, args, terms);
}

// Heads of 16 are padded to 32 with zeros.
template <class Products>
cudaError_t launch_mode(const ops::AttentionBackwardArgs& args, const QueryTerms* terms,
                        cudaStream_t stream) {
  if (args.forward.head_dim <= 32) return launch_gradients<Products, 32>(args, terms, stream);
  if (args.forward.head_dim == 64) return launch_gradients<Products, 64>(args, terms, stream);
  return launch_gradients<Products, 128>(args, terms, stream);
}

bool supported(const ops::AttentionBackwardArgs& args) {
  const ops::AttentionArgs& a = args.forward;
  for (int b = 0; b < a.bank_count; ++b) {
    const ops::Bank& bank = a.banks[b];
    if (bank.dtype != ops::DType::F32 ||
        !vectorizable(bank.head_stride, {args.grads[b].dk, args.grads[b].dv}) ||
        bank.position_stride % 4 != 0)
      return false;
  }
  const bool known_head = a.head_dim == 16 || a.head_dim == 32 || a.head_dim == 64 || a.head_dim == 128;
  return known_head && a.query_heads % a.kv_heads == 0 &&
         vectorizable(a.head_dim, {a.q, a.out, args.dout, args.dq});
}

}  // namespace

size_t attention_backward_workspace(const ops::AttentionBackwardArgs& args) {
  const ops::AttentionArgs& a = args.forward;
  return static_cast<size_t>(a.bank_count * a.batch * a.query_heads * a.queries) * sizeof(QueryTerms);
}

cudaError_t attention_backward(const ops::AttentionBackwardArgs& args, void* workspace, cudaStream_t stream) {
  const ops::AttentionArgs& a = args.forward;
  const int64_t count = a.batch * a.query_heads * a.queries;
  if (count == 0) return cudaSuccess;
  if (!supported(args)) return cudaErrorInvalidValue;
  auto* terms = static_cast<QueryTerms*>(workspace);
  DUOKV_CUDA_TRY(DUOKV_LAUNCH(query_terms_kernel,
                              dim3(static_cast<unsigned>(ceil_div(count * kTermsLanes, kTermsThreads))),
                              kTermsThreads, 0, stream, args, count, terms));
  switch (a.mode) {
    case ops::ProductMode::FP32:
      return launch_mode<Fp32Products>(args, terms, stream);
    case ops::ProductMode::TF32x3:
      return launch_mode<TensorCoreProducts<Tf32x3>>(args, terms, stream);
    case ops::ProductMode::BF16:
      return launch_mode<TensorCoreProducts<Bf16>>(args, terms, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace duokv::cuda
