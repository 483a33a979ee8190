#pragma once

#include <memory>
#include <optional>

#include "addon/resource.h"
#include "dist/collective.h"

namespace duokv::addon {

struct GroupSlot {
  std::shared_ptr<dist::Collective> group;  // its calls are safe on any thread
};

class GroupResource final : public Resource {
 public:
  using Resource::Resource;
  ~GroupResource() override;

  const std::shared_ptr<GroupSlot> slot = std::make_shared<GroupSlot>();

 protected:
  std::function<void()> release() override;
  int64_t bytes() const override { return 0; }
};

// The ranks of a data-parallel run. JavaScript: rank, size, localRank, threads, description, sum(values),
// broadcast(bytes, root), fail(reason), close().
class GroupObject : public Napi::ObjectWrap<GroupObject> {
 public:
  static void define(Napi::Env env);
  // The module's function joinGroup(address): Promise<Group>; `address` undefined: through MPI, else { host,
  // port, rank, size }.
  static Napi::Value join(const Napi::CallbackInfo& info);
  // The module's function findLibraries(): { mpi, nccl }, each { found, version, path, why }: what joinGroup
  // and the trainers of its groups would use.
  static Napi::Value find_libraries(const Napi::CallbackInfo& info);
  // Throws ERR_ARGUMENT where `value` is no group, ERR_DISPOSED where it was closed.
  static std::shared_ptr<GroupResource> resource_of(Napi::Value value);

  explicit GroupObject(const Napi::CallbackInfo& info);

 private:
  Napi::Value sum(const Napi::CallbackInfo& info);
  Napi::Value broadcast(const Napi::CallbackInfo& info);
  void fail(const Napi::CallbackInfo& info);
  Napi::Value close(const Napi::CallbackInfo& info);

  std::shared_ptr<GroupResource> resource_;
};

}  // namespace duokv::addon
