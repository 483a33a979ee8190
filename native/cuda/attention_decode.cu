// Attention over up to two banks, forward: one query per row.
//
// What a query sees of a bank is cut into chunks at multiples of their size in absolute position, so that a
// row's sums depend on nothing but the row. A block has one chunk and the query heads of one KV head, in
// whose registers K and V lie: each byte is read once for the whole group, 16 at a time, all loads before the
// first use. A second kernel adds the chunks' sums up in order. Chunks that a query does not reach end at
// once, so one launch, sized for the longest row, serves a cache that grows.
//
// Roofline (bandwidth; H100: 3.35 TB/s): 2 * entries * kv_heads * head_dim values of the banks. 1,792 + 128
// entries, 4 KV heads of 64 in FP32: 3.9 MB, 1.2 µs, so latency decides: one round of loads, then the second
// kernel. 12 heads, batch 64: 252 MB, 75 µs.
#include <algorithm>
#include <type_traits>

#include "cuda/attention_block.cuh"
#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

using attention::base_of;
using attention::kBanks;
using attention::kMinusInfinity;
using attention::Running;

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;

// How a chunk of a bank of T is spread over a block.
template <class T, int HeadDim>
struct Spread {
  static constexpr int kWidth = 16 / static_cast<int>(sizeof(T));  // values a lane loads at once
  static constexpr int kLanes = HeadDim / kWidth;                  // that share an entry
  static constexpr int kAtOnce = kWarpSize / kLanes;               // entries of a warp side by side
  static constexpr int kRounds = kAtOnce >= 16 ? 1 : (kAtOnce == 1 ? 8 : 16 / kAtOnce);
  static constexpr int kPerWarp = kAtOnce * kRounds;
  static constexpr int kChunk = kWarps * kPerWarp;
};

template <class T>
constexpr int chunk_of(int head_dim) {
  switch (head_dim) {
    case 16:
      return Spread<T, 16>::kChunk;
    case 32:
      return Spread<T, 32>::kChunk;
    case 64:
      return Spread<T, 64>::kChunk;
    default:
      return Spread<T, 128>::kChunk;
  }
}

// Chunks that a query can reach, per bank.
struct Chunks {
  int of_bank[kBanks];
  int total;
};
Chunks chunks_of(const ops::AttentionArgs& args) {
  Chunks chunks = {};
  for (int32_t b = 0; b < args.bank_count; ++b) {
    const ops::Bank& bank = args.banks[b];
    const int chunk =
        bank.dtype == ops::DType::F32 ? chunk_of<float>(args.head_dim) : chunk_of<bf16>(args.head_dim);
    const int entries = bank.window > 0 ? std::min(bank.longest, bank.window) : bank.longest;
    // Entries that begin in the middle of a chunk reach into one more.
    if (entries > 0) chunks.of_bank[b] = (entries + chunk - 2) / chunk + 1;
    chunks.total += chunks.of_bank[b];
  }
  return chunks;
}

// Sums of the chunks: out [batch, chunks, query_heads, head_dim] before division, running [batch, chunks,
// query_heads] largest score and sum.
struct Partial {
  float* out;
  float2* running;
  Chunks chunks;
};

// Values of an entry that a lane holds.
template <class T, int Width>
struct Values {
  float4 raw[Width * static_cast<int>(sizeof(T)) / 16];

