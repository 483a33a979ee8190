// Runs golden cases through the core on a backend and compares everything that they have, as lib/golden.ts
// does: logits, cross-entropies, gradients, an update, prefill by every route, decoding, caches, counts and
// bytes; of a training case three updates.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <stdexcept>

#include "core/session.h"
#include "core/trainer.h"
#include "tools/golden_case.h"
#include "tools/tool.h"

namespace duokv::tools {
namespace {

// The tolerances of lib/golden.ts, for FP32.
constexpr double kValue = 5e-5, kMeanNll = 1e-6, kLoss = 5e-6, kGradientDistance = 3e-5, kZeroGradient = 1e-7;
constexpr double kGradientElement = 2e-5, kGradientNorm = 1e-5, kSettledGradient = 1e-6,
                 kSettledParameter = 1e-6;
constexpr double kTrainedParameter = 2e-6, kTrainedShare = 0.999, kLearningRate = 3e-4;
constexpr double kMismatch = 1e9;  // the share of what must be equal and is not, or is not a number

using Floats = std::vector<float>;

// Collects the worst deviation of each quantity of a case, as a fraction of its tolerance.
class Comparison {
 public:
  void add(const std::string& quantity, double share, const std::string& at) {
    const double worst = std::isnan(share) ? kMismatch : std::min(share, kMismatch);
    for (Result& result : results_)
      if (result.quantity == quantity) {
        if (worst > result.worst) result.worst = worst, result.at = at;
        return;
      }
    results_.push_back({quantity, worst, at});
  }
  template <class T>
  void equal(const std::string& quantity, const T& actual, const T& expected, const std::string& what) {
    add(quantity, actual == expected ? 0 : kMismatch, what);
  }
  void scalar(const std::string& quantity, double actual, double expected, double limit) {
    add(quantity, std::abs(actual - expected) / limit,
        std::to_string(actual) + ", expected " + std::to_string(expected));
  }
  template <class Limit>
  void elements(const std::string& quantity, const std::string& name, const Floats& actual,
                const Floats& expected, Limit&& limit) {
    if (actual.size() != expected.size()) {
      add(quantity, kMismatch,
          name + ": " + std::to_string(actual.size()) + " elements, expected " +
              std::to_string(expected.size()));
      return;
    }
    double worst = -1;
    size_t at = 0;
    for (size_t i = 0; i < actual.size() && !std::isnan(worst); ++i) {
      const double share = std::abs(static_cast<double>(actual[i]) - expected[i]) / limit(i);
      if (share > worst || std::isnan(share)) worst = share, at = i;
    }
    if (actual.empty()) return;
    add(quantity, worst,
        name + "[" + std::to_string(at) + "] is " + std::to_string(actual[at]) + ", expected " +
            std::to_string(expected[at]));
  }
  void values(const std::string& quantity, const std::string& name, const Floats& actual,
              const Floats& expected) {
    elements(quantity, name, actual, expected,
             [&](size_t i) { return kValue + kValue * std::abs(static_cast<double>(expected[i])); });
  }

  struct Result {
    std::string quantity;
    double worst;
    std::string at;
  };
  const std::vector<Result>& results() const { return results_; }
  double worst() const {
    double largest = 0;
    for (const Result& result : results_) largest = std::max(largest, result.worst);
    return largest;
  }

