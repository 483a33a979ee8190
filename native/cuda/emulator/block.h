// State of the block that is running; private to the emulator.
#pragma once

#include <memory>

#include "cuda/emulator/memory.h"
#include "cuda/emulator/scheduler.h"

namespace duokv::simt {

struct AsyncCopy {
  void* destination;
  const void* source;
  uint32_t bytes, valid_bytes, group;
};

struct Thread {
  enum class State : uint8_t { kReady, kWaiting, kDone };
  static constexpr uint32_t kMaxCopies = 128;

  Context context;
  Stack* stack;
  uint3 position;
  uint32_t index, warp, lane;
  State state;
  Collective kind;  // with `site`: what it waits for
  Site site;
  uint32_t copy_count, copy_group;  // copies in flight, groups committed
  AsyncCopy copies[kMaxCopies];
};

struct WarpMeeting {
  Collective kind;
  uint32_t mask, arrived;
  Site site;
  void* sync;
  void* operands[kWarpSize];
};

struct Warp {
  uint32_t rank, ready, present, meeting_count;
  WarpMeeting meetings[kWarpSize];  // each has a lane that waits in it
};

struct Barrier {
  uint32_t count, arrived, waiting_count;
  Site site;
  void* sync;
  uint16_t waiting[kMaxThreads];
};

// Shared memory of a block: static arrays with gaps between them, and the dynamic part, which ends at an
// inaccessible page.
class SharedMemory {
 public:
  SharedMemory();
  void start(size_t dynamic_bytes, size_t limit);
  std::string finish();  // empty, or which gap was written
  void* array(const void* declaration, size_t bytes, size_t alignment);
  void* dynamic() const { return dynamic_; }
  std::string describe(const void* address) const;

  Region region;

 private:
  struct Array {
    const void* declaration;
    char* begin;
    size_t bytes;
  };
  static constexpr uint32_t kMaxArrays = 32;
  Array arrays_[kMaxArrays];
  uint32_t array_count_ = 0;
  size_t static_bytes_ = 0, dynamic_bytes_ = 0, limit_ = 0;
  char *static_begin_, *static_end_, *dynamic_end_;
  char *next_, *dynamic_ = nullptr;
};

// What the threads of one block run on. ThreadSanitizer's fibers are costly to make, so they are used again,
// and with them their stacks and shared memory. Blocks on the same set are therefore ordered as far as
// ThreadSanitizer knows; successive blocks take different sets, so that races between blocks are seen unless
// they happen to share one.
struct FiberSet {
  Stack stacks[kMaxThreads];
  void* tsan_fibers[kMaxThreads] = {};
  SharedMemory shared;
  uint64_t order_sync[2] = {};  // what the previous block released, what this one releases
  uint32_t generation = 0;
};

struct Block {
  static constexpr uint32_t kSyncObjects = 4096, kFiberSets = 2;

  const KernelLaunch* launch = nullptr;
  const Region* global = nullptr;  // the memory of the device it runs on
  Context scheduler;
  Thread* running = nullptr;
  Fault fault;
  uint32_t thread_count = 0, done_count = 0;
  uint32_t ready_ranks = 0;  // bit r: the warp of rank r has a ready lane
  uint32_t warp_at_rank[kMaxWarps];
  Warp warps[kMaxWarps];
  Thread threads[kMaxThreads];
  Barrier barriers[kMaxBarriers];
  FiberSet fiber_sets[kFiberSets];
  FiberSet* set = fiber_sets;
  SharedMemory& shared() { return set->shared; }

  // ThreadSanitizer's objects. A meeting takes the next of a ring: with one object per barrier, a late waker
  // would also acquire what an early thread released on its way to the next meeting, and a race would be
  // hidden.
  std::unique_ptr<uint64_t[]> sync_objects;
  uint32_t sync_index = 0;
  uint64_t fence_sync = 0, start_sync = 0, end_sync = 0;
  void* next_sync_object() { return sync_objects ? &sync_objects[sync_index++ % kSyncObjects] : nullptr; }
};

Block& the_block();
// Always inline, as every access asks for it.
[[gnu::always_inline]] inline Block& block() {
  static Block& only = the_block();
  return only;
}

// Turns an access to an inaccessible page by a running thread into a fault of its kernel.
void install_fault_handler();

}  // namespace duokv::simt
