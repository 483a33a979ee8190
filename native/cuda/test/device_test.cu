// The device: transfers through the staging ring, memory accounting, scratch, graphs, and what a recording
// refuses.
#include <unistd.h>

#include <climits>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>

#include "cuda/library_paths.h"
#include "cuda/test/test_device.h"

using namespace duokv;
using namespace duokv::cuda;
using namespace duokv::cuda::test;

DUOKV_CASE(uploads_do_not_keep_the_source) {
  TestDevice device;
  constexpr int64_t kCount = 1000, kUploads = 3000;  // more than the ring holds at once
  float* memory = floats(device, kCount * kUploads);
  std::vector<float> source(kCount);
  for (int64_t i = 0; i < kUploads; ++i) {
    std::fill(source.begin(), source.end(), static_cast<float>(i));
    write(device, memory + i * kCount, source);
  }
  const std::vector<float> got = read(device, memory, kCount * kUploads);
  for (int64_t i = 0; i < kCount * kUploads; ++i) {
    if (!expect(got[static_cast<size_t>(i)] == static_cast<float>(i / kCount), "element %lld",
                static_cast<long long>(i)))
      break;
  }
  release(device, memory);
}

DUOKV_CASE(transfers_of_every_size) {
  TestDevice device;
  for (const int64_t count : {1L, 3L, 1L << 18, (1L << 18) + 1, (3L << 18) + 5}) {
    const std::vector<float> source = normals(static_cast<size_t>(count), 1);
    float* memory = floats(device, count);
    float* other = floats(device, count);
    write(device, memory, source);
    TestDevice::ok(copy(device, other, memory, count * 4));
    expect_equal("copy", read(device, other, count), source);
    TestDevice::ok(zero(device, other, count * 4));
    expect_equal("zero", read(device, other, count), std::vector<float>(static_cast<size_t>(count)));
    release(device, memory);
    release(device, other);
  }
}

DUOKV_CASE(pieces_of_the_pool_never_overlap_and_come_back) {
  TestDevice device;
  const int64_t before = device->memory.bytes();
  device->memory.trim();
  const int64_t reserved = device->memory.reserved();
  std::mt19937_64 random(7);
  std::map<char*, int64_t> held;
  int64_t peak = 0;
  for (int step = 0; step < 3000; ++step) {
    if (held.size() > 40 || (!held.empty() && random() % 3 == 0)) {
      const auto victim = std::next(held.begin(), static_cast<int64_t>(random() % held.size()));
      release(device, victim->first);
      held.erase(victim);
    } else {
      const int64_t bytes = static_cast<int64_t>(random() % (random() % 4 == 0 ? 5000000 : 30000));
      void* memory = nullptr;
      TestDevice::ok(allocate(device, bytes, &memory));
      auto* const begin = static_cast<char*>(memory);
      expect(reinterpret_cast<uintptr_t>(begin) % 256 == 0, "not aligned");
      const auto after = held.lower_bound(begin);
      expect(after == held.end() || begin + bytes <= after->first, "overlaps the piece after it");
      expect(after == held.begin() || std::prev(after)->first + std::prev(after)->second <= begin,
             "overlaps the piece before it");
      held[begin] = bytes;
    }
    peak = std::max(peak, device->memory.bytes());
  }
  expect(device->memory.peak() >= peak, "the peak is not the largest use");
  for (const auto& [begin, bytes] : held) release(device, begin);
  expect(device->memory.bytes() == before, "%lld bytes did not come back",
         static_cast<long long>(device->memory.bytes() - before));
  const int64_t idle = device->memory.reserved();
  void* again = nullptr;
  TestDevice::ok(allocate(device, 4000000, &again));
  expect(device->memory.reserved() == idle, "a piece that was free was not used again");
  release(device, again);
  device->memory.trim();
  expect(device->memory.reserved() == reserved, "trim left %lld bytes",
         static_cast<long long>(device->memory.reserved() - reserved));
}

DUOKV_CASE(running_out_gives_back_what_is_idle_first) {
  TestDevice device;
#ifndef __CUDACC__
  // The emulator writes to all that it hands out, so little must do.
  size_t free = 0, total = 0;
  cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  simt::set_device_memory(total - free + (size_t{64} << 20));
#endif
  ops::DeviceInfo info;
  TestDevice::ok(cuda::info(device, &info));
  const int64_t most = info.memory_free / 4 * 3;
  void *first = nullptr, *second = nullptr;
  TestDevice::ok(allocate(device, most, &first));
  expect_status(allocate(device, most, &second), ops::kOutOfMemory, "bytes asked for");
  release(device, first);
  // Larger than what is idle, and there is no other memory.
  TestDevice::ok(allocate(device, most + (int64_t{3} << 20), &second));
  release(device, second);
#ifndef __CUDACC__
  simt::set_device_memory(total);
#endif
}