 private:
  std::vector<Result> results_;
};

struct Check {
  const GoldenCase& golden;
  std::shared_ptr<Model> model;
  Precision precision;
  bool graphs;  // run every pass of a session until it is replayed
  Comparison& comparison;
};

// The parameter's values on the device.
Floats parameter(const Check& check, const Parameter& p) {
  Floats values(static_cast<size_t>(p.elements));
  check.model->read(p.name, values.data(), p.elements);
  return values;
}

void check_scoring(const Check& check) {
  const GoldenCase& golden = check.golden;
  const Batch batch = golden.batch();
  const size_t positions = static_cast<size_t>(batch.rows * batch.length);
  Floats logits(positions * static_cast<size_t>(golden.config.vocab)), nll(positions);
  compute_logits(*check.model, batch, check.precision, logits.data(), nullptr);
  check.comparison.values("logits", "logits", logits, golden.expect("logits"));
  compute_token_nll(*check.model, batch, check.precision, nll.data(), nullptr);
  double sum = 0;
  int64_t valid = 0;
  for (size_t i = 0; i < positions; ++i)
    if (batch.target_document_ids[i] == batch.document_ids[i]) sum += nll[i], ++valid;
  check.comparison.values("nll", "nll", nll, golden.expect("nll"));
  check.comparison.equal("valid targets", static_cast<double>(valid),
                         golden.fact(golden.facts, "valid_targets"), std::to_string(valid));
  check.comparison.scalar("mean nll", sum / static_cast<double>(valid), golden.fact(golden.facts, "loss"),
                          kMeanNll);
}

void check_loss(const Check& check, const Json& facts, const GradientResult& result) {
  const GoldenCase& golden = check.golden;
  const double norm = golden.fact(facts, "grad_norm");
  check.comparison.equal("valid targets", static_cast<double>(result.valid_targets),
                         golden.fact(facts, "valid_targets"), std::to_string(result.valid_targets));
  check.comparison.scalar("loss", result.loss, golden.fact(facts, "loss"), kLoss);
  check.comparison.scalar("gradient norm", result.grad_norm, norm, kGradientNorm * norm);
}

void check_gradient(const std::string& name, const Floats& actual, const Floats& expected,
                    Comparison& comparison) {
  double largest = 0, squares = 0, distance = 0;
  for (size_t i = 0; i < std::min(actual.size(), expected.size()); ++i) {
    const double e = expected[i];
    largest = std::max(largest, std::abs(e)), squares += e * e;
    distance += (actual[i] - e) * (actual[i] - e);
  }
  if (squares == 0)
    comparison.elements("gradients", name, actual, expected, [](size_t) { return kZeroGradient; });
  else
    comparison.add("gradients", std::sqrt(distance / squares) / kGradientDistance,
                   name + ": relative L2 " + std::to_string(std::sqrt(distance / squares)));
  const double limit = kGradientElement * largest + kZeroGradient;
  comparison.elements("gradient elements", name, actual, expected, [&](size_t) { return limit; });
}

TrainerOptions recipe(const Check& check, int64_t microbatch) {
  TrainerOptions options;
  options.precision = check.precision;
  options.optimizer = {kLearningRate, 0.9, 0.95, 1e-8, 0.1};
  options.clip_norm = 1, options.microbatch = microbatch;
  return options;
}

// Gradients, and the parameters after one update. Leaves the model updated.
void check_update(const Check& check) {
  const GoldenCase& golden = check.golden;
  const Batch batch = golden.batch();
  Trainer trainer(check.model, recipe(check, batch.rows));
  check_loss(check, golden.facts, trainer.gradients(batch, nullptr));
  for (const Parameter& p : check.model->plan().parameters) {
    Floats gradient(static_cast<size_t>(p.elements));
    trainer.read_state(Trainer::State::Gradient, p.name, gradient.data(), p.elements);
    check_gradient(p.name, gradient, golden.expect("grad." + p.name), check.comparison);
  }
  trainer.step(batch, nullptr);
  const double clip = golden.fact(golden.facts, "clip_coefficient");
  for (const Parameter& p : check.model->plan().parameters) {
    if (golden.expected.count("adamw1." + p.name) == 0) continue;
    const Floats& gradient = golden.expect("grad." + p.name);
    check.comparison.elements(
        "adamw1", p.name, parameter(check, p), golden.expect("adamw1." + p.name), [&](size_t i) {
          return clip * std::abs(static_cast<double>(gradient[i])) >= kSettledGradient ? kSettledParameter
                                                                                       : 2 * kLearningRate;
        });
  }
}

// Every stored tensor is expected, every expected one stored, and their values agree. `part` restricts both.
void check_cache(const Check& check, const Session& session, const std::string& quantity,
                 const std::string& prefix, const std::string& part = "") {
  std::vector<std::string> stored, expected;
  for (const std::string& name : session.names())
    if (name != "documentIds" && name.rfind(part, 0) == 0) stored.push_back(name);
  for (const auto& [name, values] : check.golden.expected)
    if (name.rfind(prefix, 0) == 0) expected.push_back(name.substr(prefix.length()));
  std::sort(stored.begin(), stored.end());
  std::sort(expected.begin(), expected.end());
  check.comparison.equal("cache tensors", stored, expected, prefix);
  const int64_t width = check.golden.config.kv_width();
  for (const std::string& name : stored) {
    if (!std::binary_search(expected.begin(), expected.end(), name)) continue;
    Floats all;
    for (int64_t row = 0; row < session.options().batch; ++row) {
      const size_t at = all.size();
      all.resize(at + static_cast<size_t>(session.entries(name, row) * width));
      session.read(name, row, all.data() + at);
    }
    check.comparison.values(quantity, name, all, check.golden.expect(prefix + name));
  }
}

void check_document_ids(const Check& check, const Session& session, int64_t steps) {
  const GoldenCase& golden = check.golden;
  const int64_t batch = session.options().batch, length = golden.length();
  const std::vector<int64_t>& decoded = golden.ids.at("decode_document_ids");
  const int64_t per_row = static_cast<int64_t>(decoded.size()) / batch;
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t* prompt = golden.batch().document_ids + row * length;
    std::vector<int64_t> expected(prompt, prompt + length);
    expected.insert(expected.end(), decoded.begin() + row * per_row, decoded.begin() + row * per_row + steps);
    check.comparison.equal("document ids", session.document_ids(row), expected, "row " + std::to_string(row));
  }
}

void check_bytes(const Check& check, const Session& session, const char* key) {
  const GoldenCase& golden = check.golden;
  const SessionBytes bytes = session.bytes();
  const Json& facts = golden.facts.at(key);
  const auto check_part = [&](const char* part, int64_t actual) {
    check.comparison.equal("cache bytes", static_cast<double>(actual), golden.fact(facts, part), part);
  };
  check_part("kv", bytes.lower + bytes.global + bytes.local);
  check_part("document_ids", bytes.document_ids);
  check_part("total", bytes.total());
}

// Teacher-forced steps after a prefill. Steps of one power of two share their launches, so that with graphs
// all but the first two of these are replays.
void check_decode(const Check& check, Session& session) {
  const GoldenCase& golden = check.golden;
  const int64_t batch = session.options().batch;
  const auto steps = static_cast<int64_t>(golden.fact(golden.facts, "decode_steps"));
  const auto vocab = static_cast<size_t>(golden.config.vocab);
  const std::vector<int32_t>& tokens = golden.tokens.at("decode_tokens");
  const std::vector<int64_t>& ids = golden.ids.at("decode_document_ids");
  const Floats& expected = golden.expect("decode_logits");
  Floats logits(static_cast<size_t>(batch) * vocab);
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<DecodeRow> rows;
    for (int64_t row = 0; row < batch; ++row) {
      const auto at = static_cast<size_t>(row * steps + step);
      rows.push_back({row, tokens[at], true, ids[at]});
    }
    session.decode(rows, {logits.data()}, nullptr);
    for (int64_t row = 0; row < batch; ++row) {
      const auto from = logits.begin() + static_cast<int64_t>(vocab) * row;
      const auto wanted = expected.begin() + static_cast<int64_t>(vocab) * (row * steps + step);
      check.comparison.values(
          "decode logits", "row " + std::to_string(row) + ", step " + std::to_string(step),
          {from, from + static_cast<int64_t>(vocab)}, {wanted, wanted + static_cast<int64_t>(vocab)});
    }
  }
  check_cache(check, session, "decoded cache", "decoded.cache.");
  check_document_ids(check, session, steps);
  check_bytes(check, session, "cache_bytes_fp32_after_decode");
}

