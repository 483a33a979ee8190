#include "cuda/operations.h"
#include "cuda/pack_cache.h"

namespace duokv::cuda {

ops::Status pack_cache_create(ops::Device* device, ops::PackCache** cache) {
  return guarded(device, [&] {
    require(cache != nullptr, "pack_cache_create: cache is null");
    *cache = new ops::PackCache(*device);
  });
}

void pack_cache_destroy(ops::Device* device, ops::PackCache* cache) {
  guarded(device, [&] { delete cache; });
}

int64_t pack_cache_bytes(const ops::PackCache* cache) { return cache ? cache->bytes() : 0; }

}  // namespace duokv::cuda

namespace duokv::ops {

PackCache::~PackCache() {
  for (const auto& [weight, entry] : entries_) device_.release(entry.memory);
}

const cuda::bf16* PackCache::get(const Weight& weight) {
  Entry& entry = entries_[weight.data];
  const int64_t elements = weight.n * weight.k;
  if (entry.version == weight.version && entry.elements == elements) return entry.memory;
  device_.require_not_recording("the first product with a weight's version");
  entry.version.reset();  // in case making the copy fails
  const auto bytes = elements * static_cast<int64_t>(sizeof(cuda::bf16));
  if (entry.elements != elements) {
    device_.release(entry.memory);
    bytes_ -= entry.elements * static_cast<int64_t>(sizeof(cuda::bf16));
    entry = {};
    entry.memory = static_cast<cuda::bf16*>(device_.memory.allocate(bytes, "BF16 copy of a weight"));
    entry.elements = elements;
    bytes_ += bytes;
  }
  cuda::check(cuda::to_bf16(weight.data, elements, entry.memory, device_.stream), "BF16 copy of a weight");
  entry.version = weight.version;
  return entry.memory;
}

}  // namespace duokv::ops
