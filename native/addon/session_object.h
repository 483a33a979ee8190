#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "addon/model_object.h"
#include "core/session.h"

namespace duokv::addon {

// What a session can be asked without waiting for the engine: its state after the last call that ended.
struct SessionSnapshot {
  SessionBytes bytes;
  std::vector<int64_t> lengths;  // [batch] positions stored
  std::vector<bool> exact;       // [batch]
  GraphStats graphs;
};

struct SessionSlot {
  std::unique_ptr<Session> session;  // engine thread
  std::optional<Failure> failure;    // engine thread: why there is none

  Session& get() {
    if (failure) throw Error(failure->code, failure->message);
    return *session;
  }
  void refresh();  // engine thread
  SessionSnapshot snapshot() const {
    std::lock_guard lock(mutex_);
    return snapshot_;
  }

 private:
  mutable std::mutex mutex_;
  SessionSnapshot snapshot_;
};

class SessionResource final : public Resource {
 public:
  explicit SessionResource(Napi::Env env, std::shared_ptr<ModelResource> model, int64_t batch)
      : Resource(env, model, "session"), model(std::move(model)), batch(batch) {}
  ~SessionResource() override { retire(); }

  const std::shared_ptr<ModelResource> model;
  const int64_t batch;
  const std::shared_ptr<SessionSlot> slot = std::make_shared<SessionSlot>();

 protected:
  std::function<void()> release() override {
    return [slot = slot] { slot->session.reset(); };
  }
  int64_t bytes() const override { return slot->snapshot().bytes.reserved; }
};

// A session. JavaScript: disposed, prefill(rows, counts, tokens, documentIds, schedule, suffix,
// cancellation), decode(rows, tokens, documentIds, cancellation), draw(rows, counts, tokens, settings,
// schedule, suffix, cancellation), reset(rows), readCache(name, row), state(), dispose().
class SessionObject : public Napi::ObjectWrap<SessionObject> {
 public:
  static void define(Napi::Env env);
  // model.createSession(batch, capacity, precision): { session, ready }, as for trainers.
  static Napi::Value create(const Napi::CallbackInfo& info, const std::shared_ptr<ModelResource>& model);

  explicit SessionObject(const Napi::CallbackInfo& info);

 private:
  Napi::Value prefill(const Napi::CallbackInfo& info);
  Napi::Value decode(const Napi::CallbackInfo& info);
  Napi::Value draw(const Napi::CallbackInfo& info);
  Napi::Value reset(const Napi::CallbackInfo& info);
  Napi::Value read_cache(const Napi::CallbackInfo& info);
  Napi::Value state(const Napi::CallbackInfo& info);
  void dispose(const Napi::CallbackInfo& info);
  Napi::Value is_disposed(const Napi::CallbackInfo& info);

  std::shared_ptr<SessionResource> resource_;
};

}  // namespace duokv::addon