// Prefill of the case's prompt into a fresh session by one route, and what its cache holds then.
void check_route(const Check& check, const char* name, const Route& route, int rounds) {
  const GoldenCase& golden = check.golden;
  const Batch batch = golden.batch();
  const auto steps = static_cast<int64_t>(golden.fact(golden.facts, "decode_steps"));
  Session session(check.model, {batch.rows, batch.length + steps, check.precision, check.graphs});
  std::vector<PrefillRow> rows;
  std::vector<int64_t> all;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const int64_t at = row * batch.length;
    rows.push_back({row, batch.tokens + at, batch.document_ids + at, batch.length});
    all.push_back(row);
  }
  Comparison& comparison = check.comparison;
  Floats logits(static_cast<size_t>(batch.rows * golden.config.vocab));
  const bool approximate = route.kind == Route::Kind::Approximate;
  for (int round = 0; round < rounds; ++round) {
    session.reset(all);
    const PrefillResult result = session.prefill(rows, route, {logits.data()}, nullptr);
    comparison.equal("exactness", result.exact, !approximate, name);
    comparison.values(std::string(name) + " logits", "logits", logits,
                      golden.expect(approximate ? "approximate.prefill_logits" : "prefill_logits"));
    if (approximate) {
      check_cache(check, session, "approximate cache", "approximate.cache.", "local.");
      continue;
    }
    check_cache(check, session, std::string(name) + " cache", "cache.");
    check_document_ids(check, session, 0);
    const Json& counts = golden.facts.at("upper_positions").at(name);
    comparison.equal("positions", static_cast<double>(result.positions[0].kv_input),
                     golden.fact(counts, "kv_input_positions"), name);
    comparison.equal("positions", static_cast<double>(result.positions[0].query_output),
                     golden.fact(counts, "query_output_positions"), name);
    check_bytes(check, session, "cache_bytes_fp32");
    if (route.kind == Route::Kind::Exact) check_decode(check, session);
  }
  if (rounds > 2) comparison.equal("graphs replayed", session.graphs().replayed > 0, true, name);
}

