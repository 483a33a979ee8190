#include <memory>

#include "cpu/bf16.h"
#include "test/harness.h"
#include "test/threads.h"

namespace duokv::test {
namespace {

using Values = std::vector<float>;

// One bank in host memory: values by [head, slot, element], -1 where nothing was written.
struct Ring {
  int32_t heads, head_dim, capacity;
  Values values;

  Ring(int32_t heads, int32_t head_dim, int32_t capacity)
      : heads(heads),
        head_dim(head_dim),
        capacity(capacity),
        values(static_cast<size_t>(heads * head_dim * capacity), -1.0f) {}
  float& at(int32_t head, int64_t slot, int32_t i) {
    return values[static_cast<size_t>((head * capacity + slot % capacity) * head_dim + i)];
  }
};

Values as_stored(Values values, ops::DType dtype) {
  return dtype == ops::DType::BF16 ? to_bf16(std::move(values)) : values;
}

// A bank in device memory, head-major, of either type.
class DeviceBank {
 public:
  DeviceBank(ops::Device* device, ops::DType dtype, const Values& values)
      : dtype_(dtype),
        f32_(device, dtype == ops::DType::F32 ? values : Values{}),
        bf16_(device, narrow(dtype, values)) {}

  void* data() const { return dtype_ == ops::DType::F32 ? static_cast<void*>(f32_.data()) : bf16_.data(); }
  Values get() const {
    if (dtype_ == ops::DType::F32) return f32_.get();
    Values values;
    for (uint16_t bits : bf16_.get()) values.push_back(cpu::float_from_bf16(bits));
    return values;
  }

