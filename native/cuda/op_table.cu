// The op table: checks what the host can check of an operation's arguments, gives it scratch memory and
// queues it.
#include <climits>
#include <string>

#include "cuda/linear.h"
#include "cuda/operations.h"
#include "cuda/pack_cache.h"

namespace duokv::cuda {
namespace {

using ops::Device;
using ops::Status;

// Runs `body(*args)` on the device.
template <class Args, class Body>
Status operation(Device* device, const Args* args, Body&& body) noexcept {
  return guarded(device, [&] {
    require(args != nullptr, "args is null");
    body(*args);
  });
}

void require_product_mode(ops::ProductMode mode, const char* message) {
  require(mode == ops::ProductMode::FP32 || mode == ops::ProductMode::BF16, message);
}

void require_norm_width(int64_t d) {
  if (d < 1 || d > kMaxNormWidth)
    throw Unavailable("rms_norm on CUDA: d is " + std::to_string(d) + ", must be 1 to " +
                      std::to_string(kMaxNormWidth));
}

// ---------------------------------------------------------------- products

Status linear_forward_entry(Device* device, const ops::LinearArgs* args) {
  return operation(device, args, [&](const ops::LinearArgs& a) {
    require(a.count >= 1 && a.count <= 3, "linear_forward: count must be in [1, 3]");
    require(a.x && a.m >= 1 && a.per_row >= 1, "linear_forward: x is null, or m or per_row is not positive");
    require_product_mode(a.mode, "linear_forward: mode must be FP32 or BF16");
    for (int32_t i = 0; i < a.count; ++i) {
      const ops::Weight& w = a.w[i];
      require(w.data && a.y[i], "linear_forward: w or y is null");
      require(w.n >= 1 && w.k >= 1 && w.k == a.w[0].k,
              "linear_forward: n and k must be at least 1, and k the same for all weights");
      require(w.packs == a.w[0].packs, "linear_forward: weights of one call must share their pack cache");
    }
    require(!a.residual || a.count == 1, "linear_forward: a residual needs count 1");
    if (a.norm.weight) require_norm_width(a.w[0].k);
    linear_forward(*device, a);
  });
}

Status feed_forward_entry(Device* device, const ops::FeedForwardArgs* args) {
  return operation(device, args, [&](const ops::FeedForwardArgs& a) {
    const bool gated = a.w_up.data != nullptr;
    require(a.x && a.y && a.norm.weight, "feed_forward: x, y or norm is null");
    require(a.w_gate.data && a.w_down.data, "feed_forward: w_gate or w_down is null");
    require(a.m >= 1 && a.per_row >= 1 && a.w_gate.n >= 1,
            "feed_forward: m, per_row and f must be at least 1");
    require(a.w_down.n == a.w_gate.k && a.w_down.k == a.w_gate.n, "feed_forward: w_down must be [d, f]");
    require(!gated || (a.w_up.n == a.w_gate.n && a.w_up.k == a.w_gate.k),
            "feed_forward: w_up must be [f, d]");
    require(a.w_down.packs == a.w_gate.packs && (!gated || a.w_up.packs == a.w_gate.packs),
            "feed_forward: its weights must share their pack cache");
    require_product_mode(a.mode, "feed_forward: mode must be FP32 or BF16");
    require_norm_width(a.w_gate.k);
    feed_forward(*device, a);
  });
}

Status linear_backward_entry(Device* device, const ops::LinearBackwardArgs* args) {
  return operation(device, args, [&](const ops::LinearBackwardArgs& a) {
    require(a.dy != nullptr, "linear_backward: dy is null");
    require(!a.dx || a.w.data, "linear_backward: dx is wanted but w is null");
    require(!a.dw || a.x, "linear_backward: dw is wanted but x is null");
    require(a.m >= 1 && a.w.n >= 1 && a.w.k >= 1, "linear_backward: m, n and k must be at least 1");
    require_product_mode(a.mode, "linear_backward: mode must be FP32 or BF16");
    linear_backward(*device, a);
  });
}

Status linear_cross_entropy_entry(Device* device, const ops::LinearCrossEntropyArgs* args) {
  return operation(device, args, [&](const ops::LinearCrossEntropyArgs& a) {
    require(a.x && a.embedding.data && a.targets && a.nll,
            "linear_cross_entropy: x, embedding, targets or nll is null");
    require(a.m >= 1 && a.embedding.n >= 1 && a.embedding.k >= 1,
            "linear_cross_entropy: m, V and d must be at least 1");
    require(!a.token_scale == !a.dx && !a.dx == !a.dembedding,
            "linear_cross_entropy: token_scale, dx and dembedding must be all given or all null");
    require_product_mode(a.mode, "linear_cross_entropy: mode must be FP32 or BF16");
    linear_cross_entropy(*device, a);
  });
}

// ---------------------------------------------------------------- attention

void require_attention(const ops::AttentionArgs& a) {
  require(a.batch >= 0 && a.queries >= 0, "attention: batch or queries is negative");
  require(a.kv_heads > 0 && a.query_heads > 0, "attention: an empty head");
  require(a.query_heads % a.kv_heads == 0, "attention: query_heads is not a multiple of kv_heads");
  require(a.bank_count == 1 || a.bank_count == 2, "attention: bank_count is neither 1 nor 2");
  for (int32_t bank = 0; bank < a.bank_count; ++bank) {
    require(a.banks[bank].window >= 0, "attention: a window is negative");
    require(a.banks[bank].longest >= 0, "attention: a bank's longest row is negative");
  }
  // Not a mistake of core, which knows no backend's limits.
  if (a.head_dim != 16 && a.head_dim != 32 && a.head_dim != 64 && a.head_dim != 128)
    throw Unavailable("attention on CUDA: head_dim is " + std::to_string(a.head_dim) +
                      ", must be 16, 32, 64 or 128");
}

Status attention_forward_entry(Device* device, const ops::AttentionArgs* args) {
  return operation(device, args, [&](const ops::AttentionArgs& a) {
    require_attention(a);
    if (a.batch == 0 || a.queries == 0) return;
    check(attention_forward(a, device->workspace(attention_forward_workspace(a)), device->stream),
          "attention_forward");
  });
}

Status attention_backward_entry(Device* device, const ops::AttentionBackwardArgs* args) {
  return operation(device, args, [&](const ops::AttentionBackwardArgs& a) {
    require_attention(a.forward);
    require(a.forward.lse != nullptr, "attention_backward: lse is null");
    for (int32_t bank = 0; bank < a.forward.bank_count; ++bank)
      require(a.forward.banks[bank].dtype == ops::DType::F32, "attention_backward: a bank is not FP32");
    if (a.forward.batch == 0 || a.forward.queries == 0) return;
    check(attention_backward(a, device->workspace(attention_backward_workspace(a)), device->stream),
          "attention_backward");
  });
}

void require_fuse(const ops::FuseArgs& a) {
  require(a.m >= 0, "fuse: m is negative");
  require(a.heads > 0 && a.head_dim > 0, "fuse: an empty head");
}

Status fuse_forward_entry(Device* device, const ops::FuseArgs* args) {
  return operation(device, args, [&](const ops::FuseArgs& a) {
    require_fuse(a);
    check(fuse_forward(a, device->stream), "fuse_forward");
  });
}

Status fuse_backward_entry(Device* device, const ops::FuseBackwardArgs* args) {
  return operation(device, args, [&](const ops::FuseBackwardArgs& a) {
    require_fuse(a.forward);
    check(fuse_backward(a, device->workspace(fuse_backward_workspace(a)), device->stream), "fuse_backward");
  });
}

// ---------------------------------------------------------------- cache

Status cache_write_entry(Device* device, const ops::CacheWriteArgs* args) {
  return operation(device, args, [&](const ops::CacheWriteArgs& a) {
    require(a.batch >= 0 && a.count >= 0 && a.kv_heads >= 1, "cache_write: a dimension is out of range");
    require(a.head_dim >= 2 && a.head_dim % 2 == 0, "cache_write: head_dim is not a positive even number");
    check(cache_write(a, device->stream), "cache_write");
  });
}

Status cache_read_entry(Device* device, const ops::CacheReadArgs* args) {
  return operation(device, args, [&](const ops::CacheReadArgs& a) {
    require(a.kv_heads >= 1 && a.head_dim >= 1 && a.slot >= 0,
            "cache_read: a dimension or the slot is out of range");
    require(a.count >= 0 && a.count <= a.capacity, "cache_read: count is not in [0, capacity]");
    check(cache_read(a, device->stream), "cache_read");
  });
}

Status cache_copy_entry(Device* device, const ops::CacheCopyArgs* args) {
  return operation(device, args, [&](const ops::CacheCopyArgs& a) {
    require(a.kv_heads >= 1 && a.head_dim >= 1, "cache_copy: a dimension is out of range");
    require(a.src_slot >= 0 && a.dst_slot >= 0, "cache_copy: a slot is negative");
    require(a.count >= 0 && a.count <= a.src_capacity && a.count <= a.dst_capacity,
            "cache_copy: count is not in [0, capacity] of both banks");
    check(cache_copy(a, device->stream), "cache_copy");
  });
}

// ---------------------------------------------------------------- row-wise operations

Status embedding_forward_entry(Device* device, const ops::EmbeddingArgs* args) {
  return operation(device, args, [&](const ops::EmbeddingArgs& a) {
    require(a.m >= 0 && a.d >= 1, "embedding_forward: m is negative or d is not positive");
    check(embedding_forward(a, device->stream), "embedding_forward");
  });
}

Status embedding_backward_entry(Device* device, const ops::EmbeddingBackwardArgs* args) {
  return operation(device, args, [&](const ops::EmbeddingBackwardArgs& a) {
    require(a.m >= 0 && a.d >= 1 && a.vocab >= 1,
            "embedding_backward: m is negative, or d or vocab is not positive");
    void* workspace = device->workspace(embedding_backward_workspace(a.m, a.vocab));
    check(embedding_backward(a, workspace, device->stream), "embedding_backward");
  });
}

Status rms_norm_forward_entry(Device* device, const ops::RmsNormArgs* args) {
  return operation(device, args, [&](const ops::RmsNormArgs& a) {
    require(a.m >= 0, "rms_norm_forward: m is negative");
    require_norm_width(a.d);
    require(a.y != a.x || !a.rstd, "rms_norm_forward: y may be x only when rstd is null");
    check(rms_norm_forward(a, device->stream), "rms_norm_forward");
  });
}

Status rms_norm_backward_entry(Device* device, const ops::RmsNormBackwardArgs* args) {
  return operation(device, args, [&](const ops::RmsNormBackwardArgs& a) {
    require(a.m >= 0, "rms_norm_backward: m is negative");
    require_norm_width(a.d);
    require(a.dx != a.dy || !a.accumulate, "rms_norm_backward: dx may be dy only when not accumulating");
    void* workspace = device->workspace(rms_norm_backward_workspace(a.m, a.d));
    check(rms_norm_backward(a, workspace, device->stream), "rms_norm_backward");
  });
}

Status rotary_entry(Device* device, const ops::RotaryArgs* args) {
  return operation(device, args, [&](const ops::RotaryArgs& a) {
    require(a.m >= 0 && a.heads >= 1, "rotary: m is negative or heads is not positive");
    require(a.head_dim >= 2 && a.head_dim % 2 == 0, "rotary: head_dim is not a positive even number");
    check(rotary(a, device->stream), "rotary");
  });
}

Status swiglu_forward_entry(Device* device, const ops::SwigluArgs* args) {
  return operation(device, args, [&](const ops::SwigluArgs& a) {
    require(a.n >= 0, "swiglu_forward: n is negative");
    check(swiglu_forward(a, device->stream), "swiglu_forward");
  });
}

Status swiglu_backward_entry(Device* device, const ops::SwigluBackwardArgs* args) {
  return operation(device, args, [&](const ops::SwigluBackwardArgs& a) {
    require(a.n >= 0, "swiglu_backward: n is negative");
    require(!a.up == !a.dup, "swiglu_backward: up and dup must both be given or both be null");
    check(swiglu_backward(a, device->stream), "swiglu_backward");
  });
}

Status suffix_rows_entry(Device* device, const ops::SuffixRowsArgs* args) {
  return operation(device, args, [&](const ops::SuffixRowsArgs& a) {
    require(a.batch >= 0 && a.d >= 1, "suffix_rows: batch is negative or d is not positive");
    require(a.keep >= 0 && a.keep <= a.count, "suffix_rows: keep is not in [0, count]");
    check(suffix_rows(a, device->stream), "suffix_rows");
  });
}

Status add_entry(Device* device, const ops::AddArgs* args) {
  return operation(device, args, [&](const ops::AddArgs& a) {
    require(a.n >= 0, "add: n is negative");
    check(add(a, device->stream), "add");
  });
}

Status sample_entry(Device* device, const ops::SampleArgs* args) {
  return operation(device, args, [&](const ops::SampleArgs& a) {
    require(a.rows >= 0, "sample: rows is negative");
    require(a.vocab >= 1 && a.vocab <= ops::kMostSampled, "sample: vocab is not in [1, 2^24]");
    check(sample(a, device->stream), "sample");
  });
}

// ---------------------------------------------------------------- optimiser

Status sum_squares_entry(Device* device, const ops::SumSquaresArgs* args) {
  return operation(device, args, [&](const ops::SumSquaresArgs& a) {
    require(a.n >= 0 && a.result, "sum_squares: n is negative or result is null");
    device->require_not_recording("sum_squares");
    // The sum comes first in the block, and travels to the host from there.
    constexpr size_t kSumBytes = 64;
    auto* block = static_cast<char*>(device->workspace(kSumBytes + sum_squares_workspace(a.n)));
    auto* sum = reinterpret_cast<double*>(block);
    check(sum_squares(a.x, a.n, sum, block + kSumBytes, device->stream), "sum_squares");
    device->staging.download(a.result, sum, sizeof *sum);
  });
}

Status adamw_entry(Device* device, const ops::AdamWArgs* args) {
  return operation(device, args, [&](const ops::AdamWArgs& a) {
    require(a.n >= 0, "adamw: n is negative");
    require(a.update >= 1, "adamw: update counts from 1");
    check(adamw(a, device->stream), "adamw");
  });
}

constexpr ops::OpTable kTable = {
    .abi_version = ops::kAbiVersion,
    .backend = "cuda",
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
    .linear_forward = linear_forward_entry,
    .linear_backward = linear_backward_entry,
    .feed_forward = feed_forward_entry,
    .linear_cross_entropy = linear_cross_entropy_entry,
    .attention_forward = attention_forward_entry,
    .attention_backward = attention_backward_entry,
    .fuse_forward = fuse_forward_entry,
    .fuse_backward = fuse_backward_entry,
    .cache_write = cache_write_entry,
    .cache_read = cache_read_entry,
    .cache_copy = cache_copy_entry,
    .embedding_forward = embedding_forward_entry,
    .embedding_backward = embedding_backward_entry,
    .rms_norm_forward = rms_norm_forward_entry,
    .rms_norm_backward = rms_norm_backward_entry,
    .rotary = rotary_entry,
    .swiglu_forward = swiglu_forward_entry,
    .swiglu_backward = swiglu_backward_entry,
    .suffix_rows = suffix_rows_entry,
    .sample = sample_entry,
    .add = add_entry,
    .sum_squares = sum_squares_entry,
    .adamw = adamw_entry,
    .graph_begin = graph_begin,
    .graph_end = graph_end,
    .graph_launch = graph_launch,
    .graph_destroy = graph_destroy,
    .graph_bytes = graph_bytes,
};

}  // namespace
}  // namespace duokv::cuda

// What native/ops/load.h looks for.
extern "C" __attribute__((visibility("default"))) const duokv::ops::OpTable* duokv_cuda_op_table() {
  return &duokv::cuda::kTable;
}