void check_sessions(const Check& check) {
  const int rounds = check.graphs ? 3 : 1;
  const std::pair<const char*, Route> routes[] = {{"exact", {Route::Kind::Exact, 0}},
                                                  {"full", {Route::Kind::Full, 0}},
                                                  {"uniform", {Route::Kind::Uniform, 0}}};
  for (const auto& [name, route] : routes)
    if (check.golden.facts.at("upper_positions").contains(name)) check_route(check, name, route, rounds);
  const Json& suffix = check.golden.facts.at("approximate_R");
  if (suffix.is_number()) check_route(check, "approximate", {Route::Kind::Approximate, suffix}, rounds);
}

// Three updates of two micro-batches each, with clipping, schedule and moments.
void check_three_updates(const Check& check) {
  const GoldenCase& golden = check.golden;
  const Json& schedule = golden.facts.at("schedule");
  TrainerOptions options = recipe(check, golden.shape[golden.shape.size() - 2]);
  options.optimizer.lr = golden.fact(schedule, "peak");
  options.schedule = {static_cast<int64_t>(golden.fact(schedule, "warmup")),
                      static_cast<int64_t>(golden.fact(schedule, "total")),
                      golden.fact(schedule, "final_fraction")};
  Trainer trainer(check.model, options);
  double farthest = 0;
  int64_t index = 0;
  for (const Json& expected : golden.facts.at("updates")) {
    const StepResult result = trainer.step(golden.batch(index++), nullptr);
    const double rate = golden.fact(expected, "lr");
    check_loss(check, expected, result);
    check.comparison.scalar("learning rate", result.learning_rate, rate, 1e-12 * rate);
    farthest += 2 * rate;
    std::vector<double> distances;
    for (const Parameter& p : check.model->plan().parameters) {
      const Floats actual = parameter(check, p);
      const Floats& values = golden.expect("update" + std::to_string(index) + "." + p.name);
      if (values.size() != actual.size()) throw std::runtime_error(p.name + " has another size");
      for (size_t i = 0; i < values.size(); ++i) {
        const double distance = std::abs(static_cast<double>(actual[i]) - values[i]);
        distances.push_back(std::isnan(distance) ? kMismatch : distance);
      }
    }
    std::sort(distances.begin(), distances.end());
    const double most =
        distances[static_cast<size_t>(std::ceil(kTrainedShare * static_cast<double>(distances.size()))) - 1];
    check.comparison.add("parameters after updates",
                         std::max(most / kTrainedParameter, distances.back() / farthest),
                         "update " + std::to_string(index));
  }
}

