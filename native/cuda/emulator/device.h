// CUDA's device functions that involve other threads or memory, under CUDA's names. Each checks what the
// hardware leaves undefined. `file` and `line` are the caller's and appear in reports.
#pragma once

#include <type_traits>

#include "cuda/emulator/language.h"
#include "cuda/emulator/memory.h"
#include "cuda/emulator/scheduler.h"

#define DUOKV_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace duokv::simt {

enum class Shuffle : uint8_t { kIndex, kUp, kDown, kXor };
enum class Vote : uint8_t { kBallot, kAny, kAll };
enum class Reduction : uint8_t { kAdd, kMin, kMax, kAnd, kOr };
enum class Atomic : uint8_t { kAdd, kMin, kMax, kAnd, kOr, kExchange };

uint64_t shuffle(Shuffle kind, uint32_t mask, uint64_t value, int operand, int width, Site site);
uint32_t vote(Vote kind, uint32_t mask, bool predicate, Site site);
uint32_t reduce_unsigned(Reduction kind, uint32_t mask, uint32_t value, Site site);
int32_t reduce_signed(Reduction kind, uint32_t mask, int32_t value, Site site);

// Defined for float, double, int, unsigned and unsigned long long, as far as CUDA has them.
template <class T>
T atomic(Atomic kind, T* address, T value);
template <class T>
T compare_and_swap(T* address, T expected, T desired);

template <class T>
T shuffle_value(Shuffle kind, uint32_t mask, T value, int operand, int width, Site site) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles move 4 or 8 bytes");
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  return std::bit_cast<T>(
      static_cast<Bits>(shuffle(kind, mask, std::bit_cast<Bits>(value), operand, width, site)));
}

}  // namespace duokv::simt

inline void __syncthreads(DUOKV_SITE) { duokv::simt::meet_block(0, 0, true, {file, line}); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, DUOKV_SITE) {
  duokv::simt::meet_warp(duokv::simt::Collective::kSyncWarp, mask, {file, line}, nullptr);
}
inline void __threadfence() { duokv::simt::memory_fence(); }
inline void __threadfence_block() { duokv::simt::memory_fence(); }
[[noreturn]] inline void __trap(DUOKV_SITE) {
  duokv::simt::fault(duokv::simt::FaultCode::kLaunchFailure, "__trap at %s:%d", duokv::simt::base_name(file),
                     line);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, DUOKV_SITE) {
  return duokv::simt::shuffle_value(duokv::simt::Shuffle::kIndex, mask, value, lane, width, {file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, DUOKV_SITE) {
  return duokv::simt::shuffle_value(duokv::simt::Shuffle::kUp, mask, value, static_cast<int>(delta), width,
                                    {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, DUOKV_SITE) {
  return duokv::simt::shuffle_value(duokv::simt::Shuffle::kDown, mask, value, static_cast<int>(delta), width,
                                    {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, DUOKV_SITE) {
  return duokv::simt::shuffle_value(duokv::simt::Shuffle::kXor, mask, value, lane_mask, width, {file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, DUOKV_SITE) {
  return duokv::simt::vote(duokv::simt::Vote::kBallot, mask, predicate != 0, {file, line});
}
inline int __any_sync(unsigned mask, int predicate, DUOKV_SITE) {
  return static_cast<int>(duokv::simt::vote(duokv::simt::Vote::kAny, mask, predicate != 0, {file, line}));
}
inline int __all_sync(unsigned mask, int predicate, DUOKV_SITE) {
  return static_cast<int>(duokv::simt::vote(duokv::simt::Vote::kAll, mask, predicate != 0, {file, line}));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, DUOKV_SITE) {
  return duokv::simt::reduce_unsigned(duokv::simt::Reduction::kAdd, mask, value, {file, line});
}
inline int __reduce_add_sync(unsigned mask, int value, DUOKV_SITE) {
  return duokv::simt::reduce_signed(duokv::simt::Reduction::kAdd, mask, value, {file, line});
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, DUOKV_SITE) {
  return duokv::simt::reduce_unsigned(duokv::simt::Reduction::kMin, mask, value, {file, line});
}
inline int __reduce_min_sync(unsigned mask, int value, DUOKV_SITE) {
  return duokv::simt::reduce_signed(duokv::simt::Reduction::kMin, mask, value, {file, line});
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, DUOKV_SITE) {
  return duokv::simt::reduce_unsigned(duokv::simt::Reduction::kMax, mask, value, {file, line});
}
inline int __reduce_max_sync(unsigned mask, int value, DUOKV_SITE) {
  return duokv::simt::reduce_signed(duokv::simt::Reduction::kMax, mask, value, {file, line});
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, DUOKV_SITE) {
  return duokv::simt::reduce_unsigned(duokv::simt::Reduction::kAnd, mask, value, {file, line});
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, DUOKV_SITE) {
  return duokv::simt::reduce_unsigned(duokv::simt::Reduction::kOr, mask, value, {file, line});
}

template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return duokv::simt::atomic(duokv::simt::Atomic::kAdd, address, value);
}
template <class T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return duokv::simt::atomic(duokv::simt::Atomic::kMin, address, value);
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return duokv::simt::atomic(duokv::simt::Atomic::kMax, address, value);
}
template <class T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return duokv::simt::atomic(duokv::simt::Atomic::kAnd, address, value);
}
template <class T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return duokv::simt::atomic(duokv::simt::Atomic::kOr, address, value);
}
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return duokv::simt::atomic(duokv::simt::Atomic::kExchange, address, value);
}
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
  return duokv::simt::compare_and_swap(address, expected, desired);
}

// The read-only path of a global load; an ordinary load here.
template <class T>
T __ldg(const T* address) {
  return *address;
}
