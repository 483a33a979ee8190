#include "addon/group_object.h"

#include <dlfcn.h>

#include <algorithm>
#include <vector>

#include "addon/arguments.h"
#include "addon/backends.h"
#include "addon/environment.h"
#include "addon/wrapping.h"
#include "cpu/thread_pool.h"
#include "dist/libraries.h"

namespace duokv::addon {
namespace {

constexpr napi_type_tag kTag = {0x2f70c51be89a4d36, 0x8be1964f03d7a25c};

Napi::Object receiver(const Napi::CallbackInfo& info) {
  return info.This().IsObject() ? info.This().As<Napi::Object>() : Napi::Object::New(info.Env());
}

// The library beside this one.
std::string mpi_library() {
  Dl_info place{};
  dladdr(reinterpret_cast<const void*>(&mpi_library), &place);
  const std::string path = place.dli_fname == nullptr ? "" : place.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + "duokv_mpi.so";
}

// NCCL is part of the CUDA backend's library, which may be missing or of no use here.
dist::Finding find_nccl() {
  try {
    return dist::find_nccl(backend_table("cuda"));
  } catch (const Error& error) {
    return {false, "", "", error.what()};
  }
}

// Leaves the group; its calls have ended, or are about to.
void leave(GroupSlot& slot) {
  if (slot.group == nullptr) return;
  try {
    slot.group->close();
  } catch (const Error&) {
    // Nobody is left to tell.
  }
}

}  // namespace

GroupResource::~GroupResource() {
  retire();
  engine()->stop(env());
}

std::function<void()> GroupResource::release() {
  return [slot = slot] { leave(*slot); };
}

void GroupObject::define(Napi::Env env) {
  Environment::of(env).group = Napi::Persistent(DefineClass(
      env, "NativeGroup",
      {InstanceMethod<&GroupObject::sum>("sum"), InstanceMethod<&GroupObject::broadcast>("broadcast"),
       InstanceMethod<&GroupObject::fail>("fail"), InstanceMethod<&GroupObject::close>("close")}));
}

Napi::Value GroupObject::join(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    std::function<std::shared_ptr<dist::Collective>()> join;
    if (is_absent(info[0])) {
      join = [] { return dist::Collective::join_mpi(mpi_library()); };
    } else {
      const Napi::Object address = to_object(info[0], "address");
      const auto integer = [&](const char* key) {
        return static_cast<int>(to_integer(address.Get(key), key));
      };
      join = [host = to_text(address.Get("host"), "host"), port = integer("port"), rank = integer("rank"),
              size = integer("size")] { return dist::Collective::join_at(host, port, rank, size); };
    }
    auto resource = std::make_shared<GroupResource>(env, Engine::start(env));
    return resource->call(
        env, receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource->slot, join = std::move(join)](Cancel) {
          slot->group = join();
          return Done{};
        },
        [resource](Napi::Env e, Done&) { return wrap(e, Environment::of(e).group, resource); });
  });
}

Napi::Value GroupObject::find_libraries(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    const auto to_object = [env](const dist::Finding& finding) {
      Napi::Object object = Napi::Object::New(env);
      object.Set("found", finding.found);
      object.Set("version", finding.version);
      object.Set("path", finding.path);
      object.Set("why", finding.why);
      return object;
    };
    Napi::Object result = Napi::Object::New(env);
    result.Set("mpi", to_object(dist::find_mpi(mpi_library())));
    result.Set("nccl", to_object(find_nccl()));
    return result;
  });
}

std::shared_ptr<GroupResource> GroupObject::resource_of(Napi::Value value) {
  if (!value.IsObject() || !value.As<Napi::Object>().CheckTypeTag(&kTag))
    throw Error("ERR_ARGUMENT", "group must be a Group");
  const std::shared_ptr<GroupResource>& resource = Unwrap(value.As<Napi::Object>())->resource_;
  resource->require_live();
  return resource;
}

GroupObject::GroupObject(const Napi::CallbackInfo& info)
    : ObjectWrap(info), resource_(unwrap<GroupResource>(info, "joinGroup")) {
  const Napi::Object self = info.This().As<Napi::Object>();
  self.TypeTag(&kTag);
  const dist::Collective& group = *resource_->slot->group;
  self.Set("rank", group.rank());
  self.Set("size", group.size());
  self.Set("localRank", group.local_rank());
  self.Set("threads", std::max(1, cpu::usable_cpus() / group.sharing_cpus()));
  self.Set("description", group.description());
}

// Resolves to a Float64Array.
Napi::Value GroupObject::sum(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    resource_->require_live();
    if (!info[0].IsTypedArray() || info[0].As<Napi::TypedArray>().TypedArrayType() != napi_float64_array)
      throw Error("ERR_ARGUMENT", "values must be a Float64Array");
    const auto given = info[0].As<Napi::Float64Array>();
    std::vector<double> values(given.Data(), given.Data() + given.ElementLength());
    return resource_->call(
        env, receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot, values = std::move(values)](Cancel cancel) mutable {
          slot->group->sum(values.data(), static_cast<int64_t>(values.size()), cancel);
          return std::move(values);
        },
        [](Napi::Env e, const std::vector<double>& result) {
          Napi::Float64Array array = Napi::Float64Array::New(e, result.size());
          std::copy(result.begin(), result.end(), array.Data());
          return array;
        });
  });
}

// Resolves to rank `root`'s bytes, a Uint8Array.
Napi::Value GroupObject::broadcast(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    resource_->require_live();
    if (!info[0].IsTypedArray() || info[0].As<Napi::TypedArray>().TypedArrayType() != napi_uint8_array)
      throw Error("ERR_ARGUMENT", "bytes must be a Uint8Array");
    const auto given = info[0].As<Napi::Uint8Array>();
    const int64_t root = to_integer(info[1], "root");
    if (root < 0 || root >= resource_->slot->group->size())
      throw Error("ERR_ARGUMENT", "root is " + std::to_string(root) + "; it must be a rank of the group");
    std::vector<char> bytes(given.Data(), given.Data() + given.ElementLength());
    return resource_->call(
        env, receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot, bytes = std::move(bytes), root](Cancel cancel) mutable {
          slot->group->broadcast(bytes, static_cast<int>(root), cancel);
          return std::move(bytes);
        },
        [](Napi::Env e, const std::vector<char>& result) {
          Napi::Uint8Array array = Napi::Uint8Array::New(e, result.size());
          std::copy(result.begin(), result.end(), array.Data());
          return array;
        });
  });
}

// At once, also while another call of the group waits.
void GroupObject::fail(const Napi::CallbackInfo& info) {
  guarded(info.Env(), [&] {
    if (!resource_->disposed()) resource_->slot->group->fail(to_text(info[0], "reason"));
  });
}

// Resolves when all ranks have left; rejects where one failed.
Napi::Value GroupObject::close(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    resource_->require_live();
    const Napi::Promise closed = resource_->call(
        env, receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot](Cancel) {
          slot->group->close();
          return Done{};
        },
        Undefined());
    return closed;
  });
}

}  // namespace duokv::addon