Comparison run_case(const GoldenCase& golden, const std::shared_ptr<Device>& device,
                    const Precision& precision, bool graphs) {
  Comparison comparison;
  const Check check{golden, Model::create(device, golden.config, ""), precision, graphs, comparison};
  std::vector<std::string> names, expected;
  for (const Parameter& p : check.model->plan().parameters) names.push_back(p.name);
  for (const auto& [name, values] : golden.weights) {
    expected.push_back(name);
    check.model->write(name, values.data(), static_cast<int64_t>(values.size()));
  }
  std::sort(names.begin(), names.end());
  comparison.equal("parameter names", names, expected, "");
  if (golden.facts.contains("updates")) {
    check_three_updates(check);
    return comparison;
  }
  comparison.equal("parameters", static_cast<double>(check.model->plan().parameter_count),
                   golden.fact(golden.facts, "parameters"), "");
  check_scoring(check);
  check_sessions(check);
  check_update(check);
  return comparison;
}

const std::vector<Arguments::Option> kOptions = {
    {"backend", "PATH", "library of the backend, or cpu"},
    {"precision", "NAME", "default fp32; fp32-tf32x3 has the same tolerances"},
    {"graphs", nullptr, "run session passes three times each, so that replays are compared too"},
    {"out", "FILE", "where the record goes"},
    {"verbose", nullptr, "prints every quantity, not only the worst of each case"},
    {"fact", "KEY=VALUE", "added to the record"},
    {"help", nullptr, "prints this"}};

// Whether all cases pass.
bool run(const Arguments& arguments) {
  const std::shared_ptr<Device> device = open_device(arguments.get("backend", "cpu"));
  const Precision precision = parse_precision(arguments.get("precision", "fp32"));
  const bool graphs = arguments.has("graphs");
  if (graphs && !Graph::available(*device)) throw std::invalid_argument("--graphs: this backend has none");
  Json record = describe(arguments, *device);
  record["settings"] = {{"precision", precision.name}, {"graphs", graphs}};
  record["cases"] = Json::array();
  std::vector<std::string> words = arguments.words();
  if (words.empty()) words.push_back("test/fixtures/golden");
  int cases = 0, failed = 0;
  for (const std::string& word : words)
    for (const std::string& directory : find_golden_cases(word)) {
      Json row{{"name", directory.substr(directory.find_last_of('/') + 1)}};
      double worst = kMismatch;
      try {
        const Comparison comparison = run_case(read_golden_case(directory), device, precision, graphs);
        worst = comparison.worst();
        for (const Comparison::Result& result : comparison.results()) {
          row["quantities"].push_back(
              {{"quantity", result.quantity}, {"worst", result.worst}, {"at", result.at}});
          if (arguments.has("verbose") || result.worst > 1 || (worst > 0 && result.worst == worst))
            std::printf("  %-26s %10.3g  %s\n", result.quantity.c_str(), result.worst, result.at.c_str());
        }
      } catch (const std::exception& error) {
        row["error"] = error.what();
        std::printf("  %s\n", error.what());
      }
      const bool passed = worst <= 1;
      row["worst"] = worst, row["passed"] = passed;
      record["cases"].push_back(row);
      std::printf("%s %s: %.3g of the tolerance\n", passed ? "ok    " : "FAILED",
                  row["name"].get<std::string>().c_str(), worst);
      std::fflush(stdout);
      ++cases, failed += passed ? 0 : 1;
      if (arguments.has("out")) write_json(arguments.get("out", ""), record);
    }
  std::printf("%d of %d golden cases passed on %s, %s%s\n", cases - failed, cases, device->table().backend,
              precision.name.c_str(), graphs ? ", with graphs" : "");
  return failed == 0;
}

}  // namespace
}  // namespace duokv::tools

int main(int argc, char** argv) {
  using namespace duokv::tools;
  const std::string help =
      "golden [options] [folder ...]\n  folders of cases, default test/fixtures/golden\n" + usage(kOptions);
  try {
    const Arguments arguments(argc, argv, kOptions);
    if (arguments.has("help")) {
      std::printf("%s", help.c_str());
      return 0;
    }
    return run(arguments) ? 0 : 1;
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "golden: %s\n%s", error.what(), help.c_str());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "golden: %s\n", error.what());
    return 1;
  }
}
