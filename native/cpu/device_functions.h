// The table's entries that concern the device itself; the arguments are those of ops::OpTable.
#pragma once

#include "ops/ops.h"

namespace duokv::cpu {

ops::Status open(const char* options, int32_t threads, ops::Device** device);
ops::Status open_planning(ops::Device* device, ops::Device** planning);
void close(ops::Device* device);
ops::Status info(ops::Device* device, ops::DeviceInfo* info);

ops::Status allocate(ops::Device* device, int64_t bytes, void** memory);
void release(ops::Device* device, void* memory);
ops::Status upload(ops::Device* device, void* dst, const void* host_src, int64_t bytes);
ops::Status download(ops::Device* device, void* host_dst, const void* src, int64_t bytes);
ops::Status copy(ops::Device* device, void* dst, const void* src, int64_t bytes);
ops::Status zero(ops::Device* device, void* dst, int64_t bytes);

}  // namespace duokv::cpu
