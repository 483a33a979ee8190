#include "cpu/thread_pool.h"

#include <hwy/cache_control.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <fstream>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/prefetch.h"

namespace duokv::cpu {
namespace {

// A worker without a job spins for about 30 µs, the distance between two operations, before it sleeps. A
// longer spin makes things worse: the kernel may wake a worker on the CPU of a thread that spins waiting for
// it.
constexpr int kWorkerSpins = 2000;
constexpr int kCallerSpins = 200;

// CPUs granted by a cgroup's quota, or a huge number where there is none.
double cgroup_cpus() {
  const double unlimited = std::numeric_limits<double>::infinity();
  double quota = -1, period = 0;
  std::string word;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> word >> period && word != "max")
    quota = std::atof(word.c_str());
  for (const char* folder : {"/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"}) {
    if (quota > 0) break;
    std::ifstream(std::string(folder) + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(std::string(folder) + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : unlimited;
}

}  // namespace

int32_t usable_cpus() {
  cpu_set_t set;
  int count = sched_getaffinity(0, sizeof(set), &set) == 0
                  ? CPU_COUNT(&set)
                  : static_cast<int>(std::thread::hardware_concurrency());
  // A quota of 1.5 CPUs is used best by two threads.
  const double quota = cgroup_cpus();
  if (quota < count) count = static_cast<int>(quota) + (quota > static_cast<int>(quota));
  return std::max(count, 1);
}

struct ThreadPool::State {
  // The job's generation in the upper 32 bits, its chunks not yet taken in the lower. Taking a chunk is one
  // decrement by compare-and-swap, which fails if another job has been posted meanwhile, so `call` and `body`
  // belong to the job of which a chunk was taken and cannot change before that chunk is done. They share its
  // cache line: between chiplets a line takes 0.3 µs.
  alignas(64) std::atomic<uint64_t> word{0};
  Chunk call = nullptr;
  void* body = nullptr;
  size_t body_bytes = 0;
  int64_t chunks = 0;
  alignas(64) std::atomic<int64_t> unfinished{0};
  std::exception_ptr error;  // written once per job, by the thread that set `failed`
  std::atomic<bool> failed{false};

  alignas(64) std::atomic<int32_t> sleepers{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable wake;
  int worker_spins = 0;
  std::vector<std::thread> workers;

  // Takes chunks until none is left.
  void work(int32_t worker) {
    uint64_t seen = word.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen) != 0) {
      if (!word.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      int64_t done = 1;
      if (worker != 0) prefetch(static_cast<const char*>(body), static_cast<int64_t>(body_bytes));
      try {
        call(body, chunks - static_cast<uint32_t>(seen), worker);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
        done += drop_remaining();
      }
      unfinished.fetch_sub(done, std::memory_order_acq_rel);
      seen = word.load(std::memory_order_acquire);
    }
  }

  // Takes the current job's remaining chunks without running them. Only a thread that holds a chunk may call
  // it.
  int64_t drop_remaining() {
    uint64_t seen = word.load(std::memory_order_acquire);
    while (!word.compare_exchange_weak(seen, seen >> 32 << 32, std::memory_order_acq_rel)) {
    }
    return static_cast<uint32_t>(seen);
  }

  bool idle() const { return static_cast<uint32_t>(word.load()) == 0 && !stop.load(); }

  void worker_loop(int32_t worker) {
    while (!stop.load(std::memory_order_relaxed)) {
      work(worker);
      for (int i = 0; i < worker_spins && idle(); ++i) hwy::Pause();
      if (!idle()) continue;
      std::unique_lock lock(mutex);
      // Sequentially consistent with `post`: either the sleeper is counted before the caller looks, or the
      // sleeper sees the job.
      sleepers.fetch_add(1);
      wake.wait(lock, [this] { return !idle(); });
      sleepers.fetch_sub(1);
    }
  }

  void notify() {
    if (sleepers.load() == 0) return;
    { std::lock_guard lock(mutex); }
    wake.notify_all();
  }
};

ThreadPool::ThreadPool(int32_t threads, bool planning)
    : threads_(threads), planning_(planning), state_(std::make_unique<State>()) {
  if (threads < 1)
    throw std::invalid_argument("ThreadPool: threads is " + std::to_string(threads) + ", must be at least 1");
  ranges_ = std::make_unique<Range[]>(static_cast<size_t>(threads));
  state_->worker_spins = threads <= usable_cpus() ? kWorkerSpins : 0;
  for (int32_t worker = 1; worker < threads && !planning; ++worker) {
    state_->workers.emplace_back([state = state_.get(), worker] { state->worker_loop(worker); });
  }
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true);
  { std::lock_guard lock(state_->mutex); }
  state_->wake.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

void ThreadPool::run_chunks(int64_t chunks, Chunk call, void* body, size_t body_bytes) {
  if (chunks <= 0 || planning_) return;
  if (threads_ == 1 || chunks == 1) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) call(body, chunk, 0);
    return;
  }
  if (chunks > std::numeric_limits<uint32_t>::max())
    throw std::invalid_argument("ThreadPool::run: too many chunks");
  State& state = *state_;
  state.call = call;
  state.body = body;
  state.body_bytes = body_bytes;
  state.chunks = chunks;
  state.failed.store(false, std::memory_order_relaxed);
  state.unfinished.store(chunks, std::memory_order_relaxed);
  const uint64_t generation = (state.word.load(std::memory_order_relaxed) >> 32) + 1;
  state.word.store(generation << 32 | static_cast<uint64_t>(chunks));
  state.notify();
  state.work(0);
  for (int spins = 0; state.unfinished.load(std::memory_order_acquire) != 0; ++spins) {
    spins < kCallerSpins ? hwy::Pause() : std::this_thread::yield();
  }
  if (state.failed.load()) std::rethrow_exception(std::exchange(state.error, nullptr));
}

}  // namespace duokv::cpu
