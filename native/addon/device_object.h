#pragma once

#include <memory>

#include "addon/resource.h"

namespace duokv::addon {

class DeviceResource final : public Resource {
 public:
  using Resource::Resource;
  ~DeviceResource() override;

 protected:
  std::function<void()> release() override;
  int64_t bytes() const override { return 0; }
};

// A device and its engine thread. JavaScript: info(), createModel(config, seed),
// predictMemory(config, program), close().
class DeviceObject : public Napi::ObjectWrap<DeviceObject> {
 public:
  static void define(Napi::Env env);
  // The module's function openDevice(backend, threads, options): Promise<Device>.
  static Napi::Value open(const Napi::CallbackInfo& info);

  explicit DeviceObject(const Napi::CallbackInfo& info);

 private:
  Napi::Value info(const Napi::CallbackInfo& info);
  Napi::Value predict_memory(const Napi::CallbackInfo& info);
  Napi::Value create_model(const Napi::CallbackInfo& info);
  Napi::Value close(const Napi::CallbackInfo& info);
  Napi::Value is_disposed(const Napi::CallbackInfo& info);

  std::shared_ptr<DeviceResource> resource_;
};

}  // namespace duokv::addon
