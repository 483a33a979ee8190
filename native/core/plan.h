// A design is data: a config becomes a table with one row per layer, and every program, name, count and
// suffix length derives from that table. Nothing outside plan.cpp and config.cpp asks which design it is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/config.h"

namespace duokv {

inline constexpr int32_t kNone = -1;

// A parameter tensor. Matrices are [out, in], row-major. `offset` is in elements from the start of the arena.
struct Parameter {
  std::string name;  // Hugging Face Llama names, spec/architecture.md section 5
  std::vector<int64_t> shape;
  int64_t offset;
  int64_t elements;
  enum class Init { Normal, Ones, Zeros } init;
  double std;  // of Init::Normal
};

// Representation 0 is the token embedding, representation i + 1 the output of layer i.
//
// A projection turns one representation into K and V: k = RoPE(Wk u), v = Wv u with u =
// RMSNorm(representation; norm). It fills the bank of the same index, and runs as soon as its representation
// exists: before the attention of the layer whose input that is.
struct Projection {
  int32_t representation;
  int32_t norm, k_proj, v_proj;
};

// Storage for one projection's K and V.
struct BankPlan {
  std::string name;  // "layer.3", "global", "local.8"
  enum class Part { Lower, Global, Local } part;
  int64_t window;  // entries kept, 0: all
};

// One bank as a layer reads it. K and V normally come from the same bank; under provider `cross` they do not.
struct Read {
  int32_t k_bank, v_bank;
  int64_t window;          // entries visible to a query, itself included; 0: all earlier ones
  bool multiplicity_bias;  // adds log m_t, m_t = min(history_window, position in document + 1)
};

struct LayerPlan {
  bool upper;
  int32_t attention_norm, q_proj, o_proj;
  int32_t fusion_logit;              // kNone: one joint softmax over all reads
  std::vector<int32_t> projections;  // of this layer's input representation, run before its attention
  std::vector<Read> reads;           // one or two; global before local
  int32_t ffn_norm, gate_proj, up_proj, down_proj;
  int32_t adapter_up, adapter_down;  // kNone: no adapter
};

struct Plan {
  ModelConfig config;
  std::vector<Parameter> parameters;
  int64_t arena_elements;   // all parameters, each at a 64-byte boundary
  int64_t parameter_count;  // without the padding
  int32_t embedding, final_norm;
  std::vector<LayerPlan> layers;
  std::vector<Projection> projections;
  std::vector<BankPlan> banks;  // banks[i] is filled by projections[i]
  bool has_global_bank;         // upper layers share one bank: `uniform` and `approximate` routes exist
  int64_t history_window;       // caps m_t; 0 where no read uses it

  const Parameter& parameter(int32_t index) const { return parameters[static_cast<size_t>(index)]; }
  // By name; throws ERR_TENSOR_NAME, or ERR_SHAPE unless it has `elements` elements.
  const Parameter& parameter(const std::string& name, int64_t elements) const;
};

// Validates the config (ERR_CONFIG) and builds its plan.
Plan make_plan(const ModelConfig&);

// Which of the last positions of a prompt each layer must compute.
struct Route {
  enum class Kind { Exact, Full, Uniform, Approximate } kind = Kind::Exact;
  int64_t suffix = 0;  // R of Approximate
};

struct Suffixes {
  std::vector<int64_t> query;       // [layers] query, output, residual and FFN positions
  std::vector<int64_t> projection;  // [projections] K/V-input positions
  bool exact;
};

// Positions that a prefill of `n` appended positions computes (spec/execution.md section 1), by one backward
// walk over the plan: which positions of this representation does anyone still need? Throws ERR_CONFIG where
// the route does not exist.
Suffixes suffix_lengths(const Plan&, int64_t n, const Route&);

// Positions summed over the upper layers: K/V inputs of their projections (the provider not counted),
// query/output.
struct PositionCounts {
  int64_t kv_input, query_output;
};
PositionCounts position_counts(const Plan&, const Suffixes&);

// The shortest suffix R that is enough for every upper layer (route `uniform`), before it is capped by the
// prompt.
int64_t uniform_suffix(const Plan&);

// Complete-cache bytes of `batch` rows of `n` positions by formula-free summation over the banks, at
// `element` bytes each.
struct CacheBytes {
  int64_t lower = 0, global = 0, local = 0, document_ids = 0;
  int64_t total() const { return lower + global + local + document_ids; }
  int64_t& part(BankPlan::Part part) {
    return part == BankPlan::Part::Lower ? lower : part == BankPlan::Part::Global ? global : local;
  }
};
CacheBytes planned_cache_bytes(const Plan&, int64_t batch, int64_t n, int64_t element);

// Matrix-product FLOPs of one forward pass over documents (2 per multiply-add), spec/protocols.md section 2.
struct FlopCount {
  double projections = 0, ffn = 0, head = 0, attention = 0;
  double forward() const { return projections + ffn + head + attention; }
  double training() const { return 3 * forward(); }
};
// Attention over the visible pairs of documents of these lengths.
FlopCount count_flops(const Plan&, const std::vector<int64_t>& document_lengths);
// The same from average visible pairs per token: `causal_pairs` of an unbounded bank, `window_pairs` of a
// bounded one.
FlopCount count_flops(const Plan&, double tokens, double causal_pairs, double window_pairs);

}  // namespace duokv
