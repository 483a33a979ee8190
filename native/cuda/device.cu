#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/cublaslt.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace duokv::cuda {
namespace {

constexpr int64_t kAlignment = 64;  // of copies in a staging segment

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

template <size_t N>
void put(char (&field)[N], const std::string& text) {
  std::snprintf(field, N, "%s", text.c_str());
}

int32_t parse_index(const char* options) {
  if (options == nullptr || *options == '\0') return 0;
  char* end = nullptr;
  const long index = std::strtol(options, &end, 10);
  if (*end != '\0' || index < 0 || index > INT_MAX)
    throw InvalidArgument(std::string("open: options is '") + options + "', must be a device's index");
  return static_cast<int32_t>(index);
}

// Makes the device current and describes it.
cudaDeviceProp select_device(int32_t index) {
  int count = 0, driver = 0, runtime = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (error == cudaErrorInsufficientDriver && driver == 0) throw Unavailable("no NVIDIA driver is installed");
  if (error == cudaErrorInsufficientDriver)
    throw Unavailable("the NVIDIA driver is too old: it supports CUDA " + version_text(driver) + ", " +
                      version_text(runtime) + " is needed");
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
    throw Unavailable("the NVIDIA driver finds no GPU (CUDA_VISIBLE_DEVICES can hide one)");
  if (error != cudaSuccess)
    throw Unavailable(std::string("the NVIDIA driver fails: ") + cudaGetErrorName(error) + ": " +
                      cudaGetErrorString(error));
  const std::string name = "cuda:" + std::to_string(index);
  if (index >= count)
    throw Unavailable(name + " does not exist: there " + (count == 1 ? "is " : "are ") +
                      std::to_string(count) + (count == 1 ? " GPU" : " GPUs"));
  cudaDeviceProp properties = {};
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  if (properties.major < 8)
    throw Unavailable(name + " (" + properties.name + ") has compute capability " +
                      std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                      ", 8.0 is needed");
  check(cudaSetDevice(index), "cudaSetDevice");
  return properties;
}

}  // namespace

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that is not sticky ends here
  const std::string message =
      std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) throw OutOfMemory(message);
  throw std::runtime_error(message);
}

// ---------------------------------------------------------------- stream and memory

Stream::Stream(bool planning) : stream_(planning_stream()) {
  if (!planning) check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}

void* Scratch::take(size_t bytes, bool recording) {
  if (bytes <= bytes_) return blocks_.back().first;
  if (recording)
    throw std::runtime_error(
        "an operation needs more scratch memory than any before it: it must run once before it is recorded");
  // By half at least, so that blocks kept for graphs stay few.
  const size_t size = std::max(bytes, bytes_ / 2 * 3);
  if (graphs_ == 0) {
    while (!blocks_.empty()) release_front();
    bytes_ = 0;
  }
  const int64_t before = memory_.bytes();
  blocks_.emplace_back(memory_.allocate(static_cast<int64_t>(size), "scratch of an operation"), 0);
  blocks_.back().second = memory_.bytes() - before;
  held_ += blocks_.back().second;
  bytes_ = size;
  return blocks_.back().first;
}

void Scratch::release_front() {
  memory_.release(blocks_.front().first);
  held_ -= blocks_.front().second;
  blocks_.erase(blocks_.begin());
}

void Scratch::remove_graph() {
  if (--graphs_ > 0) return;
  while (blocks_.size() > 1) release_front();
}

// ---------------------------------------------------------------- staging

Staging::Staging(cudaStream_t stream) : stream_(stream) {
  if (only_plans(stream)) return;
  for (Segment& segment : segments_) {
    check(cudaMallocHost(reinterpret_cast<void**>(&segment.memory), kSegmentBytes), "pinned host memory");
    check(cudaEventCreateWithFlags(&segment.read, cudaEventDisableTiming), "cudaEventCreate");
  }
}

Staging::~Staging() {
  for (const Segment& segment : segments_) {
    if (segment.memory) cudaFreeHost(segment.memory);
    if (segment.read) cudaEventDestroy(segment.read);
  }
}

char* Staging::room_for(int64_t bytes) {
  if (used_ + bytes > kSegmentBytes) {
    check(cudaEventRecord(segments_[current_].read, stream_), "cudaEventRecord");
    current_ = (current_ + 1) % kSegments;
    check(cudaEventSynchronize(segments_[current_].read), "an earlier operation");
    used_ = 0;
  }
  char* room = segments_[current_].memory + used_;
  used_ += round_up(bytes, kAlignment);
  return room;
}

void Staging::upload(void* destination, const void* source, int64_t bytes) {
  if (only_plans(stream_)) return;
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  for (int64_t piece; bytes > 0; to += piece, from += piece, bytes -= piece) {
    piece = std::min(bytes, kSegmentBytes);
    char* pinned = room_for(piece);
    std::memcpy(pinned, from, static_cast<size_t>(piece));
    check(cudaMemcpyAsync(to, pinned, static_cast<size_t>(piece), cudaMemcpyHostToDevice, stream_), "upload");
  }
}

