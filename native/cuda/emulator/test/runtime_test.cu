// The emulated runtime: launches and their limits, streams, events, copies, graphs and their capture, error
// codes.
#include <functional>
#include <thread>

#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

__global__ void set_kernel(int* x, int value) { x[threadIdx.x] = value; }
__global__ void append_kernel(int* x, int digit) { x[0] = x[0] * 10 + digit; }
__global__ void copy_kernel(const int* x, int* y) { y[threadIdx.x] = x[threadIdx.x]; }

void expect_error(cudaError_t got, cudaError_t expected, const char* what) {
  expect(got == expected, "%s: %s, expected %s", what, cudaGetErrorName(got), cudaGetErrorName(expected));
}

int only(const Array<int>& array) { return array.get()[0]; }

// ---------------------------------------------------------------- launches and memory

DUOKV_CASE(launches_are_checked) {
  Array<int> x(1024);
  const auto launch = [&](dim3 grid, dim3 block, size_t shared) {
    return DUOKV_LAUNCH(set_kernel, grid, block, shared, stream(), x.data(), 1);
  };
  expect_error(launch(1, 1025, 0), cudaErrorInvalidConfiguration, "1025 threads");
  expect_error(launch(1, 0, 0), cudaErrorInvalidConfiguration, "no threads");
  expect_error(launch(0, 32, 0), cudaErrorInvalidConfiguration, "no blocks");
  expect_error(launch(dim3(1, 65536), 32, 0), cudaErrorInvalidConfiguration, "a grid too high");
  expect_error(launch(1, 32, 48 * 1024), cudaSuccess, "48 KiB");
  expect_error(launch(1, 32, 48 * 1024 + 1), cudaErrorInvalidValue, "more than 48 KiB");
  expect_error(cudaPeekAtLastError(), cudaErrorInvalidValue, "the last error");
  expect_error(cudaGetLastError(), cudaErrorInvalidValue, "the last error");
  expect_error(cudaGetLastError(), cudaSuccess, "the last error, taken once");
  for (const auto& [architecture, limit] :
       {std::pair(simt::Architecture::kSm80, 163), std::pair(simt::Architecture::kSm90, 227)}) {
    simt::set_architecture(architecture);
    const auto raise = [](int bytes) {
      return cudaFuncSetAttribute(set_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    };
    expect_error(raise(limit * 1024 + 1), cudaErrorInvalidValue, "past the opt-in limit");
    expect_error(raise(limit * 1024), cudaSuccess, "the opt-in limit");
    expect_error(launch(1, 32, static_cast<size_t>(limit) * 1024), cudaSuccess,
                 "a launch at the opt-in limit");
    expect_error(raise(0), cudaSuccess, "lowering it");
  }
}

DUOKV_CASE(memory_is_bounded_and_checked) {
  size_t free = 0, total = 0, free_after = 0;
  check(cudaMemGetInfo(&free, &total));
  simt::set_device_memory(1 << 20);
  int* memory = nullptr;
  expect_error(cudaMalloc(&memory, 2 << 20), cudaErrorMemoryAllocation, "more than there is");
  expect(memory == nullptr, "a failed allocation left a pointer");
  check(cudaMalloc(&memory, 1 << 20));
  int* second = nullptr;
  expect_error(cudaMalloc(&second, 1), cudaErrorMemoryAllocation, "one byte more");
  expect_error(cudaFree(memory + 1), cudaErrorInvalidValue, "freeing the inside");
  check(cudaFree(memory));
  expect_error(cudaFree(memory), cudaErrorInvalidValue, "freeing twice");
  simt::set_device_memory(total);
  check(cudaMemGetInfo(&free_after, &total));
  expect(free == free_after, "%zu bytes free, %zu before", free_after, free);
}

DUOKV_CASE(copies_are_checked) {
  const std::vector<int> host = {1, 2, 3, 4};
  std::vector<int> back(4);
  Array<int> x(4), y(4);
  expect_error(cudaMemcpy(x.data(), host.data(), 16, cudaMemcpyDeviceToHost), cudaErrorInvalidMemcpyDirection,
               "the wrong direction");
  check(cudaMemcpy(x.data(), host.data(), 16, cudaMemcpyDefault));
  check(cudaMemcpy(y.data(), x.data(), 16, cudaMemcpyDeviceToDevice));
  check(cudaMemset(y.data() + 1, 0xFF, 4));
  check(cudaMemcpy(back.data(), y.data(), 16, cudaMemcpyDeviceToHost));
  expect_equal("copies", back, {1, -1, 3, 4});
  expect_error(cudaMemcpy(x.data(), host.data(), 20, cudaMemcpyHostToDevice), cudaErrorIllegalAddress,
               "past the allocation");
  expect_error(cudaMalloc(reinterpret_cast<void**>(&back), 4), cudaErrorIllegalAddress,
               "any call after a fault");
  simt::reset_device();
}

DUOKV_CASE(reading_back_what_nobody_wrote_is_reported) {
  int value = 0;
  Array<int> x(1);
  expect_error(cudaMemcpy(&value, x.data(), 4, cudaMemcpyDeviceToHost), cudaErrorLaunchFailure,
               "an uninitialised copy");
  simt::reset_device();
}

// ---------------------------------------------------------------- streams and events

DUOKV_CASE(a_stream_keeps_its_order) {
  Array<int> x(std::vector<int>{0});
  for (int digit = 1; digit <= 9; ++digit)
    check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, stream(), x.data(), digit));
  expect(only(x) == 123456789, "%d", only(x));
}