  DUOKV_DEVICE void load(const T* address) { raw[0] = load4(reinterpret_cast<const float*>(address)); }
  DUOKV_DEVICE void get(float (&x)[Width], bool round) const {
    if constexpr (std::is_same_v<T, float>) {
      x[0] = raw[0].x, x[1] = raw[0].y, x[2] = raw[0].z, x[3] = raw[0].w;
      if (round) {
#pragma unroll
        for (int i = 0; i < Width; ++i) x[i] = __bfloat162float(__float2bfloat16_rn(x[i]));
      }
    } else {
      const float4 a = unpack_bf16x4(make_float2(raw[0].x, raw[0].y)),
                   b = unpack_bf16x4(make_float2(raw[0].z, raw[0].w));
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
      x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
  }
};

DUOKV_DEVICE float rounded(float x, bool round) {
  return round ? __bfloat162float(__float2bfloat16_rn(x)) : x;
}

// One chunk of one bank and the group of one KV head. `shared` holds q [group, head_dim], outputs [kWarps,
// group, head_dim], then largest scores and sums [kWarps, group].
template <class T, int HeadDim>
DUOKV_DEVICE void chunk_sums(const ops::AttentionArgs& args, int bank, int chunk, int slot, int kv_head,
                             int64_t batch, const Partial& partial, float* shared) {
  using S = Spread<T, HeadDim>;
  const int group = args.query_heads / args.kv_heads;
  const bool round = args.mode == ops::ProductMode::BF16;
  const ops::Bank& source = args.banks[bank];
  const ops::BankRow row = source.rows[batch];
  const Span seen = attention::query_sees(args, bank, batch, 0);
  const int64_t vector = (batch * partial.chunks.total + slot) * args.query_heads + kv_head * group;
  const int first = (seen.begin / S::kChunk + chunk) * S::kChunk;
  if (seen.empty() || first >= seen.end) {
    if (static_cast<int>(threadIdx.x) < group)
      partial.running[vector + threadIdx.x] = make_float2(kMinusInfinity, 0);
    return;
  }

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
            lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int column = lane % S::kLanes * S::kWidth, beside = lane / S::kLanes;
  Values<T, S::kWidth> k[S::kRounds], v[S::kRounds];
  const int64_t head = kv_head * source.head_stride + column;
  const auto position_of = [&](int r) { return first + warp * S::kPerWarp + r * S::kAtOnce + beside; };
#pragma unroll
  for (int r = 0; r < S::kRounds; ++r) {
    // An entry that is not seen stands in for none: its weight is 0, but what it holds may be anything.
    const int position = min(max(position_of(r), seen.begin), seen.end - 1);
    const int64_t at = head + entry_slot(row, position) * source.position_stride;
    k[r].load(static_cast<const T*>(row.k) + at);
    v[r].load(static_cast<const T*>(row.v) + at);
  }

  float* const q = shared;
  float* const outputs = q + group * HeadDim;
  auto* const runnings = reinterpret_cast<float2*>(outputs + kWarps * group * HeadDim);
  const float* query = args.q + (batch * args.query_heads + kv_head * group) * HeadDim;
  for (int i = static_cast<int>(threadIdx.x); i < group * HeadDim; i += kThreads)
    q[i] = rounded(query[i], round);
  __syncthreads();

  const float scale = args.scale * kLog2E, bias = source.bias ? source.bias[batch] * kLog2E : 0.0f;
  for (int g = 0; g < group; ++g) {
    float mine[S::kWidth], score[S::kRounds];
#pragma unroll
    for (int i = 0; i < S::kWidth; i += 4) {
      const float4 part = load4(q + g * HeadDim + column + i);
      mine[i] = part.x, mine[i + 1] = part.y, mine[i + 2] = part.z, mine[i + 3] = part.w;
    }
    float top = kMinusInfinity;
#pragma unroll
    for (int r = 0; r < S::kRounds; ++r) {
      float key[S::kWidth], dot = 0;
      k[r].get(key, round);
#pragma unroll
      for (int i = 0; i < S::kWidth; ++i) dot = fmaf(mine[i], key[i], dot);
#pragma unroll
      for (int offset = S::kLanes / 2; offset > 0; offset /= 2)
        dot += __shfl_xor_sync(kFullMask, dot, offset);
      score[r] = seen.contains(position_of(r)) ? fmaf(dot, scale, bias) : kMinusInfinity;
      top = fmaxf(top, score[r]);
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset >= S::kLanes; offset /= 2)
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, offset));
    const float base = base_of(top);
    float sum = 0, out[S::kWidth] = {};
#pragma unroll
    for (int r = 0; r < S::kRounds; ++r) {
      if (!seen.contains(position_of(r))) continue;
      const float weight = exp2_approximate(score[r] - base);
      sum += weight;
      const float factor = rounded(weight, round);
      float value[S::kWidth];
      v[r].get(value, round);
#pragma unroll
      for (int i = 0; i < S::kWidth; ++i) out[i] = fmaf(factor, value[i], out[i]);
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset >= S::kLanes; offset /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, offset);
#pragma unroll
      for (int i = 0; i < S::kWidth; ++i) out[i] += __shfl_xor_sync(kFullMask, out[i], offset);
    }
    if (beside == 0) {
#pragma unroll
      for (int i = 0; i < S::kWidth; i += 4) {
        store4(outputs + (warp * group + g) * HeadDim + column + i,
               make_float4(out[i], out[i + 1], out[i + 2], out[i + 3]));
      }
    }
    if (lane == 0) runnings[warp * group + g] = make_float2(top, sum);
  }
  __syncthreads();

  for (int i = static_cast<int>(threadIdx.x); i < group * HeadDim; i += kThreads) {
    const int g = i / HeadDim;
    float top = kMinusInfinity, sum = 0, out = 0;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, runnings[w * group + g].x);
    for (int w = 0; w < kWarps; ++w) {
      const float2 running = runnings[w * group + g];
      const float factor = exp2_approximate(running.x - base_of(top));
      sum = fmaf(running.y, factor, sum);
      out = fmaf(outputs[w * group * HeadDim + i], factor, out);
    }
    partial.out[vector * HeadDim + i] = out;
    if (i % HeadDim == 0) partial.running[vector + g] = make_float2(top, sum);
  }
}

