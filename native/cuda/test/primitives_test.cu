// The device primitives, emulated or on a GPU: warp collectives, barriers, shared memory, atomics,
// asynchronous copies, tensor cores.
#include <algorithm>
#include <bit>
#include <numeric>

#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

constexpr int kLanes = 32;

// ---------------------------------------------------------------- warp collectives

__global__ void shuffle_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  out[lane] = __shfl_sync(kFullMask, lane, 5);
  out[32 + lane] = __shfl_up_sync(kFullMask, lane, 3);
  out[64 + lane] = __shfl_down_sync(kFullMask, lane, 3);
  out[96 + lane] = __shfl_xor_sync(kFullMask, lane, 9);
  out[128 + lane] = __shfl_sync(kFullMask, lane, 10, 8);
  out[160 + lane] = __shfl_up_sync(kFullMask, lane, 3, 8);
  out[192 + lane] = __shfl_down_sync(kFullMask, lane, 3, 8);
  out[224 + lane] = static_cast<int>(__shfl_xor_sync(kFullMask, static_cast<double>(lane), 16));
}

DUOKV_CASE(shuffles_move_lanes) {
  std::vector<int> expected(256);
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto i = static_cast<size_t>(lane);
    expected[i] = 5;
    expected[32 + i] = lane < 3 ? lane : lane - 3;
    expected[64 + i] = lane > 28 ? lane : lane + 3;
    expected[96 + i] = lane ^ 9;
    expected[128 + i] = lane / 8 * 8 + 2;
    expected[160 + i] = lane % 8 < 3 ? lane : lane - 3;
    expected[192 + i] = lane % 8 > 4 ? lane : lane + 3;
    expected[224 + i] = lane ^ 16;
  }
  Array<int> out(expected.size());
  check(DUOKV_LAUNCH(shuffle_kernel, 1, 32, 0, stream(), out.data()));
  expect_equal("shuffles", out.get(), expected);
}

// Odd and even lanes meet separately, in different statements.
__global__ void vote_kernel(unsigned* out) {
  const unsigned lane = threadIdx.x;
  unsigned value = 0;
  if (lane % 2 == 0) {
    value = __ballot_sync(0x55555555u, lane % 4 == 0) + __reduce_add_sync(0x55555555u, lane);
  } else {
    value = __reduce_max_sync(0xAAAAAAAAu, lane) * 10 +
            static_cast<unsigned>(__all_sync(0xAAAAAAAAu, lane > 0)) * 2 +
            static_cast<unsigned>(__any_sync(0xAAAAAAAAu, lane > 40));
  }
  __syncwarp();
  out[lane] = value + static_cast<unsigned>(__reduce_min_sync(kFullMask, -static_cast<int>(lane)));
}

DUOKV_CASE(votes_and_reductions_under_partial_masks) {
  std::vector<unsigned> expected(32);
  for (unsigned lane = 0; lane < 32; ++lane)
    expected[lane] = (lane % 2 == 0 ? 0x11111111u + 240u : 31u * 10 + 2) - 31u;
  Array<unsigned> out(32);
  check(DUOKV_LAUNCH(vote_kernel, 1, 32, 0, stream(), out.data()));
  expect_equal("votes", out.get(), expected);
}

// ---------------------------------------------------------------- blocks

template <int Threads>
__global__ void block_sum_kernel(const float* x, float* out) {
  const unsigned i = blockIdx.x * Threads + threadIdx.x;
  const float first = block_sum<Threads>(x[i]);
  const float second = block_sum<Threads>(x[i] + first);
  out[i] = second;
}

DUOKV_CASE(block_sums_reach_every_thread) {
  std::vector<float> x(3 * 128);
  std::iota(x.begin(), x.end(), 0.0f);
  std::vector<float> expected(x.size());
  for (size_t b = 0; b < 3; ++b) {
    const auto begin = x.begin() + static_cast<ptrdiff_t>(b * 128);
    const float total = std::accumulate(begin, begin + 128, 0.0f);
    std::fill_n(expected.begin() + static_cast<ptrdiff_t>(b * 128), 128, total * 129);
  }
  Array<float> dev_x(x), out(x.size());
  check(DUOKV_LAUNCH(block_sum_kernel<128>, 3, 128, 0, stream(), dev_x.data(), out.data()));
  expect_equal("sums", out.get(), expected);
}

