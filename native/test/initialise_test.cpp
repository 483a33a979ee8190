// The initialisation stream against values computed by an independent implementation.
#include "core/initialise.h"

#include "test/harness.h"

namespace duokv::test {
namespace {

std::vector<float> values(const char* seed, const char* name, double std, int64_t n, int32_t threads) {
  std::vector<float> out(static_cast<size_t>(n));
  normal_parameters(seed, name, std, out.data(), n, threads);
  return out;
}

DUOKV_TEST(golden_values) {
  const std::vector<float> v = values("0", "model.embed_tokens.weight", 0.02, 196608, 2);
  const struct {
    size_t index;
    double value;
  } golden[] = {{0, -0.02862817607820034},   {1, -0.01445695385336876},   {2, 0.018977541476488113},
                {3, -0.004269257187843323},  {4, 0.004063420929014683},   {7, -0.033542435616254807},
                {767, -0.03246036171913147}, {768, 0.003903062781319022}, {196607, -0.030055321753025055}};
  for (const auto& g : golden)
    expect(v[g.index] == static_cast<float>(g.value), "element %zu is %.9g, expected %.9g", g.index,
           static_cast<double>(v[g.index]), g.value);
  const std::vector<float> o =
      values("17", "model.layers.15.self_attn.o_proj.weight", 0.02 / std::sqrt(32.0), 196608, 1);
  expect(o[0] == 0.0019173665205016732f, "o_proj of seed 17: %.9g", static_cast<double>(o[0]));
  expect(o[1] == 0.001363556832075119f, "o_proj of seed 17: %.9g", static_cast<double>(o[1]));
}

DUOKV_TEST(an_element_depends_on_neither_count_nor_threads) {
  const std::vector<float> whole = values("5", "x", 1.0, 100003, 3);
  const std::vector<float> prefix = values("5", "x", 1.0, 50001, 1);
  expect_bitwise("prefix", prefix, {whole.begin(), whole.begin() + 50001});
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
