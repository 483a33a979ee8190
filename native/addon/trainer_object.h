#pragma once

#include <atomic>
#include <memory>

#include "addon/group_object.h"
#include "addon/model_object.h"
#include "core/trainer.h"

namespace duokv::addon {

struct TrainerSlot {
  std::unique_ptr<Trainer> trainer;  // engine thread
  std::optional<Failure> failure;    // engine thread: why there is none
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> update{0};

  Trainer& get() {
    if (failure) throw Error(failure->code, failure->message);
    return *trainer;
  }
  void refresh() {
    bytes = trainer->bytes();
    update = trainer->update();
  }
};

class TrainerResource final : public Resource {
 public:
  TrainerResource(Napi::Env env, std::shared_ptr<ModelResource> model, std::shared_ptr<GroupResource> group)
      : Resource(env, model, "trainer"), model(std::move(model)), group(std::move(group)) {}
  ~TrainerResource() override { retire(); }

  const std::shared_ptr<ModelResource> model;
  const std::shared_ptr<GroupResource> group;  // null: one rank
  const std::shared_ptr<TrainerSlot> slot = std::make_shared<TrainerSlot>();

 protected:
  std::function<void()> release() override {
    return [slot = slot] { slot->trainer.reset(); };
  }
  int64_t bytes() const override { return slot->bytes; }
};

// A trainer. JavaScript: disposed, bytes, update, gradients(batch, cancellation), step(batch, cancellation),
// refuse(), checkRanks(), readState(kind, name), writeState(kind, name, values), setUpdate(update),
// dispose().
class TrainerObject : public Napi::ObjectWrap<TrainerObject> {
 public:
  static void define(Napi::Env env);
  // model.createTrainer(options, group): { trainer, ready }. The object exists at once; its memory once
  // `ready` has settled.
  static Napi::Value create(const Napi::CallbackInfo& info, const std::shared_ptr<ModelResource>& model);

  explicit TrainerObject(const Napi::CallbackInfo& info);

 private:
  Napi::Value gradients(const Napi::CallbackInfo& info);
  Napi::Value step(const Napi::CallbackInfo& info);
  Napi::Value refuse(const Napi::CallbackInfo& info);
  Napi::Value check_ranks(const Napi::CallbackInfo& info);
  Napi::Value read_state(const Napi::CallbackInfo& info);
  Napi::Value write_state(const Napi::CallbackInfo& info);
  Napi::Value set_update(const Napi::CallbackInfo& info);
  void dispose(const Napi::CallbackInfo& info);
  Napi::Value bytes(const Napi::CallbackInfo& info);
  Napi::Value update(const Napi::CallbackInfo& info);
  Napi::Value is_disposed(const Napi::CallbackInfo& info);

  std::shared_ptr<TrainerResource> resource_;
};

}  // namespace duokv::addon
