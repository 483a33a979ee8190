// Times of the hot operations at the 126M shapes beside the machine's ceilings, which are sampled between the
// calls. One JSON line per operation: every time in milliseconds, the rates of the median, and the roofline's
// time over it.
//   operations_bench [part of an operation's name] …
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "bench/ceilings.h"
#include "bench/operations.h"
#include "cpu/bf16.h"
#include "test/harness.h"

namespace {

using namespace duokv::bench;

constexpr double kSecondsEach = 0.4;
constexpr int kFewest = 3, kMost = 200;

double milliseconds(const std::function<void(int64_t)>& call, int64_t i) {
  const auto start = std::chrono::steady_clock::now();
  call(i);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void run(const Operation& operation, Ceilings& ceilings) {
  const auto call = operation.prepare();
  call(0);
  std::vector<double> times;
  double flops = 0, read = 0, spent = 0;
  for (int i = 0; i < kFewest || (spent < kSecondsEach * 1e3 && i < kMost); ++i) {
    times.push_back(milliseconds(call, i));
    spent += times.back();
    if (i >= kFewest && i % 32 != 0) continue;
    flops = std::max(flops, ceilings.flops());
    read = std::max(read, ceilings.read());
  }
  std::vector<double> sorted = times;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<int64_t>(sorted.size() / 2), sorted.end());
  const double median = sorted[sorted.size() / 2] * 1e-3;
  // Instructions for pairs of BF16 values do twice the operations.
  if (operation.mode == "bf16" && duokv::cpu::has_bf16_dot()) flops *= 2;
  const double roof = std::max(operation.flops / flops, operation.bytes / read);
  std::printf("{\"operation\":\"%s\",\"mode\":\"%s\",\"gflops\":%.2f,\"gbytes\":%.2f,",
              operation.name.c_str(), operation.mode.c_str(), operation.flops / median * 1e-9,
              operation.bytes / median * 1e-9);
  std::printf("\"ceiling_gflops\":%.2f,\"ceiling_gbytes\":%.2f,\"share\":%.3f,\"ms\":[", flops * 1e-9,
              read * 1e-9, roof / median);
  for (size_t i = 0; i < times.size(); ++i) std::printf("%s%.4f", i == 0 ? "" : ",", times[i]);
  std::printf("]}\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  duokv::ops::Device* device = duokv::test::device();
  Ceilings ceilings(device);
  for (const Operation& operation : operations(device, {2048, 32768, int64_t{256} << 20})) {
    const bool wanted = argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char* part) {
                          return operation.name.find(part) != std::string::npos;
                        });
    if (wanted) run(operation, ceilings);
  }
}
