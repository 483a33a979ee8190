// Small models of every design, and random batches for them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/session.h"
#include "core/trainer.h"
#include "test/harness.h"

namespace duokv::test {

inline ModelConfig small_config(Design design) {
  ModelConfig c;
  c.design = design;
  c.vocab = 61, c.hidden = 24, c.ffn = 40, c.lower_layers = 2, c.upper_layers = 4;
  c.query_heads = 4, c.kv_heads = 2, c.head_dim = 16, c.window = 1;
  if (design == Design::LocalHistory) c.window = 5;
  if (design == Design::RepeatedCurrent) c.history_window = 6;
  if (design == Design::GlobalAdapters) c.adapter_rank = 8;
  return c;
}

// Every design with its defaults, and the local options one by one and together (a few of these under a
// sanitizer).
inline std::vector<ModelConfig> all_configs() {
  std::vector<ModelConfig> all;
  for (Design d : {Design::LocalHistory, Design::CurrentOnly, Design::RepeatedCurrent, Design::GlobalOnly,
                   Design::GlobalAdapters, Design::Independent, Design::Gqa2, Design::Gqa4Cla2})
    all.push_back(small_config(d));
  std::vector<ModelConfig> options;
  for (Design d : {Design::LocalHistory, Design::RepeatedCurrent})
    for (Fusion f : {Fusion::Joint, Fusion::Separate})
      for (LocalSource s : {LocalSource::PerLayer, LocalSource::PairedInput, LocalSource::SharedKv})
        for (Provider p : {Provider::Boundary, Provider::Cross}) {
          ModelConfig c = small_config(d);
          c.fusion = f, c.local_source = s, c.provider = p;
          options.push_back(c);
        }
  const size_t wanted = static_cast<size_t>(trials(static_cast<int>(options.size())));
  for (size_t i = 1; i <= wanted; ++i) all.push_back(options[i * options.size() / wanted - 1]);
  return all;
}

inline std::string describe(const ModelConfig& c) {
  return std::string(name(c.design)) + " " + name(c.fusion) + " " + name(c.local_source) + " " +
         name(c.provider);
}

// Parameters with far larger values than the training initialisation, so that every term matters.
inline std::shared_ptr<Model> random_model(const std::shared_ptr<Device>& device, const ModelConfig& config,
                                           uint64_t seed) {
  std::shared_ptr<Model> model = Model::create(device, config, "");
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  for (const Parameter& p : model->plan().parameters) {
    const float scale = p.shape.size() == 2 ? 0.6f / std::sqrt(static_cast<float>(p.shape[1])) : 0.2f;
    const float offset = p.init == Parameter::Init::Ones ? 1.0f : 0.0f;
    std::vector<float> values(static_cast<size_t>(p.elements));
    for (float& v : values) v = offset + scale * normal(random);
    model->write(p.name, values.data(), p.elements);
  }
  return model;
}

// Rows of packed documents of random length, ids far beyond 32 bits and in no order.
struct RandomBatch {
  std::vector<int32_t> tokens, targets;
  std::vector<int64_t> ids, target_ids;
  Batch batch;

  RandomBatch(const ModelConfig& config, int64_t rows, int64_t length, uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto token = [&] { return static_cast<int32_t>(random() % static_cast<uint64_t>(config.vocab)); };
    for (int64_t r = 0; r < rows; ++r) {
      int64_t id = static_cast<int64_t>(random());
      for (int64_t t = 0; t < length; ++t) {
        tokens.push_back(token());
        targets.push_back(token());
        ids.push_back(id);
        if (random() % 9 == 0) id = static_cast<int64_t>(random());
        target_ids.push_back(id);
      }
    }
    batch = {rows, length, tokens.data(), ids.data(), targets.data(), target_ids.data()};
  }
};

inline std::shared_ptr<Device> core_device() {
  static std::shared_ptr<Device> shared = Device::open(cpu::op_table(), 2);
  return shared;
}

}  // namespace duokv::test
