// Separate fusion against FP64.
#include <array>

#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

DUOKV_CASE(matches_fp64) {
  for (const auto& [m, heads, head_dim] :
       {std::array<int, 3>{1, 1, 16}, {3, 5, 32}, {67, 2, 64}, {200, 3, 16}, {130, 12, 64}}) {
    const auto width = static_cast<size_t>(heads * head_dim), count = static_cast<size_t>(m) * width;
    const std::vector<float> global = normals(count, 1), local = normals(count, 2), dout = normals(count, 3),
                             logit = normals(static_cast<size_t>(heads), 4),
                             old = normals(static_cast<size_t>(heads), 5);
    std::vector<double> out(count), dglobal(count), dlocal(count), dlogit(old.begin(), old.end());
    for (size_t i = 0; i < count; ++i) {
      const size_t h = i % width / static_cast<size_t>(head_dim);
      const double beta = 1 / (1 + std::exp(-double{logit[h]}));
      out[i] = (1 - beta) * global[i] + beta * local[i];
      dglobal[i] = (1 - beta) * dout[i];
      dlocal[i] = beta * dout[i];
      dlogit[h] += beta * (1 - beta) * dout[i] * (double{local[i]} - global[i]);
    }
    Array<float> g(global), l(local), d(dout), b(logit), dev_out(count), dg(count), dl(count), db(old);
    const ops::FuseArgs forward{g.data(), l.data(), b.data(), m, heads, head_dim, dev_out.data()};
    check(fuse_forward(forward, stream()));
    const ops::FuseBackwardArgs backward{forward, d.data(), dg.data(), dl.data(), db.data()};
    Array<char> workspace(fuse_backward_workspace(backward));
    check(fuse_backward(backward, workspace.data(), stream()));
    const std::string name = std::to_string(m) + " x " + std::to_string(heads) + ": ";
    expect_relative(name + "out", dev_out.get(), out, 1e-6);
    expect_relative(name + "dglobal", dg.get(), dglobal, 1e-6);
    expect_relative(name + "dlocal", dl.get(), dlocal, 1e-6);
    expect_relative(name + "dlogit", db.get(), dlogit, 1e-5);
  }
}

DUOKV_CASE(equal_branches_stay_as_they_are) {
  const std::vector<float> x = normals(3 * 2 * 16, 1), logit = normals(2, 2);
  Array<float> g(x), l(x), b(logit), out(x.size());
  check(fuse_forward({g.data(), l.data(), b.data(), 3, 2, 16, out.data()}, stream()));
  expect_equal("out", out.get(), x);
}

DUOKV_CASE(what_is_not_finite_stays_so) {
  constexpr int kRows = 3, kHeads = 2, kDim = 16;
  constexpr size_t kCount = kRows * kHeads * kDim, kBad = 37;  // of head 0
  for (const float bad : {NAN, INFINITY}) {
    for (const bool of_dout : {false, true}) {
      std::vector<float> local = normals(kCount, 1), dout = normals(kCount, 2);
      (of_dout ? dout : local)[kBad] = bad;
      Array<float> g(normals(kCount, 3)), l(local), d(dout), b(normals(kHeads, 4)), out(kCount), dg(kCount),
          dl(kCount), db(std::vector<float>(kHeads, 0.0f));
      const ops::FuseArgs forward{g.data(), l.data(), b.data(), kRows, kHeads, kDim, out.data()};
      check(fuse_forward(forward, stream()));
      const ops::FuseBackwardArgs backward{forward, d.data(), dg.data(), dl.data(), db.data()};
      Array<char> workspace(fuse_backward_workspace(backward));
      check(fuse_backward(backward, workspace.data(), stream()));
      const std::vector<float> got_out = out.get(), got_dl = dl.get(), got_db = db.get();
      for (size_t i = 0; i < kCount; ++i) {
        expect(std::isfinite(got_out[i]) == (of_dout || i != kBad), "out[%zu] is %g", i,
               static_cast<double>(got_out[i]));
        expect(std::isfinite(got_dl[i]) == (!of_dout || i != kBad), "dlocal[%zu] is %g", i,
               static_cast<double>(got_dl[i]));
      }
      const size_t head = kBad / kDim % kHeads;
      expect(!std::isfinite(got_db[head]) && std::isfinite(got_db[1 - head]), "dlogit is %g and %g",
             static_cast<double>(got_db[0]), static_cast<double>(got_db[1]));
    }
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
