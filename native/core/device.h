// A backend's device as the core sees it: its op table with errors turned into exceptions, and memory that
// frees itself.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/error.h"
#include "ops/ops.h"

namespace duokv {

class Device {
 public:
  // `threads` 0: as many as the process may use; `options` as the table's `open` takes them. Throws
  // ERR_DEVICE_UNAVAILABLE, ERR_DEVICE_MEMORY.
  static std::shared_ptr<Device> open(const ops::OpTable& table, int32_t threads,
                                      const std::string& options = "");
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // A device like this one that computes nothing and whose memory costs nothing: what it counts is what the
  // same calls would take here.
  std::shared_ptr<Device> planner() const;

  ops::DeviceInfo info() const;
  // Bytes of the buffers on this device, by what they are for.
  const std::map<std::string, int64_t>& held() const { return held_; }
  // Throws ERR_DEVICE_MEMORY where `bytes` more are not free, naming who holds the rest.
  void require_free(int64_t bytes, const std::string& what) const;
  const ops::OpTable& table() const { return table_; }
  ops::Device* handle() const { return handle_; }

  // Calls an operation of the table: device.run(&OpTable::rotary, args). Throws Error.
  template <class Args>
  void run(ops::Status (*ops::OpTable::*op)(ops::Device*, const Args*), const Args& args) {
    check((table_.*op)(handle_, &args));
  }
  void upload(void* dst, const void* src, int64_t bytes) { check(table_.upload(handle_, dst, src, bytes)); }
  void download(void* dst, const void* src, int64_t bytes) {
    check(table_.download(handle_, dst, src, bytes));
  }
  void copy(void* dst, const void* src, int64_t bytes) { check(table_.copy(handle_, dst, src, bytes)); }
  void zero(void* dst, int64_t bytes) { check(table_.zero(handle_, dst, bytes)); }
  void check(ops::Status status) const;

 private:
  Device(const ops::OpTable& table, ops::Device* handle, std::string name)
      : table_(table), handle_(handle), name_(std::move(name)) {}
  friend class Buffer;
  Error memory_error(int64_t bytes, const std::string& what) const;
  const ops::OpTable& table_;
  ops::Device* handle_;
  std::string name_;  // as messages call it: "cpu", "cuda:1"
  std::map<std::string, int64_t> held_;
};

// Operations recorded once and run together, on the memory they named; where the backend has graphs.
class Graph {
 public:
  Graph() = default;
  static bool available(const Device& device) { return device.table().graph_begin != nullptr; }
  // What `operations()` queues on the device is recorded, not run. Nothing is kept when it throws.
  template <class Operations>
  static Graph record(std::shared_ptr<Device> device, Operations&& operations) {
    device->check(device->table().graph_begin(device->handle()));
    try {
      operations();
    } catch (...) {
      device->table().graph_end(device->handle(), nullptr);
      throw;
    }
    Graph graph;
    device->check(device->table().graph_end(device->handle(), &graph.graph_));
    graph.device_ = std::move(device);
    return graph;
  }
  ~Graph();
  Graph(Graph&& other) noexcept { swap(other); }
  Graph& operator=(Graph&& other) noexcept {
    swap(other);
    return *this;
  }

  void launch() const { device_->check(device_->table().graph_launch(device_->handle(), graph_)); }
  int64_t bytes() const { return graph_ == nullptr ? 0 : device_->table().graph_bytes(graph_); }
  explicit operator bool() const { return graph_ != nullptr; }

 private:
  void swap(Graph& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(graph_, other.graph_);
  }
  std::shared_ptr<Device> device_;
  ops::Graph* graph_ = nullptr;
};

// Device memory with one owner.
class Buffer {
 public:
  Buffer() = default;
  // Throws ERR_DEVICE_MEMORY naming `what`, the bytes asked for, those that are free and who holds the rest.
  Buffer(std::shared_ptr<Device> device, int64_t bytes, const std::string& what);
  ~Buffer();
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }

  template <class T = float>
  T* as() const {
    return static_cast<T*>(memory_);
  }
  int64_t bytes() const { return bytes_; }
  explicit operator bool() const { return memory_ != nullptr; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    std::swap(what_, other.what_);
  }
  std::shared_ptr<Device> device_;
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
  std::string what_;
};

}  // namespace duokv
