#include "core/model.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/initialise.h"

namespace duokv {

Model::Model(std::shared_ptr<Device> device, Plan plan) : device_(std::move(device)), plan_(std::move(plan)) {
  const int64_t bytes = plan_.arena_elements * static_cast<int64_t>(sizeof(float));
  parameters_ = Buffer(device_, bytes, "parameters");
  device_->zero(parameters_.as(), bytes);
  device_->check(device_->table().pack_cache_create(device_->handle(), &packs_));
}

Model::~Model() { device_->table().pack_cache_destroy(device_->handle(), packs_); }

std::shared_ptr<Model> Model::create(std::shared_ptr<Device> device, const ModelConfig& config,
                                     const std::string& seed) {
  std::shared_ptr<Model> model(new Model(std::move(device), make_plan(config)));
  if (seed.empty()) return model;
  const int32_t threads = model->device_->info().threads;
  std::vector<float> values;
  for (const Parameter& parameter : model->plan_.parameters) {
    if (parameter.init == Parameter::Init::Zeros) continue;
    values.assign(static_cast<size_t>(parameter.elements), 1.0f);
    if (parameter.init == Parameter::Init::Normal)
      normal_parameters(seed, parameter.name, parameter.std, values.data(), parameter.elements, threads);
    model->device_->upload(model->arena() + parameter.offset, values.data(),
                           parameter.elements * static_cast<int64_t>(sizeof(float)));
  }
  return model;
}

int64_t Model::bytes() const {
  return parameters_.bytes() + rotary_.bytes() + device_->table().pack_cache_bytes(packs_);
}

void Model::read(const std::string& name, float* out, int64_t elements) const {
  const Parameter& p = plan_.parameter(name, elements);
  device_->download(out, arena() + p.offset, elements * static_cast<int64_t>(sizeof(float)));
}

void Model::write(const std::string& name, const float* values, int64_t elements) {
  const Parameter& p = plan_.parameter(name, elements);
  device_->upload(arena() + p.offset, values, elements * static_cast<int64_t>(sizeof(float)));
  touch();
}

ops::Weight Model::weight(int32_t parameter, bool serving) const {
  const Parameter& p = plan_.parameter(parameter);
  return {arena() + p.offset, p.shape[0], p.shape[1], version_, serving ? packs_ : nullptr};
}

const float* Model::rotary_table(int64_t positions) {
  if (positions <= rotary_positions_) return rotary_.as();
  positions = std::max(positions, 2 * rotary_positions_);
  const ModelConfig& c = plan_.config;
  const int64_t half = c.head_dim / 2;
  std::vector<float> table(static_cast<size_t>(positions * half * 2));
  for (int64_t i = 0; i < half; ++i) {
    const double frequency =
        1.0 / std::pow(c.rope_theta, static_cast<double>(2 * i) / static_cast<double>(c.head_dim));
    for (int64_t p = 0; p < positions; ++p) {
      const double angle = static_cast<double>(p) / c.rope_scale * frequency;
      float* pair = table.data() + (p * half + i) * 2;
      pair[0] = static_cast<float>(std::cos(angle));
      pair[1] = static_cast<float>(std::sin(angle));
    }
  }
  Buffer buffer(device_, static_cast<int64_t>(table.size() * sizeof(float)), "rotary table");
  device_->upload(buffer.as(), table.data(), buffer.bytes());
  rotary_ = std::move(buffer);
  rotary_positions_ = positions;
  return rotary_.as();
}

}  // namespace duokv
