#include "addon/resource.h"

#include <algorithm>

#include "addon/environment.h"

namespace duokv::addon {
namespace {

// V8 misbehaves when told of very large steps at once.
constexpr int64_t kAccountingStep = int64_t{512} << 20;

// Appends, dropping what has ended meanwhile once the list is long enough to matter.
template <class T>
void append(std::vector<std::weak_ptr<T>>& list, const std::shared_ptr<T>& item) {
  if (list.size() >= 16) std::erase_if(list, [](const std::weak_ptr<T>& entry) { return entry.expired(); });
  list.push_back(item);
}

}  // namespace

void DeviceSlot::refresh() {
  if (!device) return;
  ops::DeviceInfo info{};
  if (device->table().info(device->handle(), &info) != ops::kOk) return;
  std::lock_guard lock(mutex_);
  info_ = info;
}

ops::DeviceInfo DeviceSlot::info() const {
  std::lock_guard lock(mutex_);
  return info_;
}

Resource::Resource(Napi::Env env, std::shared_ptr<Engine> engine)
    : env_(env), engine_(std::move(engine)), device_(std::make_shared<DeviceSlot>()), kind_("device") {
  ++Environment::of(env).live_resources;
}

Resource::Resource(Napi::Env env, std::shared_ptr<Resource> parent, const char* kind)
    : env_(env),
      parent_(std::move(parent)),
      engine_(parent_->engine_),
      device_(parent_->device_),
      kind_(kind) {
  ++Environment::of(env).live_resources;
}

void Resource::require_live() const {
  if (!disposed()) return;
  throw Error("ERR_DISPOSED",
              std::string("the ") + kind_ + " was disposed" +
                  (disposed_by_ == "it" ? "" : " with the " + disposed_by_ + " it belongs to"));
}

void Resource::dispose(const std::string& by) {
  if (disposed()) return;
  disposed_by_ = by;
  for (auto& entry : children_)
    if (auto child = entry.lock()) child->dispose(by == "it" ? kind_ : by);
  children_.clear();
  for (auto& entry : calls_)
    if (auto flag = entry.lock()) flag->raise(StopReason::Disposed);
  calls_.clear();
  retire();
}

void Resource::retire() {
  if (retired_) return;
  retired_ = true;
  engine_->post([free = release(), device = device_] {
    free();
    device->refresh();
  });
  account();
  --Environment::of(env_).live_resources;
}

void Resource::account() {
  const int64_t target = retired_ ? 0 : bytes();
  while (accounted_ != target) {
    const int64_t step = std::clamp(target - accounted_, -kAccountingStep, kAccountingStep);
    int64_t total = 0;
    napi_adjust_external_memory(env_, step, &total);
    accounted_ += step;
  }
}

void Resource::adopt(const std::shared_ptr<Resource>& child) { append(children_, child); }

void Resource::remember(const std::shared_ptr<CancelFlag>& flag) { append(calls_, flag); }

}  // namespace duokv::addon
