// FP32 products y [m, n] = x [m, k] · W [n, k]ᵀ, for up to three weights in one launch: exact prefill.
//
// A thread sums each of its results in order of k, whatever the tile, so a row's bits depend on nothing but
// the row, and the launch may take the tile that suits m and n. Rows of x and W, both contiguous along k, lie
// in shared memory as they come, 36 floats apart for 32 of them: eight neighbouring rows then start in
// different banks, and asynchronous copies need no transposition. A thread reads four k of all its rows at
// once. Lanes 0 and 1 share a column, lanes 0 and 2 a row: that lets 16-byte reads of a half-warp be served
// together.
//
// Roofline (H100: 67 TFLOP/s at 1.98 GHz, 128 FMAs a clock and processor), m = 1,792, 2 m n k FLOPs:
//   q, k and v, n = 768 + 256 + 256, k = 768    3.5 GFLOP: 53 µs
//   gate and up, n = 2 * 2,048, k = 768        11.3 GFLOP: 168 µs
//   down, n = 768, k = 2,048                    5.6 GFLOP: 84 µs
// Bytes are few beside that (gate and up: 47 MB, 16 µs), and shared memory is read half as fast as it could
// be with 8 x 8 results a thread. Few rows have k FMAs in a chain as their limit: 768 of 4 clocks, 1.6 µs.
#include <algorithm>
#include <iterator>

#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

// Of k at once. The same for all tiles, as zeros past the end can change a zero's sign.
constexpr int kStep = 32, kQuads = kStep / 4;
constexpr int kStride = kStep + 4;  // floats between rows in shared memory
constexpr int kLaneRows = 4, kLaneColumns = 8;

// A weight with its result; the column tiles of the weights follow each other, this one's from `begin` on.
struct Weighted {
  const float* w;
  float* y;
  int64_t n, begin;
};

struct Fp32Parameters {
  const float* x;
  int64_t m;
  int depth;
  Weighted weights[3];
  const float* residual;  // [m, n of the first], may be its y; null: 0
};

// A block's results. A warp has 4 x 8 threads, each of them ThreadRows x ThreadColumns results: every fourth
// row, every eighth column. Resident: blocks that registers must leave room for on a processor.
template <int Rows, int Columns, int ThreadRows, int ThreadColumns, int Stages, int Resident>
struct Tile {
  static constexpr int kRows = Rows, kColumns = Columns, kThreadRows = ThreadRows,
                       kThreadColumns = ThreadColumns, kStages = Stages, kResident = Resident;
  static constexpr int kWarpRows = kLaneRows * ThreadRows, kWarpColumns = kLaneColumns * ThreadColumns;
  static constexpr int kWarpsAcross = Columns / kWarpColumns;
  static constexpr int kThreads = Rows / kWarpRows * kWarpsAcross * kWarpSize;
  static constexpr int kStageFloats = (Rows + Columns) * kStride;
  static constexpr size_t kSharedBytes = sizeof(float) * Stages * kStageFloats;
  // Of the loop over a step's fours: few results need many loads in flight.
  static constexpr int kUnroll = ThreadRows * ThreadColumns >= 32 ? 2 : kQuads;
  static_assert(Rows % kWarpRows == 0 && Columns % kWarpColumns == 0 && kThreads % kQuads == 0);
};

// Copies columns k … k+31 of `Count` rows, of which `rows` exist, to shared memory; zeros past the end.
// Vector: rows start at multiples of 16 bytes.
template <int Count, int Threads, bool Vector>
DUOKV_DEVICE void stage_rows(const float* from, int64_t rows, int depth, int k, float* shared) {
  constexpr int kPerPass = Threads / kQuads;
  const int thread = static_cast<int>(threadIdx.x), first = thread / kQuads, column = thread % kQuads * 4;
  from += static_cast<int64_t>(first) * depth + k + column;
  shared += first * kStride + column;
#pragma unroll
  for (int pass = 0; pass < (Count + kPerPass - 1) / kPerPass; ++pass) {
    const int row = first + pass * kPerPass;
    if (Count % kPerPass != 0 && row >= Count) break;
    const float* source = from + static_cast<int64_t>(pass) * kPerPass * depth;
    float* target = shared + pass * kPerPass * kStride;
    const int left = row < rows ? depth - k - column : 0;
    if constexpr (Vector) {
      copy_async16(target, source, left > 0);
    } else {
      store4(target, make_float4(left > 0 ? source[0] : 0, left > 1 ? source[1] : 0, left > 2 ? source[2] : 0,
                                 left > 3 ? source[3] : 0));
    }
  }
}

