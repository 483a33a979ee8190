// Stream capture and graphs. A capture keeps the queued operations instead of running them: kernels with the
// parameters they were given, copies with the pointers they were given, which are read at every replay.
#include <algorithm>

#include "cuda/emulator/device_state.h"

namespace duokv::simt {

cudaError_t invalidate(Capture& capture, cudaError_t error, const std::string& why) {
  capture.invalidated = true;
  return fail(error, why);
}

void capture_operation(CUstream_st& stream, Operation operation) {
  Nodes& nodes = stream.capture->nodes;
  nodes.push_back({std::move(operation), stream.tail});
  stream.tail = {nodes.size() - 1};
}

namespace {

// Whether every node of `wanted` is a node of `tail` or comes before one.
bool precedes(const Nodes& nodes, const std::vector<size_t>& wanted, const std::vector<size_t>& tail) {
  std::vector<bool> reached(nodes.size());
  for (const size_t node : tail) reached[node] = true;
  for (size_t i = nodes.size(); i-- > 0;) {  // dependencies have smaller indices
    if (!reached[i]) continue;
    for (const size_t dependency : nodes[i].dependencies) reached[dependency] = true;
  }
  return std::all_of(wanted.begin(), wanted.end(), [&](size_t node) { return reached[node]; });
}

// Runs the nodes in a random order that respects their dependencies.
Fault run_nodes(const Nodes& nodes) {
  std::vector<size_t> missing(nodes.size()), ready;
  for (size_t i = 0; i < nodes.size(); ++i) {
    missing[i] = nodes[i].dependencies.size();
    if (missing[i] == 0) ready.push_back(i);
  }
  while (!ready.empty()) {
    std::swap(ready[next_random() % ready.size()], ready.back());
    const size_t node = ready.back();
    ready.pop_back();
    if (const Fault fault = nodes[node].operation.run(); fault.code != FaultCode::kNone) return fault;
    for (size_t i = node + 1; i < nodes.size(); ++i) {
      const auto& dependencies = nodes[i].dependencies;
      if (std::find(dependencies.begin(), dependencies.end(), node) != dependencies.end() &&
          --missing[i] == 0)
        ready.push_back(i);
    }
  }
  return {};
}

}  // namespace
}  // namespace duokv::simt

using namespace duokv::simt;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const std::lock_guard lock(device().mutex);
  if (!stream) return fail(cudaErrorStreamCaptureUnsupported, "the legacy stream cannot be captured");
  if (const cudaError_t error = check_stream(stream, "cudaStreamBeginCapture"); error != cudaSuccess)
    return error;
  if (stream->capture)
    return fail(cudaErrorIllegalState, "cudaStreamBeginCapture: the stream is already being captured");
  stream->capture = std::make_shared<Capture>(Capture{stream, mode, std::this_thread::get_id(), {}, false});
  stream->tail.clear();
  device().captures.insert(stream->capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard lock(device().mutex);
  *graph = nullptr;
  if (const cudaError_t error = check_stream(stream, "cudaStreamEndCapture"); error != cudaSuccess)
    return error;
  if (!stream || !stream->capture)
    return fail(cudaErrorIllegalState, "cudaStreamEndCapture: the stream is not being captured");
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture->origin != stream)
    return invalidate(*capture, cudaErrorStreamCaptureUnmatched, "the capture began in another stream");
  bool joined = true;
  for (CUstream_st* other : device().streams) {
    if (other->capture != capture) continue;
    joined = joined && precedes(capture->nodes, other->tail, stream->tail);
    other->capture = nullptr;
  }
  for (const auto& [handle, event] : device().events) {
    if (event->capture == capture) event->capture = nullptr;
  }
  device().captures.erase(capture);
  if (capture->invalidated)
    return fail(cudaErrorStreamCaptureInvalidated, "an illegal call ended the capture");
  if (!joined)
    return fail(cudaErrorStreamCaptureUnjoined, "the work of another stream in the capture was not joined");
  *graph = new CUgraph_st{std::move(capture->nodes)};
  device().graphs.insert(*graph);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_stream(stream, "cudaStreamIsCapturing"); error != cudaSuccess)
    return error;
  *status = !stream || !stream->capture    ? cudaStreamCaptureStatusNone
            : stream->capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                           : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

static cudaError_t check_graph(cudaGraph_t graph) {
  if (!device().graphs.contains(graph)) return fail(cudaErrorInvalidValue, "no such graph");
  return check_context();
}
static cudaError_t check_executable(cudaGraphExec_t executable) {
  if (!device().executables.contains(executable))
    return fail(cudaErrorInvalidValue, "no such executable graph");
  return check_context();
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_graph(graph); error != cudaSuccess) return error;
  *executable = new CUgraphExec_st{std::make_shared<const Nodes>(graph->nodes)};
  device().executables.insert(*executable);
  return cudaSuccess;
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo* info) {
  const std::lock_guard lock(device().mutex);
  *info = {cudaGraphExecUpdateError, nullptr, nullptr};
  if (const cudaError_t error = check_executable(executable); error != cudaSuccess) return error;
  if (const cudaError_t error = check_graph(graph); error != cudaSuccess) return error;
  const Nodes &old = *executable->nodes, &updated = graph->nodes;
  cudaGraphExecUpdateResult result = cudaGraphExecUpdateSuccess;
  if (old.size() != updated.size()) result = cudaGraphExecUpdateErrorTopologyChanged;
  for (size_t i = 0; i < old.size() && result == cudaGraphExecUpdateSuccess; ++i) {
    const Operation &a = old[i].operation, &b = updated[i].operation;
    if (old[i].dependencies != updated[i].dependencies) result = cudaGraphExecUpdateErrorTopologyChanged;
    if (a.kind != b.kind || a.direction != b.direction) result = cudaGraphExecUpdateErrorNodeTypeChanged;
    if (a.kind == OperationKind::kKernel && a.function != b.function)
      result = cudaGraphExecUpdateErrorFunctionChanged;
  }
  info->result = result;
  if (result != cudaGraphExecUpdateSuccess)
    return fail(cudaErrorGraphExecUpdateFailure, "the new graph's nodes are not those of the executable one");
  executable->nodes = std::make_shared<const Nodes>(updated);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_executable(executable); error != cudaSuccess) return error;
  if (const cudaError_t error = check_stream(stream, "cudaGraphLaunch"); error != cudaSuccess) return error;
  if (stream && stream->capture)
    return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported,
                      "cudaGraphLaunch into a capture is not emulated");
  CUstream_st::Item item;
  item.run = [nodes = executable->nodes] { return run_nodes(*nodes); };
  return enqueue(stream, std::move(item));
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_graph(graph); error != cudaSuccess) return error;
  if (nodes) {
    for (size_t i = 0; i < std::min(*count, graph->nodes.size()); ++i)
      nodes[i] = reinterpret_cast<cudaGraphNode_t>(&graph->nodes[i]);
  }
  *count = graph->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_graph(graph); error != cudaSuccess) return error;
  device().graphs.erase(graph);
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_executable(executable); error != cudaSuccess) return error;
  device().executables.erase(executable);
  delete executable;
  return cudaSuccess;
}
