// The head and its loss, chunked over rows, so that [m, V] logits never exist:
//   logits = x · Eᵀ;  nll and dlogits from them (cross_entropy.cu);  dx = dlogits · E;  dE += dlogitsᵀ · x.
// Under BF16 the operands x, E and dlogits are rounded, logits and gradients are FP32.
//
// Roofline: 2 m V d FLOPs forward, 6 m V d with gradients, beside 4 m V bytes of logits written and read
// again (8 m V, or 6 m V under BF16, with gradients). m = 131,072, V = 32,000, d = 768 under BF16: 19.3
// TFLOP, 32 ms at 600 TFLOP/s, and 8 to 17 ms for the logits.
#include <algorithm>

#include "cuda/linear.h"
#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

// Rows of logits held at once: 256 MiB of them, in whole tiles.
int64_t chunk_rows(int64_t vocab) {
  constexpr int64_t kTile = 128, kElements = int64_t{1} << 26;
  return std::max(kTile, kElements / vocab / kTile * kTile);
}

}  // namespace

void linear_cross_entropy(ops::Device& device, const ops::LinearCrossEntropyArgs& args) {
  const int64_t vocab = args.embedding.n, d = args.embedding.k;
  const int64_t most = chunk_rows(vocab), rows_held = std::min(args.m, most);
  const bool bf16_operands = args.mode == ops::ProductMode::BF16, gradients = args.dx != nullptr;
  Parts parts;
  const size_t logits_at = parts.add<float>(rows_held * vocab),
               embedding_at = parts.add<bf16>(bf16_operands ? transient(args.embedding) : 0),
               x_at = parts.add<bf16>(bf16_operands ? rows_held * d : 0),
               dlogits_at = parts.add<bf16>(bf16_operands && gradients ? rows_held * vocab : 0);
  void* block = device.workspace(parts.bytes());
  auto* logits = part<float>(block, logits_at);
  auto* x_copy = part<bf16>(block, x_at);
  auto* dlogits_copy = bf16_operands && gradients ? part<bf16>(block, dlogits_at) : nullptr;
  const void* embedding = args.embedding.data;
  if (bf16_operands) embedding = rounded(device, args.embedding, part<bf16>(block, embedding_at));
  const ops::DType operands = bf16_operands ? ops::DType::BF16 : ops::DType::F32;

  for (int64_t first = 0; first < args.m; first += most) {
    const int64_t rows = std::min(most, args.m - first);
    const void* x = args.x + first * d;
    if (bf16_operands) {
      check(to_bf16(args.x + first * d, rows * d, x_copy, device.stream), "linear_cross_entropy");
      x = x_copy;
    }
    // The algorithm does not depend on m: a row's loss is its own.
    device.products.run({.rows = rows,
                         .columns = vocab,
                         .depth = d,
                         .a = x,
                         .a_transposed = false,
                         .b = embedding,
                         .b_transposed = true,
                         .operands = operands,
                         .c = logits,
                         .result = ops::DType::F32,
                         .accumulate = false,
                         .reference_rows = reference_rows(most),
                         .may_split_depth = false},
                        device.stream);
    check(cross_entropy({.logits = logits,
                         .rows = rows,
                         .vocab = vocab,
                         .targets = args.targets + first,
                         .token_scale = gradients ? args.token_scale + first : nullptr,
                         .nll = args.nll + first,
                         .dlogits = dlogits_copy},
                        device.stream),
          "linear_cross_entropy");
    if (!gradients) continue;
    const void* dlogits = bf16_operands ? static_cast<const void*>(dlogits_copy) : logits;
    device.products.run({.rows = rows,
                         .columns = d,
                         .depth = vocab,
                         .a = dlogits,
                         .a_transposed = false,
                         .b = embedding,
                         .b_transposed = false,
                         .operands = operands,
                         .c = args.dx + first * d,
                         .result = ops::DType::F32,
                         .accumulate = false,
                         .reference_rows = reference_rows(most),
                         .may_split_depth = false},
                        device.stream);
    device.products.run({.rows = vocab,
                         .columns = d,
                         .depth = rows,
                         .a = dlogits,
                         .a_transposed = true,
                         .b = x,
                         .b_transposed = false,
                         .operands = operands,
                         .c = args.dembedding,
                         .result = ops::DType::F32,
                         .accumulate = true,
                         .reference_rows = vocab,
                         .may_split_depth = true},
                        device.stream);
  }
}

}  // namespace duokv::cuda
