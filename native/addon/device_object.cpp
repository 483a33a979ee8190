#include "addon/device_object.h"

#include "addon/arguments.h"
#include "addon/backends.h"
#include "addon/config_object.h"
#include "addon/environment.h"
#include "addon/model_object.h"
#include "addon/route.h"
#include "addon/wrapping.h"
#include "core/memory.h"

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
                                    InstanceMethod<&DeviceObject::predict_memory>("predictMemory"),
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
    result.Set("memoryFree", static_cast<double>(info.memory_free));
    result.Set("memoryPeak", static_cast<double>(info.memory_peak));
    return result;
  });
}

Napi::Value DeviceObject::create_model(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] { return ModelObject::create(info, resource_); });
}

// `program`: { kind: 'training', precision, rows, length, microbatch, recompute } | { kind: 'serving',
// precision, batch, capacity, prompt, schedule, suffix, graphs } | { kind: 'scoring', precision, length }.
// Resolves to { total, parts: { [what]: bytes } }.
Napi::Value DeviceObject::predict_memory(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    const ModelConfig config = to_config(info[0]);
    const Napi::Object program = to_object(info[1], "program");
    const auto integer = [&](const char* key) { return to_integer(program.Get(key), key); };
    const auto flag = [&](const char* key) { return to_boolean(program.Get(key), key); };
    const std::string kind = to_text(program.Get("kind"), "kind");
    const Precision precision = parse_precision(to_text(program.Get("precision"), "precision"));
    std::function<MemoryPrediction(const Device&)> predict;
    if (kind == "training") {
      TrainerOptions options;
      options.precision = precision;
      options.microbatch = integer("microbatch");
      options.recompute = flag("recompute");
      predict = [=, rows = integer("rows"), length = integer("length")](const Device& device) {
        return predict_training(device, config, options, rows, length);
      };
    } else if (kind == "serving") {
      const SessionOptions options{integer("batch"), integer("capacity"), precision, flag("graphs")};
      predict = [=, prompt = integer("prompt"),
                 route = to_route(program.Get("schedule"), program.Get("suffix"))](const Device& device) {
        return predict_serving(device, config, options, prompt, route);
      };
    } else {
      predict = [=, length = integer("length")](const Device& device) {
        return predict_scoring(device, config, precision, length);
      };
    }
    return resource_->call(
        info.Env(), info.This().As<Napi::Object>(), std::make_shared<CancelFlag>(),
        [slot = resource_->device(), predict](Cancel) { return predict(*slot->device); },
        [](Napi::Env env, const MemoryPrediction& prediction) {
          Napi::Object parts = Napi::Object::New(env), result = Napi::Object::New(env);
          for (const auto& [part, bytes] : prediction.parts) parts.Set(part, static_cast<double>(bytes));
          result.Set("total", static_cast<double>(prediction.total));
          result.Set("parts", parts);
          return result;
        });
  });
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
