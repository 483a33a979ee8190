// What the machine can do, against which operations are held: rates of all threads of a device together.
#pragma once

#include <vector>

#include "cpu/device.h"

namespace duokv::bench {

class Ceilings {
 public:
  explicit Ceilings(ops::Device* device);

  // FP32 operations a second (2 per fused multiply-add) of chains that stay in registers; one sample of about
  // 10 ms.
  double flops();

  // Bytes a second of reading 64 MiB; one sample. Each takes another quarter of 256 MiB, which no cache
  // holds.
  double read();

 private:
  ops::Device* device_;
  std::vector<float> memory_;
  int64_t round_ = 0;
};

}  // namespace duokv::bench
