// Products of few rows, y [m, n] = x [m, k] · W [n, k]ᵀ, for up to three weights in one launch: decoding.
//
// A warp computes Columns columns of one W for Rows rows of x, which the block keeps in shared memory. Its
// lanes read W along k, 16 bytes each, and every 16 bytes serve all rows. A lane sums its products in order
// of k, and lanes are summed in pairs 16, 8, 4, 2, 1 apart: neither order knows Rows, Columns or m, so a
// row's bits depend on nothing but the row, and the launch may take whatever shape suits m and n.
// More than kMostRows rows are tiles of rows; those that read the same columns run side by side, so that W
// comes from memory once.
//
// Roofline (bandwidth; H100: 3.35 TB/s), FP32 weights, m <= 8: 4 n k bytes beside the launch's 2 to 3 µs:
//   gate and up, 2 * 2048 x 768   12.6 MB: 3.8 µs
//   down, 768 x 2048               6.3 MB: 1.9 µs
//   head, 32,000 x 768            98.3 MB: 29 µs
// BF16 weights take half of that. Of FMAs, 2 m n k FLOPs, m = 64 has 3.1 GFLOP in the head: 47 µs at 67
// TFLOP/s, whatever the weights are, so past 32 rows of FP32 (16 of BF16) arithmetic is the limit.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

constexpr int kMostWarps = 8, kMostRows = 16;
constexpr int64_t kSharedBytes = int64_t{160} << 10;  // of the 163 KiB a block can have on sm_80
static_assert(kSkinnyDepth * int64_t{sizeof(float)} <= kSharedBytes);

// Column groups of the weights follow each other: weight i has those from end[i - 1] to end[i].
struct SkinnyParameters {
  const float* x;
  int64_t m;
  int depth, padded;  // k, and k in whole steps of a warp
  const void* weight[3];
  float* y[3];
  int64_t n[3], end[3];
  bool round_operands, round_output;
  const float* residual;  // [m, n[0]], may be y[0]; null: 0
};

DUOKV_DEVICE float round_bf16(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// 16 bytes of a weight, as floats' bits.
template <bool Bf16>
struct Weights;

template <>
struct Weights<false> {
  using Element = float;
  static constexpr int kCount = 4;
  DUOKV_DEVICE static void unpack(float4 v, int, bool round, float (&w)[4]) {
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    if (!round) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = round_bf16(w[i]);
  }
  DUOKV_DEVICE static float4 gather(const float* w, int count) {
    return make_float4(w[0], count > 1 ? w[1] : 0, count > 2 ? w[2] : 0, count > 3 ? w[3] : 0);
  }
};

template <>
struct Weights<true> {
  using Element = bf16;
  static constexpr int kCount = 8;
  // The first (half 0) or last four.
  DUOKV_DEVICE static void unpack(float4 v, int half, bool, float (&w)[4]) {
    const float4 four = unpack_bf16x4(half ? make_float2(v.z, v.w) : make_float2(v.x, v.y));
    w[0] = four.x, w[1] = four.y, w[2] = four.z, w[3] = four.w;
  }
  DUOKV_DEVICE static float pair(const bf16* w, int i, int count) {
    const unsigned low = i < count ? __float_as_uint(__bfloat162float(w[i])) >> 16 : 0u;
    const unsigned high = i + 1 < count ? __float_as_uint(__bfloat162float(w[i + 1])) : 0u;
    return __uint_as_float(low | high);
  }
  DUOKV_DEVICE static float4 gather(const bf16* w, int count) {
    return make_float4(pair(w, 0, count), pair(w, 2, count), pair(w, 4, count), pair(w, 6, count));
  }
};

// Sums each of Count values, a power of two, over the warp. A lane is left with the sum of value lane * Count
// / 32 and, where there are more values than lanes, of the next.
template <int Count, int Distance = kWarpSize / 2>
DUOKV_DEVICE void scatter_sums(float* v, int lane) {
  if constexpr (Count > 1) {
    const bool upper = (lane & Distance) != 0;
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const float kept = upper ? v[i + Count / 2] : v[i], given = upper ? v[i] : v[i + Count / 2];
      v[i] = kept + __shfl_xor_sync(kFullMask, given, Distance);
    }
  } else {
    v[0] += __shfl_xor_sync(kFullMask, v[0], Distance);
  }
  if constexpr (Distance > 1) scatter_sums<(Count > 1 ? Count / 2 : 1), Distance / 2>(v, lane);
}

// Vector: rows of x and W start at multiples of 16 bytes.
template <bool Bf16, bool Vector, int Rows, int Columns>
struct Skinny {
  using W = Weights<Bf16>;
  using Element = typename W::Element;
  static constexpr int kStep = kWarpSize * W::kCount;  // of k, one load of a warp
  // Loads of a column in flight: 8 in all, or what the sums leave registers for.
  static constexpr int kDepth = Columns < 4 ? 8 / Columns : Rows == 8 ? 1 : 2;
  static constexpr int kSums = Rows * Columns, kOwned = kSums > kWarpSize ? kSums / kWarpSize : 1;

