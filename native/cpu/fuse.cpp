#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "ops/rounding.h"

namespace duokv::cpu {

namespace {

// Rows of a block: the unit of work, and of the fixed order in which dlogit is summed.
constexpr int64_t kBlockRows = 32;

struct Weights {
  float global, local;  // 1 - beta, beta
};

std::vector<Weights> fusion_weights(const ops::FuseArgs& args) {
  std::vector<Weights> weights(static_cast<size_t>(args.heads));
  for (size_t head = 0; head < weights.size(); ++head) {
    // Each from its own exponential, so that neither loses digits where it is small.
    const double logit = args.logit[head];
    weights[head] = {static_cast<float>(1 / (1 + std::exp(logit))),
                     static_cast<float>(1 / (1 + std::exp(-logit)))};
  }
  return weights;
}

void check_fuse(const ops::FuseArgs& args) {
  require(args.m >= 0, "fuse: m is negative");
  require(args.heads > 0 && args.head_dim > 0, "fuse: an empty head");
}

}  // namespace

Status fuse_forward(Device* device, const ops::FuseArgs* args) {
  return guarded([&] {
    check_fuse(*args);
    const std::vector<Weights> weights = fusion_weights(*args);
    device->pool.run(ceil_div(args->m, kBlockRows), [&](int64_t block, int32_t) {
      const int64_t end = std::min(args->m, (block + 1) * kBlockRows);
      for (int64_t i = block * kBlockRows * args->heads; i < end * args->heads; ++i) {
        const Weights w = weights[static_cast<size_t>(i % args->heads)];
        for (int64_t j = i * args->head_dim; j < (i + 1) * args->head_dim; ++j) {
          args->out[j] = w.global * args->global[j] + w.local * args->local[j];
        }
      }
    });
  });
}

// d(out)/d(logit) = beta (1 - beta) (local - global).
Status fuse_backward(Device* device, const ops::FuseBackwardArgs* args) {
  return guarded([&] {
    const ops::FuseArgs& forward = args->forward;
    check_fuse(forward);
    const std::vector<Weights> weights = fusion_weights(forward);
    const int64_t blocks = ceil_div(forward.m, kBlockRows), heads = forward.heads;
    std::vector<double> sums(static_cast<size_t>(blocks * heads), 0.0);
    device->pool.run(blocks, [&](int64_t block, int32_t) {
      const int64_t end = std::min(forward.m, (block + 1) * kBlockRows);
      for (int64_t i = block * kBlockRows * heads; i < end * heads; ++i) {
        const Weights w = weights[static_cast<size_t>(i % heads)];
        double dot = 0;
        for (int64_t j = i * forward.head_dim; j < (i + 1) * forward.head_dim; ++j) {
          const float dout = args->dout[j];
          dot += static_cast<double>(dout) * (static_cast<double>(forward.local[j]) - forward.global[j]);
          args->dglobal[j] = w.global * dout;
          args->dlocal[j] = w.local * dout;
        }
        sums[static_cast<size_t>(block * heads + i % heads)] += dot;
      }
    });
    for (int64_t head = 0; head < heads; ++head) {
      const Weights w = weights[static_cast<size_t>(head)];
      double sum = 0;
      for (int64_t block = 0; block < blocks; ++block) sum += sums[static_cast<size_t>(block * heads + head)];
      args->dlogit[head] += static_cast<float>(static_cast<double>(w.global) * w.local * sum);
    }
  });
}

}  // namespace duokv::cpu
