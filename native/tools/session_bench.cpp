// Prefill by route, decode steps, and whole requests, through the sessions that users call. Times are the
// host's: of a call from its arguments to the logits in host memory.
#include <cstdio>
#include <random>

#include "core/session.h"
#include "tools/bench.h"

namespace duokv::tools {
namespace {

struct NamedRoute {
  const char* name;
  Route route;
};

std::vector<PrefillRow> prompts(const std::vector<int32_t>& tokens, int64_t batch, int64_t count) {
  std::vector<PrefillRow> rows;
  for (int64_t r = 0; r < batch; ++r) rows.push_back({r, tokens.data() + r * count, nullptr, count});
  return rows;
}

std::vector<int64_t> all_rows(int64_t batch) {
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < batch; ++r) rows.push_back(r);
  return rows;
}

std::vector<DecodeRow> next_tokens(int64_t batch, const std::vector<int32_t>& tokens, int64_t step) {
  std::vector<DecodeRow> rows;
  for (int64_t r = 0; r < batch; ++r)
    rows.push_back({r, tokens[static_cast<size_t>(step * batch + r)], false, 0});
  return rows;
}

// Every precision, without and with graphs. A setting that fails is recorded as such.
template <class Body>
void for_each_setting(Campaign& campaign, const char* section, Body&& body) {
  for (const std::string& name : campaign.precisions) {
    for (const bool graphs : campaign.graphs) {
      if (graphs && !Graph::available(*campaign.device)) continue;
      try {
        body(name, parse_precision(name), graphs);
      } catch (const Error& error) {
        std::printf("%s %s graphs %d failed: %s\n", section, name.c_str(), graphs, error.what());
        campaign.record["failures"].push_back(
            {{"section", section}, {"precision", name}, {"graphs", graphs}, {"error", error.what()}});
      }
    }
  }
}

}  // namespace

void bench_prefill(Campaign& campaign) {
  const ModelConfig config = preset(campaign.shape, Design::LocalHistory);
  const std::shared_ptr<Model> model = fast_model(campaign.device, config);
  const NamedRoute routes[] = {{"exact", {Route::Kind::Exact, 0}},
                               {"full", {Route::Kind::Full, 0}},
                               {"uniform", {Route::Kind::Uniform, 0}}};
  const std::vector<int64_t> batches =
      campaign.tiny() ? std::vector<int64_t>{1, 4} : std::vector<int64_t>{1, 4, 8};
  const std::vector<int64_t> lengths =
      campaign.tiny() ? std::vector<int64_t>{48} : std::vector<int64_t>{512, 1024, 1792};
  for_each_setting(
      campaign, "prefill", [&](const std::string& name, const Precision& precision, bool graphs) {
        for (const int64_t batch : batches)
          for (const int64_t length : lengths)
            for (const NamedRoute& route : routes) {
              const std::vector<int32_t> tokens = random_tokens(batch * length, config.vocab, 1);
              Session session(model, {batch, length, precision, graphs});
              std::vector<float> logits(static_cast<size_t>(batch * config.vocab));
              const std::vector<PrefillRow> rows = prompts(tokens, batch, length);
              std::vector<double> ms;
              for (int i = 0; i < campaign.warmups + campaign.repeats; ++i) {
                session.reset(all_rows(batch));
                const double taken =
                    milliseconds([&] { session.prefill(rows, route.route, {logits.data()}, nullptr); });
                if (i >= campaign.warmups) ms.push_back(taken);
              }
              campaign.add("prefill",
                           {{"design", "local-history"},
                            {"precision", name},
                            {"graphs", graphs},
                            {"route", route.name},
                            {"batch", batch},
                            {"length", length},
                            {"replayed", session.graphs().replayed}},
                           ms);
            }
      });
}

void bench_decode(Campaign& campaign) {
  const ModelConfig config = preset(campaign.shape, Design::LocalHistory);
  const std::shared_ptr<Model> model = fast_model(campaign.device, config);
  const int64_t length = campaign.tiny() ? 48 : 1792;
  const std::vector<int64_t> batches =
      campaign.tiny() ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{1, 8, 32};
  for_each_setting(campaign, "decode", [&](const std::string& name, const Precision& precision, bool graphs) {
    for (const int64_t batch : batches) {
      const int64_t steps = campaign.warmups + 4 * campaign.repeats;
      const std::vector<int32_t> tokens = random_tokens(batch * (length + steps), config.vocab, 2);
      Session session(model, {batch, length + steps, precision, graphs});
      std::vector<float> logits(static_cast<size_t>(batch * config.vocab));
      session.prefill(prompts(tokens, batch, length), {Route::Kind::Exact, 0}, {logits.data()}, nullptr);
      std::vector<double> ms;
      for (int64_t step = 0; step < steps; ++step) {
        const std::vector<DecodeRow> rows = next_tokens(batch, tokens, step);
        const double taken = milliseconds([&] { session.decode(rows, {logits.data()}, nullptr); });
        if (step >= campaign.warmups) ms.push_back(taken);
      }
      campaign.add("decode",
                   {{"design", "local-history"},
                    {"precision", name},
                    {"graphs", graphs},
                    {"batch", batch},
                    {"length", length},
                    {"replayed", session.graphs().replayed}},
                   ms);
    }
  });
}

void bench_request(Campaign& campaign) {
  const int64_t length = campaign.tiny() ? 48 : 1792, steps = campaign.tiny() ? 8 : 128;
  for (const Design design : {Design::LocalHistory, Design::Gqa2, Design::Gqa4Cla2, Design::Independent}) {
    const ModelConfig config = preset(campaign.shape, design);
    const std::shared_ptr<Model> model = fast_model(campaign.device, config);
    const std::vector<int32_t> tokens = random_tokens(length + steps, config.vocab, 3);
    for_each_setting(campaign, "request",
                     [&](const std::string& name, const Precision& precision, bool graphs) {
                       Session session(model, {1, length + steps, precision, graphs});
                       std::vector<float> logits(static_cast<size_t>(config.vocab));
                       std::vector<double> total, prefill;
                       for (int i = 0; i < campaign.warmups + (campaign.repeats + 1) / 2; ++i) {
                         session.reset({0});
                         const double first = milliseconds([&] {
                           session.prefill({{0, tokens.data(), nullptr, length}}, {Route::Kind::Exact, 0},
                                           {logits.data()}, nullptr);
                         });
                         const double rest = milliseconds([&] {
                           for (int64_t step = 0; step < steps; ++step)
                             session.decode(next_tokens(1, tokens, length + step), {logits.data()}, nullptr);
                         });
                         if (i >= campaign.warmups) total.push_back(first + rest), prefill.push_back(first);
                       }
                       campaign.add("request",
                                    {{"design", duokv::name(design)},
                                     {"precision", name},
                                     {"graphs", graphs},
                                     {"batch", 1},
                                     {"length", length},
                                     {"steps", steps},
                                     {"prefillMs", prefill},
                                     {"prefillMedian", median(prefill)},
                                     {"cacheBytes", session.bytes().total()}},
                                    total);
                     });
  }
}

}  // namespace duokv::tools
