// A session: `batch` independent slots with a complete cache each; prefill by any route, decode step by step.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/model.h"

namespace duokv {

class Cache;
class CacheBanks;
class Programs;
class Workspace;
struct Pass;
struct PassInputs;
struct Program;
struct Scores;
struct ProgramKey;

struct SessionOptions {
  int64_t batch = 1;
  int64_t capacity = 0;  // positions per row
  Precision precision;
  bool graphs = true;        // record prefills of empty rows and decode steps, where the backend can
  int64_t graph_limit = 16;  // recorded programs kept; the least recently used goes first
};

// Programs recorded by a session, and what they cost and saved.
struct GraphStats {
  int64_t held = 0, recorded = 0, replayed = 0, dropped = 0;
  int64_t bytes = 0;         // device memory of the programs kept: the workspaces that graphs name
  int64_t driver_bytes = 0;  // by which the driver's free memory fell while it made the held graphs
  double seconds = 0;        // spent recording
};

struct PrefillRow {
  int64_t row;                  // slot
  const int32_t* tokens;        // host [count]
  const int64_t* document_ids;  // host [count]; null: continues the row's last document, or one new document
  int64_t count;
};

struct PrefillResult {
  bool exact;                             // false once anything approximate is in one of the rows
  std::vector<PositionCounts> positions;  // per given row
};

struct DecodeRow {
  int64_t row;
  int32_t token;
  bool has_document_id;  // false: the row's last document goes on
  int64_t document_id;
};

struct Sampled {
  int32_t token;
  float logprob;  // log softmax(logits)[token]
};

// What a call gives for each of its rows, in their order: the logits after its last token, or a token drawn
// from them.
struct Outputs {
  float* logits = nullptr;                   // host [rows, V]
  const ops::SampleRow* settings = nullptr;  // host [rows]; null: logits are wanted
  Sampled* sampled = nullptr;                // host [rows]
};

struct SessionBytes : CacheBytes {  // entries in use
  int64_t reserved = 0;             // what was allocated for them
  int64_t device = 0, host = 0;     // where the retained bytes are
};

class Session {
 public:
  // Throws ERR_SHAPE, ERR_DEVICE_MEMORY.
  Session(std::shared_ptr<Model> model, const SessionOptions& options);
  ~Session();

  const SessionOptions& options() const { return options_; }
  const std::shared_ptr<Model>& model() const { return model_; }

  // Appends each row's tokens and gives what follows them. Rows of equal length run together. Cache writes
  // are staged: nothing changes when it throws (ERR_SHAPE, ERR_CAPACITY, ERR_TOKEN_RANGE, ERR_DOCUMENT_IDS,
  // ERR_CONFIG, ABORT_ERR, ERR_NOT_FINITE where no token can be drawn), and rows not named stay bitwise as
  // they were.
  PrefillResult prefill(const std::vector<PrefillRow>& rows, const Route& route, const Outputs& outputs,
                        Cancel cancel);

  // One step: appends one token to each named row. Throws as prefill does.
  void decode(const std::vector<DecodeRow>& rows, const Outputs& outputs, Cancel cancel);

  void reset(const std::vector<int64_t>& rows);

  int64_t length(int64_t row) const;
  bool exact(int64_t row) const;

  SessionBytes bytes() const;
  GraphStats graphs() const;
  std::vector<std::string> names() const;  // "layer.0.k", ..., "documentIds"
  // Entries of one row's tensor: count, then [count, kv_heads, head_dim] FP32, oldest first. ERR_TENSOR_NAME.
  int64_t entries(const std::string& name, int64_t row) const;
  void read(const std::string& name, int64_t row, float* out) const;
  std::vector<int64_t> document_ids(int64_t row) const;

 private:
  struct Group;
  Program* recorded_program(const Group& group);
  static ProgramKey key(const Group& group);
  static bool continues(const Group& group);
  static const float* rotary_table(Model& model, const Group& group);
  bool planned(const std::map<int64_t, Group>& groups);
  template <class Use>
  void with_pass(Model& model, Workspace& workspace, const Group& group, CacheBanks& banks,
                 std::vector<int32_t> start, Cancel cancel, Use&& use);
  void reserve(const std::map<int64_t, Group>& groups, Workspace& workspace);
  void run(Group& group, Program* program, Cancel cancel, const Outputs& outputs);
  Scores compute_scores(const Pass& pass, CacheBanks& banks, const PassInputs& inputs) const;
  void download_logits(const Group& group, const float* scores, float* logits);
  void download_sampled(const Group& group, const int32_t* drawn, Sampled* sampled);
  void commit(Group& group);
  void check_row(int64_t row, const char* argument) const;

  std::shared_ptr<Model> model_;
  SessionOptions options_;
  std::unique_ptr<Cache> cache_;
  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<Programs> programs_;
  std::vector<ProgramKey> planned_;  // whose memory the workspace has
};

}  // namespace duokv