// Adds a step's products to the sums. `a` and `b` are the thread's first row of x and of W.
template <class T>
DUOKV_DEVICE void multiply(const float* a, const float* b, float (&sum)[T::kThreadRows][T::kThreadColumns]) {
#pragma unroll T::kUnroll
  for (int quad = 0; quad < kQuads; ++quad) {
    float4 x[T::kThreadRows];
#pragma unroll
    for (int i = 0; i < T::kThreadRows; ++i) x[i] = load4(a + i * kLaneRows * kStride + quad * 4);
#pragma unroll
    for (int j = 0; j < T::kThreadColumns; ++j) {
      const float4 w = load4(b + j * kLaneColumns * kStride + quad * 4);
#pragma unroll
      for (int i = 0; i < T::kThreadRows; ++i) sum[i][j] = fmaf(x[i].x, w.x, sum[i][j]);
#pragma unroll
      for (int i = 0; i < T::kThreadRows; ++i) sum[i][j] = fmaf(x[i].y, w.y, sum[i][j]);
#pragma unroll
      for (int i = 0; i < T::kThreadRows; ++i) sum[i][j] = fmaf(x[i].z, w.z, sum[i][j]);
#pragma unroll
      for (int i = 0; i < T::kThreadRows; ++i) sum[i][j] = fmaf(x[i].w, w.w, sum[i][j]);
    }
  }
}

template <class T, bool Vector>
__global__ void __launch_bounds__(T::kThreads, T::kResident) fp32_product_kernel(Fp32Parameters p) {
  DUOKV_DYNAMIC_SHARED(float, shared);  // [kStages][kRows of x, then kColumns of W][kStride]
  const int64_t tile = blockIdx.y;
  Weighted own = p.weights[0];
  if (tile >= p.weights[1].begin) own = p.weights[1];
  if (tile >= p.weights[2].begin) own = p.weights[2];
  const int64_t first_row = int64_t{blockIdx.x} * T::kRows, first_column = (tile - own.begin) * T::kColumns;
  const float* x = p.x + first_row * p.depth;
  const float* w = own.w + first_column * p.depth;

  const auto stage = [&](int step) {
    float* to = shared + step % T::kStages * T::kStageFloats;
    stage_rows<T::kRows, T::kThreads, Vector>(x, p.m - first_row, p.depth, step * kStep, to);
    stage_rows<T::kColumns, T::kThreads, Vector>(w, own.n - first_column, p.depth, step * kStep,
                                                 to + T::kRows * kStride);
  };
  const int steps = (p.depth + kStep - 1) / kStep;
#pragma unroll
  for (int step = 0; step < T::kStages - 1; ++step) {
    if (step < steps) stage(step);
    copy_async_commit();
  }

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
            lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int row = warp / T::kWarpsAcross * T::kWarpRows + lane % 2 + lane / 16 * 2,
            column = warp % T::kWarpsAcross * T::kWarpColumns + lane / 2 % kLaneColumns;
  float sum[T::kThreadRows][T::kThreadColumns] = {};
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<T::kStages - 2>();
    __syncthreads();
    if (step + T::kStages - 1 < steps) stage(step + T::kStages - 1);
    copy_async_commit();
    const float* now = shared + step % T::kStages * T::kStageFloats;
    multiply<T>(now + row * kStride, now + (T::kRows + column) * kStride, sum);
  }

