#include "core/config.h"

#include <cmath>

#include "core/error.h"

namespace duokv {
namespace {

template <class E>
struct Choice {
  E value;
  const char* name;
};

constexpr Choice<Design> kDesigns[] = {
    {Design::LocalHistory, "local-history"},
    {Design::CurrentOnly, "current-only"},
    {Design::RepeatedCurrent, "repeated-current"},
    {Design::GlobalOnly, "global-only"},
    {Design::GlobalAdapters, "global-adapters"},
    {Design::Independent, "independent"},
    {Design::Gqa2, "gqa2"},
    {Design::Gqa4Cla2, "gqa4-cla2"},
};
constexpr Choice<Fusion> kFusions[] = {{Fusion::Joint, "joint"}, {Fusion::Separate, "separate"}};
constexpr Choice<LocalSource> kLocalSources[] = {
    {LocalSource::PerLayer, "per-layer"},
    {LocalSource::PairedInput, "paired-input"},
    {LocalSource::SharedKv, "shared-kv"},
};
constexpr Choice<Provider> kProviders[] = {{Provider::Boundary, "boundary"}, {Provider::Cross, "cross"}};

template <class E, size_t N>
const char* name_of(const Choice<E> (&choices)[N], E value) {
  for (const auto& c : choices)
    if (c.value == value) return c.name;
  return "";
}

template <class E, size_t N>
E parse(const Choice<E> (&choices)[N], const char* key, const std::string& text) {
  std::string all;
  for (const auto& c : choices) {
    if (text == c.name) return c.value;
    all += (all.empty() ? "" : ", ") + std::string(c.name);
  }
  throw Error("ERR_CONFIG", std::string(key) + " is '" + text + "'; it must be one of " + all);
}

[[noreturn]] void reject(const std::string& reason) { throw Error("ERR_CONFIG", reason); }

void at_least(const char* key, int64_t value, int64_t least) {
  if (value < least)
    reject(std::string(key) + " is " + std::to_string(value) + "; it must be at least " +
           std::to_string(least));
}

// Beyond this no product of two sizes fits the index types; it is far above any model this engine is for.
constexpr int64_t kLargest = int64_t{1} << 24;
constexpr int64_t kMostLayers = 1024;

void in_range(const char* key, int64_t value) {
  at_least(key, value, 1);
  if (value > kLargest)
    reject(std::string(key) + " is " + std::to_string(value) + "; it must be at most " +
           std::to_string(kLargest));
}

void positive(const char* key, double value) {
  if (!(value > 0) || !std::isfinite(value))
    reject(std::string(key) + " is " + std::to_string(value) + "; it must be a positive number");
}

bool has_local_bank(Design design) {
  return design == Design::LocalHistory || design == Design::CurrentOnly || design == Design::RepeatedCurrent;
}

}  // namespace

const char* name(Design value) { return name_of(kDesigns, value); }
const char* name(Fusion value) { return name_of(kFusions, value); }
const char* name(LocalSource value) { return name_of(kLocalSources, value); }
const char* name(Provider value) { return name_of(kProviders, value); }
Design parse_design(const std::string& text) { return parse(kDesigns, "design", text); }
Fusion parse_fusion(const std::string& text) { return parse(kFusions, "fusion", text); }
LocalSource parse_local_source(const std::string& text) { return parse(kLocalSources, "localSource", text); }
Provider parse_provider(const std::string& text) { return parse(kProviders, "provider", text); }

void validate(const ModelConfig& c) {
  in_range("vocab", c.vocab);
  in_range("hidden", c.hidden);
  in_range("ffn", c.ffn);
  in_range("queryHeads", c.query_heads);
  in_range("kvHeads", c.kv_heads);
  in_range("headDim", c.head_dim);
  in_range("window", c.window);
  at_least("lowerLayers", c.lower_layers, 0);
  at_least("upperLayers", c.upper_layers, 0);
  in_range("lowerLayers + upperLayers", c.layers());
  // A plan is a table in memory, built on the caller's thread: a config from a damaged file must not hold it
  // up.
  if (c.layers() > kMostLayers)
    reject("lowerLayers + upperLayers is " + std::to_string(c.layers()) + "; it must be at most " +
           std::to_string(kMostLayers));
  positive("ropeTheta", c.rope_theta);
  positive("ropeScale", c.rope_scale);
  positive("rmsNormEps", c.rms_norm_eps);
  if (c.query_heads % c.kv_heads != 0)
    reject("queryHeads is " + std::to_string(c.query_heads) +
           "; it must be a multiple of kvHeads, which is " + std::to_string(c.kv_heads));
  if (c.head_dim % 2 != 0)
    reject("headDim is " + std::to_string(c.head_dim) + "; rotary positions need an even number");
  if (c.head_dim > 256) reject("headDim is " + std::to_string(c.head_dim) + "; it must be at most 256");

  const std::string design = name(c.design);
  const bool local = has_local_bank(c.design);
  const bool global = local || c.design == Design::GlobalOnly || c.design == Design::GlobalAdapters;
  if (global && (c.lower_layers < 1 || c.upper_layers < 1))
    reject("design '" + design + "' needs lowerLayers and upperLayers of at least 1; they are " +
           std::to_string(c.lower_layers) + " and " + std::to_string(c.upper_layers));
  if (!local) {
    if (c.fusion != Fusion::Joint)
      reject("fusion is '" + std::string(name(c.fusion)) + "', but design '" + design +
             "' has no local bank to fuse");
    if (c.local_source != LocalSource::PerLayer)
      reject("localSource is '" + std::string(name(c.local_source)) + "', but design '" + design +
             "' has no local bank");
    if (c.provider != Provider::Boundary)
      reject("provider is '" + std::string(name(c.provider)) +
             "'; it is an option of the designs with a local bank, not of '" + design + "'");
  }
  if (local && c.local_source != LocalSource::PerLayer && c.upper_layers % 2 != 0)
    reject("localSource '" + std::string(name(c.local_source)) + "' pairs upper layers, but upperLayers is " +
           std::to_string(c.upper_layers) + ", an odd number");
  if (c.design == Design::Gqa4Cla2 && c.layers() % 2 != 0)
    reject("design '" + design + "' pairs layers, but lowerLayers + upperLayers is " +
           std::to_string(c.layers()) + ", an odd number");
  if (global && c.design != Design::LocalHistory && c.window != 1)
    reject("window is " + std::to_string(c.window) + "; design '" + design + "' needs 1");
  if (c.design == Design::RepeatedCurrent)
    in_range("historyWindow", c.history_window);
  else if (c.history_window != 0)
    reject("historyWindow is an option of design 'repeated-current', not of '" + design + "'");
  if (c.design == Design::GlobalAdapters)
    in_range("adapterRank", c.adapter_rank);
  else if (c.adapter_rank != 0)
    reject("adapterRank is an option of design 'global-adapters', not of '" + design + "'");
}

}  // namespace duokv
