// One pool per device. A job is a number of chunks; the caller takes chunks too and at the end waits only for
// chunks that another thread has taken, so a worker that never woke costs nothing. Chunk boundaries are the
// caller's and must depend on shapes only, never on the number of threads: that keeps results the same for
// any thread count.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace duokv::cpu {

// Usable CPUs of this process: the smaller of the affinity mask and the cgroup (v1 or v2) quota, at least 1.
int32_t usable_cpus();

class ThreadPool {
 public:
  // The pool of a planning device runs nothing.
  explicit ThreadPool(int32_t threads, bool planning = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t threads() const { return threads_; }
  bool planning() const { return planning_; }

  // Calls body(chunk, worker) for every chunk in [0, chunks), worker in [0, threads()). The first exception
  // of a chunk is rethrown here after all taken chunks have ended. Not reentrant: one caller at a time, no
  // nesting.
  template <class Body>
  void run(int64_t chunks, Body&& body) {
    using B = std::remove_reference_t<Body>;
    run_chunks(
        chunks, [](void* b, int64_t chunk, int32_t worker) { (*static_cast<B*>(b))(chunk, worker); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Like run, but a thread goes through neighbouring chunks for as long as it can, so that what they read is
  // one stream, and a thread that has ended its own helps with another's. Calls body(chunk, next, worker):
  // `next` is the chunk that this thread will probably take after it, or -1.
  template <class Body>
  void run_neighbours(int64_t chunks, Body&& body) {
    const int64_t ranges = std::min<int64_t>(chunks, threads_);
    for (int64_t i = 0; i < ranges; ++i) {
      Range& range = ranges_[i];
      range.first.store(chunks * i / ranges, std::memory_order_relaxed);
      range.end = chunks * (i + 1) / ranges;
    }
    run(ranges, [&](int64_t own, int32_t worker) {
      for (int64_t i = 0; i < ranges; ++i) {
        Range& range = ranges_[(own + i) % ranges];
        for (;;) {
          const int64_t chunk = range.first.fetch_add(1, std::memory_order_relaxed);
          if (chunk >= range.end) break;
          body(chunk, chunk + 1 < range.end ? chunk + 1 : -1, worker);
        }
      }
    });
  }

 private:
  // Chunks [first, end), which are not taken yet.
  struct alignas(64) Range {
    std::atomic<int64_t> first;
    int64_t end;
  };

  using Chunk = void (*)(void* body, int64_t chunk, int32_t worker);
  void run_chunks(int64_t chunks, Chunk call, void* body);

  struct State;
  int32_t threads_;
  bool planning_;
  std::unique_ptr<State> state_;
  std::unique_ptr<Range[]> ranges_;  // [threads] of run_neighbours
};

}  // namespace duokv::cpu
