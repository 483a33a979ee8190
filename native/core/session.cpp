#include "core/session.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <set>

#include "core/batch.h"
#include "core/cache.h"
#include "core/layers.h"
#include "core/planning.h"
#include "core/programs.h"

namespace duokv {

using ops::OpTable;

// Rows that append the same number of tokens run as one batch.
struct Session::Group {
  int64_t count = 0;
  std::vector<size_t> requests;  // indices into the call's rows
  std::vector<int64_t> rows;
  std::vector<int32_t> tokens, first, start, position;
  std::vector<DocumentUpdate> documents;
  std::vector<std::vector<int64_t>> ids;
  std::vector<ops::SampleRow> settings;  // empty: logits are wanted
  std::unique_ptr<CacheBanks> banks;
  Suffixes suffixes;
  bool stored = false;  // the pass itself moved its local entries to their rings
};

// What a pass reads on the device beside the arrays of its positions.
struct PassInputs {
  const int32_t* tokens;           // [rows, count]
  const ops::SampleRow* settings;  // [rows]; null: no token is drawn
};

Session::Session(std::shared_ptr<Model> model, const SessionOptions& options)
    : model_(std::move(model)), options_(options) {
  if (options.batch < 1)
    throw Error("ERR_SHAPE", "batch is " + std::to_string(options.batch) + "; it must be at least 1");
  if (options.capacity < 1 || options.capacity >= std::numeric_limits<int32_t>::max())
    throw Error("ERR_SHAPE",
                "capacity is " + std::to_string(options.capacity) + "; it must be in [1, 2^31 - 2]");
  cache_ = std::make_unique<Cache>(model_->device(), model_->plan(), options);
  workspace_ = std::make_unique<Workspace>(model_->device());
  if (options.graphs && options.graph_limit > 0 && Graph::available(*model_->device()))
    programs_ = std::make_unique<Programs>(model_->device(), options.graph_limit);
}

Session::~Session() = default;

void Session::check_row(int64_t row, const char* argument) const {
  if (row < 0 || row >= options_.batch)
    throw Error("ERR_SHAPE", std::string(argument) + ": row " + std::to_string(row) + " is outside [0, " +
                                 std::to_string(options_.batch) + ")");
}

PrefillResult Session::prefill(const std::vector<PrefillRow>& rows, const Route& route,
                               const Outputs& outputs, Cancel cancel) {
  const Plan& plan = model_->plan();
  if (rows.empty()) throw Error("ERR_SHAPE", "rows is empty; a prefill needs at least 1 row");
  std::set<int64_t> seen;
  std::map<int64_t, Group> groups;
  for (size_t i = 0; i < rows.size(); ++i) {
    const PrefillRow& request = rows[i];
    check_row(request.row, "rows");
    if (!seen.insert(request.row).second)
      throw Error("ERR_SHAPE", "rows: row " + std::to_string(request.row) + " is named twice");
    if (request.count < 1)
      throw Error("ERR_SHAPE", "tokens: the prompt of row " + std::to_string(request.row) + " is empty");
    const CacheRow& row = cache_->row(request.row);
    if (row.length + request.count > options_.capacity)
      throw Error("ERR_CAPACITY", "row " + std::to_string(request.row) + " holds " +
                                      std::to_string(row.length) + " positions and would get " +
                                      std::to_string(request.count) + " more; its capacity is " +
                                      std::to_string(options_.capacity));
    check_tokens(request.tokens, request.count, plan.config.vocab, "tokens", request.row);

    Group& group = groups[request.count];
    group.count = request.count;
    const size_t offset = group.tokens.size(), end = offset + static_cast<size_t>(request.count);
    group.requests.push_back(i);
    group.rows.push_back(request.row);
    if (outputs.settings != nullptr) group.settings.push_back(outputs.settings[i]);
    group.tokens.insert(group.tokens.end(), request.tokens, request.tokens + request.count);
    group.first.push_back(static_cast<int32_t>(row.length));
    group.start.resize(end);
    group.position.resize(end);
    group.documents.push_back(append_documents(row.documents, request.document_ids, request.count, row.length,
                                               "documentIds", request.row, group.start.data() + offset,
                                               group.position.data() + offset));
    group.ids.push_back(
        request.document_ids != nullptr
            ? std::vector<int64_t>(request.document_ids, request.document_ids + request.count)
            : std::vector<int64_t>(static_cast<size_t>(request.count), group.documents.back().last_id));
  }

  PrefillResult result{true, std::vector<PositionCounts>(rows.size())};
  for (auto& [count, group] : groups) group.suffixes = suffix_lengths(plan, count, route);
  // A recorded pass stores its local entries too, so it must be all that the call does.
  Program* program = groups.size() == 1 ? recorded_program(groups.begin()->second) : nullptr;
  Workspace& workspace = program != nullptr ? program->workspace : *workspace_;
  if (program != nullptr ? program->warm : planned(groups)) {
    workspace.begin();
  } else {
    reserve(groups, workspace);
  }
  for (auto& [count, group] : groups) run(group, program, cancel, outputs);
  for (auto& [count, group] : groups) {
    commit(group);
    for (size_t request : group.requests) result.positions[request] = position_counts(plan, group.suffixes);
    for (int64_t row : group.rows) result.exact = result.exact && cache_->row(row).exact;
  }
  return result;
}

void Session::decode(const std::vector<DecodeRow>& rows, const Outputs& outputs, Cancel cancel) {
  std::vector<PrefillRow> appended;
  for (const DecodeRow& row : rows)
    appended.push_back({row.row, &row.token, row.has_document_id ? &row.document_id : nullptr, 1});
  prefill(appended, {Route::Kind::Exact, 0}, outputs, cancel);
}

// What fixes the memory of a pass over rows that begin empty, or of a step; other passes depend on what their
// rows hold.
ProgramKey Session::key(const Group& group) {
  const int32_t longest = *std::max_element(group.first.begin(), group.first.end());
  const int64_t entries = group.count > 1 ? 0 : CacheBanks::launch_entries(longest + 1);
  return {group.rows,
          group.count,
          group.suffixes.query,
          group.suffixes.projection,
          entries,
          !group.settings.empty()};
}

bool Session::continues(const Group& group) {
  return group.count > 1 && *std::max_element(group.first.begin(), group.first.end()) > 0;
}

// The program of a pass that can be recorded: a prefill of empty rows, whose banks begin at slot 0, or one
// step, which reads and writes its banks through descriptors.
Program* Session::recorded_program(const Group& group) {
  return programs_ == nullptr || continues(group) ? nullptr : &programs_->find(key(group));
}

// Whether the workspace has the memory of such a call already.
bool Session::planned(const std::map<int64_t, Group>& groups) {
  if (groups.size() != 1 || continues(groups.begin()->second)) return false;
  constexpr size_t kMost = 64;
  const ProgramKey wanted = key(groups.begin()->second);
  if (std::find(planned_.begin(), planned_.end(), wanted) != planned_.end()) return true;
  if (planned_.size() == kMost) planned_.erase(planned_.begin());
  planned_.push_back(wanted);
  return false;
}

void Session::reserve(const std::map<int64_t, Group>& groups, Workspace& workspace) {
  const auto program = [&](Model& twin, Workspace& dry) {
    for (const auto& [count, group] : groups) {
      CacheBanks banks(dry, *cache_, twin.plan(), group.rows, count, group.suffixes,
                       rotary_table(twin, group));
      const WorkspaceScope scope(dry);
      // As one document, in which every query sees the most.
      with_pass(twin, dry, group, banks, std::vector<int32_t>(group.start.size(), 0), nullptr,
                [&](const Pass& pass, const PassInputs& inputs) { compute_scores(pass, banks, inputs); });
    }
  };
  std::string what = "a pass over";
  const char* separator = " ";
  for (const auto& [count, group] : groups) {
    what += separator + std::to_string(group.rows.size()) + " x " + std::to_string(count) + " positions";
    separator = " and ";
  }
  try {
    begin_planned(*model_, workspace, what, program);
  } catch (...) {
    planned_.clear();
    throw;
  }
}

const float* Session::rotary_table(Model& model, const Group& group) {
  return model.rotary_table(*std::max_element(group.first.begin(), group.first.end()) + group.count);
}

// Calls use(pass, inputs) with everything on the device that a pass of the group needs. `start` [rows,
// count]: where each token's document starts.
template <class Use>
void Session::with_pass(Model& model, Workspace& workspace, const Group& group, CacheBanks& banks,
                        std::vector<int32_t> start, Cancel cancel, Use&& use) {
  PassInputs inputs{workspace.upload(group.tokens), nullptr};
  if (!group.settings.empty()) inputs.settings = workspace.upload(group.settings);
  Positions positions(workspace, static_cast<int64_t>(group.rows.size()), group.count, group.first,
                      std::move(start), group.position, model.plan().history_window);
  prepare_layers(positions, group.suffixes, workspace);
  const Pass pass{
      model, workspace, options_.precision, true, rotary_table(model, group), positions, group.suffixes,
      banks, cancel};
  use(pass, inputs);
}

// One pass of a group, and what it gives to the call's outputs.
void Session::run(Group& group, Program* program, Cancel cancel, const Outputs& outputs) {
  Workspace& workspace = program != nullptr ? program->workspace : *workspace_;
  const float* table = rotary_table(*model_, group);
  group.banks = std::make_unique<CacheBanks>(workspace, *cache_, model_->plan(), group.rows, group.count,
                                             group.suffixes, table);
  const WorkspaceScope scope(workspace);  // the banks' staging, taken before, stays until the commit
  with_pass(*model_, workspace, group, *group.banks, group.start, cancel,
            [&](const Pass& pass, const PassInputs& inputs) {
              Scores scores;
              if (program == nullptr) {
                scores = compute_scores(pass, *group.banks, inputs);
              } else {
                poll(cancel);
                scores = programs_->run(*program, model_->version(), table, [&] {
                  const Scores computed = compute_scores(pass, *group.banks, inputs);
                  group.banks->store();
                  return computed;
                });
                group.stored = true;
              }
              if (scores.drawn != nullptr) {
                download_sampled(group, scores.drawn, outputs.sampled);
              } else {
                download_logits(group, scores.logits, outputs.logits);
              }
            });
}

Scores Session::compute_scores(const Pass& pass, CacheBanks& banks, const PassInputs& inputs) const {
  const Plan& plan = pass.model.plan();
  Device& device = *pass.model.device();
  const int64_t batch = pass.positions.batch(), d = plan.config.hidden;
  banks.load();
  float* x = run_layers(pass, inputs.tokens, nullptr);
  poll(pass.cancel);
  float* last = pass.workspace.take(batch * d);
  device.run(&OpTable::suffix_rows, {x, batch, pass.suffixes.query.back(), 1, d, false, last});
  Scores scores{pass.workspace.take(batch * plan.config.vocab), nullptr};
  pass.model.head(last, batch, 1, true, options_.precision, scores.logits);
  if (inputs.settings != nullptr) {
    scores.drawn = pass.workspace.take<int32_t>(2 * batch);
    device.run(&OpTable::sample, {scores.logits, batch, plan.config.vocab, inputs.settings, scores.drawn,
                                  reinterpret_cast<float*>(scores.drawn + batch)});
  }
  return scores;
}

// scores [requests of the group, V] to their places in logits [requests of the call, V].
void Session::download_logits(const Group& group, const float* scores, float* logits) {
  const int64_t vocab = model_->plan().config.vocab;
  for (size_t begin = 0, end; begin < group.requests.size(); begin = end) {
    for (end = begin + 1; end < group.requests.size(); ++end)
      if (group.requests[end] != group.requests[end - 1] + 1) break;
    model_->device()->download(logits + static_cast<int64_t>(group.requests[begin]) * vocab,
                               scores + static_cast<int64_t>(begin) * vocab,
                               static_cast<int64_t>((end - begin) * sizeof(float)) * vocab);
  }
}

// Scores::drawn to its places in sampled [requests of the call].
void Session::download_sampled(const Group& group, const int32_t* drawn, Sampled* sampled) {
  const size_t batch = group.requests.size();
  std::vector<int32_t> host(2 * batch);
  model_->device()->download(host.data(), drawn, static_cast<int64_t>(host.size() * sizeof(int32_t)));
  for (size_t i = 0; i < batch; ++i) {
    if (host[i] < 0)
      throw Error("ERR_NOT_FINITE", "row " + std::to_string(group.rows[i]) + ": logit " +
                                        std::to_string(-1 - host[i]) +
                                        " is infinite or not a number; no token can be drawn");
    sampled[group.requests[i]] = {host[i], std::bit_cast<float>(host[batch + i])};
  }
}

void Session::commit(Group& group) {
  for (size_t r = 0; r < group.rows.size(); ++r) {
    cache_->store_document_ids(group.rows[r], group.ids[r]);
    apply(group.documents[r], cache_->row(group.rows[r]).documents);
  }
  if (!group.stored) group.banks->store();
  group.banks->commit(group.suffixes.exact);
}

void Session::reset(const std::vector<int64_t>& rows) {
  for (int64_t row : rows) check_row(row, "rows");
  for (int64_t row : rows) cache_->row(row) = CacheRow{};
}

int64_t Session::length(int64_t row) const {
  check_row(row, "row");
  return cache_->row(row).length;
}

bool Session::exact(int64_t row) const {
  check_row(row, "row");
  return cache_->row(row).exact;
}

SessionBytes Session::bytes() const { return cache_->bytes(); }

GraphStats Session::graphs() const { return programs_ != nullptr ? programs_->stats() : GraphStats{}; }

std::vector<std::string> Session::names() const { return cache_->names(); }

int64_t Session::entries(const std::string& name, int64_t row) const {
  check_row(row, "row");
  return cache_->entries(name, row);
}

void Session::read(const std::string& name, int64_t row, float* out) const {
  check_row(row, "row");
  cache_->read(name, row, out);
}

std::vector<int64_t> Session::document_ids(int64_t row) const {
  check_row(row, "row");
  return cache_->document_ids(row);
}

}  // namespace duokv
