// Several devices in one process: each has its own memory, graphs, faults and end. On a machine with one card
// the cases run on that one alone; the emulator has as many as DUOKV_SIMT_DEVICES says.
#include <memory>
#include <thread>

#include "cuda/test/test_device.h"

using namespace duokv;
using namespace duokv::cuda;
using namespace duokv::cuda::test;

namespace {

int count_devices() {
  int count = 0;
  cuda::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  expect(count > 1 || !kEmulated, "this test runs with DUOKV_SIMT_DEVICES=2");
  return count;
}

// All of them.
std::vector<std::unique_ptr<TestDevice>> open_all() {
  std::vector<std::unique_ptr<TestDevice>> devices;
  for (int i = 0; i < count_devices(); ++i)
    devices.push_back(std::make_unique<TestDevice>(std::to_string(i)));
  return devices;
}

ops::DeviceInfo info_of(ops::Device* device) {
  ops::DeviceInfo info;
  TestDevice::ok(cuda::info(device, &info));
  return info;
}

std::vector<float> silu_of(ops::Device* device, const std::vector<float>& values) {
  const auto count = static_cast<int64_t>(values.size());
  float *x = floats(device, count), *y = floats(device, count);
  write(device, x, values);
  run_silu(device, x, count, y);
  const std::vector<float> result = read(device, y, count);
  release(device, x);
  release(device, y);
  return result;
}

// Bytes that cudaMalloc will still give on the device. The emulator writes to all that it hands out, so there
// little must do.
void limit_memory(ops::Device* device, int64_t free) {
#ifndef __CUDACC__
  cuda::check(cudaSetDevice(device->index), "cudaSetDevice");
  size_t now = 0, total = 0;
  cuda::check(cudaMemGetInfo(&now, &total), "cudaMemGetInfo");
  simt::set_device_memory(total - now + static_cast<size_t>(free));
#else
  static_cast<void>(device), static_cast<void>(free);
#endif
}

}  // namespace

DUOKV_CASE(each_device_counts_its_own_memory) {
  const auto devices = open_all();
  std::vector<ops::DeviceInfo> before;
  for (const auto& device : devices) before.push_back(info_of(*device));
  for (size_t i = 0; i < devices.size(); ++i) {
    const int64_t bytes = (static_cast<int64_t>(i) + 1) << 22;
    float* memory = floats(*devices[i], bytes / 4);
    // Asked for by a thread in which no device was ever current.
    std::thread([&] {
      for (size_t j = 0; j < devices.size(); ++j) {
        const ops::DeviceInfo now = info_of(*devices[j]);
        const int64_t taken = i == j ? bytes : 0;
        expect(now.memory_used - before[j].memory_used == taken, "device %zu: %lld bytes used for %lld", j,
               static_cast<long long>(now.memory_used - before[j].memory_used),
               static_cast<long long>(taken));
        expect(before[j].memory_free - now.memory_free == taken, "device %zu: %lld bytes less free for %lld",
               j, static_cast<long long>(before[j].memory_free - now.memory_free),
               static_cast<long long>(taken));
      }
    }).join();
    release(*devices[i], memory);
  }
}

DUOKV_CASE(devices_compute_side_by_side) {
  const auto devices = open_all();
  const std::vector<float> values = normals(1003, 1);
  const std::vector<float> expected = silu_of(*devices[0], values);
  std::vector<float*> inputs, outputs;
  std::vector<ops::Graph*> graphs(devices.size());
  // Every step on all devices before the next one: recordings and replays interleave.
  for (const auto& device : devices) {
    inputs.push_back(floats(*device, 1003));
    outputs.push_back(floats(*device, 1003));
    write(*device, inputs.back(), values);
  }
  for (const auto& device : devices) TestDevice::ok(graph_begin(*device));
  for (size_t i = 0; i < devices.size(); ++i) run_silu(*devices[i], inputs[i], 1003, outputs[i]);
  for (size_t i = 0; i < devices.size(); ++i) TestDevice::ok(graph_end(*devices[i], &graphs[i]));
  for (size_t i = 0; i < devices.size(); ++i) TestDevice::ok(graph_launch(*devices[i], graphs[i]));
  for (size_t i = 0; i < devices.size(); ++i) {
    expect_equal("device " + std::to_string(i), read(*devices[i], outputs[i], 1003), expected);
    graph_destroy(*devices[i], graphs[i]);
    release(*devices[i], inputs[i]);
    release(*devices[i], outputs[i]);
  }
}

DUOKV_CASE(running_out_on_one_leaves_the_others) {
  auto devices = open_all();
  const std::vector<float> values = normals(77, 2);
  const std::vector<float> expected = silu_of(*devices[0], values);
  for (size_t i = 0; i < devices.size(); ++i) {
    limit_memory(*devices[i], int64_t{8} << 20);
    void* memory = nullptr;
    expect_status(allocate(*devices[i], info_of(*devices[i]).memory_free + (int64_t{4} << 20), &memory),
                  ops::kOutOfMemory, "out of memory on cuda:" + std::to_string(i) + ": ");
    for (const auto& device : devices) expect_equal("afterwards", silu_of(*device, values), expected);
    limit_memory(*devices[i], int64_t{1} << 30);
  }
}

DUOKV_CASE(closing_one_leaves_the_others) {
  auto devices = open_all();
  const std::vector<float> values = normals(77, 3);
  const std::vector<float> expected = silu_of(*devices[0], values);
  while (!devices.empty()) {
    expect_equal("the last device", silu_of(*devices.back(), values), expected);
    devices.erase(devices.begin());
  }
}

DUOKV_CASE(a_device_that_is_not_there_is_named) {
  const int count = count_devices();
  const std::string name = "cuda:" + std::to_string(count) + " does not exist: there ";
  ops::Device* device = nullptr;
  expect_status(cuda::open(std::to_string(count).c_str(), 0, &device), ops::kUnavailable,
                name + (count == 1 ? "is 1 GPU" : "are " + std::to_string(count) + " GPUs"));
}

#ifndef __CUDACC__
// A pointer of one device in a kernel of another is what goes wrong first with several.
DUOKV_CASE(another_devices_memory_is_a_fault_of_the_kernel_alone) {
  const auto devices = open_all();
  const std::vector<float> values = normals(5, 4);
  const std::vector<float> expected = silu_of(*devices[0], values);
  float* foreign = floats(*devices[0], 5);
  write(*devices[0], foreign, values);
  float* own = floats(*devices[1], 5);
  run_silu(*devices[1], foreign, 5, own);
  float host[5];
  expect_status(download(*devices[1], host, own, 20), ops::kInternal, "read of another device's memory");
  expect_equal("the other device", silu_of(*devices[0], values), expected);
  release(*devices[0], foreign);
}
#endif

DUOKV_MAIN
