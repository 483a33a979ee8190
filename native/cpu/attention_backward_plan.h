// How attention's gradients are cut into work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/attention.h"
#include "ops/ops.h"
#include "ops/rounding.h"

namespace duokv::cpu {

// Per query: what P = exp(score - lse) and dS = P ∘ (dP - delta) need. Where a query sees one entry in all
// its weight is 1 whatever the score, and `factor` 0 makes dS exactly so.
struct QueryTerms {
  float lse, delta, factor;
};

// Queries and output gradients of every row and KV head, stacked. A block of them is [block_rows, padded]
// FP32 values or, in as many words, pairs of BF16 values: [block_rows, padded / 2] for products along
// columns, then [block_rows / 2, padded] for those along rows.
struct Stacked {
  float* q;           // [batch, kv_heads, blocks] of blocks
  float* dout;        // the same
  QueryTerms* terms;  // [batch, kv_heads, queries · group]
  uint8_t* finite;    // [batch, kv_heads, blocks] whether all of a block's q and dout are
};

// A tile of a row of a bank and the query blocks that see some of it. Tile i holds positions i · kKeys …
struct KeyTile {
  // A multiple of every target's panels and register blocks.
  static constexpr int64_t kKeys = 192;

  int32_t bank;
  int64_t tile, first_block, last_block;
  int64_t pairs;  // visible ones of a query head
  Span seen;      // what some query sees

  Span span() const { return {static_cast<int32_t>(tile * kKeys), static_cast<int32_t>((tile + 1) * kKeys)}; }
};

// A run of one row's key tiles, for one KV head: the owner of these keys' gradients, and of its own part of
// dq.
struct KeyUnit {
  int64_t row;
  int32_t head;
  size_t first, last;  // key_tiles[row], last exclusive
  int64_t begin, end;  // query positions
  int64_t pairs;
  float* dq;  // [(end - begin) · group, padded]
};

// Who computes what, and where. It depends on the call alone.
struct BackwardPlan {
  BackwardPlan(const AttentionCall& attention, const ops::AttentionBackwardArgs& arguments, int64_t values);

  const AttentionCall& call;
  const ops::AttentionBackwardArgs& args;
  int64_t block;        // query positions of a block
  int64_t step_values;  // of a step of a product: 1, or 2 where it is of BF16 pairs
  Stacked stacked;
  std::vector<Span> block_spans;                // [bank_count, batch, blocks] what a block sees
  std::vector<std::vector<KeyTile>> key_tiles;  // by row, bank after bank
  std::vector<KeyUnit> units;                   // by row, KV head, group
  std::vector<size_t> first_units;              // [batch · kv_heads + 1]

  int64_t blocks() const { return ceil_div(call.args.queries, block); }
  int64_t stack_rows() const { return call.args.queries * call.group; }
  int64_t block_rows() const { return round_up(block * call.group, 2); }
  int64_t block_index(int64_t row, int64_t head, int64_t b) const {
    return (row * call.args.kv_heads + head) * blocks() + b;
  }
  uint8_t& finite(int64_t row, int64_t head, int64_t b) const {
    return stacked.finite[block_index(row, head, b)];
  }
  // Block b of q or dout.
  template <class T>
  T* stacked_block(float* stack, int64_t row, int64_t head, int64_t b) const {
    return reinterpret_cast<T*>(stack) + block_index(row, head, b) * block_rows() * call.padded;
  }
  int64_t stack(int64_t row, int64_t head) const { return (row * call.args.kv_heads + head) * stack_rows(); }
  Span block_span(int32_t bank, int64_t row, int64_t b) const {
    return block_spans[static_cast<size_t>((bank * call.args.batch + row) * blocks() + b)];
  }
};

}  // namespace duokv::cpu
