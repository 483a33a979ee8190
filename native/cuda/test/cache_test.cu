// Cache writes, reads and copies: K is what the rotary operation makes of it, everything lands where the
// descriptors say, and nothing else is touched.
#include <memory>
#include <utility>

#include "cuda/operations.h"
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

constexpr int kPositions = 50;

struct Write {
  int64_t count;
  int32_t heads, head_dim;
  std::vector<std::pair<int32_t, int32_t>> rows;  // slot, capacity
};
const Write kCases[] = {
    {1, 4, 64, {{0, 1}}},
    {1, 2, 16, {{4, 5}, {0, 5}, {2, 5}}},
    {5, 2, 10, {{3, 5}, {4, 7}}},  // wraps
    {13, 1, 2, {{2, 3}, {0, 4}}},  // more entries than slots: the last ones stay
    {61, 4, 64, {{100, 128}, {7, 64}}},
};

template <class T>
constexpr ops::DType kTypeOf = std::is_same_v<T, float> ? ops::DType::F32 : ops::DType::BF16;

float widened(float x) { return x; }
float widened(bf16 x) { return __bfloat162float(x); }

template <class T>
T stored(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return __float2bfloat16_rn(x);
  }
}

template <class T>
void write_and_read(const Write& c) {
  const auto batch = static_cast<int64_t>(c.rows.size());
  const int64_t width = int64_t{c.heads} * c.head_dim;
  const auto count = static_cast<size_t>(batch * c.count * width);
  const std::vector<float> k = normals(count, 1), v = normals(count, 2),
                           table = normals(static_cast<size_t>(kPositions * c.head_dim), 3);
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < batch * c.count; ++t) positions.push_back(static_cast<int32_t>(t * 7 % kPositions));
  Array<float> dev_k(k), dev_v(v), dev_table(table), rotated(k);
  Array<int32_t> dev_positions(positions);
  check(rotary(
      {rotated.data(), batch * c.count, c.heads, c.head_dim, dev_positions.data(), dev_table.data(), false},
      stream()));
  const std::vector<float> turned = rotated.get();

  int32_t longest = 0;
  for (const auto& [slot, capacity] : c.rows) longest = std::max(longest, capacity);
  const auto slots = static_cast<size_t>(longest * width);
  std::vector<std::unique_ptr<Array<T>>> banks;
  std::vector<std::vector<T>> expected;
  std::vector<ops::BankSlot> targets;
  for (int64_t row = 0; row < batch; ++row) {
    const auto [slot, capacity] = c.rows[static_cast<size_t>(row)];
    for (const std::vector<float>* source : {&turned, &v}) {
      banks.push_back(std::make_unique<Array<T>>(std::vector<T>(slots, stored<T>(-1.0f))));
      std::vector<T>& bank = expected.emplace_back(slots, stored<T>(-1.0f));
      for (int64_t e = 0; e < c.count; ++e) {
        for (int64_t h = 0; h < c.heads; ++h) {
          for (int64_t i = 0; i < c.head_dim; ++i) {
            bank[static_cast<size_t>((h * longest + (slot + e) % capacity) * c.head_dim + i)] = stored<T>(
                (*source)[static_cast<size_t>(((row * c.count + e) * c.heads + h) * c.head_dim + i)]);
          }
        }
      }
    }
    targets.push_back({banks[static_cast<size_t>(2 * row)]->data(),
                       banks[static_cast<size_t>(2 * row + 1)]->data(), slot, capacity});
  }
  Array<ops::BankSlot> dev_targets(targets);
  check(cache_write(
      {dev_k.data(), dev_v.data(), batch, c.count, c.heads, c.head_dim, dev_positions.data(),
       dev_table.data(), kTypeOf<T>, int64_t{longest} * c.head_dim, c.head_dim, dev_targets.data()},
      stream()));
  for (size_t i = 0; i < banks.size(); ++i)
    expect_equal("bank " + std::to_string(i), banks[i]->get(), expected[i]);
  expect_equal("k is as it was", dev_k.get(), k);

  for (int64_t row = 0; row < batch; ++row) {
    const auto [slot, capacity] = c.rows[static_cast<size_t>(row)];
    const int64_t held = std::min<int64_t>(c.count, capacity);
    Array<float> read(static_cast<size_t>(held * width));
    check(cache_read({banks[static_cast<size_t>(2 * row)]->data(), held, slot, capacity, c.heads, c.head_dim,
                      kTypeOf<T>, int64_t{longest} * c.head_dim, c.head_dim, read.data()},
                     stream()));
    // To a ring of another capacity, and there as it was read.
    const int32_t other = capacity + 3, other_slot = other - 1;
    Array<T> copy(std::vector<T>(static_cast<size_t>(other * width), stored<T>(-2.0f)));
    check(cache_copy({banks[static_cast<size_t>(2 * row)]->data(), slot, capacity,
                      int64_t{longest} * c.head_dim, copy.data(), other_slot, other,
                      int64_t{other} * c.head_dim, held, c.head_dim, c.heads, c.head_dim, kTypeOf<T>},
                     stream()));
    std::vector<float> entries(static_cast<size_t>(held * width));
    std::vector<T> ring(static_cast<size_t>(other * width), stored<T>(-2.0f));
    for (int64_t e = 0; e < held; ++e) {
      for (int64_t h = 0; h < c.heads; ++h) {
        for (int64_t i = 0; i < c.head_dim; ++i) {
          const T value =
              expected[static_cast<size_t>(2 * row)]
                      [static_cast<size_t>((h * longest + (slot + e) % capacity) * c.head_dim + i)];
          entries[static_cast<size_t>((e * c.heads + h) * c.head_dim + i)] = widened(value);
          ring[static_cast<size_t>((h * other + (other_slot + e) % other) * c.head_dim + i)] = value;
        }
      }
    }
    expect_equal("entries", read.get(), entries);
    expect_equal("copy", copy.get(), ring);
  }
}

