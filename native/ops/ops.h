// The op list: everything a backend must be able to do, declared once.
//
// `core` calls operations only through the `OpTable` below, a table of plain C functions over plain structs,
// so that a backend can be a library opened at run time. No exception crosses this line: every function
// returns a `Status`, and `last_error` gives the message of the calling thread's last failure.
//
// Conventions
//   * Pointers are device memory of the backend unless a comment says "host". Matrices are dense and
//     row-major.
//   * All activations, parameters and gradients are FP32; `ProductMode` says how the operands of a product
//     are rounded.
//   * Letters: m rows (batch * positions), d hidden width, f FFN width, k = kv_heads * head_dim, V
//     vocabulary.
//   * "accumulates" means `+=`; everything else is overwritten. Outputs alias inputs only where a comment
//     allows it.
//   * Every operation is deterministic: same inputs and thread count, same bits. Forward operations are also
//     row-independent: a row's result does not depend on m, on its index, or on the other rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace duokv::ops {

inline constexpr uint32_t kAbiVersion = 5;

enum Status : int32_t {
  kOk = 0,
  kInvalid = 1,      // arguments that no caller should pass; a bug in core
  kOutOfMemory = 2,  // the device cannot hold what was asked
  kUnavailable = 3,  // no such device, or a needed library is missing
  kInternal = 4,     // the backend failed
};

enum class DType : int32_t { F32 = 0, BF16 = 1 };

// How a product treats its FP32 operands (spec/numerics.md section 1). Accumulation is FP32 in every mode.
enum class ProductMode : int32_t {
  FP32 = 0,    // IEEE FP32
  BF16 = 1,    // operands rounded to BF16 (nearest even)
  TF32x3 = 2,  // attention only; a backend without tensor cores runs FP32, which is at least as accurate
};

struct Device;     // a backend's device: memory, threads or streams, scratch
struct PackCache;  // packed or converted copies of weights, keyed by weight and version
struct Graph;      // a recorded sequence of operations

struct DeviceInfo {
  char name[128];       // processor or card
  char isa[64];         // instruction set or compute capability in use
  char libraries[256];  // "oneDNN 2.6.3; Highway 1.0.3"
  char attention[128];  // how TF32x3 attention runs here
  int32_t threads;
  int64_t memory_total;    // bytes
  int64_t memory_free;     // bytes that may still be allocated; without limit on a planning device
  int64_t memory_used;     // bytes held through this device, scratch and packed weights included
  int64_t memory_peak;     // the largest memory_used so far
  int64_t memory_scratch;  // of memory_used: what operations hold for themselves
};

// ---------------------------------------------------------------- products

// W of y = x · Wᵀ: FP32 master [n, k]. With a pack cache the backend may keep a packed copy of `version`; a
// copy of another version is never read. Without one (training) it packs transiently.
struct Weight {
  const float* data;
  int64_t n, k;
  uint64_t version;
  PackCache* packs;  // null in training
};

// RMSNorm(x; weight) on the way into a product, as in RmsNormArgs. weight == null: x as it is.
struct Norm {
  const float* weight;
  float eps;
};

// y[i] [m, n_i] = residual + norm(x) [m, k] · W[i]ᵀ for up to three weights that read the same x.
struct LinearArgs {
  const float* x;
  int64_t m;
  int64_t
      per_row;  // positions per batch row: may choose the kernel, where m, which batch mates change, may not
  Norm norm;
  int32_t count;  // 1 … 3
  Weight w[3];
  float* y[3];
  const float* residual;  // [m, n_0], may be y[0]; null: 0. Only where count is 1
  bool round_output;  // round the product to BF16 before storing or adding: projections and FFN under BF16
  ProductMode mode;
};

// The feed-forward block with its residual: y = x + h · W_downᵀ, h = silu(gate) * up, gate = n · W_gateᵀ,
// up = n · W_upᵀ, n = norm(x). Without W_up (data == null): h = silu(gate), the adapter.
struct FeedForwardArgs {
  const float* x;  // [m, d]
  float* y;        // may be x
  int64_t m;
  int64_t per_row;  // as in LinearArgs
  Norm norm;
  Weight w_gate, w_up;  // [f, d]
  Weight w_down;        // [d, f]
  float* gate;          // [m, f] kept for the backward pass; null: not wanted
  float* up;            // likewise
  bool round_output;    // of every product, as in LinearArgs
  ProductMode mode;
};