// Warps 0 and 1 hand values to warps 2 and 3 through two named barriers.
__global__ void named_barrier_kernel(int* out) {
  DUOKV_SHARED(int, mailbox, [2][32]);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            pair = warp % 2;
  if (warp < 2) {
    mailbox[pair][lane] = 100 * pair + lane;
    __threadfence_block();
    barrier_arrive(1 + pair, 64);
  } else {
    barrier_sync(1 + pair, 64);
    out[pair * 32 + lane] = mailbox[pair][lane];
  }
}

DUOKV_CASE(named_barriers_pair_warps) {
  std::vector<int> expected(64);
  for (int i = 0; i < 64; ++i) expected[static_cast<size_t>(i)] = 100 * (i / 32) + i % 32;
  Array<int> out(64);
  check(DUOKV_LAUNCH(named_barrier_kernel, 1, 128, 0, stream(), out.data()));
  expect_equal("mailboxes", out.get(), expected);
}

__global__ void indices_kernel(int* out, int* order) {
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned i = block * blockDim.x * blockDim.y * blockDim.z + thread;
  out[i] = static_cast<int>(i);
  order[atomicAdd(order, 1) + 1] = static_cast<int>(i);
}

DUOKV_CASE(every_thread_runs_once_in_an_order_that_depends_on_the_seed) {
  constexpr size_t kThreads = 3 * 2 * 2 * 8 * 2 * 2;
  Array<int> out(kThreads), order(std::vector<int>(kThreads + 1, 0));
  check(DUOKV_LAUNCH(indices_kernel, dim3(3, 2, 2), dim3(8, 2, 2), 0, stream(), out.data(), order.data()));
  std::vector<int> expected(kThreads);
  std::iota(expected.begin(), expected.end(), 0);
  expect_equal("indices", out.get(), expected);
  std::vector<int> ran = order.get();
  ran.erase(ran.begin());
  static std::vector<int> previous;
  expect(!kEmulated || (ran != expected && ran != previous),
         "the order is ascending or that of another seed");
  previous = ran;
  std::sort(ran.begin(), ran.end());
  expect_equal("threads that ran", ran, expected);
}

__global__ void atomic_kernel(float* sum, int* extremes, unsigned* bits, unsigned long long* total) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(sum, 0.5f);
  atomicMin(extremes, -i);
  atomicMax(extremes + 1, i);
  atomicOr(bits, 1u << (i % 32));
  atomicAnd(bits + 1, ~(1u << (i % 32)));
  atomicAdd(total, 1ull << 40);
  unsigned old = atomicAdd(bits + 2, 0u), seen;
  do {
    seen = old;
    old = atomicCAS(bits + 2, seen, seen + 2);
  } while (old != seen);
}

DUOKV_CASE(atomics_lose_nothing) {
  Array<float> sum(std::vector<float>{0});
  Array<int> extremes(std::vector<int>{0, 0});
  Array<unsigned> bits(std::vector<unsigned>{0, ~0u, 0});
  Array<unsigned long long> total(std::vector<unsigned long long>{0});
  check(DUOKV_LAUNCH(atomic_kernel, 4, 64, 0, stream(), sum.data(), extremes.data(), bits.data(),
                     total.data()));
  expect_equal("sum", sum.get(), {128.0f});
  expect_equal("extremes", extremes.get(), {-255, 255});
  expect_equal("bits", bits.get(), {~0u, 0u, 512u});
  expect_equal("total", total.get(), {256ull << 40});
}

// ---------------------------------------------------------------- asynchronous copies

// Two stages: tile i+1 is on its way while tile i is used. Threads read what their neighbour copied.
__global__ void pipeline_kernel(const float* x, int tiles, int count, float* out) {
  DUOKV_DYNAMIC_SHARED(float, stage);  // [2][128]
  const int thread = static_cast<int>(threadIdx.x);
  const auto fetch = [&](int tile) {
    const int i = tile * 128 + thread * 4;
    copy_async16(stage + (tile % 2) * 128 + thread * 4, x + i, i < count);
    copy_async_commit();
  };
  fetch(0);
  float sum = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) {
      fetch(tile + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    const float4 v = load4(stage + (tile % 2) * 128 + (thread + 1) % 32 * 4);
    sum += v.x + v.y + v.z + v.w;
    __syncthreads();
  }
  out[thread] = sum;
}

