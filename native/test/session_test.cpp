// Prefill and decode of every design against the full forward pass, and what a failed call leaves behind.
#include "test/models.h"

namespace duokv::test {
namespace {

constexpr double kTolerance = 2e-5;

// All entries of every cache tensor of a row.
std::vector<float> cache_of(const Session& session, int64_t row) {
  std::vector<float> all;
  for (const std::string& name : session.names()) {
    if (name == "documentIds") continue;
    const size_t offset = all.size();
    const int64_t width = session.model()->plan().config.kv_width();
    all.resize(offset + static_cast<size_t>(session.entries(name, row) * width));
    session.read(name, row, all.data() + offset);
  }
  return all;
}

DUOKV_TEST(every_route_and_any_split_agree_with_the_full_forward_pass) {
  constexpr int64_t kLength = 43, kRows = 2;
  for (const ModelConfig& config : all_configs()) {
    const std::string label = describe(config);
    const auto model = random_model(core_device(), config, 3);
    const size_t vocab = static_cast<size_t>(config.vocab);
    const RandomBatch random(config, kRows, kLength, 11);
    const Precision fp32 = parse_precision("fp32");
    std::vector<float> logits(kRows * kLength * vocab);
    compute_logits(*model, random.batch, fp32, logits.data(), nullptr);
    const auto expected = [&](int64_t row, int64_t position) {
      const float* from = logits.data() + static_cast<size_t>(row * kLength + position) * vocab;
      return std::vector<float>(from, from + vocab);
    };

    std::vector<float> reference_cache;
    std::vector<Route> routes{{Route::Kind::Full, 0}, {Route::Kind::Exact, 0}};
    if (model->plan().has_global_bank) routes.push_back({Route::Kind::Uniform, 0});
    // Prefill of all but the last tokens in chunks, then decode.
    for (const std::vector<int64_t>& chunks : {std::vector<int64_t>{40}, {1, 2, 30, 7}, {17, 23}, {3, 37}})
      for (const Route& route : routes) {
        Session session(model, {kRows, kLength, fp32});
        std::vector<float> out(kRows * vocab);
        int64_t at = 0;
        for (int64_t count : chunks) {
          std::vector<PrefillRow> rows;
          for (int64_t r = 0; r < kRows; ++r)
            rows.push_back(
                {r, random.tokens.data() + r * kLength + at, random.ids.data() + r * kLength + at, count});
          expect(session.prefill(rows, route, {out.data()}, nullptr).exact, "%s: not exact", label.c_str());
          at += count;
          for (int64_t r = 0; r < kRows; ++r)
            expect_close(label + " prefill",
                         {out.begin() + r * static_cast<int64_t>(vocab),
                          out.begin() + (r + 1) * static_cast<int64_t>(vocab)},
                         expected(r, at - 1), kTolerance, kTolerance);
        }
        for (; at < kLength; ++at) {
          std::vector<DecodeRow> rows;
          for (int64_t r = kRows; r-- > 0;)
            rows.push_back({r, random.tokens[static_cast<size_t>(r * kLength + at)], true,
                            random.ids[static_cast<size_t>(r * kLength + at)]});
          session.decode(rows, {out.data()}, nullptr);
          expect_close(label + " decode", {out.begin() + static_cast<int64_t>(vocab), out.end()},
                       expected(0, at), kTolerance, kTolerance);
        }
        const std::vector<float> cache = cache_of(session, 1);
        if (reference_cache.empty()) reference_cache = cache;
        expect_close(label + " cache", cache, reference_cache, kTolerance, kTolerance);
        const CacheBytes planned = planned_cache_bytes(model->plan(), kRows, kLength, 4);
        expect(session.bytes().total() == planned.total(), "%s: retained bytes", label.c_str());
      }
  }
}

DUOKV_TEST(rows_are_independent_slots) {
  const ModelConfig config = small_config(Design::LocalHistory);
  const auto model = random_model(core_device(), config, 5);
  const RandomBatch random(config, 3, 30, 12);
  const Precision fp32 = parse_precision("fp32");
  const size_t vocab = static_cast<size_t>(config.vocab);
  const auto request = [&](int64_t slot, int64_t source, int64_t begin, int64_t count) {
    return PrefillRow{slot, random.tokens.data() + source * 30 + begin,
                      random.ids.data() + source * 30 + begin, count};
  };
  std::vector<float> alone(vocab), together(3 * vocab);
  Session single(model, {1, 32, fp32}), batch(model, {4, 32, fp32});
  single.prefill({request(0, 1, 0, 20)}, {}, {alone.data()}, nullptr);
  batch.prefill({request(3, 0, 0, 20), request(0, 1, 0, 20), request(2, 2, 0, 9)}, {}, {together.data()},
                nullptr);
  expect_bitwise(
      "batch and slot invariance",
      {together.begin() + static_cast<int64_t>(vocab), together.begin() + 2 * static_cast<int64_t>(vocab)},
      alone);
  expect_bitwise("cache", cache_of(batch, 0), cache_of(single, 0));
  const std::vector<float> untouched = cache_of(batch, 0);
  batch.reset({3});
  batch.prefill({request(3, 0, 0, 5)}, {}, {together.data()}, nullptr);
  expect_bitwise("an untouched row", cache_of(batch, 0), untouched);
}

DUOKV_TEST(a_failed_call_changes_nothing) {
  const ModelConfig config = small_config(Design::LocalHistory);
  const auto model = random_model(core_device(), config, 6);
  const RandomBatch random(config, 1, 40, 13);
  std::vector<float> logits(static_cast<size_t>(config.vocab));
  Session session(model, {1, 40, parse_precision("fp32")});
  session.prefill({{0, random.tokens.data(), random.ids.data(), 20}}, {}, {logits.data()}, nullptr);
  const std::vector<float> before = cache_of(session, 0);

  const auto fails = [&](const char* code, const PrefillRow& row, Cancel cancel) {
    try {
      session.prefill({row}, {}, {logits.data()}, cancel);
      expect(false, "%s was not raised", code);
    } catch (const Error& e) {
      expect(e.code == code, "%s, expected %s: %s", e.code.c_str(), code, e.what());
    }
    expect(session.length(0) == 20, "%s: the length changed", code);
    expect_bitwise(code, cache_of(session, 0), before);
  };
  const std::atomic<bool> cancelled{true};
  const PrefillRow next{0, random.tokens.data() + 20, random.ids.data() + 20, 15};
  fails(kAbortCode, next, &cancelled);
  const std::vector<int32_t> outside{3, 61};
  fails("ERR_TOKEN_RANGE", {0, outside.data(), nullptr, 2}, nullptr);
  fails("ERR_CAPACITY", {0, random.tokens.data(), nullptr, 21}, nullptr);
  fails("ERR_SHAPE", {0, random.tokens.data(), nullptr, 0}, nullptr);
  fails("ERR_SHAPE", {1, random.tokens.data(), nullptr, 1}, nullptr);
  const std::vector<int64_t> recurring{random.ids[19], 1, random.ids[19]};
  fails("ERR_DOCUMENT_IDS", {0, random.tokens.data(), recurring.data(), 3}, nullptr);
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
