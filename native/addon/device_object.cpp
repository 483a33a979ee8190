#include "addon/device_object.h"

#include "addon/arguments.h"
#include "addon/backends.h"
#include "addon/environment.h"
#include "addon/model_object.h"
#include "addon/wrapping.h"

namespace duokv::addon {

DeviceResource::~DeviceResource() {
  retire();
  engine()->stop(env());
}

std::function<void()> DeviceResource::release() {
  return [slot = device()] { slot->device.reset(); };
}

void DeviceObject::define(Napi::Env env) {
  Environment::of(env).device =
      Napi::Persistent(DefineClass(env, "NativeDevice",
                                   {InstanceMethod<&DeviceObject::info>("info"),
                                    InstanceMethod<&DeviceObject::create_model>("createModel"),
                                    InstanceMethod<&DeviceObject::close>("close"),
                                    InstanceAccessor<&DeviceObject::is_disposed>("disposed")}));
}

Napi::Value DeviceObject::open(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    const std::string backend = to_text(info[0], "backend");
    const int64_t threads = to_integer(info[1], "threads");
    if (threads < 0 || threads > 4096) throw Error("ERR_ARGUMENT", "threads must be between 0 and 4096");
    const std::string options = is_absent(info[2]) ? "" : to_text(info[2], "options");
    auto resource = std::make_shared<DeviceResource>(env, Engine::start(env));
    return resource->call(
        env, info.This().IsObject() ? info.This().As<Napi::Object>() : Napi::Object::New(env),
        std::make_shared<CancelFlag>(),
        [slot = resource->device(), backend, options, threads](Cancel) {
          slot->device = Device::open(backend_table(backend), static_cast<int32_t>(threads), options);
          return Done{};
        },
        [resource](Napi::Env e, Done&) { return wrap(e, Environment::of(e).device, resource); });
  });
}

DeviceObject::DeviceObject(const Napi::CallbackInfo& info)
    : ObjectWrap(info), resource_(unwrap<DeviceResource>(info, "openDevice")) {}

Napi::Value DeviceObject::info(const Napi::CallbackInfo& call) {
  const Napi::Env env = call.Env();
  return guarded(env, [&]() -> Napi::Value {
    resource_->require_live();
    const ops::DeviceInfo info = resource_->device()->info();
    Napi::Object result = Napi::Object::New(env);
    result.Set("name", info.name);
    result.Set("isa", info.isa);
    result.Set("libraries", info.libraries);
    result.Set("attention", info.attention);
    result.Set("threads", info.threads);
    result.Set("memoryTotal", static_cast<double>(info.memory_total));
    result.Set("memoryUsed", static_cast<double>(info.memory_used));
    return result;
  });
}

Napi::Value DeviceObject::create_model(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] { return ModelObject::create(info, resource_); });
}

// Everything on the device is disposed now; the promise settles when the engine has let go of it.
Napi::Value DeviceObject::close(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    resource_->dispose("it");
    const auto run = [](Cancel) { return Done{}; };
    const auto convert = [resource = resource_](Napi::Env e, Done&) {
      resource->engine()->stop(e);
      return e.Undefined();
    };
    auto job = std::make_unique<CallJob<decltype(run), decltype(convert)>>(
        env, std::make_shared<CancelFlag>(), run, convert);
    job->hold(info.This().As<Napi::Object>());
    return resource_->engine()->submit(env, std::move(job));
  });
}

Napi::Value DeviceObject::is_disposed(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), resource_->disposed());
}

}  // namespace duokv::addon
