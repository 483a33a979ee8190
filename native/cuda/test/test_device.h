// A device of the backend for a test, and what tests do with it.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {

// A device of its own for every case.
class TestDevice {
 public:
  // `options` as ops::OpTable::open takes them.
  explicit TestDevice(const std::string& options = "") { ok(cuda::open(options.c_str(), 0, &device_)); }
  ~TestDevice() { cuda::close(device_); }
  TestDevice(const TestDevice&) = delete;
  TestDevice& operator=(const TestDevice&) = delete;
  operator ops::Device*() const { return device_; }
  ops::Device* operator->() const { return device_; }

  static void ok(ops::Status status) {
    if (status != ops::kOk) throw std::runtime_error(last_error());
  }

 private:
  ops::Device* device_ = nullptr;
};

inline void expect_status(ops::Status status, ops::Status wanted, const std::string& part) {
  expect(status == wanted && std::string(last_error()).find(part) != std::string::npos,
         "status %d with '%s', expected %d with '%s'", status, last_error(), wanted, part.c_str());
}

inline float* floats(ops::Device* device, int64_t count) {
  void* memory = nullptr;
  TestDevice::ok(allocate(device, count * 4, &memory));
  return static_cast<float*>(memory);
}

inline std::vector<float> read(ops::Device* device, const float* memory, int64_t count) {
  std::vector<float> host(static_cast<size_t>(count));
  TestDevice::ok(download(device, host.data(), memory, count * 4));
  return host;
}

inline void write(ops::Device* device, float* memory, const std::vector<float>& host) {
  TestDevice::ok(upload(device, memory, host.data(), static_cast<int64_t>(host.size()) * 4));
}

// h = silu(gate), which needs no scratch.
inline void run_silu(ops::Device* device, const float* gate, int64_t n, float* h) {
  TestDevice::ok(guarded(device, [&] {
    cuda::check(swiglu_forward({.gate = gate, .up = nullptr, .n = n, .h = h}, device->stream), "silu");
  }));
}

}  // namespace duokv::cuda::test
