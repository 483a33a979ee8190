#include "core/data_parallel.h"

#include <algorithm>
#include <string>
#include <utility>

#include "dist/hash.h"

namespace duokv {
namespace {

// Parameters are read back and hashed in pieces of this size.
constexpr int64_t kHashElements = int64_t{4} << 20;

std::string rank_name(size_t rank) { return "rank " + std::to_string(rank); }

// [parameters] The layer whose backward pass is the last to add to each one's gradient; -1 for those that the
// pass completes at its end.
std::vector<int64_t> completing_layers(const Plan& plan) {
  // What no layer owns, the final norm, is complete before the layers begin.
  std::vector<int64_t> layers(plan.parameters.size(), static_cast<int64_t>(plan.layers.size()));
  const auto owns = [&](size_t layer, int32_t parameter) {
    if (parameter == kNone) return;
    int64_t& completes = layers[static_cast<size_t>(parameter)];
    completes = std::min(completes, static_cast<int64_t>(layer));
  };
  for (size_t i = 0; i < plan.layers.size(); ++i) {
    const LayerPlan& layer = plan.layers[i];
    for (int32_t parameter :
         {layer.attention_norm, layer.q_proj, layer.o_proj, layer.fusion_logit, layer.ffn_norm,
          layer.gate_proj, layer.up_proj, layer.down_proj, layer.adapter_up, layer.adapter_down})
      owns(i, parameter);
    for (int32_t index : layer.projections) {
      const Projection& projection = plan.projections[static_cast<size_t>(index)];
      for (int32_t parameter : {projection.norm, projection.k_proj, projection.v_proj}) owns(i, parameter);
    }
  }
  layers[static_cast<size_t>(plan.embedding)] = -1;
  return layers;
}

}  // namespace

std::vector<GradientBucket> gradient_buckets(const Plan& plan, int64_t largest) {
  const std::vector<int64_t> layers = completing_layers(plan);
  std::vector<GradientBucket> buckets;
  int64_t end = plan.arena_elements;  // of the bucket being filled
  int64_t layer = static_cast<int64_t>(plan.layers.size());
  const auto cut = [&](int64_t begin) {
    while (end > begin) {
      const int64_t elements = std::min(largest, end - begin);
      buckets.push_back({end - elements, elements, layer});
      end -= elements;
    }
  };
  for (size_t i = plan.parameters.size(); i-- > 0;) {
    const Parameter& parameter = plan.parameters[i];
    const int64_t above = parameter.offset + parameter.elements;
    // A parameter that would overfill the bucket starts the next; one that completes later than the bucket
    // would hold it back, unless the bucket is small.
    const bool overfull = end - parameter.offset > largest;
    const bool later = layers[i] < layer && end - above >= largest / 2;
    if (overfull || later) {
      cut(above);
      layer = layers[i];
    }
    layer = std::min(layer, layers[i]);
  }
  cut(0);
  std::stable_sort(buckets.begin(), buckets.end(),
                   [](const GradientBucket& a, const GradientBucket& b) { return a.layer > b.layer; });
  return buckets;
}

DataParallel::DataParallel(std::shared_ptr<dist::Collective> group, std::shared_ptr<Model> model,
                           int64_t bucket)
    : model_(std::move(model)) {
  if (group == nullptr || group->size() == 1) return;
  group_ = std::move(group);
  buckets_ = gradient_buckets(model_->plan(), bucket);
  guard([&] {
    const Device& device = *model_->device();
    sum_ = std::make_unique<dist::DeviceSum>(group_, device.table(), device.handle());
  });
}

void DataParallel::open(Opening& opening, Cancel cancel) {
  if (!active()) return;
  begun_ = 0;
  const auto size = static_cast<size_t>(group_->size()), rank = static_cast<size_t>(group_->rank());
  // Both totals, then which ranks refuse, then every rank's fingerprint.
  std::vector<int64_t> values(2 + 2 * size);
  const size_t refusals = 2, fingerprints = 2 + size;
  values[0] = opening.valid_targets;
  values[1] = opening.tokens;
  values[refusals + rank] = opening.refused ? 1 : 0;
  values[fingerprints + rank] = opening.fingerprint;
  group_->sum(values.data(), static_cast<int64_t>(values.size()), cancel);
  opening.valid_targets = values[0];
  opening.tokens = values[1];
  if (opening.refused) return;  // the caller knows better what to say
  for (size_t r = 0; r < size; ++r) {
    if (values[refusals + r] != 0)
      throw Error("ERR_DISTRIBUTED", rank_name(r) + " refused its part of the batch; nothing was changed");
    if (values[fingerprints + r] != values[fingerprints])
      throw Error("ERR_DISTRIBUTED", rank_name(r) +
                                         " has another model, other trainer options, another backend or "
                                         "another number of updates done than rank 0; nothing was changed");
  }
}

void DataParallel::layer_done(int64_t layer, float* gradients) {
  if (!active()) return;
  group_->check();
  for (; begun_ < buckets_.size() && buckets_[begun_].layer >= layer; ++begun_)
    sum_->begin(gradients + buckets_[begun_].offset, buckets_[begun_].elements);
}

void DataParallel::finish(float* gradients, Cancel cancel) {
  if (!active()) return;
  layer_done(-1, gradients);
  sum_->finish(cancel);
}

void DataParallel::close(double& loss, double& squares, Cancel cancel) {
  if (!active()) return;
  double values[2] = {loss, group_->rank() == 0 ? squares : 0};
  group_->sum(values, 2, cancel);
  loss = values[0];
  squares = values[1];
}

void DataParallel::check_parameters() {
  if (!active()) return;
  std::vector<float> piece;
  int64_t hash = 0;
  for (const Parameter& parameter : model_->plan().parameters) {
    for (int64_t begin = 0; begin < parameter.elements; begin += kHashElements) {
      const int64_t n = std::min(kHashElements, parameter.elements - begin);
      piece.resize(static_cast<size_t>(n));
      const size_t bytes = piece.size() * sizeof(float);
      model_->device()->download(piece.data(), model_->arena() + parameter.offset + begin,
                                 static_cast<int64_t>(bytes));
      hash = dist::hash_bytes(piece.data(), bytes, hash);
    }
  }
  const std::vector<int64_t> hashes = group_->gather(hash);
  for (size_t r = 0; r < hashes.size(); ++r)
    if (hashes[r] != hashes[0])
      throw Error("ERR_DISTRIBUTED", "the parameters of " + rank_name(r) +
                                         " are no longer those of rank 0: they began from other checkpoints, "
                                         "or the machines compute differently");
}

}  // namespace duokv
