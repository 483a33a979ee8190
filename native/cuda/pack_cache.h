// BF16 copies of weights, kept between calls for serving.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "cuda/device.h"

// A cache belongs to the owner of the weights and must be destroyed before their memory is reused. A copy is
// read only at the version it was made of; at another version it is made anew, in place.
struct duokv::ops::PackCache {
 public:
  explicit PackCache(Device& device) : device_(device) {}
  ~PackCache();

  // The weight [n, k] in BF16. Copies are made while nothing is recorded: in a graph they would be made again
  // at every launch.
  const cuda::bf16* get(const Weight& weight);
  int64_t bytes() const { return bytes_; }

 private:
  struct Entry {
    std::optional<uint64_t> version;
    int64_t elements = 0;
    cuda::bf16* memory = nullptr;
  };
  Device& device_;
  std::map<const float*, Entry> entries_;
  int64_t bytes_ = 0;
};

namespace duokv::cuda {

ops::Status pack_cache_create(ops::Device* device, ops::PackCache** cache);
void pack_cache_destroy(ops::Device* device, ops::PackCache* cache);
int64_t pack_cache_bytes(const ops::PackCache* cache);

}  // namespace duokv::cuda