  // A warp's columns: first … first+Columns-1 of a weight, the last one again where the weight ends.
  struct Group {
    const Element* weight;
    float* y;
    int64_t n, first;
  };

  DUOKV_DEVICE static Group group_at(const SkinnyParameters& p, int64_t group) {
    if (group < p.end[0]) return {static_cast<const Element*>(p.weight[0]), p.y[0], p.n[0], group * Columns};
    if (group < p.end[1])
      return {static_cast<const Element*>(p.weight[1]), p.y[1], p.n[1], (group - p.end[0]) * Columns};
    return {static_cast<const Element*>(p.weight[2]), p.y[2], p.n[2], (group - p.end[1]) * Columns};
  }

  // From k on; zeros past the end.
  DUOKV_DEVICE static void load(const Group& group, int depth, int k, int lane,
                                float4 (&w)[kDepth][Columns]) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int at = k + i * kStep + lane * W::kCount;
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        const int64_t column = min(group.first + c, group.n - 1);
        const Element* from = group.weight + column * depth + at;
        w[i][c] = make_float4(0, 0, 0, 0);
        if (at >= depth) continue;
        w[i][c] =
            Vector ? load4_streaming(reinterpret_cast<const float*>(from)) : W::gather(from, depth - at);
      }
    }
  }

  // A row's k in the order in which lanes read it: of a step first every lane's first four, then, under BF16,
  // every lane's last four.
  DUOKV_DEVICE static void stage(const SkinnyParameters& p, int64_t first_row, float* shared_x) {
    constexpr int kHalves = W::kCount / 4;
    const int quads = p.padded / 4;
    for (int quad = static_cast<int>(threadIdx.x); quad < quads; quad += static_cast<int>(blockDim.x)) {
      const int k = quad * 4;
      float4 v[Rows];
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        v[r] = make_float4(0, 0, 0, 0);
        if (first_row + r >= p.m || k >= p.depth) continue;
        const float* from = p.x + (first_row + r) * p.depth + k;
        v[r] = Vector ? load4(from) : Weights<false>::gather(from, p.depth - k);
      }
      const int lane = quad / kHalves % kWarpSize, half = quad % kHalves, step = quad / (kHalves * kWarpSize);
      float* to = shared_x + step * kStep + (half * kWarpSize + lane) * 4;
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        if (p.round_operands)
          v[r] = make_float4(round_bf16(v[r].x), round_bf16(v[r].y), round_bf16(v[r].z), round_bf16(v[r].w));
        store4(to + r * quads * 4, v[r]);
      }
    }
  }

  DUOKV_DEVICE static void multiply(const SkinnyParameters& p, const float* shared_x, int k, int lane,
                                    const float4 (&loaded)[kDepth][Columns], float (&sum)[kSums]) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (k + i * kStep >= p.padded) break;
#pragma unroll
      for (int half = 0; half < W::kCount / 4; ++half) {
        float w[Columns][4];
#pragma unroll
        for (int c = 0; c < Columns; ++c) W::unpack(loaded[i][c], half, p.round_operands, w[c]);
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          const float4 x = load4(shared_x + r * p.padded + k + i * kStep + (half * kWarpSize + lane) * 4);
#pragma unroll
          for (int c = 0; c < Columns; ++c) {
            float& s = sum[r * Columns + c];
            s = fmaf(w[c][3], x.w, fmaf(w[c][2], x.z, fmaf(w[c][1], x.y, fmaf(w[c][0], x.x, s))));
          }
        }
      }
    }
  }
};

// As many as leave registers for what a warp has in flight.
constexpr int blocks_per_processor(int rows, int columns) {
  return rows == 1 && columns < 4 ? 3 : rows <= 8 ? 2 : 1;
}

template <bool Bf16, bool Vector, int Rows, int Columns>
__global__ void __launch_bounds__(kMostWarps* kWarpSize, blocks_per_processor(Rows, Columns))
    skinny_product_kernel(SkinnyParameters p) {
  using S = Skinny<Bf16, Vector, Rows, Columns>;
  DUOKV_DYNAMIC_SHARED(float, shared_x);  // [Rows][padded]
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
            lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t warps = blockDim.x / kWarpSize, stride = gridDim.y * warps;
  const int64_t first_row = int64_t{blockIdx.x} * Rows;
  int64_t index = int64_t{blockIdx.y} * warps + warp;
  const int owned = lane * S::kSums / kWarpSize;
  const bool owner = lane * S::kSums % kWarpSize == 0;

  // The first weights are under way while x is staged, the next group's while this one's sums are taken.
  float4 loaded[S::kDepth][Columns];
  typename S::Group group = {};
  if (index < p.end[2]) {
    group = S::group_at(p, index);
    S::load(group, p.depth, 0, lane, loaded);
  }
  S::stage(p, first_row, shared_x);
  __syncthreads();
  for (; index < p.end[2]; index += stride) {
    float* y[S::kOwned];
    float before[S::kOwned];
#pragma unroll
    for (int i = 0; i < S::kOwned; ++i) {
      const int64_t row = first_row + (owned + i) / Columns, column = group.first + (owned + i) % Columns;
      y[i] = owner && row < p.m && column < group.n ? group.y + row * group.n + column : nullptr;
      before[i] = p.residual && y[i] ? p.residual[row * group.n + column] : 0;
    }
    float sum[S::kSums] = {};
    for (int k = 0; k < p.depth; k += S::kDepth * S::kStep) {
      S::multiply(p, shared_x, k, lane, loaded, sum);
      if (k + S::kDepth * S::kStep < p.depth) {
        S::load(group, p.depth, k + S::kDepth * S::kStep, lane, loaded);
      } else if (index + stride < p.end[2]) {
        group = S::group_at(p, index + stride);
        S::load(group, p.depth, 0, lane, loaded);
      }
    }
    scatter_sums<S::kSums>(sum, lane);
#pragma unroll
    for (int i = 0; i < S::kOwned; ++i) {
      if (!y[i]) continue;
      const float value = p.round_output ? round_bf16(sum[i]) : sum[i];
      *y[i] = p.residual ? before[i] + value : value;
    }
  }
}

