#include "cpu/cpu.h"
#include "cpu/device_functions.h"
#include "cpu/operations.h"
#include "ops/guarded.h"

namespace duokv::cpu {

const ops::OpTable& op_table() {
  static constexpr ops::OpTable table = {
      .abi_version = ops::kAbiVersion,
      .backend = "cpu",
      .open = open,
      .open_planning = open_planning,
      .close = close,
      .info = info,
      .last_error = ops::last_error,
      .allocate = allocate,
      .release = release,
      .upload = upload,
      .download = download,
      .copy = copy,
      .zero = zero,
      .pack_cache_create = pack_cache_create,
      .pack_cache_destroy = pack_cache_destroy,
      .pack_cache_bytes = pack_cache_bytes,
      .linear_forward = linear_forward,
      .linear_backward = linear_backward,
      .feed_forward = feed_forward,
      .linear_cross_entropy = linear_cross_entropy,
      .attention_forward = attention_forward,
      .attention_backward = attention_backward,
      .fuse_forward = fuse_forward,
      .fuse_backward = fuse_backward,
      .cache_write = cache_write,
      .cache_read = cache_read,
      .cache_copy = cache_copy,
      .embedding_forward = embedding_forward,
      .embedding_backward = embedding_backward,
      .rms_norm_forward = rms_norm_forward,
      .rms_norm_backward = rms_norm_backward,
      .rotary = rotary,
      .swiglu_forward = swiglu_forward,
      .swiglu_backward = swiglu_backward,
      .suffix_rows = suffix_rows,
      .sample = sample,
      .add = add,
      .sum_squares = sum_squares,
      .adamw = adamw,
      .graph_begin = nullptr,
      .graph_end = nullptr,
      .graph_launch = nullptr,
      .graph_destroy = nullptr,
      .graph_bytes = nullptr,
  };
  return table;
}

}  // namespace duokv::cpu
