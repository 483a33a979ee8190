#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"

namespace duokv::cpu {

Status embedding_forward(Device* device, const ops::EmbeddingArgs* args) {
  return guarded([&] {
    const int64_t d = args->d;
    require(args->m >= 0 && d >= 1, "embedding_forward: m is negative or d is not positive");
    for_rows(device->pool, args->m, d, [&](int64_t first, int64_t count) {
      for (int64_t i = first; i < first + count; ++i) {
        std::memcpy(args->x + i * d, args->table + args->tokens[i] * d,
                    static_cast<size_t>(d) * sizeof(float));
      }
    });
  });
}

Status embedding_backward(Device* device, const ops::EmbeddingBackwardArgs* args) {
  return guarded([&] {
    const int64_t m = args->m, d = args->d;
    require(m >= 0 && d >= 1, "embedding_backward: m is negative or d is not positive");
    for (int64_t i = 0; i < m; ++i) {
      if (args->tokens[i] >= 0 && args->tokens[i] < args->vocab) continue;
      throw InvalidArgument("embedding_backward: token " + std::to_string(i) + " is " +
                            std::to_string(args->tokens[i]) + ", not in [0, " + std::to_string(args->vocab) +
                            ")");
    }
    // A chunk owns a strip of columns of every token, so each sum has one owner that meets its terms in order
    // of i, and a token that fills the batch is no slower than any other.
    constexpr int64_t kColumns = 128;
    device->pool.run((d + kColumns - 1) / kColumns, [&](int64_t chunk, int32_t) {
      const int64_t first = chunk * kColumns, count = std::min(kColumns, d - first);
      for (int64_t i = 0; i < m; ++i) {
        add_values(args->dx + i * d + first, args->dtable + args->tokens[i] * d + first, count);
      }
    });
  });
}

}  // namespace duokv::cpu
