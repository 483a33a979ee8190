// A hash by which ranks compare what should be equal. Not for anything an adversary may choose.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace duokv::dist {

// Of n bytes, continuing `seed`.
inline int64_t hash_bytes(const void* data, size_t n, int64_t seed = 0) {
  const char* bytes = static_cast<const char*>(data);
  uint64_t hash = static_cast<uint64_t>(seed) ^ (n * 0x9e3779b97f4a7c15u);
  const auto mix = [&](uint64_t word) {
    hash = std::rotl((hash ^ word) * 0xff51afd7ed558ccdu, 29) * 0xc4ceb9fe1a85ec53u;
  };
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    mix(word);
  }
  uint64_t rest = 0;
  if (i < n) std::memcpy(&rest, bytes + i, n - i);
  mix(rest);
  return static_cast<int64_t>(hash ^ (hash >> 32));
}

}  // namespace duokv::dist
