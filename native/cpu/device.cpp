#include "cpu/device.h"

#include <dnnl.h>
#include <hwy/highway.h>
#include <hwy/targets.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "cpu/device_functions.h"
#include "ops/rounding.h"

namespace duokv::cpu {
namespace {

constexpr int64_t kAlignment = 64;
// Blocks of this size and more ask for huge pages: with 4 KiB pages a stream of weights restarts the hardware
// prefetcher at every page.
constexpr int64_t kHugePage = int64_t{2} << 20;
// An allocation keeps its size in front of the memory it hands out.
constexpr int64_t kPrefix = kAlignment;
// Fills and copies of more than this are shared by the pool.
constexpr int64_t kCopyChunk = int64_t{1} << 20;
constexpr int32_t kMaxThreads = 1024;

void* aligned_memory(int64_t bytes) {
  const bool huge = bytes >= 2 * kHugePage;
  void* memory = nullptr;
  if (posix_memalign(&memory, static_cast<size_t>(huge ? kHugePage : kAlignment),
                     static_cast<size_t>(bytes)) != 0) {
    return nullptr;
  }
  // Only a hint: where the kernel declines, ordinary pages serve.
  if (huge) madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return memory;
}

// Address space that nothing backs before it is written.
void* address_space(int64_t bytes) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, static_cast<size_t>(bytes), MADV_NOHUGEPAGE);
  return memory;
}

int64_t read_total_memory() {
  int64_t total = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    if (int64_t limit = 0; std::ifstream(file) >> limit && limit > 0) total = std::min(total, limit);
  }
  return total;
}

// Bytes this process may use: the machine's memory or the cgroup's limit, whichever is less, as it was at
// most a second ago. Reading it takes 0.1 ms, and a device is asked after every call.
int64_t total_memory() {
  using Clock = std::chrono::steady_clock;
  static std::mutex mutex;
  static int64_t total = 0;
  static Clock::time_point when;
  std::lock_guard lock(mutex);
  if (const auto now = Clock::now(); total == 0 || now - when > std::chrono::seconds(1)) {
    total = read_total_memory();
    when = now;
  }
  return total;
}

std::string processor_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t value = line.find_first_not_of(" \t", line.find(':') + 1);
    if (value != std::string::npos) return line.substr(value);
  }
  return "CPU";
}

const char* vector_target() {
  const int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(usable & -usable);  // the lowest bit is the best target
}

template <size_t N>
void put(char (&field)[N], const std::string& text) {
  std::snprintf(field, N, "%s", text.c_str());
}

// What is the same for every CPU device of this process. Made once: a device is asked after every call, and
// the processor's name takes 0.1 ms.
const ops::DeviceInfo& description() {
  static const ops::DeviceInfo all = [] {
    const dnnl_version_t* dnnl = dnnl_version();
    ops::DeviceInfo info{};
    put(info.name, processor_name());
    put(info.isa, vector_target());
    put(info.libraries, "oneDNN " + std::to_string(dnnl->major) + "." + std::to_string(dnnl->minor) + "." +
                            std::to_string(dnnl->patch) + "; Highway " + std::to_string(HWY_MAJOR) + "." +
                            std::to_string(HWY_MINOR) + "." + std::to_string(HWY_PATCH));
    put(info.attention, "TF32x3 runs as IEEE FP32, which is at least as accurate");
    return info;
  }();
  return all;
}

std::string bytes_text(int64_t bytes) { return std::to_string(bytes) + " bytes"; }

// Calls body(begin, end) for pieces of [0, bytes).
template <class Body>
void in_pieces(ops::Device* device, int64_t bytes, Body&& body) {
  const int64_t chunks = ceil_div(bytes, kCopyChunk);
  device->pool.run(chunks, [&](int64_t chunk, int32_t) {
    body(chunk * kCopyChunk, std::min(bytes, (chunk + 1) * kCopyChunk));
  });
}

void copy_pieces(ops::Device* device, void* dst, const void* src, int64_t bytes) {
  in_pieces(device, bytes, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(dst) + begin, static_cast<const char*>(src) + begin,
                static_cast<size_t>(end - begin));
  });
}

}  // namespace

void* Memory::allocate(int64_t bytes) {
  // The system hands out more than it has and kills the process later, so the limit is checked here.
  void* base = nullptr;
  if (planning_) {
    base = address_space(kPrefix + bytes);
  } else if (bytes <= free() - kPrefix) {
    base = aligned_memory(kPrefix + bytes);
  }
  if (!base) {
    throw ops::OutOfMemory("out of memory: " + bytes_text(bytes) + " asked for, " + bytes_text(used()) +
                           " in use, " + bytes_text(total_memory()) + " in all");
  }
  *static_cast<int64_t*>(base) = bytes;
  used_ += bytes;
  peak_ = std::max(peak_.load(), used_.load());
  return static_cast<char*>(base) + kPrefix;
}

