#include <cmath>
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

// (cos, sin) of position p and pair i, as [positions, head_dim / 2, 2].
Values angles(int64_t positions, int32_t head_dim) {
  Values table;
  for (int64_t p = 0; p < positions; ++p) {
    for (int32_t i = 0; i < head_dim / 2; ++i) {
      const double angle = static_cast<double>(p) / (1 + i);
      table.push_back(static_cast<float>(std::cos(angle)));
      table.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

// Entries of a write: K and V [batch, count, heads, head_dim], and K as the rotary operation leaves it.
struct Entries {
  Entries(ops::Device* device, Rng& rng, int64_t tokens, int32_t heads, int32_t head_dim)
      : k(rng.normals(tokens * heads * head_dim)), v(rng.normals(tokens * heads * head_dim)) {
    constexpr int32_t kPositions = 50;
    for (int64_t t = 0; t < tokens; ++t) positions.push_back(static_cast<int32_t>(t * 7 % kPositions));
    table = angles(kPositions, head_dim);
    const Array<float> x(device, k), angle_table(device, table);
    const Array<int32_t> at(device, positions);
    const ops::RotaryArgs rotary = {.x = x.data(),
                                    .m = tokens,
                                    .heads = heads,
                                    .head_dim = head_dim,
                                    .positions = at.data(),
                                    .table = angle_table.data(),
                                    .inverse = false};
    check(test::table().rotary(device, &rotary));
    rotated = x.get();
  }

  Values k, v, rotated, table;
  std::vector<int32_t> positions;
};

void write(ops::Device* device, const Entries& entries, int64_t batch, int64_t count, int32_t heads,
           int32_t head_dim, ops::DType dtype, int64_t head_stride, int64_t position_stride,
           const std::vector<ops::BankSlot>& rows) {
  const Array<float> k(device, entries.k), v(device, entries.v), angle_table(device, entries.table);
  const Array<int32_t> positions(device, entries.positions);
  const ops::CacheWriteArgs args = {.k = k.data(),
                                    .v = v.data(),
                                    .batch = batch,
                                    .count = count,
                                    .kv_heads = heads,
                                    .head_dim = head_dim,
                                    .positions = positions.data(),
                                    .table = angle_table.data(),
                                    .dtype = dtype,
                                    .head_stride = head_stride,
                                    .position_stride = position_stride,
                                    .rows = rows.data()};
  check(table().cache_write(device, &args));
  expect_bitwise("the source", k.get(), entries.k);
}

// Banks are head-major.
Values read(const Ring& ring, const DeviceBank& bank, ops::DType dtype, int32_t slot, int64_t count) {
  const Array<float> dst(device(), count * ring.heads * ring.head_dim);
  const ops::CacheReadArgs args = {.bank = bank.data(),
                                   .count = count,
                                   .slot = slot,
                                   .capacity = ring.capacity,
                                   .kv_heads = ring.heads,
                                   .head_dim = ring.head_dim,
                                   .dtype = dtype,
                                   .head_stride = int64_t{ring.capacity} * ring.head_dim,
                                   .position_stride = ring.head_dim,
                                   .dst = dst.data()};
  check(table().cache_read(device(), &args));
  return dst.get();
}

void copy(const Ring& from, const DeviceBank& src, int32_t src_slot, const Ring& to, const DeviceBank& dst,
          int32_t dst_slot, ops::DType dtype, int64_t count) {
  const ops::CacheCopyArgs args = {.src = src.data(),
                                   .src_slot = src_slot,
                                   .src_capacity = from.capacity,
                                   .src_head_stride = int64_t{from.capacity} * from.head_dim,
                                   .dst = dst.data(),
                                   .dst_slot = dst_slot,
                                   .dst_capacity = to.capacity,
                                   .dst_head_stride = int64_t{to.capacity} * to.head_dim,
                                   .count = count,
                                   .position_stride = from.head_dim,
                                   .kv_heads = from.heads,
                                   .head_dim = from.head_dim,
                                   .dtype = dtype};
  check(table().cache_copy(device(), &args));
}

DUOKV_TEST(write_wraps_each_row_at_its_own_slot) {
  Rng rng;
  const struct {
    int64_t count;
    int32_t heads, head_dim;
    std::vector<std::pair<int32_t, int32_t>> rows;  // slot, capacity
  } cases[] = {
      {1, 4, 64, {{0, 1}}},         {1, 2, 16, {{4, 5}, {0, 5}, {2, 5}}},
      {5, 2, 10, {{3, 5}, {4, 7}}},  // wraps
      {13, 1, 2, {{2, 3}, {0, 4}}},  // more entries than slots: the last ones stay
      {0, 2, 8, {{0, 3}}},          {331, 4, 64, {{100, 128}, {77, 400}}},
  };
  for (ops::DType dtype : kTypes) {
    for (const auto& c : cases) {
      const int64_t batch = static_cast<int64_t>(c.rows.size()), width = c.heads * c.head_dim;
      // Strides of the roomiest row serve all rows.
      int32_t longest = 0;
      for (const auto& [slot, capacity] : c.rows) longest = std::max(longest, capacity);
      const Entries entries(device(), rng, batch * c.count, c.heads, c.head_dim);
      const Values k = as_stored(entries.rotated, dtype), v = as_stored(entries.v, dtype);
      std::vector<Ring> expected_k, expected_v;
      std::vector<std::unique_ptr<DeviceBank>> banks_k, banks_v;
      std::vector<ops::BankSlot> slots;
      for (int64_t row = 0; row < batch; ++row) {
        const auto [slot, capacity] = c.rows[static_cast<size_t>(row)];
        Ring& ring_k = expected_k.emplace_back(c.heads, c.head_dim, longest);
        Ring& ring_v = expected_v.emplace_back(c.heads, c.head_dim, longest);
        banks_k.push_back(std::make_unique<DeviceBank>(device(), dtype, ring_k.values));
        banks_v.push_back(std::make_unique<DeviceBank>(device(), dtype, ring_v.values));
        slots.push_back({banks_k.back()->data(), banks_v.back()->data(), slot, capacity});
        for (int64_t e = 0; e < c.count; ++e) {
          for (int32_t head = 0; head < c.heads; ++head) {
            for (int32_t i = 0; i < c.head_dim; ++i) {
              const auto from =
                  static_cast<size_t>((row * c.count + e) * width + int64_t{head} * c.head_dim + i);
              ring_k.at(head, (slot + e) % capacity, i) = k[from];
              ring_v.at(head, (slot + e) % capacity, i) = v[from];
            }
          }
        }
      }
      write(device(), entries, batch, c.count, c.heads, c.head_dim, dtype, int64_t{longest} * c.head_dim,
            c.head_dim, slots);
      for (size_t row = 0; row < slots.size(); ++row) {
        expect_bitwise("K of row " + std::to_string(row), banks_k[row]->get(), expected_k[row].values);
        expect_bitwise("V of row " + std::to_string(row), banks_v[row]->get(), expected_v[row].values);
      }
    }
  }
}

DUOKV_TEST(write_rounds_to_bf16) {
  Rng rng;
  const Entries entries(device(), rng, 3, 2, 18);
  const DeviceBank k(device(), ops::DType::BF16, Values(entries.k.size())),
      v(device(), ops::DType::BF16, Values(entries.v.size()));
  // Token-major this time: entries 2 * 18 apart, heads 18 apart.
  write(device(), entries, 1, 3, 2, 18, ops::DType::BF16, 18, 2 * 18, {{k.data(), v.data(), 0, 3}});
  expect_bitwise("K", k.get(), to_bf16(entries.rotated));
  expect_bitwise("V", v.get(), to_bf16(entries.v));
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
      Values expected;
      for (int64_t e = 0; e < c.count; ++e) {
        for (int32_t head = 0; head < c.heads; ++head) {
          for (int32_t i = 0; i < c.head_dim; ++i) expected.push_back(ring.at(head, c.slot + e, i));
        }
      }
      expect_bitwise("entries", read(ring, bank, dtype, c.slot, c.count), expected);
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
      copy(from, src, c.slot, to, dst, dst_slot, dtype, c.count);
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

// Entries 0, 1 and 2 of two heads go to slots 3, 4 and 0 of a ring of 5.
DUOKV_TEST(non_finite_stays_where_it_is) {
  Rng rng;
  constexpr int32_t kHeads = 2, kDim = 10, kCapacity = 5, kSlot = 3;
  constexpr int64_t kCount = 3;
  for (ops::DType dtype : kTypes) {
    for (float bad : kNonFinite) {
      Entries entries(device(), rng, kCount, kHeads, kDim);
      entries.k[(1 * kHeads + 1) * kDim + 7] = bad;  // of the pair (2, 7)
      entries.v[(2 * kHeads + 0) * kDim + 4] = bad;
      const Ring ring(kHeads, kDim, kCapacity), other(kHeads, kDim, kCapacity + 1);
      const DeviceBank k(device(), dtype, ring.values), v(device(), dtype, ring.values),
          copied(device(), dtype, other.values);
      write(device(), entries, 1, kCount, kHeads, kDim, dtype, kCapacity * kDim, kDim,
            {{k.data(), v.data(), kSlot, kCapacity}});
      const size_t pair = (1 * kCapacity + 4) * kDim + 2;
      expect_non_finite_at("K", k.get(), {pair, pair + kDim / 2});
      expect_non_finite_at("V", v.get(), {4});
      expect_non_finite_at("read", read(ring, v, dtype, kSlot, kCount), {(2 * kHeads + 0) * kDim + 4});
      copy(ring, v, kSlot, other, copied, 0, dtype, kCount);
      expect_non_finite_at("copy", copied.get(), {2 * kDim + 4});
    }
  }
}

// With more entries than slots, threads must agree on which entry a slot keeps.
DUOKV_TEST(thread_counts) {
  Rng rng;
  const Entries entries(device(), rng, 2 * 4001, 1, 64);
  expect_same_for_any_threads("banks", [&](ops::Device* device) {
    const DeviceBank k(device, ops::DType::F32, Values(2 * 7 * 64)),
        v(device, ops::DType::F32, Values(2 * 7 * 64));
    const auto second = [](const DeviceBank& bank) { return static_cast<float*>(bank.data()) + 7 * 64; };
    write(device, entries, 2, 4001, 1, 64, ops::DType::F32, 7 * 64, 64,
          {{k.data(), v.data(), 3, 7}, {second(k), second(v), 6, 7}});
    Values both = k.get();
    const Values values = v.get();
    both.insert(both.end(), values.begin(), values.end());
    return both;
  });
}

DUOKV_TEST(arguments_out_of_range) {
  float bank[8] = {}, values[8] = {};
  const int32_t position = 0;
  ops::BankSlot row = {bank, bank + 4, 0, 0};
  ops::CacheWriteArgs write = {.k = values,
                               .v = values,
                               .batch = 1,
                               .count = 1,
                               .kv_heads = 1,
                               .head_dim = 2,
                               .positions = &position,
                               .table = values,
                               .dtype = ops::DType::F32,
                               .head_stride = 2,
                               .position_stride = 2,
                               .rows = &row};
  expect_status(table().cache_write(device(), &write), ops::kInvalid, "no capacity");
  row.capacity = 1;
  write.head_dim = 3;
  expect_status(table().cache_write(device(), &write), ops::kInvalid, "odd head_dim");
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
