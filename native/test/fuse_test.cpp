#include "test/harness.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

struct Fusion {
  int64_t m;
  int32_t heads, head_dim;
  std::vector<float> global, local, logit, dout;
};

Fusion random_fusion(Rng& rng, int64_t m, int32_t heads, int32_t head_dim) {
  const int64_t n = m * heads * head_dim;
  return {m, heads, head_dim, rng.normals(n), rng.normals(n), rng.normals(heads, 3), rng.normals(n)};
}

struct Result {
  std::vector<float> out, dglobal, dlocal, dlogit;
};

Result fuse(ops::Device* device, const Fusion& f, float dlogit_start = 0) {
  const auto n = static_cast<int64_t>(f.global.size());
  const Array<float> global(device, f.global), local(device, f.local), logit(device, f.logit),
      dout(device, f.dout);
  const Array<float> out(device, n), dglobal(device, n), dlocal(device, n);
  const Array<float> dlogit(device, std::vector<float>(static_cast<size_t>(f.heads), dlogit_start));
  const ops::FuseArgs forward = {.global = global.data(),
                                 .local = local.data(),
                                 .logit = logit.data(),
                                 .m = f.m,
                                 .heads = f.heads,
                                 .head_dim = f.head_dim,
                                 .out = out.data()};
  check(table().fuse_forward(device, &forward));
  const ops::FuseBackwardArgs backward = {.forward = forward,
                                          .dout = dout.data(),
                                          .dglobal = dglobal.data(),
                                          .dlocal = dlocal.data(),
                                          .dlogit = dlogit.data()};
  check(table().fuse_backward(device, &backward));
  return {out.get(), dglobal.get(), dlocal.get(), dlogit.get()};
}

DUOKV_TEST(against_fp64) {
  Rng rng(1);
  for (const Fusion& f :
       {random_fusion(rng, 1, 1, 10), random_fusion(rng, 33, 3, 32), random_fusion(rng, 257, 12, 64)}) {
    const float start = 0.25f;
    const Result got = fuse(device(), f, start);
    std::vector<double> out, dglobal, dlocal, dlogit(f.logit.size(), start);
    for (size_t i = 0; i < f.global.size(); ++i) {
      const size_t head = i / f.head_dim % f.heads;
      const double beta = 1 / (1 + std::exp(-static_cast<double>(f.logit[head])));
      const double global = f.global[i], local = f.local[i], gradient = f.dout[i];
      out.push_back((1 - beta) * global + beta * local);
      dglobal.push_back((1 - beta) * gradient);
      dlocal.push_back(beta * gradient);
      dlogit[head] += beta * (1 - beta) * (local - global) * gradient;
    }
    expect_close("out", got.out, out, 1e-6, 1e-6);
    expect_close("dglobal", got.dglobal, dglobal, 1e-7, 1e-6);
    expect_close("dlocal", got.dlocal, dlocal, 1e-7, 1e-6);
    expect_close("dlogit", got.dlogit, dlogit, 1e-5, 1e-6);
  }
}

DUOKV_TEST(extreme_logits_choose_one_source) {
  Fusion f = {1, 2, 1, {3, 3}, {5, 5}, {-200, 200}, {1, 1}};
  const Result got = fuse(device(), f);
  expect_bitwise("out", got.out, {3.0f, 5.0f});
  expect_bitwise("dlogit", got.dlogit, {0.0f, 0.0f});
}

DUOKV_TEST(non_finite_stays_where_it_is) {
  Rng rng;
  constexpr size_t kBad = 1 * 2 * 10 + 1 * 10 + 9;  // row 1, head 1
  for (float bad : kNonFinite) {
    Fusion f = random_fusion(rng, 3, 2, 10);
    const Fusion clean = f;
    f.local[kBad] = bad;
    const Result of_local = fuse(device(), f);
    expect_non_finite_at("out", of_local.out, {kBad});
    expect_non_finite_at("dlocal", of_local.dlocal, {});
    expect_non_finite_at("dlogit of local", of_local.dlogit, {1});
    f = clean;
    f.dout[kBad] = bad;
    const Result of_dout = fuse(device(), f);
    expect_non_finite_at("dglobal", of_dout.dglobal, {kBad});
    expect_non_finite_at("dlocal", of_dout.dlocal, {kBad});
    expect_non_finite_at("dlogit of dout", of_dout.dlogit, {1});
  }
}

DUOKV_TEST(rows_and_threads_change_no_bits) {
  Rng rng(2);
  const Fusion f = random_fusion(rng, 301, 12, 64);
  expect_same_for_any_threads("fusion", [&](ops::Device* on) {
    Result r = fuse(on, f);
    for (const auto* more : {&r.dglobal, &r.dlocal, &r.dlogit})
      r.out.insert(r.out.end(), more->begin(), more->end());
    return r.out;
  });
  const int64_t width = 12 * 64, row = 200;
  const auto slice = [&](const std::vector<float>& x) {
    return std::vector<float>(x.begin() + row * width, x.begin() + (row + 1) * width);
  };
  const Fusion alone = {1, 12, 64, slice(f.global), slice(f.local), f.logit, slice(f.dout)};
  expect_bitwise("a row alone", fuse(device(), alone).out, slice(fuse(device(), f).out));
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