void Memory::release(void* memory) {
  if (!memory) return;
  void* base = static_cast<char*>(memory) - kPrefix;
  const int64_t bytes = *static_cast<int64_t*>(base);
  used_ -= bytes;
  if (planning_) {
    munmap(base, static_cast<size_t>(kPrefix + bytes));
  } else {
    std::free(base);
  }
}

int64_t Memory::free() const {
  return planning_ ? std::numeric_limits<int64_t>::max() : total_memory() - used();
}

void* Scratch::reserve(int64_t bytes) {
  if (bytes <= bytes_) return memory_;
  owner_.release(std::exchange(memory_, nullptr));
  bytes_ = 0;
  memory_ = owner_.allocate(bytes);
  bytes_ = bytes;
  return memory_;
}

ops::Status open(const char* options, int32_t threads, ops::Device** device) {
  return guarded([&] {
    require(device != nullptr, "open: device is null");
    *device = nullptr;
    require(options == nullptr || *options == '\0', "open: the CPU backend takes no options");
    if (threads < 0 || threads > kMaxThreads) {
      throw InvalidArgument("open: threads is " + std::to_string(threads) + ", must be 0 to " +
                            std::to_string(kMaxThreads));
    }
    *device = new ops::Device(threads == 0 ? usable_cpus() : threads, false);
  });
}

ops::Status open_planning(ops::Device* device, ops::Device** planning) {
  return guarded([&] {
    require(device && planning, "open_planning: device or planning is null");
    *planning = nullptr;
    *planning = new ops::Device(device->pool.threads(), true);
  });
}

void close(ops::Device* device) { delete device; }

ops::Status info(ops::Device* device, ops::DeviceInfo* info) {
  return guarded([&] {
    require(device && info, "info: device or info is null");
    *info = description();
    info->threads = device->pool.threads();
    info->memory_total = total_memory();
    info->memory_free = device->memory.free();
    info->memory_used = device->memory.used();
    info->memory_peak = device->memory.peak();
    info->memory_scratch = device->scratch_bytes();
  });
}

ops::Status allocate(ops::Device* device, int64_t bytes, void** memory) {
  return guarded([&] {
    require(device && memory, "allocate: device or memory is null");
    *memory = nullptr;
    if (bytes < 0)
      throw InvalidArgument("allocate: bytes is " + std::to_string(bytes) + ", must not be negative");
    *memory = device->memory.allocate(bytes);
  });
}

void release(ops::Device* device, void* memory) { device->memory.release(memory); }

ops::Status copy(ops::Device* device, void* dst, const void* src, int64_t bytes) {
  return guarded([&] {
    require(device != nullptr, "copy: device is null");
    require(bytes >= 0, "copy: bytes is negative");
    require(bytes == 0 || (dst && src), "copy: dst or src is null");
    const char* to = static_cast<const char*>(dst);
    const char* from = static_cast<const char*>(src);
    require(bytes == 0 || to + bytes <= from || from + bytes <= to, "copy: dst and src overlap");
    copy_pieces(device, dst, src, bytes);
  });
}

// On a planning device too: operations read some of their inputs to see how much there is to do.
ops::Status upload(ops::Device* device, void* dst, const void* host_src, int64_t bytes) {
  return guarded([&] {
    require(device != nullptr, "upload: device is null");
    require(bytes >= 0, "upload: bytes is negative");
    require(bytes == 0 || (dst && host_src), "upload: dst or host_src is null");
    if (bytes > 0 && device->pool.planning()) std::memcpy(dst, host_src, static_cast<size_t>(bytes));
    copy_pieces(device, dst, host_src, bytes);
  });
}

ops::Status download(ops::Device* device, void* host_dst, const void* src, int64_t bytes) {
  return copy(device, host_dst, src, bytes);
}

ops::Status zero(ops::Device* device, void* dst, int64_t bytes) {
  return guarded([&] {
    require(device != nullptr, "zero: device is null");
    require(bytes >= 0, "zero: bytes is negative");
    require(bytes == 0 || dst, "zero: dst is null");
    in_pieces(device, bytes, [&](int64_t begin, int64_t end) {
      std::memset(static_cast<char*>(dst) + begin, 0, static_cast<size_t>(end - begin));
    });
  });
}

}  // namespace duokv::cpu

duokv::ops::Device::Device(int32_t threads, bool planning) : memory(planning), pool(threads, planning) {
  for (int32_t worker = 0; worker < threads; ++worker) worker_scratch.emplace_back(memory);
}

int64_t duokv::ops::Device::scratch_bytes() const {
  int64_t sum = shared_scratch.bytes() + block_scratch.bytes();
  for (const cpu::Scratch& scratch : worker_scratch) sum += scratch.bytes();
  return sum;
}