DUOKV_CASE(a_planning_device_counts_and_computes_nothing) {
  TestDevice device;
  ops::Device* planning = nullptr;
  TestDevice::ok(open_planning(device, &planning));
  ops::DeviceInfo info;
  const auto read_info = [&] { TestDevice::ok(cuda::info(planning, &info)); };
  read_info();
  const int64_t before = info.memory_used, scratch = info.memory_scratch;
  const int64_t bytes = int64_t{1} << 42;
  void* memory = nullptr;
  TestDevice::ok(allocate(planning, bytes, &memory));
  auto* const x = static_cast<float*>(memory);
  TestDevice::ok(zero(planning, x, bytes));
  run_silu(planning, x, 1000, x + 1000);
  float host = 3;
  TestDevice::ok(upload(planning, x, &host, 4));
  TestDevice::ok(download(planning, &host, x, 4));
  expect(host == 3, "a download changed its destination");
  planning->workspace(5000);
  read_info();
  expect(info.memory_used >= before + bytes + 5000 && info.memory_scratch >= scratch + 5000,
         "used %lld, scratch %lld", static_cast<long long>(info.memory_used),
         static_cast<long long>(info.memory_scratch));
  release(planning, memory);
  read_info();
  expect(info.memory_peak >= before + bytes && info.memory_used < bytes, "the peak is forgotten");
  cuda::close(planning);
}

DUOKV_CASE(memory_is_counted_and_running_out_is_no_end) {
  TestDevice device;
  const auto used = [&] {
    ops::DeviceInfo info;
    TestDevice::ok(cuda::info(device, &info));
    return info.memory_used;
  };
  const int64_t before = used();
  float* memory = floats(device, 1000);
  expect(used() >= before + 4000, "4000 bytes are not counted");
  void* nothing = nullptr;
  expect_status(allocate(device, int64_t{1} << 50, &nothing), ops::kOutOfMemory,
                "1125899906842624 bytes asked");
  expect(nothing == nullptr, "memory was handed out");
  expect_status(allocate(device, -1, &nothing), ops::kInvalid, "bytes is -1");
  const std::vector<float> values = normals(1000, 2);
  write(device, memory, values);
  expect_equal("after running out", read(device, memory, 1000), values);
  release(device, memory);
  expect(used() == before, "memory in use after the release: %lld, before: %lld",
         static_cast<long long>(used()), static_cast<long long>(before));
}

DUOKV_CASE(libraries_are_looked_for_in_order) {
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / ("duokv-libraries-" + std::to_string(getpid()));
  const std::string toolkit = root / "toolkit/lib64/libnccl.so.2",
                    wheel = root / "python/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2";
  for (const std::string& path : {toolkit, wheel}) {
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path) << "a library";
  }
  setenv("CUDA_HOME", (root / "toolkit").c_str(), 1);
  setenv("VIRTUAL_ENV", (root / "python").c_str(), 1);
  const auto paths = [](bool in_toolkit) {
    return library_paths("DUOKV_TEST_LIBRARY", {"libnccl.so.2"}, in_toolkit, {"nccl"});
  };
  const auto begins = [](const std::vector<std::string>& found, const std::vector<std::string>& wanted) {
    return found.size() >= wanted.size() && std::equal(wanted.begin(), wanted.end(), found.begin());
  };
  expect(begins(paths(true), {"libnccl.so.2", toolkit, wheel}), "not the loader, the toolkit, the wheel");
  expect(begins(paths(false), {"libnccl.so.2", wheel}), "the toolkit is asked for what it never has");
  setenv("DUOKV_TEST_LIBRARY", "/chosen/library", 1);
  expect(paths(true) == std::vector<std::string>{"/chosen/library"}, "more than what was chosen");
  for (const char* name : {"CUDA_HOME", "VIRTUAL_ENV", "DUOKV_TEST_LIBRARY"}) unsetenv(name);
  fs::remove_all(root);
}

DUOKV_CASE(invalid_devices_are_named) {
  ops::Device* device = nullptr;
  expect_status(cuda::open("99", 0, &device), ops::kUnavailable, "cuda:99 does not exist");
  expect_status(cuda::open("x", 0, &device), ops::kInvalid, "options is 'x'");
}

