#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"

namespace duokv::cpu {

Status suffix_rows(Device* device, const ops::SuffixRowsArgs* args) {
  return guarded([&] {
    const int64_t count = args->count, keep = args->keep, d = args->d;
    require(args->batch >= 0 && d >= 1, "suffix_rows: batch is negative or d is not positive");
    require(keep >= 0 && keep <= count, "suffix_rows: keep is not in [0, count]");
    // A chunk is a range of kept vectors, which lie apart in the longer side only between batch rows.
    for_rows(device->pool, args->batch * keep, d, [&](int64_t first, int64_t vectors) {
      for (int64_t i = first, run; i < first + vectors; i += run) {
        const int64_t row = i / keep, within = i % keep;
        run = std::min(keep - within, first + vectors - i);
        const int64_t kept = i * d, whole = (row * count + count - keep + within) * d;
        if (args->scatter_add) {
          add_values(args->src + kept, args->dst + whole, run * d);
        } else {
          std::memcpy(args->dst + kept, args->src + whole, static_cast<size_t>(run * d) * sizeof(float));
        }
      }
    });
  });
}

}  // namespace duokv::cpu
