#include "cpu/device.h"

#include <dnnl.h>
#include <hwy/highway.h>
#include <hwy/targets.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <string>
#include <utility>

#include "cpu/device_functions.h"

namespace duokv::cpu {
namespace {

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

thread_local std::string last_error_message;

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

// Bytes this process may use: the machine's memory or the cgroup's limit, whichever is less.
int64_t total_memory() {
  int64_t total = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    if (int64_t limit = 0; std::ifstream(file) >> limit && limit > 0) total = std::min(total, limit);
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

std::string bytes_text(int64_t bytes) { return std::to_string(bytes) + " bytes"; }

// Calls body(begin, end) for pieces of [0, bytes).
template <class Body>
void in_pieces(ops::Device* device, int64_t bytes, Body&& body) {
  const int64_t chunks = (bytes + kCopyChunk - 1) / kCopyChunk;
  device->pool.run(chunks, [&](int64_t chunk, int32_t) {
    body(chunk * kCopyChunk, std::min(bytes, (chunk + 1) * kCopyChunk));
  });
}

}  // namespace

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::reserve(int64_t bytes) {
  if (bytes <= bytes_) return memory_;
  std::free(std::exchange(memory_, nullptr));
  bytes_ = 0;
  memory_ = aligned_memory(bytes);
  if (!memory_) throw OutOfMemory("out of memory: scratch of " + bytes_text(bytes));
  bytes_ = bytes;
  return memory_;
}

ops::Status guarded_call(void (*call)(void*), void* body) noexcept {
  const auto failed = [](ops::Status status, const char* message) {
    last_error_message = message;
    return status;
  };
  try {
    call(body);
    return ops::kOk;
  } catch (const InvalidArgument& error) {
    return failed(ops::kInvalid, error.what());
  } catch (const OutOfMemory& error) {
    return failed(ops::kOutOfMemory, error.what());
  } catch (const std::bad_alloc&) {
    return failed(ops::kOutOfMemory, "out of memory");
  } catch (const std::exception& error) {
    return failed(ops::kInternal, error.what());
  } catch (...) {
    return failed(ops::kInternal, "unknown error");
  }
}

const char* last_error() { return last_error_message.c_str(); }

ops::Status open(const char* options, int32_t threads, ops::Device** device) {
  return guarded([&] {
    require(device != nullptr, "open: device is null");
    *device = nullptr;
    require(options == nullptr || *options == '\0', "open: the CPU backend takes no options");
    if (threads < 0 || threads > kMaxThreads) {
      throw InvalidArgument("open: threads is " + std::to_string(threads) + ", must be 0 to " +
                            std::to_string(kMaxThreads));
    }
    *device = new ops::Device(threads == 0 ? usable_cpus() : threads);
  });
}

void close(ops::Device* device) { delete device; }

ops::Status info(ops::Device* device, ops::DeviceInfo* info) {
  return guarded([&] {
    require(device && info, "info: device or info is null");
    const dnnl_version_t* dnnl = dnnl_version();
    *info = {};
    put(info->name, processor_name());
    put(info->isa, vector_target());
    put(info->libraries, "oneDNN " + std::to_string(dnnl->major) + "." + std::to_string(dnnl->minor) + "." +
                             std::to_string(dnnl->patch) + "; Highway " + std::to_string(HWY_MAJOR) + "." +
                             std::to_string(HWY_MINOR) + "." + std::to_string(HWY_PATCH));
    put(info->attention, "TF32x3 runs as IEEE FP32, which is at least as accurate");
    info->threads = device->pool.threads();
    info->memory_total = total_memory();
    info->memory_used = device->bytes_allocated;
  });
}

ops::Status allocate(ops::Device* device, int64_t bytes, void** memory) {
  return guarded([&] {
    require(device && memory, "allocate: device or memory is null");
    *memory = nullptr;
    if (bytes < 0)
      throw InvalidArgument("allocate: bytes is " + std::to_string(bytes) + ", must not be negative");
    // The system hands out more than it has and kills the process later, so the limit is checked here.
    const int64_t total = total_memory();
    void* base =
        bytes <= total - device->bytes_allocated - kPrefix ? aligned_memory(kPrefix + bytes) : nullptr;
    if (!base) {
      throw OutOfMemory("out of memory: " + bytes_text(bytes) + " asked for, " +
                        bytes_text(device->bytes_allocated) + " in use, " + bytes_text(total) + " in all");
    }
    *static_cast<int64_t*>(base) = bytes;
    device->bytes_allocated += bytes;
    *memory = static_cast<char*>(base) + kPrefix;
  });
}

void release(ops::Device* device, void* memory) {
  if (!memory) return;
  void* base = static_cast<char*>(memory) - kPrefix;
  device->bytes_allocated -= *static_cast<int64_t*>(base);
  std::free(base);
}

ops::Status copy(ops::Device* device, void* dst, const void* src, int64_t bytes) {
  return guarded([&] {
    require(device != nullptr, "copy: device is null");
    require(bytes >= 0, "copy: bytes is negative");
    require(bytes == 0 || (dst && src), "copy: dst or src is null");
    char* to = static_cast<char*>(dst);
    const char* from = static_cast<const char*>(src);
    require(bytes == 0 || to + bytes <= from || from + bytes <= to, "copy: dst and src overlap");
    in_pieces(device, bytes, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
    });
  });
}

ops::Status upload(ops::Device* device, void* dst, const void* host_src, int64_t bytes) {
  return copy(device, dst, host_src, bytes);
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

duokv::ops::Device::Device(int32_t threads) : pool(threads), worker_scratch(static_cast<size_t>(threads)) {}
