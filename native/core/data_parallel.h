// What data-parallel training adds to a step: counts over all ranks before it, sums of gradients that travel
// while the backward pass still runs, and the checks that all ranks do the same. With one rank it does
// nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/model.h"
#include "dist/collective.h"
#include "dist/device_sum.h"

namespace duokv {

// A piece of the gradient arena that is summed at once.
struct GradientBucket {
  int64_t offset, elements;
  int64_t layer;  // complete once the backward pass has left this layer; -1: at its end
};

// Cuts the arena into pieces of at most `largest` elements, in the order in which the backward pass completes
// them: parameters lie in the order of layers, so from the arena's end to its beginning.
std::vector<GradientBucket> gradient_buckets(const Plan& plan, int64_t largest);

class DataParallel {
 public:
  // `group` null: one rank. `bucket`: elements at most that are summed at once. Collective. Throws
  // ERR_DISTRIBUTED.
  DataParallel(std::shared_ptr<dist::Collective> group, std::shared_ptr<Model> model, int64_t bucket);

  bool active() const { return group_ != nullptr; }

  // What the ranks say to each other before a step.
  struct Opening {
    int64_t valid_targets, tokens;  // this rank's; all ranks' when open() returns
    int64_t fingerprint;            // of what all ranks must have in common
    bool refused;                   // this rank's rows cannot be used, so no rank goes on
  };
  // Throws ERR_DISTRIBUTED naming the rank where another one refuses or has another fingerprint.
  void open(Opening& opening, Cancel cancel);

  // From here on a failure on one rank ends the group.
  template <class Work>
  void guard(Work&& work) {
    try {
      work();
    } catch (const std::exception& error) {
      if (active()) group_->fail(error.what());
      throw;
    }
  }
  // The backward pass of the last microbatch has left `layer`: starts the sums that are due.
  void layer_done(int64_t layer, float* gradients);
  // Starts the rest, and waits for all.
  void finish(float* gradients, Cancel cancel);
  // `loss` becomes the sum over ranks. `squares` becomes rank 0's: ranks with other instruction sets may sum
  // equal gradients to other last bits, and all must clip alike.
  void close(double& loss, double& squares, Cancel cancel);
  // Throws ERR_DISTRIBUTED, naming the rank, unless all ranks hold the same parameters, bit for bit.
  void check_parameters();

 private:
  std::shared_ptr<dist::Collective> group_;  // null: one rank
  std::shared_ptr<Model> model_;
  std::unique_ptr<dist::DeviceSum> sum_;
  std::vector<GradientBucket> buckets_;
  size_t begun_ = 0;  // buckets of this step whose sums have begun
};

}  // namespace duokv