DUOKV_CASE(events_order_streams) {
  Stream a, b;
  cudaEvent_t event;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  Array<int> x(std::vector<int>{0});
  stream().synchronize();
  check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, a, x.data(), 1));
  check(cudaEventRecord(event, a));
  check(cudaStreamWaitEvent(b, event));
  check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, b, x.data(), 2));
  check(cudaEventRecord(event, b));
  check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, b, x.data(), 3));
  check(cudaEventSynchronize(event));
  check(cudaEventQuery(event));
  b.synchronize();
  expect(only(x) == 123, "%d", only(x));
  check(cudaEventDestroy(event));
}

// Without an event both orders occur among some seeds.
DUOKV_CASE(unordered_streams_run_in_either_order) {
  bool seen[2] = {};
  for (uint64_t seed = 0; seed < 64; ++seed) {
    simt::set_seed(current_seed * 1000 + seed);
    Stream a, b;
    Array<int> x(std::vector<int>{0});
    stream().synchronize();
    check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, a, x.data(), 1));
    check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, b, x.data(), 2));
    check(cudaDeviceSynchronize());
    seen[only(x) == 21] = true;
  }
  expect(seen[0] && seen[1], "only one order was seen");
}

// The host reads pinned memory before it waits: some seeds show the old value.
DUOKV_CASE(host_code_that_does_not_wait_is_exposed) {
  bool early = false;
  int* pinned = nullptr;
  check(cudaMallocHost(&pinned, sizeof(int)));
  for (uint64_t seed = 0; seed < 64; ++seed) {
    simt::set_seed(current_seed * 1000 + seed);
    Array<int> x(std::vector<int>{7});
    *pinned = 0;
    check(cudaMemcpyAsync(pinned, x.data(), sizeof(int), cudaMemcpyDeviceToHost, stream()));
    early = early || *pinned == 0;
    stream().synchronize();
    expect(*pinned == 7, "%d after synchronising", *pinned);
  }
  expect(early, "the copy was always done at once");
  check(cudaFreeHost(pinned));
  expect_error(cudaFreeHost(&early), cudaErrorInvalidValue, "freeing other memory");
}

DUOKV_CASE(host_functions_run_in_order) {
  static int seen;
  seen = 0;
  check(cudaLaunchHostFunc(
      stream(), [](void* argument) { seen = *static_cast<int*>(argument); }, &failures));
  stream().synchronize();
  expect(seen == failures, "the function did not run");
}

// ---------------------------------------------------------------- graphs

cudaGraph_t capture(cudaStream_t s, const std::function<void()>& body) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), "begin capture");
  body();
  check(cudaStreamEndCapture(s, &graph), "end capture");
  return graph;
}

