// The last rows of every batch row, cut out and added back.
#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

struct Shape {
  int64_t batch, count, keep, d;
};

DUOKV_CASE(cuts_and_adds_back) {
  for (const Shape& s : {Shape{1, 1, 1, 1}, {3, 7, 2, 5}, {2, 9, 9, 64}, {5, 31, 1, 40}, {2, 3, 0, 8}}) {
    const auto whole = static_cast<size_t>(s.batch * s.count * s.d),
               part = static_cast<size_t>(s.batch * s.keep * s.d);
    const std::vector<float> src = normals(whole, 1), added = normals(part, 2);
    std::vector<float> cut(part), sum = src;
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t i = 0; i < s.keep * s.d; ++i) {
        const auto from = static_cast<size_t>((b * s.count + s.count - s.keep) * s.d + i),
                   to = static_cast<size_t>(b * s.keep * s.d + i);
        cut[to] = src[from];
        sum[from] += added[to];
      }
    }
    Array<float> dev_src(src), dev_cut(std::max<size_t>(part, 1)),
        dev_added(added.empty() ? std::vector<float>(1) : added);
    check(suffix_rows({dev_src.data(), s.batch, s.count, s.keep, s.d, false, dev_cut.data()}, stream()));
    if (part > 0) expect_equal("cut", dev_cut.get(), cut);
    check(suffix_rows({dev_added.data(), s.batch, s.count, s.keep, s.d, true, dev_src.data()}, stream()));
    expect_equal("added", dev_src.get(), sum);
  }
}

DUOKV_CASE(what_is_not_finite_stays_where_it_is) {
  for (const float bad : kNonFinite) {
    for (const size_t d : {19, 20}) {
      const auto width = static_cast<int64_t>(d);
      std::vector<float> whole = normals(2 * 5 * d, 1), added = normals(2 * 2 * d, 2);
      // Row 0: before what is kept; row 1: in the first vector that is.
      whole[2 * d + 4] = whole[8 * d + 18] = bad;
      added[d] = bad;
      Array<float> dev_whole(whole), dev_added(added), cut(added.size());
      check(suffix_rows({dev_whole.data(), 2, 5, 2, width, false, cut.data()}, stream()));
      expect_non_finite_at("cut", cut.get(), {2 * d + 18});
      check(suffix_rows({dev_added.data(), 2, 5, 2, width, true, dev_whole.data()}, stream()));
      expect_non_finite_at("added", dev_whole.get(), {2 * d + 4, 4 * d, 8 * d + 18});
    }
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
