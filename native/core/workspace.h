// Temporary device memory of the programs: a stack that keeps its block between programs, so that a program
// of a shape that ran before allocates nothing and finds everything where it was. `planning.h` tells how
// large the block must be.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/device.h"

namespace duokv {

class Workspace {
 public:
  // `values`, `inputs`: what its memory is counted as.
  explicit Workspace(std::shared_ptr<Device> device, const char* values = "workspace",
                     const char* inputs = "inputs")
      : device_(std::move(device)), values_name_(values), inputs_name_(inputs) {}

  const std::shared_ptr<Device>& device() const { return device_; }

  // Bytes of a program: what it takes, and host values on their way to the device.
  struct Size {
    int64_t values = 0, inputs = 0;
  };
  // The most that was in use at a time since construction.
  Size peak() const { return peak_; }

  // Starts a program: everything taken before is gone.
  void begin();
  // Likewise, with room for a program of that size in one block each.
  void begin(Size size);

  // `count` elements of T, 64-byte aligned, contents undefined; valid until begin(), or release() of an
  // earlier mark.
  template <class T = float>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(count * static_cast<int64_t>(sizeof(T))));
  }
  // Device memory for a copy of `count` host values, valid until begin(). All copies since the last flush()
  // travel together, in one transfer, with the next.
  template <class T>
  const T* upload(const T* host, int64_t count) {
    return static_cast<const T*>(stage(host, count * static_cast<int64_t>(sizeof(T))));
  }
  template <class T>
  const T* upload(const std::vector<T>& host) {
    return upload(host.data(), static_cast<int64_t>(host.size()));
  }
  void flush();

  struct Mark {
    size_t block;
    int64_t used, depth;
  };
  Mark mark() const { return {current_, used_, depth_}; }
  void release(Mark mark) {
    current_ = mark.block;
    used_ = mark.used;
    depth_ = mark.depth;
  }

  int64_t bytes() const;  // held, in use or not
  // Bytes that begin(size) would add to those.
  int64_t growth(Size size) const;

 private:
  void* take_bytes(int64_t bytes);
  const void* stage(const void* host, int64_t bytes);
  void add_inputs(int64_t bytes);
  int64_t values_held() const;
  int64_t inputs_held() const;

  std::shared_ptr<Device> device_;
  const char* values_name_;
  const char* inputs_name_;
  std::vector<Buffer> blocks_;
  size_t current_ = 0;
  int64_t used_ = 0;
  int64_t depth_ = 0;  // in use in all blocks together
  Size peak_;
  // Host values on their way to the device, laid out alike on both sides.
  struct Inputs {
    Buffer device;
    std::vector<char> host;
    int64_t used = 0, sent = 0;
  };
  std::vector<Inputs> inputs_;  // the last one is being filled
  int64_t staged_ = 0;          // of all of them
};

// Releases what was taken in a scope.
class WorkspaceScope {
 public:
  explicit WorkspaceScope(Workspace& workspace) : workspace_(workspace), mark_(workspace.mark()) {}
  ~WorkspaceScope() { workspace_.release(mark_); }
  WorkspaceScope(const WorkspaceScope&) = delete;
  WorkspaceScope& operator=(const WorkspaceScope&) = delete;

 private:
  Workspace& workspace_;
  Workspace::Mark mark_;
};

}  // namespace duokv
