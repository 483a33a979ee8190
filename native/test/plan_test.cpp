// The plan against the specification's tables: parameters, suffix formulas of Proposition 1 and its group
// form, bytes.
#include <algorithm>

#include "test/models.h"

namespace duokv::test {
namespace {

ModelConfig config_126m(Design design) {
  ModelConfig c = small_config(design);
  c.vocab = 32768, c.hidden = 768, c.ffn = 2048, c.lower_layers = 8, c.upper_layers = 8;
  c.query_heads = 12, c.kv_heads = 4, c.head_dim = 64;
  if (design == Design::LocalHistory) c.window = 128;
  if (design == Design::RepeatedCurrent) c.history_window = 128;
  if (design == Design::GlobalAdapters) c.adapter_rank = 256;
  if (design == Design::Gqa2) c.kv_heads = 2;
  if (design == Design::Gqa2 || design == Design::Gqa4Cla2) c.ffn = 2144;
  return c;
}

void expect_equal(const std::string& what, int64_t got, int64_t expected) {
  expect(got == expected, "%s: %lld, expected %lld", what.c_str(), static_cast<long long>(got),
         static_cast<long long>(expected));
}

DUOKV_TEST(parameter_counts) {
  const auto count = [](ModelConfig c) { return make_plan(c).parameter_count; };
  expect_equal("local-history", count(config_126m(Design::LocalHistory)), 126248448);
  expect_equal("global-only", count(config_126m(Design::GlobalOnly)), 123102720);
  expect_equal("global-adapters", count(config_126m(Design::GlobalAdapters)), 126248448);
  expect_equal("independent", count(config_126m(Design::Independent)), 125854464);
  expect_equal("gqa2", count(config_126m(Design::Gqa2)), 126247680);
  expect_equal("gqa4-cla2", count(config_126m(Design::Gqa4Cla2)), 126247680);
  for (Design d : {Design::LocalHistory, Design::CurrentOnly, Design::RepeatedCurrent}) {
    ModelConfig c = config_126m(d);
    c.fusion = Fusion::Separate;
    expect_equal("separate", count(c), 126248544);
    c.local_source = LocalSource::SharedKv;
    expect_equal("separate shared-kv", count(c), 124675680);
    c.provider = Provider::Cross;
    c.fusion = Fusion::Joint;
    expect_equal("cross shared-kv", count(c), 124281600);
  }
}

// spec/execution.md section 1, for any number of positions.
DUOKV_TEST(exact_suffixes_follow_the_paper) {
  for (int64_t window : {1, 2, 5, 128})
    for (int64_t upper : {1, 2, 8})
      for (int64_t n : {1, 2, 7, 127, 128, 129, 700, 1017, 5000})
        for (LocalSource source : {LocalSource::PerLayer, LocalSource::PairedInput, LocalSource::SharedKv}) {
          ModelConfig c = config_126m(Design::LocalHistory);
          c.upper_layers = upper, c.window = window, c.local_source = source;
          const bool pairs = source != LocalSource::PerLayer;
          if (pairs && upper % 2 != 0) continue;
          const Plan plan = make_plan(c);
          const Suffixes s = suffix_lengths(plan, n, {});
          const int64_t groups = pairs ? upper / 2 : upper;
          PositionCounts expected{0, 0};
          for (int64_t j = 1; j <= upper; ++j) {
            const int64_t g = pairs ? (j + 1) / 2 : j;
            const int64_t in = std::min(n, 1 + (groups - g + 1) * (window - 1));
            const int64_t out = std::min(n, 1 + (groups - g) * (window - 1));
            expect_equal("query positions", s.query[static_cast<size_t>(c.lower_layers + j - 1)], out);
            expected.query_output += out;
            if (source != LocalSource::SharedKv || j % 2 == 1) expected.kv_input += in;
          }
          const PositionCounts got = position_counts(plan, s);
          expect_equal("K/V-input positions", got.kv_input, expected.kv_input);
          expect_equal("query/output positions", got.query_output, expected.query_output);
          expect_equal("uniform suffix", uniform_suffix(plan), 1 + groups * (window - 1));
        }
}

DUOKV_TEST(complete_cache_bytes) {
  const auto total = [](const ModelConfig& c) {
    return planned_cache_bytes(make_plan(c), 1, 1792, 4).total();
  };
  expect_equal("local-history", total(config_126m(Design::LocalHistory)), 35141632);
  expect_equal("gqa4-cla2", total(config_126m(Design::Gqa4Cla2)), 29374464);
  expect_equal("gqa2", total(config_126m(Design::Gqa2)), 29374464);
  expect_equal("independent", total(config_126m(Design::Independent)), 58734592);
}

DUOKV_TEST(illegal_configs_are_refused) {
  const auto refused = [](const char* what, void (*change)(ModelConfig&)) {
    ModelConfig c = small_config(Design::LocalHistory);
    change(c);
    try {
      make_plan(c);
    } catch (const Error& e) {
      expect(e.code == "ERR_CONFIG", "%s: code %s", what, e.code.c_str());
      return;
    }
    expect(false, "%s was accepted", what);
  };
  refused("odd U with pairs",
          [](ModelConfig& c) { c.upper_layers = 3, c.local_source = LocalSource::SharedKv; });
  refused("odd L+U with layer pairs",
          [](ModelConfig& c) { c = small_config(Design::Gqa4Cla2), c.upper_layers = 3; });
  refused("window with current-only", [](ModelConfig& c) { c.design = Design::CurrentOnly; });
  refused("window 0", [](ModelConfig& c) { c.window = 0; });
  refused("odd head dimension", [](ModelConfig& c) { c.head_dim = 15; });
  refused("query heads no multiple", [](ModelConfig& c) { c.query_heads = 3; });
  refused("historyWindow elsewhere", [](ModelConfig& c) { c.history_window = 4; });
  refused("separate fusion without a local bank",
          [](ModelConfig& c) { c = small_config(Design::GlobalOnly), c.fusion = Fusion::Separate; });
  refused("negative eps", [](ModelConfig& c) { c.rms_norm_eps = -1; });
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
