// The measurements of gpu_bench. Each takes the campaign's settings and adds rows to the record, every row
// with all of its raw times in milliseconds.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/model.h"
#include "tools/tool.h"

namespace duokv::tools {

struct Campaign {
  std::shared_ptr<Device> device;
  std::string shape;                    // "126m", "305m" or "tiny"
  std::vector<std::string> precisions;  // policies of spec/numerics.md
  std::vector<bool> graphs;             // sessions without and with them
  int warmups, repeats;
  int64_t microbatch;  // rows
  std::vector<std::string> train_shapes;
  Json record;
  std::function<void()> save;  // writes the record so far

  bool tiny() const { return shape == "tiny"; }
  // Appends to a section, prints the row without its raw times, and saves.
  void add(const char* section, Json row, const std::vector<double>& ms);
};

void bench_prefill(Campaign& campaign);
void bench_decode(Campaign& campaign);
void bench_request(Campaign& campaign);
void bench_train(Campaign& campaign);
void bench_linear(Campaign& campaign);
void bench_attention(Campaign& campaign);
void bench_rows(Campaign& campaign);
void bench_ceilings(Campaign& campaign);

// The paper's shapes, and the tiny one, as lib/presets.ts has them.
ModelConfig preset(const std::string& shape, Design design);

// Parameters of the initial scale (norms 1, matrices uniform of standard deviation 0.02), made faster than
// the reproducible initialisation.
std::shared_ptr<Model> fast_model(const std::shared_ptr<Device>& device, const ModelConfig& config);

std::vector<int32_t> random_tokens(int64_t count, int64_t vocab, uint64_t seed);

// Milliseconds of one call, host clock; `body` waits for its own work.
template <class Body>
double milliseconds(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace duokv::tools
