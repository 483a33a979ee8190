// Fetching memory that will be read next.
#pragma once

#include <hwy/base.h>

namespace duokv::cpu {

// Asks for a cache line for the second-level cache. A line on its way to the first level holds one of the few
// places for those until memory has answered, and what is read meanwhile waits for a place; it also evicts
// what is in use. GCC drops calls of a function that only prefetches unless it must inline it.
HWY_INLINE void fetch_to_l2(const void* line) { __builtin_prefetch(line, 0, 2); }

}  // namespace duokv::cpu
