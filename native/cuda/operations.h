// Launchers of the CUDA backend: one per operation of ops/ops.h, whose argument structs give shapes, aliasing
// and meaning. All pointers are device memory. A launcher only queues work on `stream`, so it can be captured
// into a graph; where it needs scratch memory, the caller passes as many bytes as the operation's *_workspace
// says, 16-byte aligned. The result is the launch's error.
#pragma once

#include <cstddef>

#include "cuda/primitives.cuh"
#include "ops/ops.h"

namespace duokv::cuda {

// head_dim is 16, 32, 64 or 128; q, out and all entries are 16-byte aligned. One query per row is decoded.
size_t attention_forward_workspace(const ops::AttentionArgs& args);
cudaError_t attention_forward(const ops::AttentionArgs& args, void* workspace, cudaStream_t stream);

// args.queries is 1.
size_t attention_decode_workspace(const ops::AttentionArgs& args);
cudaError_t attention_decode(const ops::AttentionArgs& args, void* workspace, cudaStream_t stream);

// Banks are FP32; head_dim is 16, 32, 64 or 128; a bank's gradients have `longest` entries in every row.
size_t attention_backward_workspace(const ops::AttentionBackwardArgs& args);
cudaError_t attention_backward(const ops::AttentionBackwardArgs& args, void* workspace, cudaStream_t stream);

cudaError_t embedding_forward(const ops::EmbeddingArgs& args, cudaStream_t stream);
size_t embedding_backward_workspace(int64_t m, int64_t vocab);
cudaError_t embedding_backward(const ops::EmbeddingBackwardArgs& args, void* workspace, cudaStream_t stream);

cudaError_t rotary(const ops::RotaryArgs& args, cudaStream_t stream);

cudaError_t cache_write(const ops::CacheWriteArgs& args, cudaStream_t stream);
cudaError_t cache_read(const ops::CacheReadArgs& args, cudaStream_t stream);
cudaError_t cache_copy(const ops::CacheCopyArgs& args, cudaStream_t stream);

cudaError_t fuse_forward(const ops::FuseArgs& args, cudaStream_t stream);
size_t fuse_backward_workspace(const ops::FuseBackwardArgs& args);
cudaError_t fuse_backward(const ops::FuseBackwardArgs& args, void* workspace, cudaStream_t stream);

cudaError_t sample(const ops::SampleArgs& args, cudaStream_t stream);

cudaError_t suffix_rows(const ops::SuffixRowsArgs& args, cudaStream_t stream);
cudaError_t add(const ops::AddArgs& args, cudaStream_t stream);

// y [n] = x, rounded to nearest even.
cudaError_t to_bf16(const float* x, int64_t n, bf16* y, cudaStream_t stream);
// y [n] = residual + x; residual may be y, or null: 0.
cudaError_t from_bf16(const bf16* x, int64_t n, const float* residual, float* y, cudaStream_t stream);

cudaError_t rms_norm_forward(const ops::RmsNormArgs& args, cudaStream_t stream);
// The same, rounded to BF16 into y, which is an operand of a product next; args.y is not used.
cudaError_t rms_norm_forward_bf16(const ops::RmsNormArgs& args, bf16* y, cudaStream_t stream);
// d is at most kMaxNormWidth.
constexpr int64_t kMaxNormWidth = 8192;
size_t rms_norm_backward_workspace(int64_t m, int64_t d);
cudaError_t rms_norm_backward(const ops::RmsNormBackwardArgs& args, void* workspace, cudaStream_t stream);

cudaError_t swiglu_forward(const ops::SwigluArgs& args, cudaStream_t stream);
// Between two BF16 products: h [n] from gate and up [n] (null: silu alone), with FP32 copies of both where
// wanted.
cudaError_t swiglu_forward_bf16(const bf16* gate, const bf16* up, int64_t n, float* kept_gate, float* kept_up,
                                bf16* h, cudaStream_t stream);
cudaError_t swiglu_backward(const ops::SwigluBackwardArgs& args, cudaStream_t stream);

// The sum goes to device memory.
size_t sum_squares_workspace(int64_t n);
cudaError_t sum_squares(const float* x, int64_t n, double* result, void* workspace, cudaStream_t stream);

cudaError_t adamw(const ops::AdamWArgs& args, cudaStream_t stream);

// Cross-entropy of rows of logits. With a scale a row's gradient scale * (softmax - onehot(target)) replaces
// its logits, or goes to `dlogits` in BF16 where that is given; a row with scale 0 gets zeros whatever its
// logits are.
struct CrossEntropyArgs {
  float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  const int32_t* targets;    // [rows], each in [0, vocab)
  const float* token_scale;  // [rows]; null: forward only
  float* nll;                // [rows]
  bf16* dlogits;             // [rows, vocab]; may be null
};
cudaError_t cross_entropy(const CrossEntropyArgs& args, cudaStream_t stream);

// Products of few rows, which stream the weights. weights[i] [n_i, k] is FP32, or BF16 with `bf16_weights`;
// under BF16 operands that are FP32 are rounded on their way. A row's bits depend on nothing but the row.
constexpr int64_t kSkinnyPositions = 4;  // per row, at most
constexpr int64_t kSkinnyDepth = 40960;  // k, at most
cudaError_t skinny_product(const ops::LinearArgs& args, const void* const weights[3], bool bf16_weights,
                           cudaStream_t stream);

// Products in FP32 of weights that read the same rows, one launch: args.norm, round_output and mode are not
// used. Every result is summed in order of k, so a row's bits depend on nothing but the row, and on no tile:
// `tile` names one of kFp32Tiles; below 0 the shape chooses.
constexpr int kFp32Tiles = 7;
cudaError_t fp32_product(const ops::LinearArgs& args, cudaStream_t stream, int tile = -1);

}  // namespace duokv::cuda
