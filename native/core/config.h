// What a user writes down: the model's shape and its design. Everything else derives from the plan (plan.h).
#pragma once

#include <cstdint>
#include <string>

namespace duokv {

enum class Design {
  LocalHistory,
  CurrentOnly,
  RepeatedCurrent,
  GlobalOnly,
  GlobalAdapters,
  Independent,
  Gqa2,
  Gqa4Cla2,
};
enum class Fusion { Joint, Separate };
enum class LocalSource { PerLayer, PairedInput, SharedKv };
enum class Provider { Boundary, Cross };

// spec/architecture.md sections 1 and 3. Names in configs are the same in camelCase; `design` and the options
// are the spec's strings ("local-history", "joint", "per-layer", "boundary", ...).
struct ModelConfig {
  Design design = Design::LocalHistory;
  Fusion fusion = Fusion::Joint;
  LocalSource local_source = LocalSource::PerLayer;
  Provider provider = Provider::Boundary;
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t ffn = 0;
  int64_t lower_layers = 0;
  int64_t upper_layers = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t window = 1;          // local bank width W, the current position included
  int64_t history_window = 0;  // caps m_t; repeated-current only
  int64_t adapter_rank = 0;    // global-adapters only
  double rope_theta = 10000.0;
  double rope_scale = 1.0;
  double rms_norm_eps = 1e-5;

  int64_t layers() const { return lower_layers + upper_layers; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t query_width() const { return query_heads * head_dim; }
};

// Strings of the options, as configs spell them; parse_* throw ERR_CONFIG naming the key and the choices.
const char* name(Design);
const char* name(Fusion);
const char* name(LocalSource);
const char* name(Provider);
Design parse_design(const std::string&);
Fusion parse_fusion(const std::string&);
LocalSource parse_local_source(const std::string&);
Provider parse_provider(const std::string&);

// Throws ERR_CONFIG with the reason unless the shape and the combination of options are legal.
void validate(const ModelConfig&);

}  // namespace duokv
