// The CPU device: its thread pool, its scratch memory and its accounting.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/thread_pool.h"
#include "ops/ops.h"

namespace duokv::cpu {

// Memory that grows to the largest request and is reused by the next one; 64-byte aligned.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // `count` elements of T, contents undefined, valid until the next call.
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(reserve(count * static_cast<int64_t>(sizeof(T))));
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* reserve(int64_t bytes);
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

// An argument no caller should pass.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool condition, const char* message) {
  if (!condition) throw InvalidArgument(message);
}

// Runs `body`, turning exceptions into a status and this thread's last error.
ops::Status guarded_call(void (*call)(void*), void* body) noexcept;
template <class Body>
ops::Status guarded(Body&& body) noexcept {
  using B = std::remove_reference_t<Body>;
  return guarded_call([](void* b) { (*static_cast<B*>(b))(); }, &body);
}

}  // namespace duokv::cpu

struct duokv::ops::Device {
  explicit Device(int32_t threads);

  cpu::ThreadPool pool;
  // Scratch of one operation, by pool worker and shared by all; an operation that calls another must not hold
  // them across.
  std::vector<cpu::Scratch> worker_scratch;
  cpu::Scratch shared_scratch;
  cpu::Scratch block_scratch;  // of an operation made of several: what one leaves for the next
  int64_t bytes_allocated = 0;
};
