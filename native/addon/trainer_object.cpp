#include "addon/trainer_object.h"

#include "addon/arguments.h"
#include "addon/environment.h"
#include "addon/wrapping.h"

namespace duokv::addon {
namespace {

Napi::Object receiver(const Napi::CallbackInfo& info) { return info.This().As<Napi::Object>(); }

TrainerOptions to_options(Napi::Value value) {
  const Napi::Object object = to_object(value, "options");
  const auto number = [&](const char* key) { return to_number(object.Get(key), key); };
  const auto integer = [&](const char* key) { return to_integer(object.Get(key), key); };
  TrainerOptions options;
  options.precision = parse_precision(to_text(object.Get("precision"), "precision"));
  options.optimizer = {number("lr"), number("beta1"), number("beta2"), number("eps"), number("weightDecay")};
  options.schedule = {integer("warmup"), integer("total"), number("finalFraction")};
  options.clip_norm = number("clipNorm");
  options.microbatch = integer("microbatch");
  options.recompute = to_boolean(object.Get("recompute"), "recompute");
  options.bucket_bytes = integer("bucketBytes");
  return options;
}

Trainer::State to_state(Napi::Value value) {
  const std::string kind = to_text(value, "kind");
  if (kind == "gradient") return Trainer::State::Gradient;
  if (kind == "m") return Trainer::State::FirstMoment;
  if (kind == "v") return Trainer::State::SecondMoment;
  throw Error("ERR_ARGUMENT", "kind must be gradient, m or v");
}

}  // namespace

void TrainerObject::define(Napi::Env env) {
  Environment::of(env).trainer = Napi::Persistent(DefineClass(
      env, "NativeTrainer",
      {InstanceMethod<&TrainerObject::gradients>("gradients"), InstanceMethod<&TrainerObject::step>("step"),
       InstanceMethod<&TrainerObject::refuse>("refuse"),
       InstanceMethod<&TrainerObject::check_ranks>("checkRanks"),
       InstanceMethod<&TrainerObject::read_state>("readState"),
       InstanceMethod<&TrainerObject::write_state>("writeState"),
       InstanceMethod<&TrainerObject::set_update>("setUpdate"),
       InstanceMethod<&TrainerObject::dispose>("dispose"), InstanceAccessor<&TrainerObject::bytes>("bytes"),
       InstanceAccessor<&TrainerObject::update>("update"),
       InstanceAccessor<&TrainerObject::is_disposed>("disposed")}));
}

Napi::Value TrainerObject::create(const Napi::CallbackInfo& info,
                                  const std::shared_ptr<ModelResource>& model) {
  const Napi::Env env = info.Env();
  model->require_live();
  const TrainerOptions options = to_options(info[0]);
  std::shared_ptr<GroupResource> group;
  if (!is_absent(info[1])) group = GroupObject::resource_of(info[1]);
  auto resource = std::make_shared<TrainerResource>(env, model, group);
  model->adopt(resource);
  const Napi::Object trainer = wrap(env, Environment::of(env).trainer, resource);
  Napi::Object result = Napi::Object::New(env);
  result.Set("trainer", trainer);
  result.Set("ready", resource->call(
                          env, trainer, std::make_shared<CancelFlag>(),
                          [slot = resource->slot, model_slot = model->slot, options, group](Cancel) {
                            try {
                              slot->trainer = std::make_unique<Trainer>(model_slot->model, options,
                                                                        group ? group->slot->group : nullptr);
                            } catch (...) {
                              slot->failure = current_failure();
                              throw;
                            }
                            slot->refresh();
                            return Done{};
                          },
                          Undefined()));
  return result;
}

TrainerObject::TrainerObject(const Napi::CallbackInfo& info)
    : ObjectWrap(info), resource_(unwrap<TrainerResource>(info, "model.trainer")) {}

// Resolves to { loss, gradNorm, validTargets }; the gradients are then read with readState.
Napi::Value TrainerObject::gradients(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    HostBatch batch(info[0]);
    batch.require_targets();
    return resource_->call(
        info.Env(), receiver(info), to_flag(info[1]),
        [slot = resource_->slot, model = resource_->model->slot, batch = std::move(batch)](Cancel cancel) {
          const GradientResult result = slot->get().gradients(batch.view(), cancel);
          slot->refresh();
          model->refresh();
          return result;
        },
        [](Napi::Env e, const GradientResult& gradient) {
          Napi::Object result = Napi::Object::New(e);
          result.Set("loss", gradient.loss);
          result.Set("gradNorm", gradient.grad_norm);
          result.Set("validTargets", static_cast<double>(gradient.valid_targets));
          return result;
        });
  });
}