// dx [m, k] = dy [m, n] · W;  dw [n, k] += dyᵀ · x.
struct LinearBackwardArgs {
  const float* x;
  const float* dy;
  int64_t m;
  Weight w;
  float* dx;  // null: not wanted
  bool accumulate_dx;
  float* dw;  // null: not wanted; accumulates
  ProductMode mode;
};

// Cross-entropy of logits = x [m, d] · Eᵀ without ever holding [m, V] logits: chunked over tokens.
struct LinearCrossEntropyArgs {
  const float* x;
  int64_t m;
  Weight embedding;          // [V, d]
  const int32_t* targets;    // [m], each in [0, V)
  const float* token_scale;  // [m] d(loss)/d(nll); null: forward only
  float* nll;                // [m] natural-log cross-entropy of every row, whatever its scale
  float* dx;                 // [m, d]; null: forward only
  float* dembedding;         // [V, d], accumulates; null: forward only
  ProductMode mode;
};

// ---------------------------------------------------------------- attention over up to two banks

// One row's stored entries: absolute positions first … first+count-1, position p at slot (slot + p - first) %
// capacity. Entry e of KV head h starts at k + h * head_stride + e_slot * position_stride (elements),
// likewise v.
struct BankRow {
  const void* k;
  const void* v;
  int32_t first, count, slot, capacity;
};

struct Bank {
  const BankRow* rows;  // [batch]
  int32_t longest;  // host: at least every row's count, for sizing a launch; chooses no order of summation
  DType dtype;
  int64_t head_stride, position_stride;  // elements; head_dim values are contiguous
  int32_t window;                        // query p reads p-window < i <= p; 0: every i <= p
  const float* bias;                     // [batch, queries], added to each score of this bank; null: 0
};

// Query t of row b has absolute position positions[b] + t and reads, in each bank, the stored entries i with
// max(document_start[b, t], p - window + 1) <= i <= p. One softmax over the union of the banks (paper eq. 1);
// an entry stored in both banks counts twice. Query head h reads KV head h * kv_heads / query_heads.
struct AttentionArgs {
  int64_t batch, queries;
  int32_t query_heads, kv_heads, head_dim;
  float scale;                    // 1/sqrt(head_dim)
  const float* q;                 // [batch, queries, query_heads, head_dim]
  const int32_t* positions;       // [batch]
  const int32_t* document_start;  // [batch, queries] absolute position at which the query's document starts
  int32_t bank_count;             // 1 or 2
  Bank banks[2];
  float* out;  // [batch, queries, query_heads, head_dim]
  // Log-sum-exp of each bank, -inf where it shows nothing; may be null. [bank_count, batch, queries,
  // query_heads]
  float* lse;
  ProductMode mode;
};

// Gradients of a bank, FP32, of every stored entry, in token-major layout [batch, count, kv_heads, head_dim]
// with the same count in every row. Accumulates.
struct BankGradient {
  float* dk;
  float* dv;
};

// Backward from the saved log-sum-exp. Where a query sees one entry in all, its score has exactly zero
// gradient.
struct AttentionBackwardArgs {
  AttentionArgs forward;  // out and lse as the forward pass left them; banks FP32
  const float* dout;      // as out
  float* dq;              // as q, overwritten
  BankGradient grads[2];
};

// Separate fusion: out = (1 - beta) * global + beta * local, beta = sigmoid(logit[head]). [m, heads,
// head_dim]
struct FuseArgs {
  const float* global;
  const float* local;
  const float* logit;  // [heads]
  int64_t m;
  int32_t heads, head_dim;
  float* out;
};
struct FuseBackwardArgs {
  FuseArgs forward;  // out unused
  const float* dout;
  float* dglobal;
  float* dlocal;
  float* dlogit;  // [heads], accumulates
};

// ---------------------------------------------------------------- cache

// Where a row's entries are written: entry i of the source goes to slot (slot + i) % capacity of both.
struct BankSlot {
  void* k;
  void* v;
  int32_t slot, capacity;
};

// Writes the entries k, v [batch, count, kv_heads, head_dim] (FP32) into each row's bank, K after its rotary
// embedding (as in RotaryArgs), both converted to dtype. k and v stay as they are.
struct CacheWriteArgs {
  const float* k;
  const float* v;
  int64_t batch, count;
  int32_t kv_heads, head_dim;
  const int32_t* positions;  // [batch, count] position within the document
  const float* table;
  DType dtype;
  int64_t head_stride, position_stride;
  const BankSlot* rows;  // [batch]
};