void Staging::download(void* destination, const void* source, int64_t bytes) {
  if (only_plans(stream_)) return;
  // What the driver would do with ordinary memory costs a small copy more than the copy itself.
  const bool small = bytes <= kSegmentBytes;
  void* to = small ? room_for(bytes) : destination;
  if (bytes > 0)
    check(cudaMemcpyAsync(to, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_),
          "download");
  check(cudaStreamSynchronize(stream_), "an operation before this download");
  if (small && bytes > 0) std::memcpy(destination, to, static_cast<size_t>(bytes));
  used_ = 0;  // nothing is in flight any more
}

// ---------------------------------------------------------------- the table's entries

ops::Status open(const char* options, int32_t, ops::Device** device) {
  return guarded([&] {
    require(device != nullptr, "open: device is null");
    *device = nullptr;
    *device = new ops::Device(parse_index(options), false);
  });
}

ops::Status open_planning(ops::Device* device, ops::Device** planning) {
  return guarded(device, [&] {
    require(planning != nullptr, "open_planning: planning is null");
    *planning = nullptr;
    *planning = new ops::Device(device->index, true);
  });
}

void close(ops::Device* device) { delete device; }

ops::Status info(ops::Device* device, ops::DeviceInfo* info) {
  // Memory is asked for of the device that is current in this thread.
  return guarded(device, [&] {
    require(info != nullptr, "info: info is null");
    const cudaDeviceProp& properties = device->properties;
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    *info = {};
    put(info->name, properties.name);
    put(info->isa, "sm_" + std::to_string(properties.major * 10 + properties.minor));
    const std::string versions =
        kEmulated ? "" : "CUDA " + version_text(runtime) + "; driver for CUDA " + version_text(driver) + "; ";
    put(info->libraries, versions + CublasLt::get().description());
    put(info->attention, "TF32x3 on tensor cores");
    info->threads = 1;
    info->memory_total = static_cast<int64_t>(properties.totalGlobalMem);
    info->memory_free = device->memory.free();
    info->memory_used = device->memory.bytes();
    info->memory_peak = device->memory.peak();
    info->memory_scratch = device->scratch.bytes() + device->between.bytes() + Products::workspace_bytes();
  });
}

ops::Status allocate(ops::Device* device, int64_t bytes, void** memory) {
  return guarded(device, [&] {
    require(memory != nullptr, "allocate: memory is null");
    *memory = nullptr;
    device->require_not_recording("allocate");
    *memory = device->memory.allocate(bytes, "allocate");
  });
}

void release(ops::Device* device, void* memory) {
  if (!memory) return;
  guarded(device, [&] { device->release(memory); });
}

ops::Status upload(ops::Device* device, void* dst, const void* host_src, int64_t bytes) {
  return guarded(device, [&] {
    require(bytes >= 0, "upload: bytes is negative");
    require(bytes == 0 || (dst && host_src), "upload: dst or host_src is null");
    device->require_not_recording("upload");
    device->staging.upload(dst, host_src, bytes);
  });
}

ops::Status download(ops::Device* device, void* host_dst, const void* src, int64_t bytes) {
  return guarded(device, [&] {
    require(bytes >= 0, "download: bytes is negative");
    require(bytes == 0 || (host_dst && src), "download: host_dst or src is null");
    device->require_not_recording("download");
    device->staging.download(host_dst, src, bytes);
  });
}

ops::Status copy(ops::Device* device, void* dst, const void* src, int64_t bytes) {
  return guarded(device, [&] {
    require(bytes >= 0, "copy: bytes is negative");
    require(bytes == 0 || (dst && src), "copy: dst or src is null");
    const char* to = static_cast<const char*>(dst);
    const char* from = static_cast<const char*>(src);
    require(bytes == 0 || to + bytes <= from || from + bytes <= to, "copy: dst and src overlap");
    if (bytes == 0) return;
    check(copy_on_device(dst, src, static_cast<size_t>(bytes), device->stream), "copy");
  });
}

ops::Status zero(ops::Device* device, void* dst, int64_t bytes) {
  return guarded(device, [&] {
    require(bytes >= 0, "zero: bytes is negative");
    require(bytes == 0 || dst, "zero: dst is null");
    if (bytes == 0) return;
    check(fill_zero(dst, static_cast<size_t>(bytes), device->stream), "zero");
  });
}

}  // namespace duokv::cuda

namespace duokv::ops {

Device::Device(int32_t index, bool planning)
    : index(index), properties(cuda::select_device(index)), stream(planning), memory(index, planning) {}

Device::~Device() {
  cudaSetDevice(index);
  if (!cuda::only_plans(stream)) cudaStreamSynchronize(stream);
}

void Device::require_not_recording(const char* call) const {
  if (recording)
    throw cuda::InvalidArgument(std::string(call) + ": not possible while a graph is being recorded");
}

void Device::release(void* block) {
  if (recording) {
    released_while_recording.push_back(block);
  } else {
    memory.release(block);
  }
}

}  // namespace duokv::ops
