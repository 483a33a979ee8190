// For every line of input a line with the rate at which all threads read memory at that moment, GB/s.
#include <cstdio>

#include "bench/ceilings.h"
#include "test/harness.h"

int main() {
  duokv::bench::Ceilings ceilings(duokv::test::device());
  for (int c; (c = std::getchar()) != EOF;) {
    if (c != '\n') continue;
    ceilings.read();  // wakes the threads
    std::printf("%.3f\n", ceilings.read() * 1e-9);
    std::fflush(stdout);
  }
}
