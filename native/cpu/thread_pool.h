// One pool per device. A job is a number of chunks; the caller takes chunks too and at the end waits only for
// chunks that another thread has taken, so a worker that never woke costs nothing. Chunk boundaries are the
// caller's and must depend on shapes only, never on the number of threads: that keeps results the same for
// any thread count.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
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
        const_cast<void*>(static_cast<const void*>(&body)), sizeof(B));
  }

  // A chunk of run_neighbours.
  struct Turn {
    int64_t chunk;
    int64_t next;  // the chunk that this thread will probably take after it, or -1
    int32_t worker;
    bool first;  // of this thread since it took part
  };

  // Like run, but a thread goes through neighbouring chunks for as long as it can, so that what they read is
  // one stream, and a thread that has ended its own helps with another's. Calls body(Turn) of a copy of body.
  template <class Body>
  void run_neighbours(int64_t chunks, Body body) {
    const int64_t ranges = std::min<int64_t>(chunks, threads_);
    if (++neighbour_jobs_ == 0) {
      for (int32_t i = 0; i < threads_; ++i) ranges_[i].word.store(0, std::memory_order_relaxed);
      neighbour_jobs_ = 1;
    }
    const uint32_t job = neighbour_jobs_;
    run(ranges, [all = ranges_.get(), chunks, ranges, job, body](int64_t own, int32_t worker) {
      bool first = true;
      for (int64_t i = 0; i < ranges; ++i) {
        const int64_t range = (own + i) % ranges;
        const int64_t begin = chunks * range / ranges, end = chunks * (range + 1) / ranges;
        for (int64_t chunk; (chunk = begin + all[range].take(job, end - begin)) < end; first = false)
          body(Turn{chunk, chunk + 1 < end ? chunk + 1 : -1, worker, first});
      }
    });
  }

 private:
  // How many chunks of a range are taken. A thread's own stays in its cache: nobody clears it before a job.
  struct alignas(64) Range {
    std::atomic<uint64_t> word{0};  // the job in the upper half, chunks taken in the lower one

    // The index in the range of a chunk that nobody has taken, or `size`.
    int64_t take(uint32_t job, int64_t size) {
      uint64_t seen = word.load(std::memory_order_relaxed);
      for (;;) {
        const int64_t taken = seen >> 32 == job ? static_cast<int64_t>(seen & 0xFFFFFFFFu) : 0;
        if (taken >= size) return size;
        const uint64_t next = uint64_t{job} << 32 | static_cast<uint64_t>(taken + 1);
        if (word.compare_exchange_weak(seen, next, std::memory_order_relaxed)) return taken;
      }
    }
  };

  using Chunk = void (*)(void* body, int64_t chunk, int32_t worker);
  void run_chunks(int64_t chunks, Chunk call, void* body, size_t body_bytes);

  struct State;
  int32_t threads_;
  bool planning_;
  std::unique_ptr<State> state_;
  std::unique_ptr<Range[]> ranges_;  // [threads] of run_neighbours
  uint32_t neighbour_jobs_ = 0;
};

}  // namespace duokv::cpu