#pragma unroll
  for (int i = 0; i < T::kThreadRows; ++i) {
    const int64_t at_row = first_row + row + i * kLaneRows;
    if (at_row >= p.m) break;
#pragma unroll
    for (int j = 0; j < T::kThreadColumns; ++j) {
      const int64_t at_column = first_column + column + j * kLaneColumns;
      if (at_column >= own.n) break;
      const int64_t at = at_row * own.n + at_column;
      own.y[at] = p.residual ? p.residual[at] + sum[i][j] : sum[i][j];
    }
  }
}

using LaunchTile = cudaError_t (*)(Fp32Parameters&, int32_t count, bool vector, cudaStream_t);

template <class T>
cudaError_t launch_tile(Fp32Parameters& p, int32_t count, bool vector, cudaStream_t stream) {
  int64_t tiles = 0;
  for (int32_t i = 0; i < 3; ++i) {
    p.weights[i].begin = tiles;
    if (i < count) tiles += ceil_div(p.weights[i].n, T::kColumns);
  }
  const auto kernel = vector ? fp32_product_kernel<T, true> : fp32_product_kernel<T, false>;
  DUOKV_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(T::kSharedBytes)));
  const dim3 grid(static_cast<unsigned>(ceil_div(p.m, T::kRows)), static_cast<unsigned>(tiles));
  return DUOKV_LAUNCH(kernel, grid, T::kThreads, T::kSharedBytes, stream, p);
}

// What chooses a tile: `rate`, FMAs a clock of a processor full of its blocks, and `alone`, clocks per k of a
// block on its own. Both are estimates from instruction counts and latencies; no timing has confirmed them.
struct Choice {
  int64_t rows, columns;
  double rate, alone;
  LaunchTile launch;
};

template <class T>
constexpr Choice choice(double rate, double alone) {
  return {T::kRows, T::kColumns, rate, alone, launch_tile<T>};
}

constexpr Choice kChoices[] = {
    choice<Tile<128, 128, 8, 8, 3, 1>>(108, 150), choice<Tile<128, 64, 8, 8, 3, 2>>(105, 110),
    choice<Tile<64, 64, 8, 4, 3, 3>>(92, 60),     choice<Tile<32, 64, 4, 4, 4, 4>>(64, 36),
    choice<Tile<32, 32, 4, 2, 4, 4>>(44, 22),     choice<Tile<16, 32, 2, 2, 6, 4>>(32, 15),
    choice<Tile<8, 32, 2, 1, 8, 4>>(22, 12)};
static_assert(std::size(kChoices) == kFp32Tiles);

}  // namespace

cudaError_t fp32_product(const ops::LinearArgs& args, cudaStream_t stream, int tile) {
  if (args.m == 0) return cudaSuccess;
  Fp32Parameters p = {};
  p.x = args.x;
  p.m = args.m;
  p.depth = static_cast<int>(args.w[0].k);
  p.residual = args.residual;
  bool vector = vectorizable(args.w[0].k, {args.x});
  for (int32_t i = 0; i < args.count; ++i) {
    p.weights[i] = {args.w[i].data, args.y[i], args.w[i].n, 0};
    vector = vector && vectorizable(4, {args.w[i].data});
  }
  if (tile < 0) {
    int device = 0, processors = 0;
    DUOKV_CUDA_TRY(cudaGetDevice(&device));
    DUOKV_CUDA_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    const auto clocks = [&](const Choice& c) {
      int64_t blocks = 0;
      for (int32_t i = 0; i < args.count; ++i) blocks += ceil_div(p.weights[i].n, c.columns);
      blocks *= ceil_div(p.m, c.rows);
      return std::max(c.alone,
                      static_cast<double>(ceil_div(blocks, processors) * c.rows * c.columns) / c.rate);
    };
    const auto best =
        std::min_element(std::begin(kChoices), std::end(kChoices),
                         [&](const Choice& a, const Choice& b) { return clocks(a) < clocks(b); });
    tile = static_cast<int>(best - std::begin(kChoices));
  }
  return kChoices[tile].launch(p, args.count, vector, stream);
}

}  // namespace duokv::cuda
