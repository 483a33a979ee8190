// Gradient sums over MPI, for backends whose memory the host can read. The library duokv_mpi.so.
//
// One thread makes every MPI call, so that any MPI library will do. It starts each sum at once and without
// blocking, and then keeps asking MPI for progress, at ease while the backward pass needs the cores and
// eagerly once somebody waits.
#include <dlfcn.h>
#include <mpi.h>

#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "dist/transport.h"

namespace duokv::dist {
namespace {

using ops::Status;
using std::chrono::microseconds;

constexpr microseconds kIdlePoll{200};

thread_local std::string error_message;

template <class Body>
Status guarded(Body&& body) noexcept {
  try {
    body();
    return ops::kOk;
  } catch (const std::exception& error) {
    error_message = error.what();
    return ops::kInternal;
  }
}

void check(int result, const char* what) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw std::runtime_error(std::string(what) + ": " + text);
}

struct Range {
  float* x;
  int64_t n;
};

class MpiThread {
 public:
  // Runs `task` on the thread and waits for it.
  void call(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    if (ending_) throw std::runtime_error("a process can join a group through MPI only once");
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
    std::exception_ptr failure;
    bool done = false;
    task_ = [&] {
      try {
        task();
      } catch (...) {
        failure = std::current_exception();
      }
      done = true;
    };
    wake_.notify_one();
    finished_.wait(lock, [&] { return done; });
    if (failure) std::rethrow_exception(failure);
  }

  void begin(Range range) {
    const std::lock_guard lock(mutex_);
    if (ending_) throw std::runtime_error("the group was closed");
    queue_.push_back(range);
    wake_.notify_one();
  }

  // True where everything begun is complete.
  bool wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    awaited_ = true;
    wake_.notify_one();
    const bool complete =
        finished_.wait_for(lock, limit, [&] { return !failure_.empty() || (queue_.empty() && !moving_); });
    awaited_ = false;
    if (!failure_.empty()) throw std::runtime_error(failure_);
    return complete;
  }

  // Stops working on what is under way, whose memory may go. MPI can do little afterwards.
  void drop() {
    std::unique_lock lock(mutex_);
    dropping_ = true;
    wake_.notify_one();
    finished_.wait(lock, [&] { return queue_.empty() && !moving_; });
    dropping_ = false;
  }

  // Ends the thread; what is under way stays so.
  void end() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
      wake_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
    queue_.clear();
    moving_ = false;
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (!ending_) {
      if (task_) {
        task_();
        task_ = nullptr;
        finished_.notify_all();
      }
      if (dropping_) {
        queue_.clear();
        requests_.clear();
        moving_ = false;
        finished_.notify_all();
      }
      std::deque<Range> begun;
      begun.swap(queue_);
      moving_ = moving_ || !begun.empty();
      const bool eager = awaited_;
      lock.unlock();
      const bool complete = advance(begun);
      if (!complete && eager) std::this_thread::yield();
      lock.lock();
      moving_ = !complete;
      if (complete) finished_.notify_all();
      const auto has_work = [&] { return ending_ || dropping_ || task_ || !queue_.empty(); };
      if (complete)
        wake_.wait(lock, has_work);
      else if (!awaited_)
        wake_.wait_for(lock, kIdlePoll, [&] { return has_work() || awaited_; });
    }
  }

  // Starts sums and lets MPI work on those under way. True where none is.
  bool advance(const std::deque<Range>& begun) noexcept {
    try {
      for (const Range& range : begun) {
        requests_.emplace_back();
        check(MPI_Iallreduce(MPI_IN_PLACE, range.x, static_cast<int>(range.n), MPI_FLOAT, MPI_SUM,
                             MPI_COMM_WORLD, &requests_.back()),
              "MPI_Iallreduce");
      }
      if (requests_.empty()) return true;
      int complete = 0;
      check(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &complete, MPI_STATUSES_IGNORE),
            "MPI_Testall");
      if (complete) requests_.clear();
      return complete != 0;
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex_);
      failure_ = error.what();
      requests_.clear();
      return true;
    }
  }

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::function<void()> task_;
  std::deque<Range> queue_;
  std::vector<MPI_Request> requests_;  // the thread's own
  std::string failure_;
  bool moving_ = false, awaited_ = false, dropping_ = false, ending_ = false;
};

// Lives as long as the process: MPI can be started once.
MpiThread& mpi_thread() {
  static MpiThread* const thread = new MpiThread;
  return *thread;
}

const char* last_error() { return error_message.c_str(); }

// Needs no MPI_Init, and may be called by any thread. The library is what this one was linked with.
Status find(FoundLibrary* found) {
  return guarded([&] {
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    check(MPI_Get_library_version(version, &length), "MPI_Get_library_version");
    Dl_info place{};
    dladdr(reinterpret_cast<const void*>(&MPI_Get_library_version), &place);
    // The version's first words, without packager and date.
    std::snprintf(found->version, sizeof found->version, "%.*s",
                  static_cast<int>(std::strcspn(version, ",\n")), version);
    std::snprintf(found->path, sizeof found->path, "%s", place.dli_fname ? place.dli_fname : "");
  });
}

Status make_id(void* id) {
  std::memset(id, 0, kIdBytes);  // MPI's ranks know each other
  return ops::kOk;
}

Status open(ops::Device*, const void*, int32_t, int32_t, Transport** transport) {
  *transport = nullptr;  // one communicator serves all
  return ops::kOk;
}

Status sum(Transport*, float* x, int64_t n) {
  return guarded([&] { mpi_thread().begin({x, n}); });
}

Status wait(Transport*, int32_t milliseconds, int32_t* complete) {
  return guarded([&] { *complete = mpi_thread().wait(std::chrono::milliseconds(milliseconds)) ? 1 : 0; });
}

void close(Transport*) { mpi_thread().drop(); }

Status start(int32_t* rank, int32_t* size) {
  return guarded([&] {
    mpi_thread().call([&] {
      int initialised = 0;
      MPI_Initialized(&initialised);
      if (initialised) throw std::runtime_error("this process has started MPI already");
      int provided = 0;
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
      // Node's own threads run beside MPI's: MPI_THREAD_SINGLE would not do.
      if (provided < MPI_THREAD_FUNNELED) throw std::runtime_error("this MPI library allows no threads");
      check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
      check(MPI_Comm_rank(MPI_COMM_WORLD, rank), "MPI_Comm_rank");
      check(MPI_Comm_size(MPI_COMM_WORLD, size), "MPI_Comm_size");
    });
  });
}

Status broadcast(void* data, int64_t bytes) {
  return guarded([&] {
    mpi_thread().call(
        [&] { check(MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast"); });
  });
}

void stop(int32_t healthy) {
  if (healthy) guarded([&] { mpi_thread().call([] { check(MPI_Finalize(), "MPI_Finalize"); }); });
  mpi_thread().end();
}

}  // namespace
}  // namespace duokv::dist

extern "C" __attribute__((visibility("default"))) const duokv::dist::MpiTable* duokv_mpi_table() {
  using namespace duokv::dist;
  static const MpiTable table = {
      {kTransportVersion, last_error, find, make_id, open, sum, wait, close}, start, broadcast, stop};
  return &table;
}