// dst [count, kv_heads, head_dim] (FP32) = entries of one row's bank, slots (slot + i) % capacity, i < count.
struct CacheReadArgs {
  const void* bank;
  int64_t count;
  int32_t slot, capacity, kv_heads, head_dim;
  DType dtype;
  int64_t head_stride, position_stride;
  float* dst;
};

// Copies entries bank to bank, all KV heads, same dtype and strides rules on both sides.
struct CacheCopyArgs {
  const void* src;
  int32_t src_slot, src_capacity;
  int64_t src_head_stride;
  void* dst;
  int32_t dst_slot, dst_capacity;
  int64_t dst_head_stride;
  int64_t count, position_stride;
  int32_t kv_heads, head_dim;
  DType dtype;
};

// ---------------------------------------------------------------- row-wise operations

// x [m, d] = table[tokens];  dtable[tokens[i]] += dx[i], summed in order of i.
struct EmbeddingArgs {
  const int32_t* tokens;  // [m], each in [0, V)
  int64_t m, d;
  const float* table;  // [V, d]
  float* x;
};
struct EmbeddingBackwardArgs {
  const int32_t* tokens;
  int64_t m, d, vocab;
  const float* dx;
  float* dtable;  // accumulates
};

// y = x * rstd * w, rstd = 1/sqrt(mean(x²) + eps), per row. y may alias x when rstd is null.
struct RmsNormArgs {
  const float* x;  // [m, d]
  const float* w;  // [d]
  int64_t m, d;
  float eps;
  float* y;
  float* rstd;  // [m], saved for backward; may be null
};
struct RmsNormBackwardArgs {
  const float* x;
  const float* w;
  const float* rstd;
  const float* dy;
  int64_t m, d;
  float* dx;  // [m, d]; may alias dy only when accumulate is false
  bool accumulate;
  float* dw;  // [d], accumulates; fixed row blocks, fixed order
};

// Rotary embedding in place, half-split layout: element i pairs with i + head_dim/2.
// table [positions, head_dim/2, 2] holds (cos, sin) by position within the document.
struct RotaryArgs {
  float* x;  // [m, heads, head_dim]
  int64_t m;
  int32_t heads, head_dim;
  const int32_t* positions;  // [m] position within the document
  const float* table;
  bool inverse;  // the backward pass: rotates by -angle
};

// h = silu(gate) * up, silu(z) = z * sigmoid(z). up == null: h = silu(gate) (the adapter). h may alias gate.
struct SwigluArgs {
  const float* gate;
  const float* up;
  int64_t n;  // elements
  float* h;
};
struct SwigluBackwardArgs {
  const float* gate;
  const float* up;  // null: silu
  const float* dh;
  int64_t n;
  float* dgate;  // may alias dh
  float* dup;    // null when up is null
};

// The last `keep` of each row's `count` vectors: dst [batch, keep, d] = src [batch, count, d][:,
// count-keep:]. With `scatter_add`, the transpose: dst [batch, count, d][:, count-keep:] += src [batch, keep,
// d].
struct SuffixRowsArgs {
  const float* src;
  int64_t batch, count, keep, d;
  bool scatter_add;
  float* dst;
};

// y += x
struct AddArgs {
  const float* x;
  int64_t n;
  float* y;
};

// ---------------------------------------------------------------- sampling

// How a row's token is drawn. Among equal logits lower ids come first.
struct SampleRow {
  float temperature;  // logits are divided by it; 0: the largest logit
  int32_t top_k;      // keeps this many of the largest logits, at least 1; at least V: all
  double top_p;       // in (0, 1]: of those, the fewest of the likeliest that hold this share of their mass
  double draw;        // uniform in [0, 1): which of the kept, in order of their ids
};

inline constexpr int64_t kMostSampled = int64_t{1} << 24;  // V, at most

// Draws a token from each row of logits. A row that has none to draw from, since its logit i is NaN or, being
// the largest, infinite, gives -1 - i and NaN. Backends whose processor fuses multiply-adds give the same
// tokens, because all masses are sums of integers (ops/sampling.h).
struct SampleArgs {
  const float* logits;       // [rows, V]
  int64_t rows, vocab;       // V: at most kMostSampled
  const SampleRow* options;  // [rows]
  int32_t* tokens;           // [rows]
  float* logprobs;           // [rows] log softmax(logits)[token], before temperature and truncation
};

