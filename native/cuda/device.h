// The CUDA device: its stream, its memory and what its operations share.
//
// All work of a device is queued on one stream, in the order of the calls; what goes wrong on the GPU shows
// at the next download. A device is used by one thread at a time; `info` may be called from any. Every entry
// makes its device current in the calling thread, so that one thread may use several.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/memory.h"
#include "cuda/primitives.cuh"
#include "cuda/product.h"
#include "ops/guarded.h"
#include "ops/ops.h"

namespace duokv::cuda {

using ops::guarded;
using ops::InvalidArgument;
using ops::last_error;
using ops::OutOfMemory;
using ops::require;
using ops::Unavailable;

// Throws where `error` is one; `what` says what was being done.
void check(cudaError_t error, const char* what);

class Stream {
 public:
  explicit Stream(bool planning);
  ~Stream() {
    if (!only_plans(stream_)) cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Memory of one operation, reused by the next; the stream's order keeps them apart. It grows to the largest
// request. A block that a live graph may name is kept until no graph is left.
class Scratch {
 public:
  explicit Scratch(Memory& memory) : memory_(memory) {}

  // 64-byte aligned, contents undefined, valid until the next call. Growing is not possible while a graph is
  // recorded.
  void* take(size_t bytes, bool recording);
  void add_graph() { ++graphs_; }
  void remove_graph();
  int64_t bytes() const { return held_; }

 private:
  void release_front();

  Memory& memory_;
  std::vector<std::pair<void*, int64_t>> blocks_;  // with what was counted for them
  size_t bytes_ = 0;                               // of the last block, the one in use
  int64_t held_ = 0;                               // of all blocks
  int64_t graphs_ = 0;
};

// Copies between ordinary host memory and the device, through a ring of pinned segments.
class Staging {
 public:
  explicit Staging(cudaStream_t stream);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Queues the copy; `source` may change as soon as this returns.
  void upload(void* destination, const void* source, int64_t bytes);
  // Waits for all work queued before and for the copy.
  void download(void* destination, const void* source, int64_t bytes);

 private:
  static constexpr int kSegments = 4;
  static constexpr int64_t kSegmentBytes = int64_t{1} << 20;
  struct Segment {
    char* memory = nullptr;
    cudaEvent_t read = nullptr;  // the copies out of it are done
  };
  char* room_for(int64_t bytes);

  cudaStream_t stream_;
  Segment segments_[kSegments];
  int current_ = 0;
  int64_t used_ = 0;  // of the current segment
};

}  // namespace duokv::cuda

struct duokv::ops::Device {
  // Throws Unavailable with the reason where the device cannot be used.
  Device(int32_t index, bool planning);
  ~Device();

  // Scratch of the running operation, as the launchers want it.
  void* workspace(size_t bytes) { return bytes == 0 ? nullptr : scratch.take(bytes, recording); }
  // Of an operation made of several: what one leaves for the next.
  void* activations(size_t bytes) { return bytes == 0 ? nullptr : between.take(bytes, recording); }
  void require_not_recording(const char* call) const;
  void release(void* memory);  // after the recording, if there is one

  const int32_t index;
  cudaDeviceProp properties = {};
  cuda::Stream stream;
  cuda::Memory memory;
  cuda::Scratch scratch{memory};
  cuda::Scratch between{memory};
  cuda::Staging staging{stream};
  cuda::Products products{memory};
  bool recording = false;
  std::vector<void*> released_while_recording;
};

namespace duokv::cuda {

// As above, with the device current in this thread.
template <class Body>
ops::Status guarded(ops::Device* device, Body&& body) noexcept {
  return guarded([&] {
    require(device != nullptr, "device is null");
    check(cudaSetDevice(device->index), "cudaSetDevice");
    body();
  });
}

// The table's entries that concern the device itself; the arguments are those of ops::OpTable.
ops::Status open(const char* options, int32_t threads, ops::Device** device);
ops::Status open_planning(ops::Device* device, ops::Device** planning);
void close(ops::Device* device);
ops::Status info(ops::Device* device, ops::DeviceInfo* info);
ops::Status allocate(ops::Device* device, int64_t bytes, void** memory);
void release(ops::Device* device, void* memory);
ops::Status upload(ops::Device* device, void* dst, const void* host_src, int64_t bytes);
ops::Status download(ops::Device* device, void* host_dst, const void* src, int64_t bytes);
ops::Status copy(ops::Device* device, void* dst, const void* src, int64_t bytes);
ops::Status zero(ops::Device* device, void* dst, int64_t bytes);

ops::Status graph_begin(ops::Device* device);
ops::Status graph_end(ops::Device* device, ops::Graph** graph);
ops::Status graph_launch(ops::Device* device, ops::Graph* graph);
void graph_destroy(ops::Device* device, ops::Graph* graph);
int64_t graph_bytes(const ops::Graph* graph);

}  // namespace duokv::cuda