DUOKV_CASE(asynchronous_copies_arrive_when_waited_for) {
  const int tiles = 5, count = 4 * 128 + 40;  // the last tile is padded with zeros
  const std::vector<float> x = normals(static_cast<size_t>(count), 1);
  std::vector<double> expected(32);
  for (int thread = 0; thread < 32; ++thread) {
    for (int tile = 0; tile < tiles; ++tile) {
      for (int j = 0; j < 4; ++j) {
        const int i = tile * 128 + (thread + 1) % 32 * 4 + j;
        if (i < count) expected[static_cast<size_t>(thread)] += x[static_cast<size_t>(i)];
      }
    }
  }
  Array<float> dev_x(x), out(32);
  check(DUOKV_LAUNCH(pipeline_kernel, 1, 32, 1024, stream(), dev_x.data(), tiles, count, out.data()));
  expect_relative("sums", out.get(), expected, 1e-6);
}

// ---------------------------------------------------------------- tensor cores

// out [16, 8] = a [16, k] * b [k, 8], one warp, k a multiple of 16.
__global__ void tf32_product_kernel(const float* a, const float* b, int k, float* out) {
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  float c[4] = {};
  for (int i = 0; i < k; i += 8) {
    const uint32_t fragment_a[4] = {to_tf32(a[g * k + i + t]), to_tf32(a[(g + 8) * k + i + t]),
                                    to_tf32(a[g * k + i + t + 4]), to_tf32(a[(g + 8) * k + i + t + 4])};
    const uint32_t fragment_b[2] = {to_tf32(b[(i + t) * 8 + g]), to_tf32(b[(i + t + 4) * 8 + g])};
    mma_tf32_m16n8k8(c, fragment_a, fragment_b, c);
  }
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

// The same with BF16 operands, fetched by ldmatrix from tiles a [16][16] and b [16][8] in shared memory.
__global__ void bf16_product_kernel(const float* a, const float* b, int k, float* out) {
  DUOKV_SHARED(uint16_t, tile_a, [16][24]);  // rows padded to 48 bytes
  DUOKV_SHARED(uint16_t, tile_b, [16][8]);
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  float c[4] = {};
  for (int i = 0; i < k; i += 16) {
    for (int e = lane; e < 256; e += 32)
      tile_a[e / 16][e % 16] = static_cast<uint16_t>(pack_bf16(a[e / 16 * k + i + e % 16], 0));
    for (int e = lane; e < 128; e += 32)
      tile_b[e / 8][e % 8] = static_cast<uint16_t>(pack_bf16(b[(i + e / 8) * 8 + e % 8], 0));
    __syncwarp();
    uint32_t fragment_a[4], fragment_b[2];
    load_matrix4(fragment_a, &tile_a[lane % 16][lane / 16 * 8]);
    load_matrix2<true>(fragment_b, &tile_b[lane % 16][0]);
    mma_bf16_m16n8k16(c, fragment_a, fragment_b, c);
    __syncwarp();
  }
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

std::vector<double> product(const std::vector<float>& a, const std::vector<float>& b, size_t k) {
  std::vector<double> out(128);
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      for (size_t i = 0; i < k; ++i) out[row * 8 + column] += double{a[row * k + i]} * b[i * 8 + column];
    }
  }
  return out;
}

DUOKV_CASE(products_have_the_true_lane_layout) {
  const size_t k = 48;
  // Small integers are exact in both types, so the layout must be right to the last element.
  std::vector<float> a = normals(16 * k, 1, 10), b = normals(k * 8, 2, 10);
  for (float& v : a) v = std::round(v);
  for (float& v : b) v = std::round(v);
  Array<float> dev_a(a), dev_b(b), out(128);
  check(DUOKV_LAUNCH(tf32_product_kernel, 1, 32, 0, stream(), dev_a.data(), dev_b.data(), static_cast<int>(k),
                     out.data()));
  expect_relative("TF32", out.get(), product(a, b, k), 0);
  check(DUOKV_LAUNCH(bf16_product_kernel, 1, 32, 0, stream(), dev_a.data(), dev_b.data(), static_cast<int>(k),
                     out.data()));
  expect_relative("BF16", out.get(), product(a, b, k), 0);
}

