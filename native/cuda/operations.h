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

cudaError_t rms_norm_forward(const ops::RmsNormArgs& args, cudaStream_t stream);
// d is at most kMaxNormWidth.
constexpr int64_t kMaxNormWidth = 8192;
size_t rms_norm_backward_workspace(int64_t m, int64_t d);
cudaError_t rms_norm_backward(const ops::RmsNormBackwardArgs& args, void* workspace, cudaStream_t stream);

cudaError_t swiglu_forward(const ops::SwigluArgs& args, cudaStream_t stream);
cudaError_t swiglu_backward(const ops::SwigluBackwardArgs& args, cudaStream_t stream);

}  // namespace duokv::cuda
