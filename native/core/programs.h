// Passes that a session recorded as graphs: which shape each one serves, the workspace its operations name,
// and when it must be recorded again.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <vector>

#include "core/device.h"
#include "core/plan.h"
#include "core/session.h"
#include "core/workspace.h"

namespace duokv {

// What fixes the launches of a pass. Tokens, documents and positions are data.
struct ProgramKey {
  std::vector<int64_t> rows;               // slots of the session, whose memory the graph names
  int64_t count;                           // appended positions per row
  std::vector<int64_t> query, projection;  // suffix lengths
  int64_t launch_entries;  // stored entries that attention launches are sized for; 0 for a prefill
  bool sampled;            // ends in drawing tokens

  bool operator==(const ProgramKey&) const = default;
};

// Where a pass leaves what it computed for each of its rows, on the device.
struct Scores {
  float* logits = nullptr;   // [rows, V]
  int32_t* drawn = nullptr;  // [rows] tokens, then [rows] log-probabilities (float); null: not wanted
};

// A shape runs once as it is, which brings its workspace and the weights' packed copies to where they stay;
// the second time it is recorded, and from then on replayed.
struct Program {
  Program(ProgramKey key, std::shared_ptr<Device> device)
      : key(std::move(key)), workspace(std::move(device), "graphs", "graphs") {}

  ProgramKey key;
  Workspace workspace;
  bool warm = false;
  uint64_t weights_version = 0;         // of the weights whose packed copies the launches read
  const float* rotary_table = nullptr;  // as the launches name it
  Graph graph;
  Scores scores;  // where the graph leaves them
};

class Programs {
 public:
  Programs(std::shared_ptr<Device> device, int64_t limit) : device_(std::move(device)), limit_(limit) {}

  // The program of a key, new or known, which becomes the most recently used.
  Program& find(const ProgramKey& key);
  // Runs `operations`, which say where they leave their scores: directly, recorded, or by replay.
  template <class Operations>
  Scores run(Program& program, uint64_t weights_version, const float* rotary_table, Operations&& operations);

  GraphStats stats() const;

 private:
  std::shared_ptr<Device> device_;
  int64_t limit_;
  std::list<Program> programs_;  // most recently used first
  GraphStats stats_;
};

template <class Operations>
Scores Programs::run(Program& program, uint64_t weights_version, const float* rotary_table,
                     Operations&& operations) {
  const bool current =
      program.warm && program.weights_version == weights_version && program.rotary_table == rotary_table;
  if (!current) {
    program.graph = Graph();
    const Scores scores = operations();
    program.warm = true;
    program.weights_version = weights_version;
    program.rotary_table = rotary_table;
    return scores;
  }
  if (program.graph) {
    ++stats_.replayed;
  } else {
    const auto begin = std::chrono::steady_clock::now();
    program.graph = Graph::record(device_, [&] { program.scores = operations(); });
    ++stats_.recorded;
    stats_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  program.graph.launch();
  return program.scores;
}

}  // namespace duokv
