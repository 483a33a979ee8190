// All of the emulator that a kernel file sees; `primitives.cuh` includes it where the compiler is not nvcc.
#pragma once

#include "cuda/emulator/device.h"
#include "cuda/emulator/language.h"
#include "cuda/emulator/runtime.h"
#include "cuda/emulator/tensor_core.h"
