#include "test/harness.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

struct Shape {
  int64_t batch, count, keep, d;
};

std::vector<float> suffix_rows(ops::Device* device, const Shape& s, bool scatter_add,
                               const std::vector<float>& src, const std::vector<float>& dst) {
  const Array<float> from(device, src), to(device, dst);
  const ops::SuffixRowsArgs args = {.src = from.data(),
                                    .batch = s.batch,
                                    .count = s.count,
                                    .keep = s.keep,
                                    .d = s.d,
                                    .scatter_add = scatter_add,
                                    .dst = to.data()};
  check(table().suffix_rows(device, &args));
  return to.get();
}

const Shape kShapes[] = {{1, 1, 1, 1},  {1, 5, 2, 10},     {3, 7, 7, 40},     {3, 7, 1, 97},
                         {2, 5, 0, 40}, {3, 131, 67, 768}, {5, 29, 13, 1024}, {0, 4, 2, 8}};

DUOKV_TEST(gathers_the_last_vectors) {
  Rng rng;
  for (const Shape& s : kShapes) {
    const std::vector<float> src = rng.normals(s.batch * s.count * s.d);
    std::vector<float> expected;
    for (int64_t b = 0; b < s.batch; ++b) {
      const auto end = src.begin() + (b + 1) * s.count * s.d;
      expected.insert(expected.end(), end - s.keep * s.d, end);
    }
    const std::vector<float> unset(expected.size(), -1.0f);
    expect_bitwise("gather", suffix_rows(device(), s, false, src, unset), expected);
  }
}

DUOKV_TEST(scatter_adds_the_transpose) {
  Rng rng;
  for (const Shape& s : kShapes) {
    const std::vector<float> src = rng.normals(s.batch * s.keep * s.d),
                             dst = rng.normals(s.batch * s.count * s.d);
    std::vector<float> expected(dst);
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t i = 0; i < s.keep * s.d; ++i) {
        expected[static_cast<size_t>(((b + 1) * s.count - s.keep) * s.d + i)] +=
            src[static_cast<size_t>(b * s.keep * s.d + i)];
      }
    }
    expect_bitwise("scatter", suffix_rows(device(), s, true, src, dst), expected);
  }
}

DUOKV_TEST(non_finite_stays_where_it_is) {
  Rng rng;
  const Shape s = {2, 5, 2, 19};
  for (float bad : kNonFinite) {
    std::vector<float> whole = rng.normals(2 * 5 * 19), part = rng.normals(2 * 2 * 19);
    whole[2 * 19 + 4] = whole[8 * 19 + 18] = bad;  // row 0: before what is kept; row 1: the first vector kept
    expect_non_finite_at("gather", suffix_rows(device(), s, false, whole, part), {2 * 19 + 18});
    part[19] = bad;
    expect_non_finite_at("scatter", suffix_rows(device(), s, true, part, whole),
                         {2 * 19 + 4, 4 * 19, 8 * 19 + 18});
  }
}

DUOKV_TEST(thread_counts) {
  Rng rng;
  const Shape s = {3, 211, 151, 768};
  const std::vector<float> src = rng.normals(s.batch * s.keep * s.d),
                           dst = rng.normals(s.batch * s.count * s.d);
  expect_same_for_any_threads("scatter",
                              [&](ops::Device* device) { return suffix_rows(device, s, true, src, dst); });
}

DUOKV_TEST(keep_past_count) {
  const ops::SuffixRowsArgs args = {
      .src = nullptr, .batch = 1, .count = 2, .keep = 3, .d = 4, .scatter_add = false, .dst = nullptr};
  expect_status(table().suffix_rows(device(), &args), ops::kInvalid, "keep 3 of 2");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
