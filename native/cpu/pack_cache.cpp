#include "cpu/pack_cache.h"

#include <algorithm>
#include <utility>

#include "cpu/operations.h"

namespace duokv::cpu {
namespace {

constexpr int64_t kLargestBlock = int64_t{32} << 20;

}  // namespace

Status pack_cache_create(Device* device, ops::PackCache** cache) {
  return guarded([&] {
    require(device && cache, "pack_cache_create: device or cache is null");
    *cache = new ops::PackCache(device->memory);
  });
}

void pack_cache_destroy(Device*, ops::PackCache* cache) { delete cache; }

int64_t pack_cache_bytes(const ops::PackCache* cache) { return cache ? cache->bytes() : 0; }

PackMemory::~PackMemory() {
  for (void* block : blocks_) owner_.release(block);
}

void* PackMemory::take(int64_t bytes) {
  if (bytes >= kLargestBlock) return block_of(bytes);
  if (bytes > left_) {
    const int64_t block = std::max(bytes, std::min(held_, kLargestBlock));
    next_ = block_of(block);
    left_ = block;
  }
  left_ -= bytes;
  return std::exchange(next_, next_ + bytes);
}

char* PackMemory::block_of(int64_t bytes) {
  blocks_.reserve(blocks_.size() + 1);
  auto* block = static_cast<char*>(owner_.allocate(bytes));
  blocks_.push_back(block);
  held_ += bytes;
  return block;
}

}  // namespace duokv::cpu

namespace duokv::ops {

cpu::RightOperand PackCache::get(Device& device, const Weight& weight, ProductMode mode, int64_t m) {
  const cpu::ProductKernel kernel = cpu::choose_kernel(mode, m);
  Entry& entry = entries_[{weight.data, mode, kernel}];
  if (entry.version == weight.version && entry.n == weight.n && entry.k == weight.k) return entry.operand;
  entry.version.reset();  // in case making the copy fails
  const int64_t bytes = cpu::prepared_bytes(kernel, weight.k, weight.n, mode);
  if (bytes > entry.bytes) {
    entry.memory = memory_.take(bytes);
    entry.bytes = bytes;
  }
  entry.operand =
      cpu::prepare(device, kernel, {weight.data, weight.k, true}, weight.k, weight.n, mode, entry.memory);
  entry.n = weight.n;
  entry.k = weight.k;
  entry.version = weight.version;
  return entry.operand;
}

}  // namespace duokv::ops
