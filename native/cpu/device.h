// The CPU device: its thread pool, its scratch memory and its accounting.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>

#include "cpu/thread_pool.h"
#include "ops/guarded.h"
#include "ops/ops.h"

namespace duokv::cpu {

inline constexpr int64_t kCacheLine = 64;  // bytes

using ops::guarded;
using ops::InvalidArgument;
using ops::require;

// Memory, counted. On a planning device it is address space, of which only what is written becomes memory.
class Memory {
 public:
  explicit Memory(bool planning) : planning_(planning) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // 64-byte aligned, contents undefined. Throws OutOfMemory with what was asked, what is used and what there
  // is.
  void* allocate(int64_t bytes);
  void release(void* memory);
  int64_t free() const;
  int64_t used() const { return used_; }
  int64_t peak() const { return peak_; }

 private:
  const bool planning_;
  // `info` may be called from any thread.
  std::atomic<int64_t> used_{0}, peak_{0};
};

// Memory that grows to the largest request and is reused by the next one; 64-byte aligned.
class Scratch {
 public:
  explicit Scratch(Memory& memory) : owner_(memory) {}
  ~Scratch() { owner_.release(memory_); }
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
  Memory& owner_;
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace duokv::cpu

struct duokv::ops::Device {
  Device(int32_t threads, bool planning);

  // Before a job whose chunks take `count` elements of T of their worker's scratch: every worker gets them
  // now, whichever chunks it will run, so that what is held depends on the operations alone.
  template <class T>
  void reserve_workers(int64_t count) {
    for (cpu::Scratch& scratch : worker_scratch) scratch.take<T>(count);
  }
  int64_t scratch_bytes() const;

  cpu::Memory memory;
  cpu::ThreadPool pool;
  // Scratch of one operation, by pool worker and shared by all; an operation that calls another must not hold
  // them across.
  std::deque<cpu::Scratch> worker_scratch;
  cpu::Scratch shared_scratch{memory};
  cpu::Scratch block_scratch{memory};  // of an operation made of several: what one leaves for the next
};
