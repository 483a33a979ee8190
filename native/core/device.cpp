#include "core/device.h"

namespace duokv {

std::shared_ptr<Device> Device::open(const ops::OpTable& table, int32_t threads, const std::string& options) {
  if (table.abi_version != ops::kAbiVersion)
    throw Error("ERR_DEVICE_UNAVAILABLE", std::string("backend '") + table.backend +
                                              "' has op list version " + std::to_string(table.abi_version) +
                                              ", this engine needs " + std::to_string(ops::kAbiVersion));
  ops::Device* handle = nullptr;
  const ops::Status status = table.open(options.c_str(), threads, &handle);
  if (status != ops::kOk)
    throw Error(status == ops::kOutOfMemory ? "ERR_DEVICE_MEMORY" : "ERR_DEVICE_UNAVAILABLE",
                table.last_error());
  const std::string name = table.backend + (options.empty() ? "" : ":" + options);
  return std::shared_ptr<Device>(new Device(table, handle, name));
}

Device::~Device() { table_.close(handle_); }

ops::DeviceInfo Device::info() const {
  ops::DeviceInfo info{};
  check(table_.info(handle_, &info));
  return info;
}

std::shared_ptr<Device> Device::planner() const {
  ops::Device* planning = nullptr;
  check(table_.open_planning(handle_, &planning));
  return std::shared_ptr<Device>(new Device(table_, planning, name_));
}

void Device::require_free(int64_t bytes, const std::string& what) const {
  if (bytes > info().memory_free) throw memory_error(bytes, what);
}

Error Device::memory_error(int64_t bytes, const std::string& what) const {
  const ops::DeviceInfo now = info();
  std::string message = what + ": " + std::to_string(bytes) + " bytes more are needed, " +
                        std::to_string(now.memory_free) + " of " + std::to_string(now.memory_total) +
                        " are free on " + name_ + (bytes <= now.memory_free ? ", in pieces too small" : "") +
                        "; this device object holds " + std::to_string(now.memory_used);
  const char* separator = ": ";
  for (const auto& [holder, held] : held_) {
    message += separator + holder + " " + std::to_string(held);
    separator = ", ";
  }
  return Error("ERR_DEVICE_MEMORY", message);
}

void Device::check(ops::Status status) const {
  switch (status) {
    case ops::kOk:
      return;
    case ops::kOutOfMemory:
      throw Error("ERR_DEVICE_MEMORY", table_.last_error());
    case ops::kUnavailable:
      throw Error("ERR_DEVICE_UNAVAILABLE", table_.last_error());
    default:
      throw Error("ERR_INTERNAL", table_.last_error());
  }
}

Graph::~Graph() {
  if (graph_ != nullptr) device_->table().graph_destroy(device_->handle(), graph_);
}

Buffer::Buffer(std::shared_ptr<Device> device, int64_t bytes, const std::string& what)
    : device_(std::move(device)), bytes_(bytes), what_(what) {
  const ops::Status status = device_->table().allocate(device_->handle(), bytes, &memory_);
  if (status == ops::kOutOfMemory) throw device_->memory_error(bytes, what);
  device_->check(status);
  device_->held_[what_] += bytes_;
}

Buffer::~Buffer() {
  if (memory_ == nullptr) return;
  device_->table().release(device_->handle(), memory_);
  if ((device_->held_[what_] -= bytes_) == 0) device_->held_.erase(what_);
}

}  // namespace duokv