Napi::Value TrainerObject::step(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    HostBatch batch(info[0]);
    batch.require_targets();
    return resource_->call(
        info.Env(), receiver(info), to_flag(info[1]),
        [slot = resource_->slot, model = resource_->model->slot, batch = std::move(batch)](Cancel cancel) {
          Trainer& trainer = slot->get();
          const StepResult result = trainer.step(batch.view(), cancel);
          slot->refresh();
          model->refresh();
          return result;
        },
        [](Napi::Env e, const StepResult& step) {
          Napi::Object result = Napi::Object::New(e);
          result.Set("update", static_cast<double>(step.update));
          result.Set("loss", step.loss);
          result.Set("gradNorm", step.grad_norm);
          result.Set("learningRate", step.learning_rate);
          result.Set("validTargets", static_cast<double>(step.valid_targets));
          result.Set("tokens", static_cast<double>(step.tokens));
          result.Set("seconds", step.seconds);
          return result;
        });
  });
}

Napi::Value TrainerObject::refuse(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    return resource_->call(
        info.Env(), receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot](Cancel cancel) {
          slot->get().refuse(cancel);
          return Done{};
        },
        Undefined());
  });
}

Napi::Value TrainerObject::check_ranks(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    return resource_->call(
        info.Env(), receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot](Cancel) {
          slot->get().check_ranks();
          return Done{};
        },
        Undefined());
  });
}

Napi::Value TrainerObject::read_state(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    const Trainer::State state = to_state(info[0]);
    const std::string name = to_text(info[1], "name");
    const FloatSpan out = make_floats(info.Env(), resource_->model->elements(name), name);
    return resource_->call(
        info.Env(), receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot, state, name, data = out.data, length = out.length](Cancel) {
          slot->get().read_state(state, name, data, length);
          return Done{};
        },
        FilledArray(out));
  });
}

Napi::Value TrainerObject::write_state(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    const Trainer::State state = to_state(info[0]);
    const std::string name = to_text(info[1], "name");
    const FloatSpan values = borrow_floats(info[2], "values");
    if (values.length != resource_->model->elements(name))
      throw Error("ERR_SHAPE", "values has " + std::to_string(values.length) + " elements, tensor '" + name +
                                   "' has " + std::to_string(resource_->model->elements(name)));
    return resource_->call(
        info.Env(), receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot, state, name, data = values.data, length = values.length](Cancel) {
          slot->get().write_state(state, name, data, length);
          return Done{};
        },
        Undefined(), {values.object});
  });
}

Napi::Value TrainerObject::set_update(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    const int64_t update = to_integer(info[0], "update");
    if (update < 0) throw Error("ERR_ARGUMENT", "update must be at least 0");
    return resource_->call(
        info.Env(), receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot, update](Cancel) {
          slot->get().set_update(update);
          slot->refresh();
          return Done{};
        },
        Undefined());
  });
}

void TrainerObject::dispose(const Napi::CallbackInfo&) { resource_->dispose("it"); }

Napi::Value TrainerObject::bytes(const Napi::CallbackInfo& info) {
  return Napi::Number::New(info.Env(), static_cast<double>(resource_->slot->bytes));
}

Napi::Value TrainerObject::update(const Napi::CallbackInfo& info) {
  return Napi::Number::New(info.Env(), static_cast<double>(resource_->slot->update));
}

Napi::Value TrainerObject::is_disposed(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), resource_->disposed());
}

}  // namespace duokv::addon
