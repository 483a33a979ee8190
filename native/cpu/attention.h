// Attention inside the CPU backend: what a query sees, and the two ways attention_forward computes it.
//
// Keys are addressed by absolute position. Both ways cut positions into blocks at fixed multiples, reduce
// every block in the order of its positions and add blocks in ascending order, bank after bank. A query's
// result therefore depends on what it sees alone: not on its batch mates, its row, the slots its entries lie
// in, the queries computed with it, or the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/ops.h"
#include "ops/rounding.h"

namespace duokv::cpu {

// Absolute positions begin … end-1; empty when end <= begin.
struct Span {
  int32_t begin = 0, end = 0;
  bool empty() const { return end <= begin; }
  int64_t size() const { return empty() ? 0 : end - begin; }
};

inline Span intersect(Span a, Span b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

inline Span unite(Span a, Span b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

// Tiles and accumulators hold head dimensions padded with zeros to a multiple of every vector length.
inline constexpr int64_t kPadding = 16;

// A row's running softmax: the largest score so far, and Σ exp(score - max). While a bank's keys are gone
// through, `max` is the largest product of query and key, of which a score is scale times and the bias more.
struct Running {
  float max = -std::numeric_limits<float>::infinity(), sum = 0;
};

// The arguments with what every route derives from them.
struct AttentionCall {
  explicit AttentionCall(const ops::AttentionArgs& arguments);

  const ops::AttentionArgs& args;
  int64_t
      group;  // query heads of a KV head; their queries are stacked as rows, row = position * group + head
  int64_t padded;  // head_dim rounded up to kPadding
  bool bf16;       // operands of products are rounded

  Span stored(int32_t bank, int64_t row) const {
    const ops::BankRow& r = args.banks[bank].rows[row];
    return {r.first, r.first + r.count};
  }
  // The stored entries of a bank that query t of a row sees.
  Span visible(int32_t bank, int64_t row, int64_t t) const {
    const int64_t position = int64_t{args.positions[row]} + t;
    int64_t begin = args.document_start[row * args.queries + t];
    if (const int32_t window = args.banks[bank].window) begin = std::max(begin, position - window + 1);
    const Span s = stored(bank, row);
    return {static_cast<int32_t>(std::max<int64_t>(begin, s.begin)),
            static_cast<int32_t>(std::min<int64_t>(position + 1, s.end))};
  }
  // The union of what queries begin … end-1 see.
  Span visible(int32_t bank, int64_t row, int64_t begin, int64_t end) const {
    Span all;
    for (int64_t t = begin; t < end; ++t) all = unite(all, visible(bank, row, t));
    return all;
  }
  float bias(int32_t bank, int64_t row, int64_t t) const {
    const float* values = args.banks[bank].bias;
    return values ? values[row * args.queries + t] : 0.0f;
  }
  // The running softmax of scores that one of products is; their weights are the same.
  Running scores(Running products, float bias) const {
    return {std::fma(args.scale, products.max, bias), products.sum};  // as the backward pass rounds it
  }
  // Where query t's first head of a KV head starts in q and out; its other heads follow.
  int64_t query_offset(int64_t row, int64_t t, int64_t kv_head) const {
    return ((row * args.queries + t) * args.query_heads + kv_head * group) * args.head_dim;
  }
  // The same in one bank's lse.
  int64_t lse_offset(int32_t bank, int64_t row, int64_t t, int64_t kv_head) const {
    return ((bank * args.batch + row) * args.queries + t) * args.query_heads + kv_head * group;
  }
};

// Throws InvalidArgument.
void check_attention(const ops::AttentionArgs& args);

// Many queries: keys and values packed once, register-blocked products.
void tiled_attention(ops::Device* device, const AttentionCall& call);
// A few queries: the banks are read once, where they lie. The last bits differ from tiled_attention's.
void streamed_attention(ops::Device* device, const AttentionCall& call);

}  // namespace duokv::cpu
