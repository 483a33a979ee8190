// Graphs: what the device's stream is asked to do between graph_begin and graph_end, recorded by stream
// capture and launched as one. A graph keeps the pointers it was recorded with, the device's scratch and the
// products' workspace among them; both belong to the device and stay where they are while a graph lives.
#include <algorithm>
#include <memory>

#include "cuda/device.h"

struct duokv::ops::Graph {
  ~Graph() {
    if (executable) cudaGraphExecDestroy(executable);
  }
  cudaGraphExec_t executable = nullptr;
  int64_t bytes = 0;  // what the driver took, as far as its free memory shows
};

namespace duokv::cuda {
ops::Status graph_begin(ops::Device* device) {
  return guarded(device, [&] {
    device->require_not_recording("graph_begin");
    // Other threads, with devices of their own, may allocate meanwhile.
    if (!only_plans(device->stream))
      check(cudaStreamBeginCapture(device->stream, cudaStreamCaptureModeThreadLocal), "graph_begin");
    device->recording = true;
  });
}

ops::Status graph_end(ops::Device* device, ops::Graph** graph) {
  return guarded(device, [&] {
    if (graph) *graph = nullptr;
    require(device->recording, "graph_end: no graph is being recorded");
    const bool planning = only_plans(device->stream);
    cudaGraph_t recorded = nullptr;
    const cudaError_t error = planning ? cudaSuccess : cudaStreamEndCapture(device->stream, &recorded);
    device->recording = false;
    for (void* memory : std::exchange(device->released_while_recording, {})) device->memory.release(memory);
    const auto destroy = [](cudaGraph_t g) { return g ? cudaGraphDestroy(g) : cudaSuccess; };
    const std::unique_ptr<CUgraph_st, cudaError_t (*)(cudaGraph_t)> owner(recorded, destroy);
    if (graph == nullptr) {
      cudaGetLastError();  // a recording that is dropped may have failed
      return;
    }
    check(error, "graph_end");
    auto result = std::make_unique<ops::Graph>();
    if (!planning) {
      const int64_t before = device->memory.free();
      check(cudaGraphInstantiate(&result->executable, recorded, 0), "graph_end");
      result->bytes = std::max<int64_t>(0, before - device->memory.free());
    }
    device->scratch.add_graph();
    device->between.add_graph();
    *graph = result.release();
  });
}

ops::Status graph_launch(ops::Device* device, ops::Graph* graph) {
  return guarded(device, [&] {
    require(graph != nullptr, "graph_launch: graph is null");
    device->require_not_recording("graph_launch");
    if (only_plans(device->stream)) return;
    check(cudaGraphLaunch(graph->executable, device->stream), "graph_launch");
  });
}

void graph_destroy(ops::Device* device, ops::Graph* graph) {
  if (!graph) return;
  guarded(device, [&] {
    // It may be running.
    if (!only_plans(device->stream))
      check(cudaStreamSynchronize(device->stream), "an operation before graph_destroy");
  });
  delete graph;
  device->scratch.remove_graph();
  device->between.remove_graph();
}

int64_t graph_bytes(const ops::Graph* graph) { return graph ? graph->bytes : 0; }

}  // namespace duokv::cuda
