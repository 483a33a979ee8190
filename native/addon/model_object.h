#pragma once

#include <atomic>
#include <memory>

#include "addon/device_object.h"
#include "core/model.h"

namespace duokv::addon {

struct ModelSlot {
  std::shared_ptr<Model> model;  // engine thread
  std::atomic<int64_t> bytes{0};

  // Engine thread. Training and packing change what a model holds.
  void refresh() {
    if (model) bytes = model->bytes();
  }
};

class ModelResource final : public Resource {
 public:
  ModelResource(Napi::Env env, std::shared_ptr<DeviceResource> device, Plan plan)
      : Resource(env, std::move(device), "model"), plan(std::move(plan)) {}
  ~ModelResource() override { retire(); }

  const Plan plan;
  const std::shared_ptr<ModelSlot> slot = std::make_shared<ModelSlot>();

  // Elements of a parameter. Throws ERR_TENSOR_NAME.
  int64_t elements(const std::string& name) const;

 protected:
  std::function<void()> release() override {
    return [slot = slot] { slot->model.reset(); };
  }
  int64_t bytes() const override { return slot->bytes; }
};

// A model. JavaScript: bytes, disposed, readTensor(name), writeTensor(name, values), logits(batch, precision,
// cancellation), tokenNll(batch, precision, cancellation), createTrainer(options, group),
// createSession(options), dispose().
class ModelObject : public Napi::ObjectWrap<ModelObject> {
 public:
  static void define(Napi::Env env);
  // device.createModel(config, seed): Promise<Model>.
  static Napi::Value create(const Napi::CallbackInfo& info, const std::shared_ptr<DeviceResource>& device);

  explicit ModelObject(const Napi::CallbackInfo& info);

 private:
  Napi::Value read_tensor(const Napi::CallbackInfo& info);
  Napi::Value write_tensor(const Napi::CallbackInfo& info);
  Napi::Value logits(const Napi::CallbackInfo& info);
  Napi::Value token_nll(const Napi::CallbackInfo& info);
  Napi::Value create_trainer(const Napi::CallbackInfo& info);
  Napi::Value create_session(const Napi::CallbackInfo& info);
  void dispose(const Napi::CallbackInfo& info);
  Napi::Value bytes(const Napi::CallbackInfo& info);
  Napi::Value is_disposed(const Napi::CallbackInfo& info);

  std::shared_ptr<ModelResource> resource_;
};

}  // namespace duokv::addon
