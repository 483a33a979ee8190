#include "core/device.h"

namespace duokv {

std::shared_ptr<Device> Device::open(const ops::OpTable& table, int32_t threads, const std::string& options) {
  if (table.abi_version != ops::kAbiVersion)
    throw Error("ERR_DEVICE_UNAVAILABLE", std::string("backend '") + table.backend +
                                              "' has op list version " + std::to_string(table.abi_version) +
                                              ", this engine needs " + std::to_string(ops::kAbiVersion));
  ops::Device* handle = nullptr;
  if (table.open(options.c_str(), threads, &handle) != ops::kOk)
    throw Error("ERR_DEVICE_UNAVAILABLE", table.last_error());
  return std::shared_ptr<Device>(new Device(table, handle));
}

Device::~Device() { table_.close(handle_); }

ops::DeviceInfo Device::info() const {
  ops::DeviceInfo info{};
  check(table_.info(handle_, &info));
  return info;
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
    : device_(std::move(device)), bytes_(bytes) {
  const ops::Status status = device_->table().allocate(device_->handle(), bytes, &memory_);
  if (status == ops::kOutOfMemory)
    throw Error("ERR_DEVICE_MEMORY", what + " needs " + std::to_string(bytes) + " bytes; " +
                                         std::to_string(device_->info().memory_used) +
                                         " are in use on this device: " + device_->table().last_error());
  device_->check(status);
}

Buffer::~Buffer() {
  if (memory_ != nullptr) device_->table().release(device_->handle(), memory_);
}

}  // namespace duokv
