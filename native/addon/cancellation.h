// The native half of an AbortSignal: `cancel()` stops the call that was given this object, at the core's next
// check.
#pragma once

#include <memory>

#include "addon/engine.h"

namespace duokv::addon {

class CancellationObject : public Napi::ObjectWrap<CancellationObject> {
 public:
  static void define(Napi::Env env, Napi::Object exports);
  // Throws Error{ERR_ARGUMENT} for any other value.
  static std::shared_ptr<CancelFlag> flag_of(Napi::Value value);

  explicit CancellationObject(const Napi::CallbackInfo& info);

 private:
  void cancel(const Napi::CallbackInfo& info);

  std::shared_ptr<CancelFlag> flag_ = std::make_shared<CancelFlag>();
};

}  // namespace duokv::addon
