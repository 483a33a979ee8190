// Attention over up to two banks, forward: many queries. One query per row goes to attention_decode.
//
// A block owns a tile of one KV head's stacked query rows and goes through the tiles of entries that any of
// them sees, first bank first, with an online softmax in base 2. Each bank keeps its own maximum and sum, so
// that its log-sum-exp is exact however far the banks' scores are apart; the output accumulates relative to
// the larger maximum. A warp passes over tiles that none of its rows sees, and masks only those that some row
// does not see whole. Masked weights are zeros, so an infinite or NaN value also reaches rows of its tile
// that do not see it; finite values never do.
//
// Few queries leave most of the GPU idle. Then the entries are cut into parts at fixed distances, blocks go
// through one part each, and a second kernel adds the parts in order. Whether and where to cut depends on the
// mode, the number of queries and the position of the row's first entry only, so that a query's bits do not
// depend on its batch.
//
//   FP32     attention_simt.cuh: FFMA; a thread has 8 x 8 scores and 8 x head_dim / 8 outputs. K of the next
//            tile arrives while weights are applied, V while scores are computed. Two blocks on an SM.
//   TF32x3   attention_mma.cuh: mma m16n8k8; a warp has 32 rows, so that a fragment of K or V is split once
//            for two products. Tiles of 32 entries in two buffers; Q is split once and kept in shared memory
//            in the order of fragments. K indices are permuted so that fragments of Q and K are 16-byte loads
//            and the scores are the next product's left operand as they stand; V columns likewise.
//   BF16     the same with mma m16n8k16 and Q in registers. BF16 banks come by cp.async in tiles of 64; FP32
//            banks pass through registers, where they are rounded, in tiles of 32.
//
// Roofline: 4 head_dim FLOPs per query row and entry seen. At head_dim 64, 12 heads over 4 KV heads, batch 1,
// 1,792 queries (19.3 M pairs): 4.9 GFLOP; H100: FP32 at 67 TFLOP/s 74 µs, TF32x3 at a third of 380 TFLOP/s
// 39 µs, BF16 at 800 TFLOP/s 6 µs; mma.sync reaches about 60 % of the tensor cores' rate. Training, 64 rows
// of 2,048 in documents of 600 with a window of 128 beside (660 M pairs): 170 GFLOP: TF32x3 1.3 ms, BF16
// 0.2 ms, against 0.4 ms at 3 TB/s for the 1.3 GB of Q, K and V of two banks, and output.
#include <algorithm>

#include "cuda/attention_mma.cuh"
#include "cuda/attention_simt.cuh"
#include "cuda/launch.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace attention {
namespace {

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
  // Two blocks of most kernels fit on an SM whose memory is not spent on L1.
  DUOKV_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
  const int64_t rows = args.queries * (args.query_heads / args.kv_heads);
  const dim3 grid(static_cast<unsigned>(args.kv_heads * partition.parts),
                  static_cast<unsigned>(ceil_div(rows, block_rows)), static_cast<unsigned>(batch_rows));
  return DUOKV_LAUNCH(kernel, grid, kThreads, shared_bytes, stream, args, partition);
}

template <class Products, int HeadDim>
cudaError_t launch_mma(const ops::AttentionArgs& args, const Partition& partition, int64_t batch_rows,
                       cudaStream_t stream) {
  return launch_tiles(attention_mma_kernel<Products, HeadDim>, Products::kBlockRows, mma_bytes<Products>(),
                      args, partition, batch_rows, stream);
}

template <int HeadDim>
cudaError_t launch_mode(const ops::AttentionArgs& args, const Partition& partition, int64_t batch_rows,
                        cudaStream_t stream) {
  switch (args.mode) {
    case ops::ProductMode::FP32:
      return launch_tiles(attention_simt_kernel<HeadDim>, SimtShape<HeadDim>::kRows,
                          SimtShape<HeadDim>::kBytes, args, partition, batch_rows, stream);
    case ops::ProductMode::TF32x3:
      return launch_mma<Tf32x3Products<HeadDim>, HeadDim>(args, partition, batch_rows, stream);
    case ops::ProductMode::BF16:
      for (int bank = 0; bank < args.bank_count; ++bank) {
        if (args.banks[bank].dtype == ops::DType::BF16) continue;
        return launch_mma<Bf16Products<HeadDim, false>, HeadDim>(args, partition, batch_rows, stream);
      }
      return launch_mma<Bf16Products<HeadDim, true>, HeadDim>(args, partition, batch_rows, stream);
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
}  // namespace attention

size_t attention_forward_workspace(const ops::AttentionArgs& args) {
  using namespace attention;
  return args.queries == 1 ? attention_decode_workspace(args) : plan_of(args).bytes;
}

cudaError_t attention_forward(const ops::AttentionArgs& args, void* workspace, cudaStream_t stream) {
  using namespace attention;
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