// Entries 0, 1 and 2 of two heads go to slots 3, 4 and 0 of a ring of 5.
template <class T>
void spoil() {
  constexpr int32_t kHeads = 2, kDim = 10, kCapacity = 5, kSlot = 3;
  constexpr int64_t kCount = 3;
  const auto values = [](const Array<T>& bank) {
    std::vector<float> values;
    for (const T x : bank.get()) values.push_back(widened(x));
    return values;
  };
  for (const float bad : kNonFinite) {
    std::vector<float> source_k = normals(kCount * kHeads * kDim, 1),
                       source_v = normals(kCount * kHeads * kDim, 2);
    source_k[(1 * kHeads + 1) * kDim + 7] = bad;  // of the pair (2, 7)
    source_v[(2 * kHeads + 0) * kDim + 4] = bad;
    const Array<float> dev_k(source_k), dev_v(source_v), table(normals(kPositions * kDim, 3)),
        entries(kCount * kHeads * kDim);
    const Array<int32_t> positions(std::vector<int32_t>{7, 8, 9});
    const std::vector<T> empty(kHeads * kCapacity * kDim, stored<T>(-1.0f));
    const Array<T> k(empty), v(empty), copied(empty);
    const Array<ops::BankSlot> target(std::vector<ops::BankSlot>{{k.data(), v.data(), kSlot, kCapacity}});
    check(cache_write({dev_k.data(), dev_v.data(), 1, kCount, kHeads, kDim, positions.data(), table.data(),
                       kTypeOf<T>, kCapacity * kDim, kDim, target.data()},
                      stream()));
    check(cache_read({v.data(), kCount, kSlot, kCapacity, kHeads, kDim, kTypeOf<T>, kCapacity * kDim, kDim,
                      entries.data()},
                     stream()));
    check(cache_copy({v.data(), kSlot, kCapacity, kCapacity * kDim, copied.data(), 1, kCapacity,
                      kCapacity * kDim, kCount, kDim, kHeads, kDim, kTypeOf<T>},
                     stream()));
    constexpr size_t kPair = (1 * kCapacity + 4) * kDim + 2;
    expect_non_finite_at("K", values(k), {kPair, kPair + kDim / 2});
    expect_non_finite_at("V", values(v), {4});
    expect_non_finite_at("entries", entries.get(), {(2 * kHeads + 0) * kDim + 4});
    expect_non_finite_at("copy", values(copied), {3 * kDim + 4});
  }
}

DUOKV_CASE(what_is_not_finite_stays_where_it_is) {
  spoil<float>();
  spoil<bf16>();
}

DUOKV_CASE(fp32_banks) {
  for (const Write& c : kCases) write_and_read<float>(c);
}

DUOKV_CASE(bf16_banks) {
  for (const Write& c : kCases) write_and_read<bf16>(c);
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
