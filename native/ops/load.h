// Backends that are libraries of their own.
#pragma once

#include <string>

#include "ops/ops.h"

namespace duokv::ops {

// Opens the library at `path` and returns the op table that its `duokv_cuda_op_table` function hands out. The
// library stays open. Throws ERR_DEVICE_UNAVAILABLE with the loader's reason where it cannot be opened, is no
// backend, or was built for another op list.
const OpTable& load_backend(const std::string& path);

}  // namespace duokv::ops
