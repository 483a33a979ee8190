#include "test/harness.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

using Values = std::vector<float>;
using Tokens = std::vector<int32_t>;

Values forward(ops::Device* device, const Tokens& tokens, const Values& embedding, int64_t d) {
  const Array<int32_t> ids(device, tokens);
  const Array<float> weights(device, embedding), x(device, ids.size() * d);
  const ops::EmbeddingArgs args = {
      .tokens = ids.data(), .m = ids.size(), .d = d, .table = weights.data(), .x = x.data()};
  check(table().embedding_forward(device, &args));
  return x.get();
}

ops::Status backward(ops::Device* device, const Tokens& tokens, const Values& dx, int64_t d,
                     Values& gradient) {
  const Array<int32_t> ids(device, tokens);
  const Array<float> grads(device, dx), out(device, gradient);
  const ops::EmbeddingBackwardArgs args = {.tokens = ids.data(),
                                           .m = ids.size(),
                                           .d = d,
                                           .vocab = out.size() / d,
                                           .dx = grads.data(),
                                           .dtable = out.data()};
  const ops::Status status = table().embedding_backward(device, &args);
  gradient = out.get();
  return status;
}

// Token frequencies like those of text: a few ids fill most of a batch.
Tokens skewed_tokens(Rng& rng, int64_t m, int32_t vocab) {
  Tokens tokens;
  for (int64_t i = 0; i < m; ++i) {
    const float u = rng.uniform(0, 1);
    tokens.push_back(std::min(vocab - 1, static_cast<int32_t>(u * u * u * static_cast<float>(vocab))));
  }
  return tokens;
}

const struct {
  int64_t m, d;
  int32_t vocab;
} kShapes[] = {{1, 1, 1},       {1, 768, 97},     {97, 1, 10},  {131, 10, 7},
               {1009, 97, 211}, {401, 768, 4096}, {7, 1024, 3}, {0, 40, 5}};

DUOKV_TEST(looks_up_rows) {
  Rng rng;
  for (const auto& [m, d, vocab] : kShapes) {
    const Values embedding = rng.normals(vocab * d);
    const Tokens tokens = skewed_tokens(rng, m, vocab);
    Values expected;
    for (int32_t token : tokens) {
      expected.insert(expected.end(), embedding.begin() + token * d, embedding.begin() + (token + 1) * d);
    }
    expect_bitwise("x", forward(device(), tokens, embedding, d), expected);
  }
}

DUOKV_TEST(gradient_sums_in_order_of_occurrence) {
  Rng rng;
  for (const auto& [m, d, vocab] : kShapes) {
    const Values dx = rng.normals(m * d), start = rng.normals(vocab * d);
    const Tokens tokens = skewed_tokens(rng, m, vocab);
    Values expected(start), got(start);
    std::vector<double> exact(start.begin(), start.end());
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < d; ++j) {
        const size_t to = static_cast<size_t>(tokens[static_cast<size_t>(i)] * d + j),
                     from = static_cast<size_t>(i * d + j);
        expected[to] += dx[from];
        exact[to] += dx[from];
      }
    }
    check(backward(device(), tokens, dx, d, got));
    expect_bitwise("order", got, expected);
    expect_relative_l2("fp64", got, exact, 1e-6);
  }
}

DUOKV_TEST(a_batch_of_one_token) {
  const int64_t m = 131072, d = 2;
  Values got(3 * d);
  check(backward(device(), Tokens(m, 1), Values(m * d, 1.0f), d, got));
  expect_bitwise("dtable", got, Values{0, 0, 131072, 131072, 0, 0});
}

DUOKV_TEST(non_finite_stays_with_its_token) {
  Rng rng;
  const int64_t d = 19;
  const Tokens tokens = {4, 1, 4, 0};
  for (float bad : kNonFinite) {
    Values embedding = rng.normals(5 * d), dx = rng.normals(4 * d), gradient = rng.normals(5 * d);
    embedding[4 * d + 18] = embedding[2 * d] = bad;  // nothing reads token 2
    expect_non_finite_at("x", forward(device(), tokens, embedding, d), {0 * d + 18, 2 * d + 18});
    dx[2 * d + 7] = gradient[3 * d + 3] = bad;
    check(backward(device(), tokens, dx, d, gradient));
    expect_non_finite_at("dtable", gradient, {3 * d + 3, 4 * d + 7});
  }
}

DUOKV_TEST(thread_counts) {
  Rng rng;
  const int64_t m = 2003, d = 768;
  const int32_t vocab = 499;
  const Tokens tokens = skewed_tokens(rng, m, vocab);
  const Values dx = rng.normals(m * d);
  expect_same_for_any_threads("dtable", [&](ops::Device* device) {
    Values gradient(static_cast<size_t>(vocab * d));
    check(backward(device, tokens, dx, d, gradient));
    return gradient;
  });
}

DUOKV_TEST(rejects_tokens_outside_the_vocabulary_before_writing) {
  for (int32_t bad : {-1, 5}) {
    Values gradient(5 * 4, 1.0f);
    const Values before = gradient;
    expect_status(backward(device(), {0, 1, bad}, Values(12, 1.0f), 4, gradient), ops::kInvalid,
                  "token out of range");
    expect(std::strstr(table().last_error(), "token 2") != nullptr, "the message is \"%s\"",
           table().last_error());
    expect_bitwise("dtable", gradient, before);
  }
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
