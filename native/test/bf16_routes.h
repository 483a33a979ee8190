// The ways to multiply BF16 values on this processor.
#pragma once

#include "cpu/bf16.h"

namespace duokv::test {

// Calls body(what) for both ways to multiply BF16 values: pairs of them by one instruction, where the
// processor has it, and as FP32.
template <class Body>
void by_each_bf16_route(Body&& body) {
  if (cpu::has_bf16_dot()) body("BF16 pairs");
  cpu::allow_bf16_dot_for_test(false);
  body("BF16 as FP32");
  cpu::allow_bf16_dot_for_test(true);
}

}  // namespace duokv::test
