// The module: classes, plain functions, and the state of one environment.
#include "addon/cancellation.h"
#include "addon/device_object.h"
#include "addon/environment.h"
#include "addon/group_object.h"
#include "addon/model_object.h"
#include "addon/plan_functions.h"
#include "addon/session_object.h"
#include "addon/trainer_object.h"

namespace duokv::addon {
namespace {

// Devices, models, trainers and sessions whose memory is not freed yet: what a leak test watches.
Napi::Value live_resources(const Napi::CallbackInfo& info) {
  return Napi::Number::New(info.Env(), static_cast<double>(Environment::of(info.Env()).live_resources));
}

Napi::Object initialise(Napi::Env env, Napi::Object exports) {
  auto* environment = new Environment;
  env.SetInstanceData(environment);
  environment->float32_array = Napi::Persistent(env.Global().Get("Float32Array").As<Napi::Function>());
  environment->bigint64_array = Napi::Persistent(env.Global().Get("BigInt64Array").As<Napi::Function>());
  CancellationObject::define(env, exports);
  DeviceObject::define(env);
  ModelObject::define(env);
  TrainerObject::define(env);
  SessionObject::define(env);
  GroupObject::define(env);
  define_plan_functions(env, exports);
  exports.Set("openDevice", Napi::Function::New<DeviceObject::open>(env, "openDevice"));
  exports.Set("joinGroup", Napi::Function::New<GroupObject::join>(env, "joinGroup"));
  exports.Set("findLibraries", Napi::Function::New<GroupObject::find_libraries>(env, "findLibraries"));
  exports.Set("liveResources", Napi::Function::New<live_resources>(env, "liveResources"));
  return exports;
}

NODE_API_MODULE(duokv, initialise)

}  // namespace
}  // namespace duokv::addon
