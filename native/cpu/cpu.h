// The CPU backend: one file per operation, each a plain function of the device and its argument struct.
// Matrix products use oneDNN, vector code Highway (run-time dispatch), and all of them one thread pool per
// device.
#pragma once

#include "ops/ops.h"

namespace duokv::cpu {

// The backend's table of functions.
const ops::OpTable& op_table();

}  // namespace duokv::cpu
