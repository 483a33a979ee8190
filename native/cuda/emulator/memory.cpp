#include "cuda/emulator/memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace duokv::simt {
namespace {

constexpr size_t kPage = 4096;

// What an environment variable says, in [1, most]; `otherwise` where it says nothing.
size_t setting(const char* name, size_t otherwise, size_t most) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text, &end, 10);
  if (*end != '\0' || value < 1 || value > most) {
    std::fprintf(stderr, "simt: %s is '%s'; it must be a number from 1 to %zu\n", name, text, most);
    std::abort();
  }
  return static_cast<size_t>(value);
}

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void* reserve(size_t bytes, int protection) {
  void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("simt: cannot reserve addresses");
    std::abort();
  }
  return memory;
}

// Straight to the system: a sanitizer's mmap would count as an access of the calling thread.
void remap(char* begin, size_t bytes, int protection) {
  const long mapped = syscall(SYS_mmap, begin, bytes, protection,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  if (mapped != reinterpret_cast<long>(begin)) {
    std::perror("simt: cannot map memory");
    std::abort();
  }
}

}  // namespace

bool stores_are_tracked = false;

// The compiler must not turn these loops back into calls of memset and memcpy.
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void raw_fill(void* destination,
                                                                            unsigned char value,
                                                                            size_t bytes) {
  auto* to = static_cast<unsigned char*>(destination);
  for (size_t i = 0; i < bytes; ++i) to[i] = value;
}

__attribute__((optimize("no-tree-loop-distribute-patterns"))) void raw_copy(void* destination,
                                                                            const void* source,
                                                                            size_t bytes) {
  auto* to = static_cast<unsigned char*>(destination);
  const auto* from = static_cast<const unsigned char*>(source);
  for (size_t i = 0; i < bytes; ++i) to[i] = from[i];
}

// ---------------------------------------------------------------- regions

Region::Region(size_t bytes)
    : bytes_(bytes),
      base_(static_cast<char*>(reserve(bytes, PROT_NONE))),
      states_(static_cast<uint8_t*>(reserve(bytes, PROT_READ | PROT_WRITE))) {}

void Region::mark(const void* address, size_t bytes, ByteState state) {
  raw_fill(states_ + (static_cast<const char*>(address) - base_), static_cast<unsigned char>(state), bytes);
}

size_t Region::first_below(const void* address, size_t bytes, ByteState least) const {
  const size_t begin = static_cast<size_t>(static_cast<const char*>(address) - base_);
  for (size_t i = 0; i < bytes; ++i) {
    if (begin + i >= bytes_ || states_[begin + i] < static_cast<uint8_t>(least)) return i;
  }
  return bytes;
}

void Region::map(char* begin, size_t bytes) { remap(begin, bytes, PROT_READ | PROT_WRITE); }
void Region::unmap(char* begin, size_t bytes) { remap(begin, bytes, PROT_NONE); }

// ---------------------------------------------------------------- device memory

int device_count() {
  static const size_t count = setting("DUOKV_SIMT_DEVICES", 1, kMostDevices);
  return static_cast<int>(count);
}

const Region& all_device_memory() {
  static const Region region(static_cast<size_t>(device_count()) * kDeviceSpan);
  return region;
}

DeviceMemory::DeviceMemory(int device)
    : region(all_device_memory(), static_cast<size_t>(device) * kDeviceSpan, kDeviceSpan),
      capacity(setting("DUOKV_SIMT_MEMORY", size_t{4} << 30, kDeviceSpan)) {}

void* DeviceMemory::allocate(size_t bytes) {
  const size_t page_bytes = round_up(bytes, kPage);
  if (live_ + bytes > capacity || next_ + page_bytes + 2 * kPage > region.bytes()) return nullptr;
  char* pages = region.base() + next_ + kPage;
  next_ += page_bytes + kPage;
  region.map(pages, page_bytes);
  char* user = pages + page_bytes - round_up(bytes, 16);
  raw_fill(pages, kPoison, page_bytes);
  region.mark(user, bytes, ByteState::kUninitialised);
  allocations_[user] = {pages, page_bytes, bytes, false};
  live_ += bytes;
  return user;
}

std::string DeviceMemory::check_guards(char* user, const Allocation& allocation) const {
  const auto written = [](char* begin, char* end) {
    while (begin < end && static_cast<unsigned char>(*begin) == kPoison) ++begin;
    return begin == end ? nullptr : begin;
  };
  char* bad = written(allocation.pages, user);
  if (!bad) bad = written(user + allocation.bytes, allocation.pages + allocation.page_bytes);
  return bad ? "a kernel or copy wrote " + describe(bad) : "";
}

std::string DeviceMemory::check_guards() const {
  for (const auto& [user, allocation] : allocations_) {
    if (allocation.freed) continue;
    if (std::string report = check_guards(user, allocation); !report.empty()) return report;
  }
  return "";
}

std::string DeviceMemory::release(void* pointer) {
  const auto found = allocations_.find(static_cast<char*>(pointer));
  if (found == allocations_.end()) return "the pointer is not the start of a device allocation";
  Allocation& allocation = found->second;
  if (allocation.freed) return "the device allocation was already freed";
  const std::string report = check_guards(found->first, allocation);
  region.mark(found->first, allocation.bytes, ByteState::kInaccessible);
  region.unmap(allocation.pages, allocation.page_bytes);
  allocation.freed = true;
  live_ -= allocation.bytes;
  return report;
}

std::string DeviceMemory::describe(const void* address) const {
  const char* p = static_cast<const char*>(address);
  auto next = allocations_.upper_bound(const_cast<char*>(p));
  char text[160];
  if (next != allocations_.begin()) {
    const auto& [user, allocation] = *std::prev(next);
    const char* end = user + allocation.bytes;
    if (p < end || p < allocation.pages + allocation.page_bytes + kPage) {
      if (p < end) {
        std::snprintf(text, sizeof text, "%td bytes into a %s%zu-byte device allocation", p - user,
                      allocation.freed ? "freed " : "", allocation.bytes);
      } else {
        std::snprintf(text, sizeof text, "%td bytes past the end of a %s%zu-byte device allocation", p - end,
                      allocation.freed ? "freed " : "", allocation.bytes);
      }
      return text;
    }
  }
  if (next != allocations_.end() && p >= next->second.pages - kPage) {
    std::snprintf(text, sizeof text, "%td bytes before a %zu-byte device allocation", next->first - p,
                  next->second.bytes);
    return text;
  }
  return "in no device allocation";
}

bool DeviceMemory::owns(const void* begin, size_t bytes) const {
  char* p = const_cast<char*>(static_cast<const char*>(begin));
  const auto next = allocations_.upper_bound(p);
  if (next == allocations_.begin()) return false;
  const auto& [user, allocation] = *std::prev(next);
  return !allocation.freed && p + bytes <= user + allocation.bytes;
}

void DeviceMemory::reset() {
  for (auto& [user, allocation] : allocations_) {
    if (allocation.freed) continue;
    region.mark(user, allocation.bytes, ByteState::kInaccessible);
    region.unmap(allocation.pages, allocation.page_bytes);
    allocation.freed = true;
  }
  live_ = 0;
}

}  // namespace duokv::simt