DUOKV_CASE(products_round_their_operands) {
  const size_t k = 64;
  const std::vector<float> a = normals(16 * k, 1), b = normals(k * 8, 2);
  Array<float> dev_a(a), dev_b(b), out(128);
  check(DUOKV_LAUNCH(tf32_product_kernel, 1, 32, 0, stream(), dev_a.data(), dev_b.data(), static_cast<int>(k),
                     out.data()));
  expect_relative("TF32", out.get(), product(a, b, k), 6e-4);
  check(DUOKV_LAUNCH(bf16_product_kernel, 1, 32, 0, stream(), dev_a.data(), dev_b.data(), static_cast<int>(k),
                     out.data()));
  expect_relative("BF16", out.get(), product(a, b, k), 5e-3);
}

// Sums of positive products: every step drops bits, so a truncating accumulator ends below the exact sum, by
// an error that grows with K.
DUOKV_CASE(accumulation_truncates) {
  const size_t k = 1024;
  std::vector<float> a = normals(16 * k, 1), b = normals(k * 8, 2);
  for (std::vector<float>* values : {&a, &b}) {
    for (float& v : *values) v = std::bit_cast<float>(std::bit_cast<uint32_t>(std::abs(v)) & ~0x1FFFu);
  }
  const std::vector<double> exact = product(a, b, k);
  Array<float> dev_a(a), dev_b(b), out(128);
  std::vector<double> losses;
  for_each_architecture([&] {
    check(DUOKV_LAUNCH(tf32_product_kernel, 1, 32, 0, stream(), dev_a.data(), dev_b.data(),
                       static_cast<int>(k), out.data()));
    const std::vector<float> got = out.get();
    double loss = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      expect(got[i] <= exact[i], "element %zu was rounded up", i);
      loss += (exact[i] - got[i]) / exact[i] / static_cast<double>(got.size());
    }
    expect(loss > 1e-6 && loss < 2e-5, "mean relative loss %g", loss);
    losses.push_back(loss);
  });
  // sm_80 adds half as many products at a time and so truncates twice as often as sm_90.
  expect(losses.front() > 1.2 * losses.back() || !kEmulated, "%g and %g", losses.front(), losses.back());
}