template <bool Bf16, bool Vector, int Rows, int Columns>
cudaError_t run(SkinnyParameters& p, int32_t count, int64_t processors, cudaStream_t stream) {
  int64_t groups = 0;
  for (int32_t i = 0; i < 3; ++i) {
    if (i < count) groups += ceil_div(p.n[i], Columns);
    p.end[i] = groups;
  }
  const int64_t tiles = ceil_div(p.m, Rows);
  const int64_t warps = std::min<int64_t>(kMostWarps, ceil_div(groups * tiles, processors));
  // As many blocks as run at once, or fewer, so that all warps take equally many groups.
  const int64_t most = ceil_div(blocks_per_processor(Rows, Columns) * processors, tiles);
  const int64_t rounds = ceil_div(groups, most * warps), blocks = ceil_div(groups, warps * rounds);
  const size_t shared_bytes = Rows * static_cast<size_t>(p.padded) * sizeof(float);
  const auto kernel = skinny_product_kernel<Bf16, Vector, Rows, Columns>;
  DUOKV_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared_bytes)));
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(blocks));
  return DUOKV_LAUNCH(kernel, grid, static_cast<unsigned>(warps) * kWarpSize, shared_bytes, stream, p);
}

template <bool Bf16>
cudaError_t dispatch(SkinnyParameters& p, int32_t count, bool vector, cudaStream_t stream) {
  int device = 0, processors = 0;
  DUOKV_CUDA_TRY(cudaGetDevice(&device));
  DUOKV_CUDA_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  p.padded = static_cast<int>(ceil_div(p.depth, kWarpSize * Weights<Bf16>::kCount)) * kWarpSize *
             Weights<Bf16>::kCount;
  if (!vector) return run<Bf16, false, 1, 1>(p, count, processors, stream);

  int rows = kMostRows;
  while (rows > 1 && (rows / 2 >= p.m || rows * p.padded * int64_t{sizeof(float)} > kSharedBytes)) rows /= 2;
  // Columns share what is read of x; fewer of them make more warps.
  int64_t columns = 0;
  for (int32_t i = 0; i < count; ++i) columns += p.n[i];
  const bool wide = columns / 4 * ceil_div(p.m, rows) >= 4 * processors;
  const auto shaped = [&](auto narrow_run, auto wide_run) {
    return (wide ? wide_run : narrow_run)(p, count, processors, stream);
  };
  switch (rows) {
    case 1:
      return shaped(run<Bf16, true, 1, 1>, run<Bf16, true, 1, 4>);
    case 2:
      return shaped(run<Bf16, true, 2, 1>, run<Bf16, true, 2, 4>);
    case 4:
      return shaped(run<Bf16, true, 4, 1>, run<Bf16, true, 4, 4>);
    case 8:
      return shaped(run<Bf16, true, 8, 1>, run<Bf16, true, 8, 4>);
    default:
      return shaped(run<Bf16, true, 16, 2>, run<Bf16, true, 16, 4>);
  }
}

}  // namespace

cudaError_t skinny_product(const ops::LinearArgs& args, const void* const weights[3], bool bf16_weights,
                           cudaStream_t stream) {
  if (args.m == 0) return cudaSuccess;
  const int64_t depth = args.w[0].k;
  if (depth > kSkinnyDepth) return cudaErrorInvalidValue;
  SkinnyParameters p = {};
  p.x = args.x;
  p.m = args.m;
  p.depth = static_cast<int>(depth);
  p.round_operands = args.mode == ops::ProductMode::BF16;
  p.round_output = args.round_output;
  p.residual = args.residual;
  bool vector = depth % (bf16_weights ? 8 : 4) == 0 && vectorizable(depth, {args.x});
  for (int32_t i = 0; i < args.count; ++i) {
    p.weight[i] = weights[i];
    p.y[i] = args.y[i];
    p.n[i] = args.w[i].n;
    vector = vector && vectorizable(4, {weights[i]});
  }
  return bf16_weights ? dispatch<true>(p, args.count, vector, stream)
                      : dispatch<false>(p, args.count, vector, stream);
}

}  // namespace duokv::cuda
