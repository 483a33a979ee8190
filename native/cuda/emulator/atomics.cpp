// Atomics are real ones, so that ThreadSanitizer, with which this file is instrumented, sees them as such.
// CUDA's are relaxed: an atomic alone orders no other access.
#include <cmath>

#include "cuda/emulator/device.h"

namespace duokv::simt {
namespace {

template <class T>
void check(T* address) {
  check_access(address, sizeof(T), sizeof(T), Access::kRead, __builtin_return_address(0));
  check_access(address, sizeof(T), sizeof(T), Access::kWrite, __builtin_return_address(0));
}

template <class T>
T apply(Atomic kind, T old, T value) {
  switch (kind) {
    case Atomic::kAdd:
      return old + value;
    case Atomic::kMin:
      return std::min(old, value);
    case Atomic::kMax:
      return std::max(old, value);
    case Atomic::kExchange:
      return value;
    case Atomic::kAnd:
      if constexpr (std::is_integral_v<T>) return old & value;
      break;
    case Atomic::kOr:
      if constexpr (std::is_integral_v<T>) return old | value;
      break;
  }
  return old;
}

}  // namespace

template <class T>
T atomic(Atomic kind, T* address, T value) {
  check(address);
  T old;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  T updated = apply(kind, old, value);
  while (!__atomic_compare_exchange(address, &old, &updated, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    updated = apply(kind, old, value);
  return old;
}

template <class T>
T compare_and_swap(T* address, T expected, T desired) {
  check(address);
  __atomic_compare_exchange(address, &expected, &desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

template float atomic(Atomic, float*, float);
template double atomic(Atomic, double*, double);
template int atomic(Atomic, int*, int);
template unsigned atomic(Atomic, unsigned*, unsigned);
template unsigned long long atomic(Atomic, unsigned long long*, unsigned long long);
template int compare_and_swap(int*, int, int);
template unsigned compare_and_swap(unsigned*, unsigned, unsigned);
template unsigned long long compare_and_swap(unsigned long long*, unsigned long long, unsigned long long);

}  // namespace duokv::simt
