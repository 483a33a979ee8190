#include "cpu/pack_cache.h"

#include "cpu/operations.h"

namespace duokv::cpu {

Status pack_cache_create(Device* device, ops::PackCache** cache) {
  return guarded([&] {
    require(device && cache, "pack_cache_create: device or cache is null");
    *cache = new ops::PackCache;
  });
}

void pack_cache_destroy(Device*, ops::PackCache* cache) { delete cache; }

int64_t pack_cache_bytes(const ops::PackCache* cache) { return cache ? cache->bytes() : 0; }

}  // namespace duokv::cpu

namespace duokv::ops {

cpu::RightOperand PackCache::get(Device& device, const Weight& weight, ProductMode mode, int64_t m) {
  const cpu::ProductKernel kernel = cpu::choose_kernel(mode, m);
  Entry& entry = entries_.try_emplace({weight.data, mode, kernel}, device.memory).first->second;
  if (entry.version == weight.version && entry.n == weight.n && entry.k == weight.k) return entry.operand;
  entry.version.reset();  // in case making the copy fails
  void* memory = entry.memory.take<char>(cpu::prepared_bytes(kernel, weight.k, weight.n, mode));
  entry.operand =
      cpu::prepare(device, kernel, {weight.data, weight.k, true}, weight.k, weight.n, mode, memory);
  entry.n = weight.n;
  entry.k = weight.k;
  entry.version = weight.version;
  return entry.operand;
}

int64_t PackCache::bytes() const {
  int64_t sum = 0;
  for (const auto& [key, entry] : entries_) sum += entry.memory.bytes();
  return sum;
}

}  // namespace duokv::ops
