#include "dist/device_sum.h"

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "dist/libraries.h"

namespace duokv::dist {
namespace {

// Between two looks at the other ranks.
constexpr int32_t kWaitMilliseconds = 20;
constexpr std::chrono::milliseconds kNewsLimit{500}, kNewsPoll{10};

const TransportTable& find_transport(const Collective& group, const ops::OpTable& backend) {
  const std::string name = backend.backend;
  if (name == "cpu") {
    if (group.mpi() != nullptr) return group.mpi()->transport;
    throw Error("ERR_DISTRIBUTED",
                "ranks on the CPU sum their gradients through MPI: start them with mpirun or srun");
  }
  if (const TransportTable* nccl = nccl_table(backend); nccl != nullptr) return *nccl;
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
  if (status == ops::kOk) return;
  const std::string message = table_->last_error();
  // The transport may notice first that a rank is gone; the group says which one.
  for (auto waited = std::chrono::milliseconds(0); waited < kNewsLimit; waited += kNewsPoll) {
    group_->check();
    std::this_thread::sleep_for(kNewsPoll);
  }
  throw Error("ERR_DISTRIBUTED", message);
}

}  // namespace duokv::dist
