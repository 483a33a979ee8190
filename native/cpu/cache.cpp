#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/bf16.h"
#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"

namespace duokv::cpu {
namespace {

int64_t element_bytes(ops::DType dtype) { return dtype == ops::DType::BF16 ? 2 : 4; }

int64_t slot_of(int32_t slot, int64_t entry, int32_t capacity) { return (slot + entry) % capacity; }

}  // namespace

Status cache_write(Device* device, const ops::CacheWriteArgs* args) {
  return guarded([&] {
    const int64_t heads = args->kv_heads, head_dim = args->head_dim;
    require(args->batch >= 0 && heads >= 1 && head_dim >= 1, "cache_write: a dimension is out of range");
    require(args->skip >= 0 && args->skip <= args->count, "cache_write: skip is not in [0, count]");
    for (int64_t row = 0; row < args->batch; ++row) {
      require(args->rows[row].capacity >= 1, "cache_write: a bank has no capacity");
      require(args->rows[row].slot >= 0, "cache_write: a slot is negative");
    }
    const int64_t written = args->count - args->skip;
    for_rows(device->pool, args->batch * written, heads * head_dim, [&](int64_t first, int64_t entries) {
      for (int64_t i = first; i < first + entries; ++i) {
        const int64_t row = i / written, entry = args->skip + i % written;
        const ops::BankSlot& target = args->rows[row];
        // A later entry of the same slot replaces this one, and another thread may be writing it.
        if (entry + target.capacity < args->count) continue;
        const float* src = args->src + (row * args->count + entry) * heads * head_dim;
        const int64_t offset = slot_of(target.slot, entry, target.capacity) * args->position_stride;
        for (int64_t head = 0; head < heads; ++head, src += head_dim) {
          const int64_t at = offset + head * args->head_stride;
          if (args->dtype == ops::DType::BF16) {
            bf16_from_floats(src, static_cast<uint16_t*>(target.bank) + at, head_dim);
          } else {
            std::memcpy(static_cast<float*>(target.bank) + at, src,
                        static_cast<size_t>(head_dim) * sizeof(float));
          }
        }
      }
    });
  });
}

Status cache_read(Device* device, const ops::CacheReadArgs* args) {
  return guarded([&] {
    const int64_t heads = args->kv_heads, head_dim = args->head_dim;
    require(heads >= 1 && head_dim >= 1 && args->slot >= 0,
            "cache_read: a dimension or the slot is out of range");
    require(args->count >= 0 && args->count <= args->capacity, "cache_read: count is not in [0, capacity]");
    for_rows(device->pool, args->count, heads * head_dim, [&](int64_t first, int64_t entries) {
      for (int64_t entry = first; entry < first + entries; ++entry) {
        float* dst = args->dst + entry * heads * head_dim;
        const int64_t offset = slot_of(args->slot, entry, args->capacity) * args->position_stride;
        for (int64_t head = 0; head < heads; ++head, dst += head_dim) {
          const int64_t at = offset + head * args->head_stride;
          if (args->dtype == ops::DType::BF16) {
            floats_from_bf16(static_cast<const uint16_t*>(args->bank) + at, dst, head_dim);
          } else {
            std::memcpy(dst, static_cast<const float*>(args->bank) + at,
                        static_cast<size_t>(head_dim) * sizeof(float));
          }
        }
      }
    });
  });
}

Status cache_copy(Device* device, const ops::CacheCopyArgs* args) {
  return guarded([&] {
    const int64_t heads = args->kv_heads, head_dim = args->head_dim;
    require(heads >= 1 && head_dim >= 1, "cache_copy: a dimension is out of range");
    require(args->src_slot >= 0 && args->dst_slot >= 0, "cache_copy: a slot is negative");
    require(args->count >= 0 && args->count <= args->src_capacity && args->count <= args->dst_capacity,
            "cache_copy: count is not in [0, capacity] of both banks");
    const int64_t size = element_bytes(args->dtype);
    const char* src = static_cast<const char*>(args->src);
    char* dst = static_cast<char*>(args->dst);
    for_rows(device->pool, args->count, heads * head_dim, [&](int64_t first, int64_t entries) {
      for (int64_t entry = first; entry < first + entries; ++entry) {
        const int64_t from = slot_of(args->src_slot, entry, args->src_capacity) * args->position_stride;
        const int64_t to = slot_of(args->dst_slot, entry, args->dst_capacity) * args->position_stride;
        for (int64_t head = 0; head < heads; ++head) {
          std::memcpy(dst + (to + head * args->dst_head_stride) * size,
                      src + (from + head * args->src_head_stride) * size,
                      static_cast<size_t>(head_dim * size));
        }
      }
    });
  });
}

}  // namespace duokv::cpu
