// A golden case on disk: weights and inputs, and what a correct engine makes of them, computed in FP64.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/model.h"
#include "tools/tool.h"

namespace duokv::tools {

struct GoldenCase {
  std::string name;
  ModelConfig config;
  std::map<std::string, std::vector<float>> weights, expected;
  std::map<std::string, std::vector<int32_t>> tokens;
  std::map<std::string, std::vector<int64_t>> ids;
  std::vector<int64_t> shape;  // of `tokens`: [rows, length], or [updates, micro-batches, rows, length]
  Json facts;                  // expected.json

  int64_t length() const { return shape.back(); }
  // Rows of a batch: those of all micro-batches of one update.
  int64_t rows() const;
  // The batch of an update (0 where the case has none). Points into this case.
  Batch batch(int64_t update = 0) const;
  // Throw std::runtime_error naming what is missing.
  const std::vector<float>& expect(const std::string& tensor) const;
  double fact(const Json& facts, const char* key) const;
};

// Directories of the cases below `directory`, in alphabetical order: itself, or its subdirectories. Throws
// std::runtime_error where there is none.
std::vector<std::string> find_golden_cases(const std::string& directory);

// Throws std::runtime_error with the file and the reason.
GoldenCase read_golden_case(const std::string& directory);

}  // namespace duokv::tools
