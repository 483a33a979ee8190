// Every instruction set that was compiled in and that this processor has.
#pragma once

#include <hwy/targets.h>

#include <cstdint>
#include <string>

namespace duokv::test {

// Calls use(name) while operations run with one instruction set, for each of them; the baseline comes first.
template <class Use>
void for_each_instruction_set(Use&& use) {
  for (const int64_t target : {static_cast<int64_t>(HWY_STATIC_TARGET), static_cast<int64_t>(HWY_AVX2),
                               static_cast<int64_t>(HWY_AVX3)}) {
    if ((hwy::SupportedTargets() & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().DeInit();
    use(std::string(hwy::TargetName(target)));
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
}

}  // namespace duokv::test
