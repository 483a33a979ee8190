#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>

#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"
#include "ops/rounding.h"

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
    // A stable counting sort brings the occurrences of each token together, in order: `next` starts as the
    // count of smaller tokens' occurrences.
    int32_t* next = device->shared_scratch.take<int32_t>(args->vocab + 1 + m);
    int32_t* order = next + args->vocab + 1;
    std::fill_n(next, args->vocab + 1, 0);
    for (int64_t i = 0; i < m; ++i) ++next[args->tokens[i] + 1];
    std::partial_sum(next, next + args->vocab, next);
    for (int64_t i = 0; i < m; ++i) order[next[args->tokens[i]]++] = static_cast<int32_t>(i);

    // Each token's sum has one owner: the chunk of occurrences in which its own begin.
    constexpr int64_t kOccurrences = 64;
    const auto continues = [&](int64_t at) { return args->tokens[order[at]] == args->tokens[order[at - 1]]; };
    device->pool.run(ceil_div(m, kOccurrences), [&](int64_t chunk, int32_t) {
      const int64_t begin = chunk * kOccurrences, end = std::min(m, begin + kOccurrences);
      int64_t at = begin;
      while (at > 0 && at < end && continues(at)) ++at;
      if (at == end) return;
      for (; at < end || (at < m && continues(at)); ++at) {
        add_values(args->dx + order[at] * d, args->dtable + args->tokens[order[at]] * d, d);
      }
    });
  });
}

}  // namespace duokv::cpu
