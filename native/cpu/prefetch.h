// Asking for memory before it is read.
#pragma once

#include <hwy/base.h>

#include <cstdint>

#include "cpu/device.h"

namespace duokv::cpu {

// GCC drops calls of a function that only prefetches unless it must inline it.
template <int kWrites, int kLocality, class T>
HWY_INLINE void prefetch_lines(const T* x, int64_t n) {
  constexpr int64_t kLine = kCacheLine / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(x + i, kWrites, kLocality);
}

// Asks for the cache lines of n values that are needed soon and that no hardware prefetcher will expect.
template <class T>
HWY_INLINE void prefetch(const T* x, int64_t n) {
  prefetch_lines<0, 3>(x, n);
}

// The same for values that are about to be written.
template <class T>
HWY_INLINE void prefetch_to_write(const T* x, int64_t n) {
  prefetch_lines<1, 3>(x, n);
}

// The same for the second-level cache. A line on its way to the first level holds one of the few places for
// those until memory has answered, and what is read meanwhile waits for a place; it also evicts what is in
// use.
template <class T>
HWY_INLINE void prefetch_to_l2(const T* x, int64_t n) {
  prefetch_lines<0, 2>(x, n);
}

}  // namespace duokv::cpu
