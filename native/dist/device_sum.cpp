#include "dist/device_sum.h"

#include <dlfcn.h>

#include <string>
#include <vector>

#include "core/error.h"

namespace duokv::dist {
namespace {

// Between two looks at the other ranks.
constexpr int32_t kWaitMilliseconds = 20;

// The CUDA backend's library has NCCL's calls beside its op table.
const TransportTable* find_nccl(const ops::OpTable& backend) {
  Dl_info place{};
  if (dladdr(&backend, &place) == 0) return nullptr;
  void* library = dlopen(place.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  const auto table = reinterpret_cast<const TransportTable* (*)()>(dlsym(library, "duokv_nccl_table"));
  return table == nullptr ? nullptr : table();
}

const TransportTable& find_transport(const Collective& group, const ops::OpTable& backend) {
  const std::string name = backend.backend;
  if (name == "cpu") {
    if (group.mpi() != nullptr) return group.mpi()->transport;
    throw Error("ERR_DISTRIBUTED",
                "ranks on the CPU sum their gradients through MPI: start them with mpirun or srun");
  }
  const TransportTable* nccl = find_nccl(backend);
  if (nccl != nullptr && nccl->version == kTransportVersion) return *nccl;
  throw Error("ERR_DISTRIBUTED", "this build's " + name + " backend has no NCCL");
}

}  // namespace

DeviceSum::DeviceSum(std::shared_ptr<Collective> group, const ops::OpTable& backend, ops::Device* device)
    : group_(std::move(group)) {
  if (group_->size() == 1) return;
  table_ = &find_transport(*group_, backend);
  std::vector<char> id(kIdBytes);
  if (group_->rank() == 0) check(table_->make_id(id.data()));
  group_->broadcast(id, 0);
  check(table_->open(device, id.data(), group_->rank(), group_->size(), &transport_));
  try {
    finish();
  } catch (...) {
    table_->close(transport_);
    throw;
  }
}

DeviceSum::~DeviceSum() {
  if (table_ != nullptr) table_->close(transport_);
}

void DeviceSum::begin(float* x, int64_t n) {
  if (table_ != nullptr) check(table_->sum(transport_, x, n));
}

void DeviceSum::finish(Stop stop) {
  if (table_ == nullptr) return;
  for (int32_t complete = 0; !complete;) {
    check(table_->wait(transport_, kWaitMilliseconds, &complete));
    if (complete) return;
    group_->check();
    if (stop != nullptr && stop->load(std::memory_order_relaxed))
      throw Error("ERR_DISTRIBUTED", "told to stop while it waited for gradients");
  }
}

void DeviceSum::check(ops::Status status) {
  if (status != ops::kOk) throw Error("ERR_DISTRIBUTED", table_->last_error());
}

}  // namespace duokv::dist
