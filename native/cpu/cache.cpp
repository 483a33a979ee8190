#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/bf16.h"
#include "cpu/device.h"
#include "cpu/operations.h"
#include "cpu/rows.h"

namespace duokv::cpu {
namespace {

int64_t element_bytes(ops::DType dtype) { return dtype == ops::DType::BF16 ? 2 : 4; }

int64_t slot_of(int32_t slot, int64_t entry, int32_t capacity) { return (slot + entry) % capacity; }

// One entry [kv_heads, head_dim], converted, into the slot at `offset` of every head.
void store_heads(const ops::CacheWriteArgs& args, const float* src, void* bank, int64_t offset) {
  for (int64_t head = 0; head < args.kv_heads; ++head, src += args.head_dim) {
    const int64_t at = offset + head * args.head_stride;
    if (args.dtype == ops::DType::BF16) {
      bf16_from_floats(src, static_cast<uint16_t*>(bank) + at, args.head_dim);
    } else {
      std::copy_n(src, args.head_dim, static_cast<float*>(bank) + at);
    }
  }
}

}  // namespace

Status cache_write(Device* device, const ops::CacheWriteArgs* args) {
  return guarded([&] {
    const int64_t heads = args->kv_heads, head_dim = args->head_dim, width = heads * head_dim;
    require(args->batch >= 0 && args->count >= 0 && heads >= 1, "cache_write: a dimension is out of range");
    require(head_dim >= 2 && head_dim % 2 == 0, "cache_write: head_dim is not a positive even number");
    for (int64_t row = 0; row < args->batch; ++row) {
      require(args->rows[row].capacity >= 1, "cache_write: a bank has no capacity");
      require(args->rows[row].slot >= 0, "cache_write: a slot is negative");
    }
    for_rows(device->pool, args->batch * args->count, 2 * width, [&](int64_t first, int64_t entries) {
      std::vector<float> rotated(static_cast<size_t>(width));
      for (int64_t i = first; i < first + entries; ++i) {
        const ops::BankSlot& target = args->rows[i / args->count];
        const int64_t entry = i % args->count;
        // A later entry of the same slot replaces this one, and another thread may be writing it.
        if (entry + target.capacity < args->count) continue;
        std::copy_n(args->k + i * width, width, rotated.begin());
        rotate_values(rotated.data(), heads, head_dim, args->table + int64_t{args->positions[i]} * head_dim);
        const int64_t offset = slot_of(target.slot, entry, target.capacity) * args->position_stride;
        store_heads(*args, rotated.data(), target.k, offset);
        store_heads(*args, args->v + i * width, target.v, offset);
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