DUOKV_CASE(a_graph_keeps_parameters_and_reads_pointers_at_replay) {
  Array<int> x(std::vector<int>{5}), y(std::vector<int>{0});
  int value = 3;
  stream().synchronize();
  const cudaGraph_t graph = capture(stream(), [&] {
    check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, stream(), x.data(), value));
    check(DUOKV_LAUNCH(copy_kernel, 1, 1, 0, stream(), x.data(), y.data()));
  });
  value = 4;
  expect(only(x) == 5, "the captured kernel ran");
  cudaGraphExec_t executable;
  check(cudaGraphInstantiate(&executable, graph));
  size_t nodes = 0;
  check(cudaGraphGetNodes(graph, nullptr, &nodes));
  expect(nodes == 2, "%zu nodes", nodes);
  check(cudaGraphDestroy(graph));
  check(cudaGraphLaunch(executable, stream()));
  x.put({1});
  check(cudaGraphLaunch(executable, stream()));
  expect(only(y) == 13, "%d", only(y));
  check(cudaGraphExecDestroy(executable));
  expect_error(cudaGraphLaunch(executable, stream()), cudaErrorInvalidValue, "a destroyed graph");
}

DUOKV_CASE(a_graph_forks_and_joins) {
  Stream side;
  cudaEvent_t fork, join;
  check(cudaEventCreate(&fork));
  check(cudaEventCreate(&join));
  Array<int> x(std::vector<int>{0}), y(std::vector<int>{0});
  stream().synchronize();
  const auto body = [&](bool joined) {
    check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, stream(), x.data(), 1));
    check(cudaEventRecord(fork, stream()));
    check(cudaStreamWaitEvent(side, fork));
    check(DUOKV_LAUNCH(copy_kernel, 1, 1, 0, side, x.data(), y.data()));
    check(cudaEventRecord(join, side));
    if (joined) check(cudaStreamWaitEvent(stream(), join));
    check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, stream(), joined ? y.data() : x.data(), 2));
  };
  const cudaGraph_t graph = capture(stream(), [&] { body(true); });
  cudaGraphExec_t executable;
  check(cudaGraphInstantiate(&executable, graph));
  for (int i = 0; i < 8; ++i) {
    x.put({0});
    check(cudaGraphLaunch(executable, stream()));
    expect(only(y) == 12, "%d", only(y));
  }
  cudaGraph_t none;
  check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal));
  body(false);
  expect_error(cudaStreamEndCapture(stream(), &none), cudaErrorStreamCaptureUnjoined,
               "a fork that is not joined");
  check(cudaGraphDestroy(graph));
  check(cudaGraphExecDestroy(executable));
}

DUOKV_CASE(a_graph_is_updated_where_only_parameters_changed) {
  Array<int> x(std::vector<int>{0}), y(std::vector<int>{0});
  stream().synchronize();
  const auto record = [&](int digit) {
    return capture(stream(), [&] { check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, stream(), x.data(), digit)); });
  };
  const cudaGraph_t first = record(1), second = record(2);
  const cudaGraph_t other =
      capture(stream(), [&] { check(DUOKV_LAUNCH(set_kernel, 1, 1, 0, stream(), x.data(), 1)); });
  const cudaGraph_t longer = capture(stream(), [&] {
    check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, stream(), x.data(), 1));
    check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, stream(), y.data(), 1));
  });
  cudaGraphExec_t executable;
  cudaGraphExecUpdateResultInfo info;
  check(cudaGraphInstantiate(&executable, first));
  check(cudaGraphLaunch(executable, stream()));
  check(cudaGraphExecUpdate(executable, second, &info));
  check(cudaGraphLaunch(executable, stream()));
  expect(only(x) == 12, "%d", only(x));
  expect_error(cudaGraphExecUpdate(executable, other, &info), cudaErrorGraphExecUpdateFailure,
               "another kernel");
  expect(info.result == cudaGraphExecUpdateErrorFunctionChanged, "result %d", static_cast<int>(info.result));
  expect_error(cudaGraphExecUpdate(executable, longer, &info), cudaErrorGraphExecUpdateFailure,
               "another topology");
  expect(info.result == cudaGraphExecUpdateErrorTopologyChanged, "result %d", static_cast<int>(info.result));
  for (const cudaGraph_t graph : {first, second, other, longer}) check(cudaGraphDestroy(graph));
  check(cudaGraphExecDestroy(executable));
}

