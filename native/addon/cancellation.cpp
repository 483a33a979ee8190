#include "addon/cancellation.h"

#include "addon/environment.h"

namespace duokv::addon {
namespace {

constexpr napi_type_tag kTag = {0x6d3f21c8a5b94e07, 0x9c41d0e2837f5ab6};

}  // namespace

void CancellationObject::define(Napi::Env env, Napi::Object exports) {
  const Napi::Function constructor =
      DefineClass(env, "Cancellation", {InstanceMethod<&CancellationObject::cancel>("cancel")});
  Environment::of(env).cancellation = Napi::Persistent(constructor);
  exports.Set("Cancellation", constructor);
}

CancellationObject::CancellationObject(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  info.This().As<Napi::Object>().TypeTag(&kTag);
}

std::shared_ptr<CancelFlag> CancellationObject::flag_of(Napi::Value value) {
  if (!value.IsObject() || !value.As<Napi::Object>().CheckTypeTag(&kTag))
    throw Error("ERR_ARGUMENT", "cancellation must be a Cancellation");
  return Unwrap(value.As<Napi::Object>())->flag_;
}

void CancellationObject::cancel(const Napi::CallbackInfo&) { flag_->raise(StopReason::Aborted); }

}  // namespace duokv::addon