// Block: chunk and KV head x, batch row y.
template <int HeadDim>
__global__ void __launch_bounds__(kThreads)
    attention_decode_kernel(const __grid_constant__ ops::AttentionArgs args, const Partial partial) {
  DUOKV_DYNAMIC_SHARED(float, shared);
  const int slot = static_cast<int>(blockIdx.x) / args.kv_heads,
            kv_head = static_cast<int>(blockIdx.x) % args.kv_heads;
  const int bank = slot < partial.chunks.of_bank[0] ? 0 : 1;
  const int chunk = slot - (bank == 0 ? 0 : partial.chunks.of_bank[0]);
  if (args.banks[bank].dtype == ops::DType::F32) {
    chunk_sums<float, HeadDim>(args, bank, chunk, slot, kv_head, blockIdx.y, partial, shared);
  } else {
    chunk_sums<bf16, HeadDim>(args, bank, chunk, slot, kv_head, blockIdx.y, partial, shared);
  }
}

// Adds the chunks of one query head up. Block: query head x, batch row y. A thread has four elements and
// every kShares-th chunk of each bank, counted from the bank's first, so that chunks that hold nothing move
// no other.
template <int HeadDim>
__global__ void __launch_bounds__(kThreads)
    attention_combine_kernel(const __grid_constant__ ops::AttentionArgs args, const Partial partial) {
  constexpr int kColumns = HeadDim / 4, kShares = kThreads / kColumns, kInFlight = 4;
  DUOKV_SHARED(float, outputs, [kShares][HeadDim]);
  DUOKV_SHARED(float, runnings, [kShares][4]);  // of both banks: largest score and sum
  const int head = static_cast<int>(blockIdx.x), share = static_cast<int>(threadIdx.x) / kColumns,
            column = static_cast<int>(threadIdx.x) % kColumns * 4;
  const int64_t batch = blockIdx.y;

  Running bank[kBanks];
  float4 out = make_float4(0, 0, 0, 0);
  int slot = 0;
#pragma unroll
  for (int b = 0; b < kBanks; ++b) {
    const int chunks = partial.chunks.of_bank[b];
    const int64_t first = (batch * partial.chunks.total + slot) * args.query_heads + head;
    for (int chunk = share; chunk < chunks; chunk += kInFlight * kShares) {
      float2 running[kInFlight];
      float4 part[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int at = chunk + i * kShares;
        running[i] = make_float2(kMinusInfinity, 0);
        if (at < chunks) running[i] = partial.running[first + int64_t{at} * args.query_heads];
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t vector = first + int64_t{chunk + i * kShares} * args.query_heads;
        part[i] = make_float4(0, 0, 0, 0);
        // Else nothing was written.
        if (running[i].y != 0) part[i] = load4(partial.out + vector * HeadDim + column);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (running[i].y == 0) continue;
        const auto step = attention::admit(bank[b], b == 0 ? kMinusInfinity : bank[0].max, running[i].x);
        const float weight = exp2_approximate(running[i].x - step.base), factor = weight * step.factor;
        bank[b].sum = fmaf(running[i].y, weight, bank[b].sum);
        out.x = fmaf(part[i].x, factor, out.x * step.shrink);
        out.y = fmaf(part[i].y, factor, out.y * step.shrink);
        out.z = fmaf(part[i].z, factor, out.z * step.shrink);
        out.w = fmaf(part[i].w, factor, out.w * step.shrink);
      }
    }
    slot += chunks;
  }
  store4(&outputs[share][column], out);
  if (column == 0) store4(runnings[share], make_float4(bank[0].max, bank[0].sum, bank[1].max, bank[1].sum));
  __syncthreads();
  if (share != 0) return;

  float4 total = load4(runnings[0]);
  for (int i = 1; i < kShares; ++i) {
    const float4 other = load4(runnings[i]);
    total.x = fmaxf(total.x, other.x), total.z = fmaxf(total.z, other.z);
  }
  const float base = base_of(fmaxf(total.x, total.z));
  total.y = total.w = 0;
  out = make_float4(0, 0, 0, 0);
  for (int i = 0; i < kShares; ++i) {
    const float4 other = load4(runnings[i]), part = load4(&outputs[i][column]);
    const float factor = exp2_approximate(fmaxf(other.x, other.z) - base);
    total.y = fmaf(other.y, exp2_approximate(other.x - base_of(total.x)), total.y);
    total.w = fmaf(other.w, exp2_approximate(other.z - base_of(total.z)), total.w);
    out.x = fmaf(part.x, factor, out.x), out.y = fmaf(part.y, factor, out.y);
    out.z = fmaf(part.z, factor, out.z), out.w = fmaf(part.w, factor, out.w);
  }
  bank[0].max = total.x, bank[0].sum = total.y, bank[1].max = total.z, bank[1].sum = total.w;
  const int64_t vector = batch * args.query_heads + head;
  const float factor = attention::finish(args, batch, 0, vector, bank[0], bank[1], column == 0);
  store4(args.out + vector * HeadDim + column,
         make_float4(out.x * factor, out.y * factor, out.z * factor, out.w * factor));
}

