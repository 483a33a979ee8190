// Cross-entropy fused with the output projection. Tokens are taken in chunks: a chunk has whole rows of
// logits, so that softmax and its gradient are finished in place and three products suffice.
#include <algorithm>
#include <cmath>
#include <string>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/pack_cache.h"
#include "cpu/product.h"
#include "ops/rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/linear_cross_entropy.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/vector_math-inl.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

// exp(v - max), at most 1. Not finite stays not finite: hn::Exp alone turns NaN into zero.
template <class D, class V>
HWY_INLINE V exp_below(D d, V v, V max) {
  const V x = hn::Sub(v, max);
  return hn::Add(hn::Exp(d, x), hn::Sub(x, x));
}

// v, with the lanes that lie past the end of the array replaced.
template <class D, class V>
HWY_INLINE V keep(D, V v, V, Whole) {
  return v;
}
template <class D, class V>
HWY_INLINE V keep(D d, V v, V replacement, Part part) {
  return hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(part.count)), v, replacement);
}

// The cross-entropy of one row of logits [n], which with `gradient` become scale * (softmax -
// onehot(target)). Where the target is nearly certain both are what the other logits leave of 1, so that
// their terms are summed apart from its own.
float cross_entropy_row(float* logits, int64_t n, int32_t target, bool gradient, float scale) {
  constexpr int64_t kBlock = 512;  // terms summed in FP32 before they join the FP64 total
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const float target_logit = logits[target];
  V maxima = hn::Set(d, target_logit);
  for_each_vector(d, n, [&](int64_t i, auto span) HWY_ATTR {
    maxima = hn::Max(maxima, keep(d, load(d, logits + i, span), maxima, span));
  });
  const V max = hn::MaxOfLanes(d, maxima);
  double others = 0;
  const auto add_others = [&](int64_t begin, int64_t end) HWY_ATTR {
    V sum = hn::Zero(d);
    for_each_vector(d, end - begin, [&](int64_t i, auto span) HWY_ATTR {
      float* at = logits + begin + i;
      const V e = keep(d, exp_below(d, load(d, at, span), max), hn::Zero(d), span);
      sum = hn::Add(sum, e);
      if (gradient) store(e, d, at, span);
    });
    others += hn::GetLane(hn::SumOfLanes(d, sum));
  };
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, n);
    if (begin <= target && target < end) {
      add_others(begin, target);
      add_others(target + 1, end);
    } else {
      add_others(begin, end);
    }
  }
  const double below = static_cast<double>(target_logit) - hn::GetLane(max);
  const double total = others + std::exp(below);
  if (gradient) {
    const V factor = hn::Set(d, static_cast<float>(scale / total));
    for_each_vector(d, n, [&](int64_t i, auto span) HWY_ATTR {
      store(hn::Mul(load(d, logits + i, span), factor), d, logits + i, span);
    });
    logits[target] = static_cast<float>(-scale * (others / total));
  }
  return static_cast<float>(std::log1p(others + std::expm1(below)) - below);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {
namespace {

HWY_EXPORT(cross_entropy_row);

// Larger chunks spare passes over the gradient of E, smaller ones spare memory: 512 rows of 32768 logits are
// 64 MiB.
constexpr int64_t kChunkTokens = 512;

void check_targets(const int32_t* targets, int64_t m, int64_t vocabulary) {
  for (int64_t i = 0; i < m; ++i) {
    if (targets[i] >= 0 && targets[i] < vocabulary) continue;
    throw InvalidArgument("linear_cross_entropy: targets[" + std::to_string(i) + "] is " +
                          std::to_string(targets[i]) + ", must be 0 to " + std::to_string(vocabulary - 1));
  }
}

// Pieces of one allocation, each 64-byte aligned.
class Layout {
 public:
  int64_t add(int64_t bytes) {
    const int64_t at = size_;
    size_ += round_up(bytes, 64);
    return at;
  }
  int64_t size() const { return size_; }

 private:
  int64_t size_ = 0;
};

}  // namespace

Status linear_cross_entropy(Device* device, const ops::LinearCrossEntropyArgs* args) {
  return guarded([&] {
    require(device && args, "linear_cross_entropy: device or args is null");
    const auto& [x, m, e, targets, token_scale, nll, dx, dembedding, mode] = *args;
    require(x && e.data && targets && nll, "linear_cross_entropy: x, embedding, targets or nll is null");
    require(m >= 1 && e.n >= 1 && e.k >= 1, "linear_cross_entropy: m, V and d must be at least 1");
    require(!token_scale == !dx && !dx == !dembedding,
            "linear_cross_entropy: token_scale, dx and dembedding must be all given or all null");
    require(mode == ops::ProductMode::FP32 || mode == ops::ProductMode::BF16,
            "linear_cross_entropy: mode must be FP32 or BF16");
    check_targets(targets, m, e.n);

    const int64_t chunk = std::min(m, kChunkTokens), vocabulary = e.n, d = e.k;
    const bool gradient = dx != nullptr;
    const ProductKernel kernel = choose_kernel(mode, chunk);            // logits and dx
    const ProductKernel rows_kernel = choose_kernel(mode, vocabulary);  // dembedding, whose rows are E's
    Layout layout;
    const int64_t logits_at = layout.add(chunk * vocabulary * 4);
    const int64_t forward_at = layout.add(e.packs ? 0 : prepared_bytes(kernel, d, vocabulary, mode));
    const int64_t backward_at = layout.add(gradient ? prepared_bytes(kernel, vocabulary, d, mode) : 0);
    const int64_t rows_at = layout.add(gradient ? prepared_bytes(rows_kernel, chunk, d, mode) : 0);
    int64_t most = 0;
    for (const int64_t count : {chunk, (m - 1) % chunk + 1})  // the last chunk may be shorter and need more
      most = std::max({most, workspace_bytes(*device, kernel, count, d, vocabulary, false),
                       workspace_bytes(*device, kernel, count, vocabulary, d, false),
                       workspace_bytes(*device, rows_kernel, vocabulary, count, d, false)});
    const int64_t workspace_at = layout.add(most);
    char* memory = device->shared_scratch.take<char>(layout.size());
    float* logits = reinterpret_cast<float*>(memory + logits_at);
    const std::span workspace(memory + workspace_at, static_cast<size_t>(most));

    const RightOperand forward =
        e.packs ? e.packs->get(*device, e, mode, chunk)
                : prepare(*device, kernel, {e.data, d, true}, d, vocabulary, mode, memory + forward_at);
    RightOperand backward{};
    if (gradient)
      backward = prepare(*device, kernel, {e.data, d, false}, vocabulary, d, mode, memory + backward_at);

    for (int64_t first = 0; first < m; first += chunk) {
      const int64_t count = std::min(chunk, m - first);
      multiply(*device, {count, {x + first * d, d, false}, forward, logits, false, false}, workspace);
      device->pool.run(count, [&](int64_t row, int32_t) {
        float* of_row = logits + row * vocabulary;
        const int64_t token = first + row;
        nll[token] = HWY_DYNAMIC_DISPATCH(cross_entropy_row)(of_row, vocabulary, targets[token], gradient,
                                                             gradient ? token_scale[token] : 0.0f);
        // A token that does not count adds nothing, whatever its logits are.
        if (gradient && token_scale[token] == 0) std::fill_n(of_row, vocabulary, 0.0f);
      });
      if (!gradient) continue;
      multiply(*device, {count, {logits, vocabulary, false}, backward, dx + first * d, false, false},
               workspace);
      const RightOperand rows =
          prepare(*device, rows_kernel, {x + first * d, d, false}, count, d, mode, memory + rows_at);
      multiply(*device, {vocabulary, {logits, vocabulary, true}, rows, dembedding, true, false}, workspace);
    }
  });
}

}  // namespace duokv::cpu
#endif
