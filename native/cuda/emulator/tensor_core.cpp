#include "cuda/emulator/tensor_core.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "cuda/emulator/memory.h"

namespace duokv::simt {
namespace {

constexpr uint32_t kAllLanes = 0xFFFFFFFF;
Architecture current_architecture = Architecture::kSm90;

double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Unbiased exponent of the value as the multiplier sees it: subnormals keep the smallest normal exponent.
int exponent_of(float value) {
  const int biased = static_cast<int>(std::bit_cast<uint32_t>(value) >> 23 & 0xFF);
  return (biased == 0 ? 1 : biased) - 127;
}

float truncate_to_float(double value) {
  const float nearest = static_cast<float>(value);
  if (std::isinf(nearest) && std::abs(value) < power_of_two(128))
    return std::copysign(std::numeric_limits<float>::max(), nearest);
  return std::abs(static_cast<double>(nearest)) > std::abs(value) ? std::nextafter(nearest, 0.0f) : nearest;
}

// One group: c + sum of a[i] * b[i].
float accumulate(const float* a, const float* b, int count, float c, int extra_bits) {
  double products[16];
  int largest = c != 0 ? exponent_of(c) : -1000;
  bool finite = std::isfinite(c);
  for (int i = 0; i < count; ++i) {
    products[i] = static_cast<double>(a[i]) * b[i];
    finite = finite && std::isfinite(a[i]) && std::isfinite(b[i]);
    if (products[i] != 0) largest = std::max(largest, exponent_of(a[i]) + exponent_of(b[i]));
  }
  if (!finite) {
    double sum = c;
    for (int i = 0; i < count; ++i) sum += products[i];
    return static_cast<float>(sum);
  }
  if (largest == -1000) return c;
  const double scale = power_of_two(23 + extra_bits - largest);
  int64_t sum = static_cast<int64_t>(c * scale);  // conversion truncates
  for (int i = 0; i < count; ++i) sum += static_cast<int64_t>(products[i] * scale);
  return truncate_to_float(static_cast<double>(sum) * power_of_two(largest - 23 - extra_bits));
}

struct MmaOperands {
  uint32_t a[4], b[2];
  float c[4];
};

// d [16, 8] = a [16, K] * b [K, 8] + c, with b given by columns.
template <int K>
void multiply(const float (&a)[16][K], const float (&b)[8][K], float (&c)[16][8]) {
  const bool sm90 = current_architecture == Architecture::kSm90;
  const int group = sm90 ? K : K / 2, extra_bits = sm90 ? 2 : 1;
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      for (int k = 0; k < K; k += group)
        c[row][column] = accumulate(a[row] + k, b[column] + k, group, c[row][column], extra_bits);
    }
  }
}

// Moves C fragments between the lanes and a matrix.
template <class F>
void for_each_accumulator(void* const* lanes, float (&c)[16][8], F move) {
  for (int lane = 0; lane < 32; ++lane) {
    auto& operands = *static_cast<MmaOperands*>(lanes[lane]);
    const int g = lane >> 2, t = lane & 3;
    for (int i = 0; i < 4; ++i) move(operands.c[i], c[g + (i >> 1) * 8][2 * t + (i & 1)]);
  }
}

void take(float& lane, float& element) { element = lane; }
void give(float& lane, float& element) { lane = element; }

float tf32_operand(uint32_t bits) { return std::bit_cast<float>(bits & ~0x1FFFu); }

void combine_tf32(void* const* lanes, uint32_t) {
  float a[16][8], b[8][8], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& operands = *static_cast<const MmaOperands*>(lanes[lane]);
    const int g = lane >> 2, t = lane & 3;
    for (int i = 0; i < 4; ++i) a[g + (i & 1) * 8][t + (i >> 1) * 4] = tf32_operand(operands.a[i]);
    for (int i = 0; i < 2; ++i) b[g][t + i * 4] = tf32_operand(operands.b[i]);
  }
  for_each_accumulator(lanes, c, take);
  multiply(a, b, c);
  for_each_accumulator(lanes, c, give);
}

float bf16_operand(uint32_t pair, int half) {
  return std::bit_cast<float>(half ? pair & 0xFFFF0000 : pair << 16);
}

void combine_bf16(void* const* lanes, uint32_t) {
  float a[16][16], b[8][16], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& operands = *static_cast<const MmaOperands*>(lanes[lane]);
    const int g = lane >> 2, t = lane & 3;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i)
        a[g + (i & 1) * 8][2 * t + half + (i >> 1) * 8] = bf16_operand(operands.a[i], half);
      for (int i = 0; i < 2; ++i) b[g][2 * t + half + i * 8] = bf16_operand(operands.b[i], half);
    }
  }
  for_each_accumulator(lanes, c, take);
  multiply(a, b, c);
  for_each_accumulator(lanes, c, give);
}

void mma(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4], Site site,
         void (*combine)(void* const*, uint32_t)) {
  MmaOperands operands = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}};
  meet_warp(Collective::kMma, kAllLanes, site, &operands, combine);
  for (int i = 0; i < 4; ++i) d[i] = operands.c[i];
}

struct LoadMatrixOperands {
  int count;
  bool transposed;
  uint16_t row[8];
  uint32_t registers[4];
};

void combine_load_matrix(void* const* lanes, uint32_t) {
  const auto element = [&](int matrix, int row, int column) {
    return static_cast<const LoadMatrixOperands*>(lanes[matrix * 8 + row])->row[column];
  };
  for (int lane = 0; lane < 32; ++lane) {
    auto& self = *static_cast<LoadMatrixOperands*>(lanes[lane]);
    const int g = lane >> 2, t = lane & 3;
    for (int m = 0; m < self.count; ++m) {
      const uint32_t low = self.transposed ? element(m, 2 * t, g) : element(m, g, 2 * t);
      const uint32_t high = self.transposed ? element(m, 2 * t + 1, g) : element(m, g, 2 * t + 1);
      self.registers[m] = low | high << 16;
    }
  }
}

}  // namespace

void set_architecture(Architecture architecture) { current_architecture = architecture; }
Architecture architecture() { return current_architecture; }

uint32_t round_tf32(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::abs(value) < std::numeric_limits<float>::infinity()) bits += 0x1000;
  return bits & ~0x1FFFu;
}

void mma_tf32_m16n8k8(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4], Site site) {
  mma(d, a, b, c, site, combine_tf32);
}

void mma_bf16_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4], Site site) {
  mma(d, a, b, c, site, combine_bf16);
}

void load_matrix(uint32_t* registers, int count, bool transposed, const void* row, Site site) {
  LoadMatrixOperands operands = {count, transposed, {}, {}};
  if (lane_index() < static_cast<uint32_t>(count) * 8) {
    if (!in_shared_memory(row))
      fault(FaultCode::kIllegalAddress, "ldmatrix at %s:%d: row not in shared memory", base_name(site.file),
            site.line);
    note_access(row, sizeof operands.row, sizeof operands.row, Access::kRead);
    raw_copy(operands.row, row, sizeof operands.row);
  }
  meet_warp(Collective::kLoadMatrix, kAllLanes, site, &operands, combine_load_matrix);
  for (int m = 0; m < count; ++m) registers[m] = operands.registers[m];
}

}  // namespace duokv::simt