// A graph keeps the pointers of its capture, also when what they pointed to is gone.
DUOKV_CASE(a_graph_that_outlives_its_memory_is_reported) {
  cudaGraphExec_t executable;
  {
    Array<int> x(std::vector<int>{0});
    stream().synchronize();
    const cudaGraph_t graph =
        capture(stream(), [&] { check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, stream(), x.data(), 1)); });
    check(cudaGraphInstantiate(&executable, graph));
    check(cudaGraphDestroy(graph));
  }
  check(cudaGraphLaunch(executable, stream()));
  expect_error(cudaStreamSynchronize(stream()), cudaErrorIllegalAddress, "a replay on freed memory");
  simt::reset_device();
  check(cudaGraphExecDestroy(executable));
}

DUOKV_CASE(illegal_calls_end_a_capture) {
  Array<int> x(std::vector<int>{0});
  int host = 0;
  void* memory = nullptr;
  cudaEvent_t event;
  check(cudaEventCreate(&event));
  stream().synchronize();
  const auto refused = [&](cudaError_t expected, const char* what, const std::function<cudaError_t()>& call) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal));
    expect_error(call(), expected, what);
    expect_error(cudaStreamEndCapture(stream(), &graph), cudaErrorStreamCaptureInvalidated, what);
    expect(graph == nullptr, "%s: there is a graph", what);
  };
  const cudaError_t unsupported = cudaErrorStreamCaptureUnsupported;
  refused(unsupported, "cudaMalloc", [&] { return cudaMalloc(&memory, 4); });
  refused(unsupported, "synchronising the stream", [&] { return cudaStreamSynchronize(stream()); });
  refused(unsupported, "synchronising the device", [] { return cudaDeviceSynchronize(); });
  refused(unsupported, "querying the stream", [&] { return cudaStreamQuery(stream()); });
  refused(cudaErrorStreamCaptureImplicit, "a copy on the legacy stream",
          [&] { return cudaMemcpy(x.data(), &host, 4, cudaMemcpyDefault); });
  refused(unsupported, "a copy of pageable memory",
          [&] { return cudaMemcpyAsync(x.data(), &host, 4, cudaMemcpyDefault, stream()); });
  refused(cudaErrorCapturedEvent, "querying a captured event", [&] {
    check(cudaEventRecord(event, stream()));
    return cudaEventQuery(event);
  });
  cudaGraph_t graph = nullptr;
  expect_error(cudaStreamEndCapture(stream(), &graph), cudaErrorIllegalState, "ending what never began");
  expect_error(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal), unsupported,
               "capturing the legacy stream");
  check(DUOKV_LAUNCH(append_kernel, 1, 1, 0, stream(), x.data(), 4));
  expect(only(x) == 4, "the stream works no more after a refused capture");
}

DUOKV_CASE(a_thread_local_capture_concerns_its_thread) {
  cudaGraph_t graph = nullptr;
  void* memory = nullptr;
  check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  cudaError_t elsewhere = cudaErrorInvalidValue;
  std::thread([&] {
    elsewhere = cudaMalloc(&memory, 4);
    if (elsewhere == cudaSuccess) elsewhere = cudaFree(memory);
  }).join();
  expect_error(elsewhere, cudaSuccess, "memory of another thread");
  expect_error(cudaStreamEndCapture(stream(), &graph), cudaSuccess, "the capture beside it");
  check(cudaGraphDestroy(graph));
  check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  expect_error(cudaMalloc(&memory, 4), cudaErrorStreamCaptureUnsupported, "memory of this thread");
  expect_error(cudaStreamEndCapture(stream(), &graph), cudaErrorStreamCaptureInvalidated, "its capture");
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
