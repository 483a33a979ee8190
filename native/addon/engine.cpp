#include "addon/engine.h"

namespace duokv::addon {
namespace {

Failure stopped(StopReason reason) {
  if (reason == StopReason::Aborted) return {kAbortCode, "the call was aborted"};
  return {"ERR_DISPOSED", "the object was disposed before the call ended"};
}

}  // namespace

void Job::execute() noexcept {
  try {
    if (flag_->raised()) throw Error(kAbortCode, "cancelled before it began");
    run(flag_->poll());
  } catch (...) {
    failure_ = current_failure();
    // The core only knows that it was told to stop; the flag knows why.
    if (failure_->code == kAbortCode) failure_ = stopped(flag_->reason());
  }
  release();
}

void Job::settle(Napi::Env env) {
  if (failure_) return reject(env, *failure_);
  try {
    deferred_.Resolve(result(env));
  } catch (const Napi::Error& error) {
    deferred_.Reject(error.Value());
  } catch (...) {
    reject(env, current_failure());
  }
}

std::shared_ptr<Engine> Engine::start(Napi::Env env) {
  std::shared_ptr<Engine> engine(new Engine);
  engine->env_ = env;
  // The function's context keeps the engine alive until Node has closed the function.
  engine->home_ = Home::New(
      env, "duokv engine", 0, 1, new Self(engine), [](Napi::Env, void*, Self* self) { delete self; },
      static_cast<void*>(nullptr));
  engine->home_.Unref(env);
  engine->thread_ = std::thread([raw = engine.get()] { raw->loop(); });
  // After the function was made, so that this hook runs before the function's own.
  napi_add_env_cleanup_hook(env, environment_closes, engine.get());
  return engine;
}

Engine::~Engine() { join(); }

void Engine::loop() {
  for (;;) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      item = std::move(queue_.front());
      queue_.pop_front();
      running_ = item.job.get();
    }
    if (item.task) item.task();
    if (item.job == nullptr) continue;
    item.job->execute();
    {
      std::lock_guard lock(mutex_);
      running_ = nullptr;
      finished_.push_back(std::move(item.job));
    }
    // A closing environment refuses the call; its cleanup hook then frees the finished jobs.
    home_.NonBlockingCall();
  }
}

Napi::Promise Engine::submit(Napi::Env env, std::unique_ptr<Job> job) {
  Napi::Promise promise = job->promise();
  {
    std::lock_guard lock(mutex_);
    if (stopping_) {
      job->reject(env, stopped(StopReason::Disposed));
      return promise;
    }
    queue_.push_back({std::move(job), {}});
  }
  if (pending_++ == 0) home_.Ref(env);
  wake_.notify_one();
  return promise;
}

void Engine::post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (!stopping_) {
      queue_.push_back({nullptr, std::move(task)});
      wake_.notify_one();
      return;
    }
  }
  task();
}

void Engine::stop(Napi::Env env) {
  if (!thread_.joinable()) return;
  join();
  napi_remove_env_cleanup_hook(env_, environment_closes, this);
  settle_finished(env);
  for (auto& item : queue_)
    if (item.job) {
      item.job->flag().raise(StopReason::Disposed);
      item.job->execute();
      settle_one(env, std::move(item.job));
    }
  queue_.clear();
  home_.Release();
}

void Engine::join() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    if (running_ != nullptr) running_->flag().raise(StopReason::Disposed);
  }
  wake_.notify_one();
  thread_.join();
  // What was handed over to be freed is freed here: no other thread uses the device any more.
  for (auto& item : queue_)
    if (item.task) item.task();
}

void Engine::environment_closes(void* data) {
  auto* engine = static_cast<Engine*>(data);
  if (!engine->thread_.joinable()) return;
  engine->join();
  // No JavaScript can run any more: promises stay as they are, references go.
  engine->finished_.clear();
  engine->queue_.clear();
  engine->home_.Release();
}

void Engine::come_home(Napi::Env env, Napi::Function, Self* self, void*) {
  if (static_cast<napi_env>(env) == nullptr) return;
  Self engine = *self;  // settling the last job may close the function and with it drop *self
  engine->settle_finished(env);
}

void Engine::settle_finished(Napi::Env env) {
  std::deque<std::unique_ptr<Job>> finished;
  {
    std::lock_guard lock(mutex_);
    finished.swap(finished_);
  }
  for (auto& job : finished) settle_one(env, std::move(job));
}

void Engine::settle_one(Napi::Env env, std::unique_ptr<Job> job) {
  Napi::HandleScope scope(env);
  try {
    job->settle(env);
  } catch (const Napi::Error&) {
    // The environment is being terminated: its promises cannot be settled any more, and nobody waits for
    // them.
  }
  job.reset();
  if (--pending_ == 0 && thread_.joinable()) home_.Unref(env);
}

}  // namespace duokv::addon
