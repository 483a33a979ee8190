#include "addon/model_object.h"

#include "addon/arguments.h"
#include "addon/config_object.h"
#include "addon/environment.h"
#include "addon/session_object.h"
#include "addon/trainer_object.h"
#include "addon/wrapping.h"

namespace duokv::addon {
namespace {

Napi::Object receiver(const Napi::CallbackInfo& info) { return info.This().As<Napi::Object>(); }

}  // namespace

int64_t ModelResource::elements(const std::string& name) const {
  for (const Parameter& parameter : plan.parameters)
    if (parameter.name == name) return parameter.elements;
  throw Error("ERR_TENSOR_NAME", "the model has no tensor '" + name + "'");
}

void ModelObject::define(Napi::Env env) {
  Environment::of(env).model = Napi::Persistent(DefineClass(
      env, "NativeModel",
      {InstanceMethod<&ModelObject::read_tensor>("readTensor"),
       InstanceMethod<&ModelObject::write_tensor>("writeTensor"),
       InstanceMethod<&ModelObject::logits>("logits"), InstanceMethod<&ModelObject::token_nll>("tokenNll"),
       InstanceMethod<&ModelObject::create_trainer>("createTrainer"),
       InstanceMethod<&ModelObject::create_session>("createSession"),
       InstanceMethod<&ModelObject::dispose>("dispose"), InstanceAccessor<&ModelObject::bytes>("bytes"),
       InstanceAccessor<&ModelObject::is_disposed>("disposed")}));
}

Napi::Value ModelObject::create(const Napi::CallbackInfo& info,
                                const std::shared_ptr<DeviceResource>& device) {
  const ModelConfig config = to_config(info[0]);
  const std::string seed = to_text(info[1], "seed");
  device->require_live();
  auto resource = std::make_shared<ModelResource>(info.Env(), device, make_plan(config));
  device->adopt(resource);
  return resource->call(
      info.Env(), receiver(info), std::make_shared<CancelFlag>(),
      [slot = resource->slot, device_slot = device->device(), config, seed](Cancel) {
        slot->model = Model::create(device_slot->device, config, seed);
        slot->refresh();
        return Done{};
      },
      [resource](Napi::Env e, Done&) {
        resource->require_live();  // the device may have been closed meanwhile
        return wrap(e, Environment::of(e).model, resource);
      });
}

ModelObject::ModelObject(const Napi::CallbackInfo& info)
    : ObjectWrap(info), resource_(unwrap<ModelResource>(info, "Model.create or Model.load")) {}

Napi::Value ModelObject::read_tensor(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    const std::string name = to_text(info[0], "name");
    const FloatSpan out = make_floats(info.Env(), resource_->elements(name), name);
    return resource_->call(
        info.Env(), receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot, name, data = out.data, length = out.length](Cancel) {
          slot->model->read(name, data, length);
          return Done{};
        },
        FilledArray(out));
  });
}

Napi::Value ModelObject::write_tensor(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    const std::string name = to_text(info[0], "name");
    const FloatSpan values = borrow_floats(info[1], "values");
    if (values.length != resource_->elements(name))
      throw Error("ERR_SHAPE", "values has " + std::to_string(values.length) + " elements, tensor '" + name +
                                   "' has " + std::to_string(resource_->elements(name)));
    return resource_->call(
        info.Env(), receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot, name, data = values.data, length = values.length](Cancel) {
          slot->model->write(name, data, length);
          slot->refresh();
          return Done{};
        },
        Undefined(), {values.object});
  });
}

Napi::Value ModelObject::logits(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    HostBatch batch(info[0]);
    const Precision precision = parse_precision(to_text(info[1], "precision"));
    const Batch view = batch.view();
    const FloatSpan out =
        make_floats(info.Env(), view.rows * view.length * resource_->plan.config.vocab, "logits");
    return resource_->call(
        info.Env(), receiver(info), to_flag(info[2]),
        [slot = resource_->slot, batch = std::move(batch), precision, data = out.data](Cancel cancel) {
          compute_logits(*slot->model, batch.view(), precision, data, cancel);
          slot->refresh();
          return Done{};
        },
        FilledArray(out));
  });
}

Napi::Value ModelObject::token_nll(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    HostBatch batch(info[0]);
    batch.require_targets();
    const Precision precision = parse_precision(to_text(info[1], "precision"));
    const Batch view = batch.view();
    const FloatSpan out = make_floats(info.Env(), view.rows * view.length, "tokenNll");
    return resource_->call(
        info.Env(), receiver(info), to_flag(info[2]),
        [slot = resource_->slot, batch = std::move(batch), precision, data = out.data](Cancel cancel) {
          compute_token_nll(*slot->model, batch.view(), precision, data, cancel);
          slot->refresh();
          return Done{};
        },
        FilledArray(out));
  });
}

Napi::Value ModelObject::create_trainer(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] { return TrainerObject::create(info, resource_); });
}

Napi::Value ModelObject::create_session(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] { return SessionObject::create(info, resource_); });
}

void ModelObject::dispose(const Napi::CallbackInfo&) { resource_->dispose("it"); }

Napi::Value ModelObject::bytes(const Napi::CallbackInfo& info) {
  return Napi::Number::New(info.Env(), static_cast<double>(resource_->slot->bytes));
}

Napi::Value ModelObject::is_disposed(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), resource_->disposed());
}

}  // namespace duokv::addon
