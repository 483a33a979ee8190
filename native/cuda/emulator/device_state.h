// State behind the runtime API; private to the emulator.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda/emulator/memory.h"
#include "cuda/emulator/runtime.h"
#include "cuda/emulator/scheduler.h"

namespace duokv::simt {

enum class OperationKind { kKernel, kCopy, kFill, kHost };

// One unit of work of a stream or a graph. Pointers are those passed at the call.
struct Operation {
  OperationKind kind;
  const void* function;  // kernel or host function
  cudaMemcpyKind direction;
  std::function<Fault()> run;
};

struct GraphNode {
  Operation operation;
  std::vector<size_t> dependencies;  // indices of earlier nodes
};
using Nodes = std::vector<GraphNode>;

// What a capture has recorded so far; shared by the streams that joined it.
struct Capture {
  CUstream_st* origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;  // that began it
  Nodes nodes;
  bool invalidated = false;
};

}  // namespace duokv::simt

struct CUevent_st {
  uint64_t recorded = 0, completed = 0;  // generations
  std::shared_ptr<duokv::simt::Capture> capture;
  std::vector<size_t> captured_after;  // nodes the event stands for
};

struct CUstream_st {
  struct Item {
    std::function<duokv::simt::Fault()> run;   // work, or empty
    std::shared_ptr<CUevent_st> record, wait;  // or an event
    uint64_t generation = 0;
    std::function<bool()> ready;  // whether another process has done its part; empty: none has one
  };
  bool blocking = true;  // ordered against the legacy stream
  std::deque<Item> queue;
  std::shared_ptr<duokv::simt::Capture> capture;
  std::vector<size_t> tail;  // nodes the next captured one depends on
};

struct CUgraph_st {
  duokv::simt::Nodes nodes;
};
struct CUgraphExec_st {
  std::shared_ptr<const duokv::simt::Nodes> nodes;
};

namespace duokv::simt {

struct Device {
  explicit Device(int ordinal) : memory(ordinal) {}

  // One for all devices, as they share the scheduler.
  inline static std::recursive_mutex mutex;
  CUstream_st legacy_stream;
  std::set<CUstream_st*> streams;
  std::map<CUevent_st*, std::shared_ptr<CUevent_st>> events;
  std::set<CUgraph_st*> graphs;
  std::set<CUgraphExec_st*> executables;
  std::map<char*, size_t> pinned;
  std::map<const void*, int> dynamic_shared_limits;
  std::set<std::shared_ptr<Capture>> captures;  // active ones
  Fault fault;                                  // sticky
  DeviceMemory memory;
};

// The calling thread's current one. Streams, events, graphs and memory are known to their own device alone,
// which must be current in every call that names them.
Device& device();
Device& device(int ordinal);

// Remembers a non-sticky error for cudaGetLastError, with a line on stderr that says why.
cudaError_t fail(cudaError_t error, const std::string& why);
void record_fault(const Fault& fault);

// The sticky error, or the one of a call that no capture may be interrupted by, or success. Entry of most
// calls.
cudaError_t check_context();
cudaError_t check_no_capture(const char* call);
cudaError_t check_stream(cudaStream_t stream, const char* call);

// Queues the operation, or adds it to the stream's capture.
cudaError_t submit(cudaStream_t stream, Operation operation);
cudaError_t enqueue(cudaStream_t stream, CUstream_st::Item item);
// What every synchronising call ends with: the check of the guard zones, and the sticky error.
cudaError_t finish_synchronise();
void capture_operation(CUstream_st& stream, Operation operation);
cudaError_t invalidate(Capture& capture, cudaError_t error, const std::string& why);

}  // namespace duokv::simt
