// The engine thread: one per device, with one queue. Everything that touches a device runs there, in the
// order in which it was submitted, so the core needs no locks and neither the event loop nor the libuv pool
// waits on compute.
//
// Threads. The JavaScript thread makes, submits, settles and destroys jobs; the engine thread executes them
// and touches no JavaScript value. Finished jobs come home through one thread-safe function, which keeps the
// process alive only while jobs are pending.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "addon/errors.h"
#include "core/model.h"

namespace duokv::addon {

enum class StopReason : int32_t { None, Aborted, Disposed };

// Cancels one call: raised on the JavaScript thread, polled by the core between layers.
class CancelFlag {
 public:
  void raise(StopReason reason) {
    StopReason none = StopReason::None;
    reason_.compare_exchange_strong(none, reason);
    raised_.store(true);
  }
  bool raised() const { return raised_.load(); }
  StopReason reason() const { return reason_.load(); }
  Cancel poll() const { return &raised_; }

 private:
  std::atomic<bool> raised_{false};
  std::atomic<StopReason> reason_{StopReason::None};
};

class Job {
 public:
  Job(Napi::Env env, std::shared_ptr<CancelFlag> flag) : deferred_(env), flag_(std::move(flag)) {}
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  Napi::Promise promise() const { return deferred_.Promise(); }
  CancelFlag& flag() { return *flag_; }
  // A JavaScript object that must live until the job is settled: its receiver, an array it fills.
  void hold(Napi::Object object) { held_.push_back(Napi::Persistent(object)); }

  void execute() noexcept;     // engine thread
  void settle(Napi::Env env);  // JavaScript thread, once
  void reject(Napi::Env env, const Failure& failure) { deferred_.Reject(to_error(env, failure).Value()); }

 protected:
  virtual void run(Cancel cancel) = 0;
  virtual void
  release() noexcept = 0;  // engine thread, after run: drops native references before the job travels home
  virtual Napi::Value result(Napi::Env env) = 0;

 private:
  Napi::Promise::Deferred deferred_;
  std::shared_ptr<CancelFlag> flag_;
  std::vector<Napi::ObjectReference> held_;
  std::optional<Failure> failure_;
};

// `run(Cancel)` makes a result on the engine thread; `convert(env, result)` turns it into the promise's
// value.
template <class Run, class Convert>
class CallJob final : public Job {
 public:
  using Result = std::invoke_result_t<Run&, Cancel>;
  CallJob(Napi::Env env, std::shared_ptr<CancelFlag> flag, Run run, Convert convert)
      : Job(env, std::move(flag)), run_(std::move(run)), convert_(std::move(convert)) {}

 private:
  void run(Cancel cancel) override { result_.emplace((*run_)(cancel)); }
  void release() noexcept override { run_.reset(); }
  Napi::Value result(Napi::Env env) override { return convert_(env, *result_); }

  std::optional<Run> run_;
  Convert convert_;
  std::optional<Result> result_;
};

class Engine {
 public:
  static std::shared_ptr<Engine> start(Napi::Env env);
  ~Engine();

  // JavaScript thread.
  Napi::Promise submit(Napi::Env env, std::unique_ptr<Job> job);
  // Any thread: runs `task` on the engine thread after what was submitted before; at once where the engine
  // has stopped.
  void post(std::function<void()> task);
  // JavaScript thread. Cancels the running job, waits for it, and rejects what is left in the queue.
  void stop(Napi::Env env);

 private:
  struct Item {
    std::unique_ptr<Job> job;
    std::function<void()> task;
  };
  using Self = std::shared_ptr<Engine>;
  static void come_home(Napi::Env env, Napi::Function, Self* self, void*);
  static void environment_closes(void* engine);
  using Home = Napi::TypedThreadSafeFunction<Self, void, &Engine::come_home>;

  Engine() = default;
  void loop();
  void join();
  void settle_finished(Napi::Env env);
  void settle_one(Napi::Env env, std::unique_ptr<Job> job);

  napi_env env_ = nullptr;
  Home home_;
  int64_t pending_ = 0;  // jobs submitted and not settled; JavaScript thread

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> queue_;
  std::deque<std::unique_ptr<Job>> finished_;
  Job* running_ = nullptr;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace duokv::addon
