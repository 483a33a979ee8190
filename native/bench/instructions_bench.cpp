// The hot operations once each, on one thread and as AVX2, for callgrind: it counts what `measured` runs and
// dumps after every call. Prints the operations' names in the order of the dumps. scripts/instructions.mjs is
// the caller.
#include <hwy/highway.h>
#include <hwy/nanobenchmark.h>

#include <cstdio>

#include "bench/operations.h"
#include "test/harness.h"

// Called by Highway's library when it is loaded, and timed there with RDTSCP, which valgrind refuses where
// the processor does not announce it. This program's own comes first; nothing here measures time.
__attribute__((visibility("default"))) uint64_t hwy::platform::TimerResolution() { return 1; }

extern "C" __attribute__((noinline, visibility("default"))) void duokv_measured(
    const std::function<void(int64_t)>& call) {
  call(0);
}

int main() {
#if HWY_ARCH_X86
  hwy::SetSupportedTargetsForTest(HWY_AVX2);
#endif
  const duokv::test::OpenDevice device(1);
  for (const auto& operation : duokv::bench::operations(device, {48, 512, 1})) {
    const auto call = operation.prepare();
    duokv_measured(call);
    std::printf("%s, %s\n", operation.name.c_str(), operation.mode.c_str());
  }
  // Asked after every call. What never changes was read when it was asked for the first time.
  const auto ask = [&](int64_t) {
    duokv::ops::DeviceInfo info;
    duokv::test::table().info(device, &info);
  };
  ask(0);
  duokv_measured(ask);
  std::printf("device info\n");
}
