#include "core/initialise.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numbers>
#include <thread>
#include <vector>

namespace duokv {
namespace {

// SHA-256 (FIPS 180-4) of a short message.
std::array<uint8_t, 32> sha256(const std::string& message) {
  static constexpr uint32_t kRound[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::vector<uint8_t> padded(message.begin(), message.end());
  padded.push_back(0x80);
  while (padded.size() % 64 != 56) padded.push_back(0);
  const uint64_t bits = uint64_t{message.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) padded.push_back(static_cast<uint8_t>(bits >> shift));

  for (size_t block = 0; block < padded.size(); block += 64) {
    uint32_t w[64];
    for (size_t i = 0; i < 16; ++i) {
      const uint8_t* b = padded.data() + block + 4 * i;
      w[i] = uint32_t{b[0]} << 24 | uint32_t{b[1]} << 16 | uint32_t{b[2]} << 8 | uint32_t{b[3]};
    }
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += mixed[i];
  }
  std::array<uint8_t, 32> digest;
  for (size_t i = 0; i < 32; ++i) digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

using Words = std::array<uint32_t, 4>;

// Philox4x32-10 (Salmon et al. 2011).
Words philox(Words counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(p0)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

struct Stream {
  std::array<uint32_t, 4> h;  // first words of the digest, little-endian
  double std;

  // Elements 4b … 4b+3.
  std::array<float, 4> block(uint64_t b) const {
    const Words x =
        philox({static_cast<uint32_t>(b), static_cast<uint32_t>(b >> 32), h[2], h[3]}, h[0], h[1]);
    std::array<float, 4> values;
    for (size_t pair = 0; pair < 2; ++pair) {
      const double u1 = (static_cast<double>(x[2 * pair]) + 1) * 0x1p-32;
      const double u2 = static_cast<double>(x[2 * pair + 1]) * 0x1p-32;
      const double r = std::sqrt(-2 * std::log(u1)), angle = 2 * std::numbers::pi * u2;
      values[2 * pair] = static_cast<float>(r * std::cos(angle) * std);
      values[2 * pair + 1] = static_cast<float>(r * std::sin(angle) * std);
    }
    return values;
  }
};

void fill(const Stream& stream, int64_t begin, int64_t end, int64_t n, float* out) {
  for (int64_t b = begin; b < end; ++b) {
    const std::array<float, 4> values = stream.block(static_cast<uint64_t>(b));
    std::copy_n(values.begin(), std::min<int64_t>(4, n - 4 * b), out + 4 * b);
  }
}

}  // namespace

void normal_parameters(const std::string& seed, std::string_view name, double std, float* out, int64_t n,
                       int32_t threads) {
  const std::array<uint8_t, 32> digest = sha256(seed + ":" + std::string(name));
  Stream stream{{}, std};
  for (size_t i = 0; i < 4; ++i)
    for (size_t byte = 0; byte < 4; ++byte) stream.h[i] |= uint32_t{digest[4 * i + byte]} << (8 * byte);

  const int64_t blocks = (n + 3) / 4;
  constexpr int64_t kBlocksPerThread = 4096;  // below this a thread costs more than it saves
  const int64_t parts = std::clamp<int64_t>(blocks / kBlocksPerThread, 1, threads);
  std::vector<std::thread> helpers;
  for (int64_t part = 1; part < parts; ++part)
    helpers.emplace_back(
        [&, part] { fill(stream, blocks * part / parts, blocks * (part + 1) / parts, n, out); });
  fill(stream, 0, blocks / parts, n, out);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace duokv
