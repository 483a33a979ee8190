// The backends that this build or a library beside it provides.
#pragma once

#include <string>

#include "ops/ops.h"

namespace duokv::addon {

// The op table of `cpu`, which is part of the addon, or of `cuda`, a library of its own: the file that
// DUOKV_CUDA_LIBRARY names, else libduokv_cuda.so beside the addon, or libduokv_cuda_emulator.so where
// DUOKV_CUDA is `emulator`. Throws ERR_DEVICE_UNAVAILABLE with the reason where there is none.
const ops::OpTable& backend_table(const std::string& backend);

}  // namespace duokv::addon
