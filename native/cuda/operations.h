// Launchers of the CUDA backend: one per operation of ops/ops.h, whose argument structs give shapes, aliasing
// and meaning. All pointers are device memory. A launcher only queues work on `stream`, so it can be captured
// into a graph; where it needs scratch memory, the caller passes as many bytes as the operation's *_workspace
// says, 16-byte aligned. The result is the launch's error.
#pragma once

#include <cstddef>

#include "cuda/primitives.cuh"
#include "ops/ops.h"

namespace duokv::cuda {

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