// ---------------------------------------------------------------- optimiser

// *result (host) = Σ x², accumulated in FP64 in an order that depends on n only.
struct SumSquaresArgs {
  const float* x;
  int64_t n;
  double* result;
};

// AdamW with decoupled weight decay on all parameters in one pass, `g` scaled by `clip` first:
//   m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g²;  p = p (1 - lr wd) - lr (m / c1) / (sqrt(v / c2) + eps)
// with c1 = 1 - b1^update, c2 = 1 - b2^update.
struct AdamWArgs {
  float* p;
  const float* g;
  float* m;
  float* v;
  int64_t n;
  double lr, beta1, beta2, eps, weight_decay, clip;
  int64_t update;  // from 1
};

// ---------------------------------------------------------------- the table

struct OpTable {
  uint32_t abi_version;
  const char* backend;  // "cpu", "cuda"

  // threads 0: decide; options: device index, ""
  Status (*open)(const char* options, int32_t threads, Device** device);
  // A planning device like this one: operations check their arguments and take their scratch memory, but
  // nothing is computed, and memory costs nothing. Only what is uploaded may be read by the host; downloads
  // leave their destination as it is. What `info` says of its memory is what the same calls would take.
  Status (*open_planning)(Device*, Device** planning);
  void (*close)(Device*);
  Status (*info)(Device*, DeviceInfo*);
  const char* (*last_error)();

  Status (*allocate)(Device*, int64_t bytes, void** memory);  // 64-byte aligned, contents undefined
  void (*release)(Device*, void* memory);
  Status (*upload)(Device*, void* dst, const void* host_src, int64_t bytes);
  // Waits for the work queued before it.
  Status (*download)(Device*, void* host_dst, const void* src, int64_t bytes);
  Status (*copy)(Device*, void* dst, const void* src, int64_t bytes);
  Status (*zero)(Device*, void* dst, int64_t bytes);

  Status (*pack_cache_create)(Device*, PackCache**);
  void (*pack_cache_destroy)(Device*, PackCache*);
  int64_t (*pack_cache_bytes)(const PackCache*);

  Status (*linear_forward)(Device*, const LinearArgs*);
  Status (*linear_backward)(Device*, const LinearBackwardArgs*);
  Status (*feed_forward)(Device*, const FeedForwardArgs*);
  Status (*linear_cross_entropy)(Device*, const LinearCrossEntropyArgs*);

  Status (*attention_forward)(Device*, const AttentionArgs*);
  Status (*attention_backward)(Device*, const AttentionBackwardArgs*);
  Status (*fuse_forward)(Device*, const FuseArgs*);
  Status (*fuse_backward)(Device*, const FuseBackwardArgs*);

  Status (*cache_write)(Device*, const CacheWriteArgs*);
  Status (*cache_read)(Device*, const CacheReadArgs*);
  Status (*cache_copy)(Device*, const CacheCopyArgs*);

  Status (*embedding_forward)(Device*, const EmbeddingArgs*);
  Status (*embedding_backward)(Device*, const EmbeddingBackwardArgs*);
  Status (*rms_norm_forward)(Device*, const RmsNormArgs*);
  Status (*rms_norm_backward)(Device*, const RmsNormBackwardArgs*);
  Status (*rotary)(Device*, const RotaryArgs*);
  Status (*swiglu_forward)(Device*, const SwigluArgs*);
  Status (*swiglu_backward)(Device*, const SwigluBackwardArgs*);
  Status (*suffix_rows)(Device*, const SuffixRowsArgs*);
  Status (*sample)(Device*, const SampleArgs*);
  Status (*add)(Device*, const AddArgs*);
  Status (*sum_squares)(Device*, const SumSquaresArgs*);
  Status (*adamw)(Device*, const AdamWArgs*);

  // Graphs; null in a backend without them. Between begin and end operations are recorded instead of run;
  // allocate, upload, download and sum_squares fail there. A launch runs the recorded operations in order on
  // the memory they named, with the bits they would have given one by one.
  Status (*graph_begin)(Device*);
  Status (*graph_end)(Device*, Graph** graph);  // null graph: drops the recording
  Status (*graph_launch)(Device*, Graph*);
  void (*graph_destroy)(Device*, Graph*);
  int64_t (*graph_bytes)(const Graph*);  // by which free memory fell while the graph was made
};

}  // namespace duokv::ops