// As tf32_product_kernel, in TF32x3; Running keeps one accumulator inside the tensor cores, which is the
// mistake to find.
template <bool Running>
__global__ void tf32x3_product_kernel(const float* a, const float* b, int k, float* out) {
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  float c[4] = {};
  for (int i = 0; i < k; i += 8) {
    const float fragment_a[4] = {a[g * k + i + t], a[(g + 8) * k + i + t], a[g * k + i + t + 4],
                                 a[(g + 8) * k + i + t + 4]};
    const float fragment_b[2] = {b[(i + t) * 8 + g], b[(i + t + 4) * 8 + g]};
    if constexpr (Running) {
      uint32_t big_a[4], small_a[4], big_b[2], small_b[2];
      for (int j = 0; j < 4; ++j) {
        big_a[j] = to_tf32(fragment_a[j]);
        small_a[j] = to_tf32(fragment_a[j] - __uint_as_float(big_a[j]));
      }
      for (int j = 0; j < 2; ++j) {
        big_b[j] = to_tf32(fragment_b[j]);
        small_b[j] = to_tf32(fragment_b[j] - __uint_as_float(big_b[j]));
      }
      mma_tf32_m16n8k8(c, small_a, big_b, c);
      mma_tf32_m16n8k8(c, big_a, small_b, c);
      mma_tf32_m16n8k8(c, big_a, big_b, c);
    } else {
      mma_tf32x3_m16n8k8(c, fragment_a, fragment_b);
    }
  }
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

double relative_error(const std::vector<float>& got, const std::vector<double>& exact) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - exact[i]) * (got[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return std::sqrt(error / norm);
}

DUOKV_CASE(tf32x3_is_as_good_as_fp32_unless_the_accumulator_runs_on) {
  for_each_architecture([] {
    for (const size_t k : {size_t{256}, size_t{2048}}) {
      for (const float scale : {1.0f, 1e15f}) {
        const std::vector<float> a = normals(16 * k, k, scale), b = normals(k * 8, k + 1, 1 / scale);
        const std::vector<double> exact = product(a, b, k);
        std::vector<float> fp32(128);
        for (size_t i = 0; i < fp32.size(); ++i) {
          for (size_t j = 0; j < k; ++j) fp32[i] = std::fma(a[i / 8 * k + j], b[j * 8 + i % 8], fp32[i]);
        }
        Array<float> dev_a(a), dev_b(b), fresh(128), running(128);
        const auto count = static_cast<int>(k);
        check(DUOKV_LAUNCH(tf32x3_product_kernel<false>, 1, 32, 0, stream(), dev_a.data(), dev_b.data(),
                           count, fresh.data()));
        check(DUOKV_LAUNCH(tf32x3_product_kernel<true>, 1, 32, 0, stream(), dev_a.data(), dev_b.data(), count,
                           running.data()));
        const double limit = 2 * relative_error(fp32, exact);
        const double good = relative_error(fresh.get(), exact), bad = relative_error(running.get(), exact);
        expect(good <= limit, "K = %zu: TF32x3 error %g, twice the FP32 error is %g", k, good, limit);
        expect(bad > limit, "K = %zu: error %g with one accumulator, which is below %g", k, bad, limit);
      }
    }
  });
}

__global__ void round_kernel(const float* x, uint32_t* out) { out[threadIdx.x] = to_tf32(x[threadIdx.x]); }

DUOKV_CASE(tf32_rounds_ties_away_from_zero) {
  const uint32_t cases[][2] = {
      {0x3F801000, 0x3F802000},  // a tie, up
      {0xBF801000, 0xBF802000},  // and away from zero
      {0x3F800FFF, 0x3F800000}, {0x3F803000, 0x3F804000},
      {0x7F7FFFFF, 0x7F800000},                            // the largest value becomes Inf
      {0x7F800000, 0x7F800000}, {0x7FFFFFFF, 0x7FFFE000},  // NaN stays NaN
      {0x7F800001, 0x7F800000},                            // unless its payload is in the dropped bits
      {0x00001000, 0x00002000},                            // subnormals are kept
  };
  std::vector<float> x;
  std::vector<uint32_t> expected;
  for (const auto& [bits, rounded] : cases) {
    x.push_back(std::bit_cast<float>(bits));
    expected.push_back(rounded);
  }
  Array<float> dev_x(x);
  Array<uint32_t> out(x.size());
  check(
      DUOKV_LAUNCH(round_kernel, 1, static_cast<unsigned>(x.size()), 0, stream(), dev_x.data(), out.data()));
  expect_equal("rounded bits", out.get(), expected);
}

DUOKV_CASE(non_finite_operands_give_non_finite_products) {
  std::vector<float> a(16 * 16, 1.0f), b(16 * 8, 1.0f);
  a[3 * 16 + 2] = INFINITY;
  a[5 * 16 + 9] = NAN;
  Array<float> dev_a(a), dev_b(b), out(128);
  for (const bool tf32 : {true, false}) {
    check(tf32 ? DUOKV_LAUNCH(tf32_product_kernel, 1, 32, 0, stream(), dev_a.data(), dev_b.data(), 16,
                              out.data())
               : DUOKV_LAUNCH(bf16_product_kernel, 1, 32, 0, stream(), dev_a.data(), dev_b.data(), 16,
                              out.data()));
    const std::vector<float> got = out.get();
    for (size_t i = 0; i < got.size(); ++i) {
      const bool finite = i / 8 != 3 && i / 8 != 5;
      expect(std::isfinite(got[i]) == finite && (!finite || got[i] == 16), "row %zu: %g", i / 8, got[i]);
    }
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
