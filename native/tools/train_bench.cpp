// Training steps over packed documents, as the trainer takes them.
#include <algorithm>
#include <cstdio>
#include <random>

#include "core/trainer.h"
#include "tools/bench.h"

namespace duokv::tools {
namespace {

// Rows filled with documents whose lengths are exponential with the given mean, as packing leaves them.
struct PackedBatch {
  std::vector<int32_t> tokens, targets;
  std::vector<int64_t> ids, target_ids;
  std::vector<int64_t> lengths;  // of the documents, cut at the rows' ends

  PackedBatch(int64_t rows, int64_t length, double mean, int64_t vocab) {
    std::mt19937_64 random(4);
    std::exponential_distribution<double> draw(1 / mean);
    tokens = random_tokens(rows * length, vocab, 5), targets = random_tokens(rows * length, vocab, 6);
    int64_t id = 0;
    for (int64_t r = 0; r < rows; ++r) {
      int64_t left = 0;
      for (int64_t t = 0; t <= length; ++t) {
        if (left == 0) {
          left = 1 + static_cast<int64_t>(draw(random));
          ++id;
          if (t < length) lengths.push_back(std::min(left, length - t));
        }
        if (t < length) ids.push_back(id);
        if (t > 0) target_ids.push_back(id);
        --left;
      }
      ++id;
    }
  }

  Batch batch(int64_t rows, int64_t length) const {
    return {rows, length, tokens.data(), ids.data(), targets.data(), target_ids.data()};
  }
};

void bench_shape(Campaign& campaign, const std::string& shape) {
  const ModelConfig config = preset(shape, Design::LocalHistory);
  const int64_t rows = campaign.tiny() ? 4 : 64, length = campaign.tiny() ? 64 : 2048;
  const PackedBatch packed(rows, length, campaign.tiny() ? 20 : 600, config.vocab);
  for (const std::string& name : campaign.precisions) {
    int64_t microbatch = std::min(campaign.microbatch, rows);
    while (microbatch >= 1) {
      try {
        const std::shared_ptr<Model> model = fast_model(campaign.device, config);
        TrainerOptions options;
        options.precision = parse_precision(name);
        options.microbatch = microbatch;
        Trainer trainer(model, options);
        // One microbatch brings the workspace and the backend's scratch to their sizes.
        trainer.step(packed.batch(microbatch, length), nullptr);
        std::vector<double> ms;
        double loss = 0;
        for (int i = 0; i < 2; ++i) {
          ms.push_back(milliseconds([&] { loss = trainer.step(packed.batch(rows, length), nullptr).loss; }));
        }
        const double tokens = static_cast<double>(rows * length), taken = median(ms);
        const double flops = count_flops(model->plan(), packed.lengths).training();
        campaign.add("train",
                     {{"shape", shape},
                      {"design", "local-history"},
                      {"precision", name},
                      {"rows", rows},
                      {"length", length},
                      {"documents", packed.lengths.size()},
                      {"microbatch", microbatch},
                      {"loss", loss},
                      {"tokensPerSecond", tokens / taken * 1e3},
                      {"tflops", flops / taken * 1e-9},
                      {"memoryUsed", campaign.device->info().memory_used}},
                     ms);
        break;
      } catch (const Error& error) {
        std::printf("train %s %s, microbatch %lld failed: %s\n", shape.c_str(), name.c_str(),
                    static_cast<long long>(microbatch), error.what());
        campaign.record["failures"].push_back({{"section", "train"},
                                               {"shape", shape},
                                               {"precision", name},
                                               {"microbatch", microbatch},
                                               {"error", error.what()}});
        if (error.code != "ERR_DEVICE_MEMORY") break;
        microbatch /= 2;
      }
    }
  }
}

}  // namespace

void bench_train(Campaign& campaign) {
  for (const std::string& shape : campaign.train_shapes) bench_shape(campaign, shape);
}

}  // namespace duokv::tools
