// The promise every operation makes: the same bits for any number of threads.
#pragma once

#include <string>
#include <vector>

#include "test/harness.h"

namespace duokv::test {

// `compute` runs the operation on a device and returns what it wrote.
template <class Compute>
void expect_same_for_any_threads(const std::string& what, Compute&& compute) {
  const OpenDevice one(1);
  const auto expected = compute(static_cast<ops::Device*>(one));
  for (int32_t threads : {2, 3}) {
    const OpenDevice several(threads);
    expect_bitwise(what + " on " + std::to_string(threads) + " threads",
                   compute(static_cast<ops::Device*>(several)), expected);
  }
}

}  // namespace duokv::test
