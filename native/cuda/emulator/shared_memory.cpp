// Shared memory of a block, and the cp.async copies that fill it.
#include <cstdio>

#include "cuda/emulator/block.h"

namespace duokv::simt {
namespace {

constexpr size_t kPage = 4096, kStaticSpan = 64 * 1024, kDynamicSpan = 256 * 1024;
constexpr size_t kGap = 32;  // bytes between static arrays

}  // namespace

SharedMemory::SharedMemory()
    : region(kStaticSpan + kDynamicSpan + 3 * kPage),
      static_begin_(region.base() + kPage),
      static_end_(static_begin_ + kStaticSpan),
      dynamic_end_(static_end_ + kPage + kDynamicSpan),
      next_(static_begin_) {
  region.map(static_begin_, kStaticSpan);
  region.map(dynamic_end_ - kDynamicSpan, kDynamicSpan);
}

void SharedMemory::start(size_t dynamic_bytes, size_t limit) {
  array_count_ = 0;
  static_bytes_ = 0;
  limit_ = limit;
  next_ = static_begin_;
  raw_fill(next_, kPoison, kGap);
  dynamic_bytes_ = dynamic_bytes;
  dynamic_ = dynamic_end_ - (dynamic_bytes + 15) / 16 * 16;
  raw_fill(dynamic_, kPoison, static_cast<size_t>(dynamic_end_ - dynamic_));
  region.mark(dynamic_, dynamic_bytes, ByteState::kUninitialised);
}

std::string SharedMemory::finish() {
  std::string report;
  const char* gap = static_begin_;
  for (uint32_t i = 0; i <= array_count_; ++i) {
    const char* end = i < array_count_ ? arrays_[i].begin : next_ + kGap;
    while (gap < end && static_cast<unsigned char>(*gap) == kPoison) ++gap;
    if (gap < end && report.empty()) report = "a thread wrote " + describe(gap);
    if (i < array_count_) gap = arrays_[i].begin + arrays_[i].bytes;
  }
  region.mark(static_begin_, static_cast<size_t>(next_ - static_begin_), ByteState::kInaccessible);
  region.mark(dynamic_, dynamic_bytes_, ByteState::kInaccessible);
  return report;
}

void* SharedMemory::array(const void* declaration, size_t bytes, size_t alignment) {
  for (uint32_t i = 0; i < array_count_; ++i) {
    if (arrays_[i].declaration == declaration) return arrays_[i].begin;
  }
  static_bytes_ += bytes;
  if (static_bytes_ > kStaticSharedLimit || static_bytes_ + dynamic_bytes_ > limit_) {
    fault(FaultCode::kLaunchFailure,
          "%zu bytes of static and %zu of dynamic shared memory: the limits are %zu and %zu in all",
          static_bytes_, dynamic_bytes_, kStaticSharedLimit, limit_);
  }
  if (array_count_ == kMaxArrays) fault(FaultCode::kLaunchFailure, "more than %u shared arrays", kMaxArrays);
  // Aligned to what was asked and no more, so that a kernel cannot rely on a lucky address.
  auto address = reinterpret_cast<uintptr_t>(next_) + kGap;
  address = (address + alignment - 1) / alignment * alignment;
  if (address % (2 * alignment) == 0) address += alignment;
  char* begin = reinterpret_cast<char*>(address);
  raw_fill(next_, kPoison, static_cast<size_t>(begin - next_) + bytes + 2 * kGap);
  region.mark(begin, bytes, ByteState::kUninitialised);
  arrays_[array_count_++] = {declaration, begin, bytes};
  next_ = begin + bytes;
  return begin;
}

std::string SharedMemory::describe(const void* address) const {
  const char* p = static_cast<const char*>(address);
  char text[128] = "outside the block's shared arrays";
  const char *begin = nullptr, *kind = "static";
  size_t bytes = 0;
  for (uint32_t i = 0; i < array_count_; ++i) {
    if (arrays_[i].begin <= p) begin = arrays_[i].begin, bytes = arrays_[i].bytes;
  }
  if (p >= static_end_) begin = dynamic_, bytes = dynamic_bytes_, kind = "dynamic";
  if (!begin) return text;
  const ptrdiff_t into = p - begin, past = into - static_cast<ptrdiff_t>(bytes);
  if (into < 0) {
    std::snprintf(text, sizeof text, "%td bytes before the %zu bytes of %s shared memory", -into, bytes,
                  kind);
  } else if (past >= 0) {
    std::snprintf(text, sizeof text, "%td bytes past the end of a %zu-byte %s shared array", past, bytes,
                  kind);
  } else {
    std::snprintf(text, sizeof text, "%td bytes into a %zu-byte %s shared array", into, bytes, kind);
  }
  return text;
}

void* shared_array(const void* declaration, size_t bytes, size_t alignment) {
  return block().shared().array(declaration, bytes, alignment);
}
void* dynamic_shared() { return block().shared().dynamic(); }
std::string describe_shared(const void* address) { return block().shared().describe(address); }

// ---------------------------------------------------------------- cp.async

void issue_copy(void* destination, const void* source, uint32_t bytes, uint32_t valid_bytes) {
  Block& b = block();
  Thread& self = *b.running;
  if (!b.shared().region.contains(destination))
    fault(FaultCode::kIllegalAddress, "cp.async to memory that is not shared");
  if (valid_bytes > bytes)
    fault(FaultCode::kLaunchFailure, "cp.async of %u bytes with %u valid", bytes, valid_bytes);
  note_access(destination, bytes, bytes, Access::kWrite);
  if (valid_bytes > 0) {
    if (!device_memory().region.contains(source))
      fault(FaultCode::kIllegalAddress, "cp.async from memory that is not global");
    note_access(source, valid_bytes, valid_bytes == bytes ? bytes : 1, Access::kRead);
  }
  if (self.copy_count == Thread::kMaxCopies)
    fault(FaultCode::kLaunchFailure, "more than %u cp.async copies of one thread in flight",
          Thread::kMaxCopies);
  self.copies[self.copy_count++] = {destination, source, bytes, valid_bytes, self.copy_group};
  raw_fill(destination, kPoison, bytes);
  b.shared().region.mark(destination, bytes, ByteState::kUninitialised);
}

void commit_copies() { ++block().running->copy_group; }

void wait_copies(uint32_t groups_in_flight) {
  Thread& self = *block().running;
  uint32_t kept = 0;
  for (uint32_t i = 0; i < self.copy_count; ++i) {
    const AsyncCopy& copy = self.copies[i];
    // Group g is complete when at most `groups_in_flight` later ones were committed after it; uncommitted
    // copies are not waited for.
    if (copy.group + groups_in_flight >= self.copy_group) {
      self.copies[kept++] = copy;
      continue;
    }
    note_access(copy.destination, copy.bytes, copy.bytes, Access::kWrite);
    raw_copy(copy.destination, copy.source, copy.valid_bytes);
    raw_fill(static_cast<char*>(copy.destination) + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
  }
  self.copy_count = kept;
}

}  // namespace duokv::simt