DUOKV_CASE(a_graph_replays_what_was_recorded_on_new_data) {
  TestDevice device;
  constexpr int64_t kCount = 1003;
  float *x = floats(device, kCount), *y = floats(device, kCount), *z = floats(device, kCount);
  const auto pass = [&] {
    run_silu(device, x, kCount, y);
    TestDevice::ok(copy(device, z, y, kCount * 4));
    run_silu(device, z, kCount, z);
  };
  write(device, x, normals(kCount, 3));
  TestDevice::ok(zero(device, z, kCount * 4));
  TestDevice::ok(graph_begin(device));
  pass();
  ops::Graph* graph = nullptr;
  TestDevice::ok(graph_end(device, &graph));
  expect(graph_bytes(graph) >= 0, "negative bytes");
  expect_equal("recording runs nothing", read(device, z, kCount), std::vector<float>(kCount));
  for (const uint64_t stream : {3u, 4u}) {
    write(device, x, normals(kCount, stream));
    TestDevice::ok(graph_launch(device, graph));
    const std::vector<float> replayed = read(device, z, kCount);
    pass();
    expect_equal("replay and eager", replayed, read(device, z, kCount));
  }
  graph_destroy(device, graph);
  for (float* memory : {x, y, z}) release(device, memory);
}

DUOKV_CASE(a_recording_refuses_what_it_cannot_hold) {
  TestDevice device;
  float *x = floats(device, 16), *y = floats(device, 16), *z = floats(device, 16);
  const std::vector<float> values = normals(16, 5);
  write(device, x, values);
  TestDevice::ok(zero(device, y, 64));
  ops::Graph* graph = nullptr;
  expect_status(graph_end(device, &graph), ops::kInvalid, "no graph is being recorded");
  TestDevice::ok(graph_begin(device));
  run_silu(device, x, 16, y);
  void* memory = nullptr;
  float host[16];
  expect_status(allocate(device, 64, &memory), ops::kInvalid, "allocate: not possible while a graph");
  expect_status(upload(device, x, values.data(), 64), ops::kInvalid, "upload: not possible while a graph");
  expect_status(download(device, host, x, 64), ops::kInvalid, "download: not possible while a graph");
  expect_status(graph_begin(device), ops::kInvalid, "graph_begin: not possible while a graph");
  expect_status(guarded(device, [&] { device->workspace(1 << 20); }), ops::kInternal, "more scratch memory");
  release(device, z);
  TestDevice::ok(graph_end(device, &graph));
  TestDevice::ok(graph_launch(device, graph));
  const std::vector<float> replayed = read(device, y, 16);
  run_silu(device, x, 16, y);
  expect_equal("after the refusals", replayed, read(device, y, 16));
  graph_destroy(device, graph);

  TestDevice::ok(zero(device, y, 64));
  TestDevice::ok(graph_begin(device));
  run_silu(device, x, 16, y);
  TestDevice::ok(graph_end(device, nullptr));
  expect_equal("a dropped recording", read(device, y, 16), std::vector<float>(16));
  for (float* block : {x, y}) release(device, block);
}

DUOKV_CASE(scratch_that_a_graph_names_stays) {
  TestDevice device;
  constexpr int64_t kCount = 500;
  float *x = floats(device, kCount), *y = floats(device, kCount);
  write(device, x, normals(kCount, 6));
  const auto pass = [&] {
    TestDevice::ok(guarded(device, [&] {
      auto* scratch = static_cast<float*>(device->workspace(kCount * 4));
      run_silu(device, x, kCount, scratch);
      run_silu(device, scratch, kCount, y);
    }));
  };
  pass();
  const std::vector<float> eager = read(device, y, kCount);
  ops::Graph *first = nullptr, *second = nullptr;
  for (ops::Graph** graph : {&first, &second}) {
    TestDevice::ok(graph_begin(device));
    pass();
    TestDevice::ok(graph_end(device, graph));
  }
  TestDevice::ok(guarded(device, [&] { device->workspace(1 << 16); }));  // another block from here on
  graph_destroy(device, first);
  TestDevice::ok(zero(device, y, kCount * 4));
  TestDevice::ok(graph_launch(device, second));
  expect_equal("replay on the old block", read(device, y, kCount), eager);
  const int64_t before = device->memory.bytes();
  graph_destroy(device, second);
  expect(device->memory.bytes() < before, "the old block outlives its graphs");
  for (float* block : {x, y}) release(device, block);
}

DUOKV_MAIN
