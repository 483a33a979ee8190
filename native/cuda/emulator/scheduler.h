// Runs the threads of a kernel, block after block, on the calling thread: each CUDA thread is a fiber that
// runs until it meets others (a barrier, a warp collective) or returns. Who runs next is random from the
// seed, so that an order that hardware merely allows does occur. Disagreement at a meeting, a deadlock or a
// bad access ends the kernel with a report.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/emulator/fiber.h"
#include "cuda/emulator/language.h"

namespace duokv::simt {

constexpr uint32_t kWarpSize = 32, kMaxThreads = 1024, kMaxWarps = kMaxThreads / kWarpSize;
constexpr uint32_t kMaxBarriers = 16;
constexpr size_t kStaticSharedLimit = 48 * 1024;

// Where in the kernel source a collective was called.
struct Site {
  const char* file;
  int line;
};

const char* base_name(const char* path);

enum class Collective : uint8_t { kBarrier, kSyncWarp, kShuffle, kVote, kReduce, kMma, kLoadMatrix };

// The device faults a kernel can end with; values are the runtime's error codes.
enum class FaultCode : int {
  kNone = 0,
  kIllegalAddress = 700,
  kMisalignedAddress = 716,
  kLaunchFailure = 719,  // everything that has no code of its own: divergence, deadlock, uninitialised reads
};

struct KernelLaunch {
  const char* kernel;  // for reports
  dim3 grid, block;
  size_t dynamic_shared;  // bytes
  size_t shared_limit;    // static plus dynamic bytes this kernel may use
  void (*invoke)(void* parameters);
  void* parameters;
  size_t parameter_bytes;
};

struct Fault {
  FaultCode code = FaultCode::kNone;
  std::string message;
};

// Runs the whole grid. A fault drops the threads that had not finished.
Fault run_kernel(const KernelLaunch& launch);

// Starts the sequence of random decisions anew.
void set_seed(uint64_t seed);
uint64_t seed();
// The next random number of that sequence; also orders streams and graph nodes.
uint64_t next_random();

// ---- for the code of a running thread

bool in_kernel();
bool on_own_stack(const void* address);
bool in_parameters(const void* address);
bool in_shared_memory(const void* address);
uint32_t lane_index();
std::string describe_shared(const void* address);

[[noreturn]] __attribute__((format(printf, 2, 3))) void fault(FaultCode code, const char* format, ...);

// Waits until every lane of `mask` has called the same collective at the same site with the same mask. The
// last to arrive runs `combine` on the lanes' operands (null for lanes outside the mask) before any of them
// goes on.
void meet_warp(Collective kind, uint32_t mask, Site site, void* operands,
               void (*combine)(void* const* operands, uint32_t mask) = nullptr);

// Barrier `id` of the block. `count` threads release it; 0 is all of the block, which then must be at the
// same site.
void meet_block(uint32_t id, uint32_t count, bool wait, Site site);

void memory_fence();

// The block's static shared array of this declaration, and its dynamic shared memory.
void* shared_array(const void* declaration, size_t bytes, size_t alignment);
void* dynamic_shared();

// ---- cp.async: the copy happens when it is waited for; until then its destination is poisoned.
void issue_copy(void* destination, const void* source, uint32_t bytes, uint32_t valid_bytes);
void commit_copies();
void wait_copies(uint32_t groups_in_flight);

}  // namespace duokv::simt
