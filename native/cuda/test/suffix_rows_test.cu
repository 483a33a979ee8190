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

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
