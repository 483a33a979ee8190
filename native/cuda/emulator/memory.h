// Device memory with a state for every byte, and the check of every access that the emulator sees.
//
// Each allocation ends (to 16 bytes) at an inaccessible page, so that in every build an access past its end
// stops the kernel; the slack inside its pages is filled with a pattern that is verified when it is freed and
// at every synchronise. New memory is filled with 0xFF, which reads as NaN (or as index -1). Freed memory is
// never handed out again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace duokv::simt {

enum class ByteState : uint8_t { kInaccessible = 0, kUninitialised = 1, kInitialised = 2 };

constexpr unsigned char kPoison = 0xFF;

// Fill and copy that no sanitizer runtime intercepts: they are the emulator's own, not accesses of the
// running thread.
void raw_fill(void* destination, unsigned char value, size_t bytes);
void raw_copy(void* destination, const void* source, size_t bytes);

// A reserved range of addresses beside the states of its bytes.
class Region {
 public:
  explicit Region(size_t bytes);
  // A part of another, which must live longer.
  Region(const Region& whole, size_t offset, size_t bytes)
      : bytes_(bytes), base_(whole.base_ + offset), states_(whole.states_ + offset) {}
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  bool contains(const void* address) const {
    return static_cast<size_t>(static_cast<const char*>(address) - base_) < bytes_;
  }
  ByteState state(const void* address) const {
    return static_cast<ByteState>(states_[static_cast<const char*>(address) - base_]);
  }
  void mark(const void* address, size_t bytes, ByteState state);
  // Offset from `address` of the first byte below `least`, or `bytes` when there is none.
  size_t first_below(const void* address, size_t bytes, ByteState least) const;

  void map(char* begin, size_t bytes);    // makes whole pages readable and writable
  void unmap(char* begin, size_t bytes);  // makes them inaccessible again

 private:
  size_t bytes_;
  char* base_;
  uint8_t* states_;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(int device);
  void* allocate(size_t bytes);  // null: out of memory
  // Empty on success, else what is wrong with the pointer or was found around the allocation.
  std::string release(void* pointer);
  std::string check_guards() const;                  // empty, or the first guard zone that was written
  std::string describe(const void* address) const;   // "12 bytes past the end of a 64-byte allocation"
  bool owns(const void* begin, size_t bytes) const;  // every byte lies in one live allocation
  void reset();                                      // frees everything

  Region region;
  size_t capacity;  // bytes that may be live at once: DUOKV_SIMT_MEMORY, 4 GiB by default
  size_t live() const { return live_; }

 private:
  struct Allocation {
    char* pages;
    size_t page_bytes, bytes;
    bool freed;
  };
  std::string check_guards(char* user, const Allocation& allocation) const;
  std::map<char*, Allocation> allocations_;  // by user pointer, freed ones included
  size_t next_ = 0, live_ = 0;
};

// Of the calling thread's current device.
DeviceMemory& device_memory();
// The addresses of all devices: those of device i are [i * kDeviceSpan, (i + 1) * kDeviceSpan) of it.
const Region& all_device_memory();
// How many devices there are: DUOKV_SIMT_DEVICES when this is first asked, 1 by default.
int device_count();
constexpr size_t kDeviceSpan = size_t{64} << 30;  // addresses, not memory
constexpr int kMostDevices = 8;

// ---- accesses

enum class Access { kRead, kWrite };

// Called by the compiler's instrumentation for every access (checked builds) and by emulated instructions
// (every build): stops the running thread when an access leaves its array, is misaligned or reads what nobody
// wrote.
void check_access(const void* address, size_t bytes, size_t alignment, Access access, const void* pc);
// An access by an emulated instruction: checked, and shown to ThreadSanitizer.
void note_access(const void* address, size_t bytes, size_t alignment, Access access);
// Set by the instrumentation's own initialisation: stores are tracked, so reads of unwritten bytes can be
// reported.
extern bool stores_are_tracked;

}  // namespace duokv::simt
