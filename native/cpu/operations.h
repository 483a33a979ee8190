// Declarations of the CPU operations, one definition file each (the file is named after the operation).
#pragma once

#include "ops/ops.h"

namespace duokv::cpu {

using ops::Device;
using ops::Status;

Status linear_forward(Device*, const ops::LinearArgs*);
// The same, and activation [m, n] = silu(y[0]) · y[1], or silu(y[0]) of one product; null: not wanted.
Status linear_activated(Device*, const ops::LinearArgs*, float* activation);
Status feed_forward(Device*, const ops::FeedForwardArgs*);
Status linear_backward(Device*, const ops::LinearBackwardArgs*);
Status linear_cross_entropy(Device*, const ops::LinearCrossEntropyArgs*);
Status pack_cache_create(Device*, ops::PackCache**);
void pack_cache_destroy(Device*, ops::PackCache*);
int64_t pack_cache_bytes(const ops::PackCache*);

Status attention_forward(Device*, const ops::AttentionArgs*);
Status attention_backward(Device*, const ops::AttentionBackwardArgs*);
Status fuse_forward(Device*, const ops::FuseArgs*);
Status fuse_backward(Device*, const ops::FuseBackwardArgs*);

Status cache_write(Device*, const ops::CacheWriteArgs*);
Status cache_read(Device*, const ops::CacheReadArgs*);
Status cache_copy(Device*, const ops::CacheCopyArgs*);

Status embedding_forward(Device*, const ops::EmbeddingArgs*);
Status embedding_backward(Device*, const ops::EmbeddingBackwardArgs*);
Status rms_norm_forward(Device*, const ops::RmsNormArgs*);
Status rms_norm_backward(Device*, const ops::RmsNormBackwardArgs*);
Status rotary(Device*, const ops::RotaryArgs*);
Status swiglu_forward(Device*, const ops::SwigluArgs*);
Status swiglu_backward(Device*, const ops::SwigluBackwardArgs*);
Status sample(Device*, const ops::SampleArgs*);
Status suffix_rows(Device*, const ops::SuffixRowsArgs*);
Status add(Device*, const ops::AddArgs*);
Status sum_squares(Device*, const ops::SumSquaresArgs*);
Status adamw(Device*, const ops::AdamWArgs*);

}  // namespace duokv::cpu
