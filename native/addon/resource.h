// What a JavaScript object owns natively: disposal with its cascade, memory accounting, and calls on the
// engine thread.
//
// The core object itself lives in a slot shared with the jobs that use it and is created, used and destroyed
// on the engine thread alone. A resource lives on the JavaScript thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "addon/engine.h"

namespace duokv::addon {

// The core device, and what `info()` says: a snapshot taken after each job, so that asking does not wait for
// the engine.
class DeviceSlot {
 public:
  std::shared_ptr<Device> device;  // engine thread
  void refresh();                  // engine thread
  ops::DeviceInfo info() const;

 private:
  mutable std::mutex mutex_;
  ops::DeviceInfo info_{};
};

class Resource : public std::enable_shared_from_this<Resource> {
 public:
  // A device's resource, and that of something made from `parent`, which it keeps alive.
  Resource(Napi::Env env, std::shared_ptr<Engine> engine);
  Resource(Napi::Env env, std::shared_ptr<Resource> parent, const char* kind);
  virtual ~Resource() = default;
  Resource(const Resource&) = delete;
  Resource& operator=(const Resource&) = delete;

  Napi::Env env() const { return env_; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }
  const std::shared_ptr<DeviceSlot>& device() const { return device_; }

  bool disposed() const { return !disposed_by_.empty(); }
  void require_live() const;  // ERR_DISPOSED
  // Cancels its calls, frees its memory once the running one has stopped, and does the same to everything
  // made from it. `by`: "it", or the parent whose disposal this follows from. Idempotent.
  void dispose(const std::string& by);
  // Disposed with this resource.
  void adopt(const std::shared_ptr<Resource>& child);
  // Tells V8 how much memory hangs on this small object.
  void account();

  // Runs `run(Cancel)` on the engine thread and resolves to `convert(env, result)`. `holds` and `receiver`
  // live until then.
  template <class Run, class Convert>
  Napi::Promise call(Napi::Env env, Napi::Object receiver, std::shared_ptr<CancelFlag> flag, Run run,
                     Convert convert, std::initializer_list<Napi::Object> holds = {}) {
    require_live();
    remember(flag);
    auto on_engine = [run = std::move(run), device = device_](Cancel cancel) mutable {
      Refresh refresh{*device};
      return run(cancel);
    };
    auto at_home = [self = shared_from_this(), convert = std::move(convert)](Napi::Env e,
                                                                             auto& result) mutable {
      self->account();
      return Napi::Value(convert(e, result));
    };
    auto job = std::make_unique<CallJob<decltype(on_engine), decltype(at_home)>>(
        env, std::move(flag), std::move(on_engine), std::move(at_home));
    job->hold(receiver);
    for (const Napi::Object& object : holds) job->hold(object);
    return engine_->submit(env, std::move(job));
  }

 protected:
  // Frees this object's memory alone. Destructors call it: nothing refers to the object any more, or it was
  // disposed.
  void retire();
  // Frees the core object; runs on the engine thread. Captures the slot, not the resource.
  virtual std::function<void()> release() = 0;
  virtual int64_t bytes() const = 0;

 private:
  struct Refresh {
    DeviceSlot& device;
    ~Refresh() { device.refresh(); }
  };
  void remember(const std::shared_ptr<CancelFlag>& flag);

  napi_env env_;
  std::shared_ptr<Resource> parent_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<DeviceSlot> device_;
  const char* kind_;
  std::string disposed_by_;
  bool retired_ = false;
  int64_t accounted_ = 0;
  std::vector<std::weak_ptr<Resource>> children_;
  std::vector<std::weak_ptr<CancelFlag>> calls_;
};

}  // namespace duokv::addon