 private:
  static std::vector<uint16_t> narrow(ops::DType dtype, const Values& values) {
    std::vector<uint16_t> bits;
    if (dtype == ops::DType::BF16) {
      for (float value : values) bits.push_back(cpu::bf16_from_float(value));
    }
    return bits;
  }
  ops::DType dtype_;
  Array<float> f32_;
  Array<uint16_t> bf16_;
};

constexpr ops::DType kTypes[] = {ops::DType::F32, ops::DType::BF16};

DUOKV_TEST(write_wraps_each_row_at_its_own_slot) {
  Rng rng;
  const struct {
    int64_t count, skip;
    int32_t heads, head_dim;
    std::vector<std::pair<int32_t, int32_t>> rows;  // slot, capacity
  } cases[] = {
      {1, 0, 4, 64, {{0, 1}}},
      {1, 0, 2, 16, {{4, 5}, {0, 5}, {2, 5}}},
      {5, 0, 2, 10, {{3, 5}, {4, 7}}},           // wraps
      {9, 4, 3, 17, {{1, 5}, {4, 5}, {0, 11}}},  // skipped entries leave their slots alone
      {13, 2, 1, 1, {{2, 3}, {0, 4}}},           // more entries than slots: the last ones stay
      {7, 7, 2, 8, {{0, 3}}},                    // everything skipped
      {331, 0, 4, 64, {{100, 128}, {77, 400}}},
  };
  for (ops::DType dtype : kTypes) {
    for (const auto& c : cases) {
      const int64_t batch = static_cast<int64_t>(c.rows.size()), width = c.heads * c.head_dim;
      // Strides of the roomiest row serve all rows.
      int32_t longest = 0;
      for (const auto& [slot, capacity] : c.rows) longest = std::max(longest, capacity);
      const Values src = as_stored(rng.normals(batch * c.count * width), dtype);
      const Array<float> source(device(), src);
      std::vector<Ring> expected;
      std::vector<std::unique_ptr<DeviceBank>> banks;
      std::vector<ops::BankSlot> slots;
      for (int64_t row = 0; row < batch; ++row) {
        const auto [slot, capacity] = c.rows[static_cast<size_t>(row)];
        Ring& ring = expected.emplace_back(c.heads, c.head_dim, longest);
        banks.push_back(std::make_unique<DeviceBank>(device(), dtype, ring.values));
        slots.push_back({banks.back()->data(), slot, capacity});
        for (int64_t e = c.skip; e < c.count; ++e) {
          for (int32_t head = 0; head < c.heads; ++head) {
            for (int32_t i = 0; i < c.head_dim; ++i) {
              ring.at(head, (slot + e) % capacity, i) =
                  src[static_cast<size_t>(((row * c.count + e) * c.heads + head) * c.head_dim + i)];
            }
          }
        }
      }
      const ops::CacheWriteArgs args = {.src = source.data(),
                                        .batch = batch,
                                        .count = c.count,
                                        .skip = c.skip,
                                        .kv_heads = c.heads,
                                        .head_dim = c.head_dim,
                                        .dtype = dtype,
                                        .head_stride = int64_t{longest} * c.head_dim,
                                        .position_stride = c.head_dim,
                                        .rows = slots.data()};
      check(table().cache_write(device(), &args));
      for (size_t row = 0; row < expected.size(); ++row) {
        expect_bitwise("row " + std::to_string(row), banks[row]->get(), expected[row].values);
      }
    }
  }
}

DUOKV_TEST(write_rounds_to_bf16) {
  Rng rng;
  const Values src = rng.normals(3 * 2 * 19);
  const Array<float> source(device(), src);
  const DeviceBank bank(device(), ops::DType::BF16, Values(src.size()));
  const ops::BankSlot row = {bank.data(), 0, 3};
  // Token-major this time: entries 2 * 19 apart, heads 19 apart.
  const ops::CacheWriteArgs args = {.src = source.data(),
                                    .batch = 1,
                                    .count = 3,
                                    .skip = 0,
                                    .kv_heads = 2,
                                    .head_dim = 19,
                                    .dtype = ops::DType::BF16,
                                    .head_stride = 19,
                                    .position_stride = 2 * 19,
                                    .rows = &row};
  check(table().cache_write(device(), &args));
  expect_bitwise("bank", bank.get(), to_bf16(src));
}

const struct {
  int32_t heads, head_dim, capacity, slot;
  int64_t count;
} kReads[] = {
    {4, 64, 128, 100, 128}, {2, 10, 7, 5, 4}, {1, 1, 1, 0, 1}, {3, 17, 11, 10, 11}, {2, 16, 5, 2, 0}};

DUOKV_TEST(read_unwraps) {
  Rng rng;
  for (ops::DType dtype : kTypes) {
    for (const auto& c : kReads) {
      Ring ring(c.heads, c.head_dim, c.capacity);
      ring.values = as_stored(rng.normals(static_cast<int64_t>(ring.values.size())), dtype);
      const DeviceBank bank(device(), dtype, ring.values);
      const Array<float> dst(device(), c.count * c.heads * c.head_dim);
      const ops::CacheReadArgs args = {.bank = bank.data(),
                                       .count = c.count,
                                       .slot = c.slot,
                                       .capacity = c.capacity,
                                       .kv_heads = c.heads,
                                       .head_dim = c.head_dim,
                                       .dtype = dtype,
                                       .head_stride = int64_t{c.capacity} * c.head_dim,
                                       .position_stride = c.head_dim,
                                       .dst = dst.data()};
      check(table().cache_read(device(), &args));
      Values expected;
      for (int64_t e = 0; e < c.count; ++e) {
        for (int32_t head = 0; head < c.heads; ++head) {
          for (int32_t i = 0; i < c.head_dim; ++i) expected.push_back(ring.at(head, c.slot + e, i));
        }
      }
      expect_bitwise("entries", dst.get(), expected);
    }
  }
}

DUOKV_TEST(copy_between_rings_of_other_capacities) {
  Rng rng;
  for (ops::DType dtype : kTypes) {
    for (const auto& c : kReads) {
      const int32_t dst_capacity = c.capacity + 3, dst_slot = dst_capacity - 1;
      Ring from(c.heads, c.head_dim, c.capacity), to(c.heads, c.head_dim, dst_capacity);
      from.values = as_stored(rng.normals(static_cast<int64_t>(from.values.size())), dtype);
      const DeviceBank src(device(), dtype, from.values), dst(device(), dtype, to.values);
      const ops::CacheCopyArgs args = {.src = src.data(),
                                       .src_slot = c.slot,
                                       .src_capacity = c.capacity,
                                       .src_head_stride = int64_t{c.capacity} * c.head_dim,
                                       .dst = dst.data(),
                                       .dst_slot = dst_slot,
                                       .dst_capacity = dst_capacity,
                                       .dst_head_stride = int64_t{dst_capacity} * c.head_dim,
                                       .count = c.count,
                                       .position_stride = c.head_dim,
                                       .kv_heads = c.heads,
                                       .head_dim = c.head_dim,
                                       .dtype = dtype};
      check(table().cache_copy(device(), &args));
      for (int64_t e = 0; e < c.count; ++e) {
        for (int32_t head = 0; head < c.heads; ++head) {
          for (int32_t i = 0; i < c.head_dim; ++i)
            to.at(head, dst_slot + e, i) = from.at(head, c.slot + e, i);
        }
      }
      expect_bitwise("bank", dst.get(), to.values);
    }
  }
}

// With more entries than slots, threads must agree on which entry a slot keeps.
DUOKV_TEST(thread_counts) {
  Rng rng;
  const Values src = rng.normals(2 * 4001 * 64);
  expect_same_for_any_threads("bank", [&](ops::Device* device) {
    const Array<float> source(device, src);
    const DeviceBank bank(device, ops::DType::F32, Values(2 * 7 * 64));
    const ops::BankSlot rows[] = {{bank.data(), 3, 7}, {static_cast<float*>(bank.data()) + 7 * 64, 6, 7}};
    const ops::CacheWriteArgs args = {.src = source.data(),
                                      .batch = 2,
                                      .count = 4001,
                                      .skip = 0,
                                      .kv_heads = 1,
                                      .head_dim = 64,
                                      .dtype = ops::DType::F32,
                                      .head_stride = 7 * 64,
                                      .position_stride = 64,
                                      .rows = rows};
    check(table().cache_write(device, &args));
    return bank.get();
  });
}

DUOKV_TEST(arguments_out_of_range) {
  float bank[8] = {}, values[8] = {};
  ops::BankSlot row = {bank, 0, 0};
  ops::CacheWriteArgs write = {.src = values,
                               .batch = 1,
                               .count = 1,
                               .skip = 0,
                               .kv_heads = 1,
                               .head_dim = 1,
                               .dtype = ops::DType::F32,
                               .head_stride = 1,
                               .position_stride = 1,
                               .rows = &row};
  expect_status(table().cache_write(device(), &write), ops::kInvalid, "no capacity");
  row.capacity = 1;
  write.skip = 2;
  expect_status(table().cache_write(device(), &write), ops::kInvalid, "skip 2 of 1");
  const ops::CacheReadArgs read = {.bank = bank,
                                   .count = 3,
                                   .slot = 0,
                                   .capacity = 2,
                                   .kv_heads = 1,
                                   .head_dim = 1,
                                   .dtype = ops::DType::F32,
                                   .head_stride = 2,
                                   .position_stride = 1,
                                   .dst = values};
  expect_status(table().cache_read(device(), &read), ops::kInvalid, "3 entries of a ring of 2");
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
