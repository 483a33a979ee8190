// Sums of device memory over the ranks of a group, by the transport that fits the backend.
#pragma once

#include <memory>

#include "dist/collective.h"

namespace duokv::dist {

class DeviceSum {
 public:
  // Collective. Throws ERR_DISTRIBUTED where nothing here can sum this backend's memory.
  DeviceSum(std::shared_ptr<Collective> group, const ops::OpTable& backend, ops::Device* device);
  ~DeviceSum();
  DeviceSum(const DeviceSum&) = delete;
  DeviceSum& operator=(const DeviceSum&) = delete;

  // x[0..n) = its sum over all ranks, the same bits on each, once the work queued on the device before has
  // run. Begins it only: x stays as it is until finish().
  void begin(float* x, int64_t n);
  // Waits for all that was begun. Throws ERR_DISTRIBUTED where a rank fails meanwhile, or `stop` is set.
  void finish(Stop stop = nullptr);

 private:
  void check(ops::Status status);

  std::shared_ptr<Collective> group_;
  const TransportTable* table_ = nullptr;  // null: a group of one
  Transport* transport_ = nullptr;
};

}  // namespace duokv::dist
