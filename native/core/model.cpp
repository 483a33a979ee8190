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
  Plan plan = make_plan(config);
  check_backend(*device, plan);
  std::shared_ptr<Model> model(new Model(std::move(device), std::move(plan)));
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

// A forward pass that computes nothing shows whether the backend has kernels for the shape.
void Model::check_backend(const Device& device, const Plan& plan) {
  const int32_t token = 0;
  Batch batch;
  batch.rows = batch.length = 1;
  batch.tokens = batch.targets = &token;
  Model planned(device.planner(), plan);
  float nll;
  try {
    compute_token_nll(planned, batch, parse_precision("fp32"), &nll, nullptr);
  } catch (const Error& error) {
    if (error.code != "ERR_DEVICE_UNAVAILABLE") throw;
    throw Error("ERR_CONFIG", error.what());
  }
}

Model& Model::twin() {
  if (twin_ == nullptr) twin_.reset(new Model(device_->planner(), plan_));
  return *twin_;
}

void Model::require_memory(int64_t bytes, const std::string& what) {
  const auto grows = [](int64_t planned, int64_t held) { return std::max<int64_t>(0, planned - held); };
  bytes += grows(twin_->device_->info().memory_scratch, device_->info().memory_scratch) +
           grows(twin_->packed_bytes(), packed_bytes()) + grows(twin_->rotary_.bytes(), rotary_.bytes());
  try {
    device_->require_free(bytes, what);
  } catch (const Error&) {
    twin_.reset();  // it counts a program that will not run
    throw;
  }
}

int64_t Model::bytes() const { return parameters_.bytes() + rotary_.bytes() + packed_bytes(); }

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

void Model::head(const float* x, int64_t m, int64_t per_row, bool norm, const Precision& precision,
                 float* logits) const {
  ops::LinearArgs args{};
  args.x = x;
  args.m = m;
  args.per_row = per_row;
  if (norm) args.norm = {data(plan_.final_norm), static_cast<float>(plan_.config.rms_norm_eps)};
  args.count = 1;
  args.w[0] = weight(plan_.embedding, true);
  args.y[0] = logits;
  args.mode = precision.linear;
  device_->run(&ops::OpTable::linear_forward, args);
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
