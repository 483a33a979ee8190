#include "addon/config_object.h"

#include <cmath>
#include <string>

#include "core/error.h"

namespace duokv::addon {
namespace {

struct IntegerKey {
  const char* name;
  int64_t ModelConfig::*member;
  bool required;
};
struct NumberKey {
  const char* name;
  double ModelConfig::*member;
};

constexpr IntegerKey kIntegers[] = {
    {"vocab", &ModelConfig::vocab, true},
    {"hidden", &ModelConfig::hidden, true},
    {"ffn", &ModelConfig::ffn, true},
    {"lowerLayers", &ModelConfig::lower_layers, true},
    {"upperLayers", &ModelConfig::upper_layers, true},
    {"queryHeads", &ModelConfig::query_heads, true},
    {"kvHeads", &ModelConfig::kv_heads, true},
    {"headDim", &ModelConfig::head_dim, true},
    {"window", &ModelConfig::window, false},
    {"historyWindow", &ModelConfig::history_window, false},
    {"adapterRank", &ModelConfig::adapter_rank, false},
};
constexpr NumberKey kNumbers[] = {
    {"ropeTheta", &ModelConfig::rope_theta},
    {"ropeScale", &ModelConfig::rope_scale},
    {"rmsNormEps", &ModelConfig::rms_norm_eps},
};
constexpr const char* kTexts[] = {"design", "fusion", "localSource", "provider"};

[[noreturn]] void reject(const std::string& message) { throw Error("ERR_CONFIG", message); }

// The value as a message shows it, short.
std::string shown(Napi::Value value) {
  if (value.IsString()) {
    std::string text = value.As<Napi::String>().Utf8Value().substr(0, 40);
    text.insert(text.begin(), '\'');
    return text.append("'");
  }
  if (value.IsNumber() || value.IsBoolean() || value.IsNull() || value.IsUndefined())
    return value.ToString().Utf8Value();
  return value.IsBigInt()     ? "a bigint"
         : value.IsFunction() ? "a function"
         : value.IsArray()    ? "an array"
                              : "an object";
}

bool is_known(const std::string& key) {
  for (const auto& k : kIntegers)
    if (key == k.name) return true;
  for (const auto& k : kNumbers)
    if (key == k.name) return true;
  for (const char* k : kTexts)
    if (key == k) return true;
  return false;
}

std::string known_keys() {
  std::string all;
  for (const char* k : kTexts) all += (all.empty() ? "" : ", ") + std::string(k);
  for (const auto& k : kIntegers) all += ", " + std::string(k.name);
  for (const auto& k : kNumbers) all += ", " + std::string(k.name);
  return all;
}

}  // namespace

ModelConfig to_config(Napi::Value value) {
  if (!value.IsObject() || value.IsArray() || value.IsFunction())
    reject("the config must be an object, not " + shown(value));
  const Napi::Object object = value.As<Napi::Object>();
  const Napi::Array keys = object.GetPropertyNames();
  for (uint32_t i = 0; i < keys.Length(); ++i) {
    const std::string key = keys.Get(i).ToString().Utf8Value();
    if (!is_known(key)) reject("unknown config key '" + key + "'; known keys: " + known_keys());
  }

  ModelConfig config;
  const auto text = [&](const char* key, bool required, auto parse, auto& target) {
    const Napi::Value entry = object.Get(key);
    if (entry.IsUndefined()) {
      if (required) reject(std::string(key) + " is missing from the config");
      return;
    }
    if (!entry.IsString()) reject(std::string(key) + " is " + shown(entry) + "; it must be a string");
    target = parse(entry.As<Napi::String>().Utf8Value());
  };
  text("design", true, parse_design, config.design);
  text("fusion", false, parse_fusion, config.fusion);
  text("localSource", false, parse_local_source, config.local_source);
  text("provider", false, parse_provider, config.provider);
  for (const auto& key : kIntegers) {
    const Napi::Value entry = object.Get(key.name);
    if (entry.IsUndefined()) {
      if (key.required) reject(std::string(key.name) + " is missing from the config");
      continue;
    }
    const double number = entry.IsNumber() ? entry.As<Napi::Number>().DoubleValue() : std::nan("");
    if (!(number == std::floor(number)) || std::abs(number) > 9007199254740991.0)
      reject(std::string(key.name) + " is " + shown(entry) + "; it must be an integer");
    config.*key.member = static_cast<int64_t>(number);
  }
  for (const auto& key : kNumbers) {
    const Napi::Value entry = object.Get(key.name);
    if (entry.IsUndefined()) continue;
    if (!entry.IsNumber()) reject(std::string(key.name) + " is " + shown(entry) + "; it must be a number");
    config.*key.member = entry.As<Napi::Number>().DoubleValue();
  }
  return config;
}

Napi::Object from_config(Napi::Env env, const ModelConfig& config) {
  Napi::Object object = Napi::Object::New(env);
  object.Set("design", name(config.design));
  object.Set("fusion", name(config.fusion));
  object.Set("localSource", name(config.local_source));
  object.Set("provider", name(config.provider));
  for (const auto& key : kIntegers) {
    // An optional key at zero does not apply to the design.
    const int64_t value = config.*key.member;
    if (key.required || value != 0) object.Set(key.name, static_cast<double>(value));
  }
  for (const auto& key : kNumbers) object.Set(key.name, config.*key.member);
  return object;
}

}  // namespace duokv::addon