size_t out_bytes(const ops::AttentionArgs& args, const Chunks& chunks) {
  return static_cast<size_t>(args.batch * chunks.total * args.query_heads * args.head_dim) * sizeof(float);
}

template <int HeadDim>
cudaError_t launch_decode(const ops::AttentionArgs& args, const Partial& partial, cudaStream_t stream) {
  const int group = args.query_heads / args.kv_heads;
  const size_t shared = static_cast<size_t>(group * HeadDim * (1 + kWarps)) * sizeof(float) +
                        static_cast<size_t>(kWarps * group) * sizeof(float2);
  constexpr size_t kWithoutAsking = 48 << 10;
  if (shared > kWithoutAsking) {
    DUOKV_CUDA_TRY(cudaFuncSetAttribute(attention_decode_kernel<HeadDim>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared)));
  }
  const auto batch = static_cast<unsigned>(args.batch);
  if (partial.chunks.total > 0) {
    const dim3 grid(static_cast<unsigned>(partial.chunks.total * args.kv_heads), batch);
    DUOKV_CUDA_TRY(
        DUOKV_LAUNCH(attention_decode_kernel<HeadDim>, grid, kThreads, shared, stream, args, partial));
  }
  const dim3 grid(static_cast<unsigned>(args.query_heads), batch);
  return DUOKV_LAUNCH(attention_combine_kernel<HeadDim>, grid, kThreads, 0, stream, args, partial);
}

}  // namespace

size_t attention_decode_workspace(const ops::AttentionArgs& args) {
  const Chunks chunks = chunks_of(args);
  return out_bytes(args, chunks) +
         static_cast<size_t>(args.batch * chunks.total * args.query_heads) * sizeof(float2);
}

cudaError_t attention_decode(const ops::AttentionArgs& args, void* workspace, cudaStream_t stream) {
  const Chunks chunks = chunks_of(args);
  auto* const out = static_cast<float*>(workspace);
  const Partial partial = {
      out, reinterpret_cast<float2*>(static_cast<char*>(workspace) + out_bytes(args, chunks)), chunks};
  const auto launch = args.head_dim == 16   ? launch_decode<16>
                      : args.head_dim == 32 ? launch_decode<32>
                      : args.head_dim == 64 ? launch_decode<64>
                                            : launch_decode<128>;
  return launch(args, partial, stream);
}

}  // namespace duokv::cuda
