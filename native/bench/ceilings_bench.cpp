// The machine's ceilings as one JSON line, every sample: {"gflops":[…],"gbytes":[…],"threads":N}.
//   ceilings_bench [samples of each]
#include <cstdio>
#include <cstdlib>

#include "bench/ceilings.h"
#include "test/harness.h"

namespace {

void print(const char* name, const std::vector<double>& samples) {
  std::printf("\"%s\":[", name);
  for (size_t i = 0; i < samples.size(); ++i) std::printf("%s%.2f", i == 0 ? "" : ",", samples[i] * 1e-9);
  std::printf("],");
}

}  // namespace

int main(int argc, char** argv) {
  duokv::ops::Device* device = duokv::test::device();
  duokv::bench::Ceilings ceilings(device);
  const int samples = argc > 1 ? std::atoi(argv[1]) : 20;
  std::vector<double> flops, read;
  for (int i = 0; i < samples; ++i) {
    flops.push_back(ceilings.flops());
    read.push_back(ceilings.read());
  }
  std::printf("{");
  print("gflops", flops);
  print("gbytes", read);
  std::printf("\"threads\":%d}\n", device->pool.threads());
}
