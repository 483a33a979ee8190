// What moves gradients between ranks: MPI for host memory, NCCL for GPUs. Each is a library of its own,
// opened at run time, so that a machine without MPI or NCCL still runs everything else. As in ops/ops.h, no
// exception crosses these tables of plain functions, and `last_error` gives the message of the calling
// thread's last failure.
#pragma once

#include <cstdint>

#include "ops/ops.h"

namespace duokv::dist {

inline constexpr uint32_t kTransportVersion = 2;
// Bytes by which the ranks of a communicator find each other.
inline constexpr int64_t kIdBytes = 128;

struct Transport;

// The library that a transport works with, as it was found here.
struct FoundLibrary {
  char version[128];  // "Open MPI v4.1.4"
  char path[512];
};

// Every rank makes the same calls in the same order.
struct TransportTable {
  uint32_t version;
  const char* (*last_error)();
  // Looks for the library. kUnavailable: it is not there, and the message says where it was looked for.
  ops::Status (*find)(FoundLibrary*);
  // What rank 0 makes and every rank opens with.
  ops::Status (*make_id)(void* id);
  // Begins to connect; complete when `wait` says so.
  ops::Status (*open)(ops::Device*, const void* id, int32_t rank, int32_t size, Transport**);
  // x[0..n) = its sum over all ranks, the same bits on each, once the work queued on the device before has
  // run. Only begins it: x must stay as it is until `wait` says that everything begun is complete.
  ops::Status (*sum)(Transport*, float* x, int64_t n);
  // Waits for about this long at most.
  ops::Status (*wait)(Transport*, int32_t milliseconds, int32_t* complete);
  // Drops what is under way. Waits for no other rank.
  void (*close)(Transport*);
};

// MPI besides: the library that finds the ranks which `mpirun` or `srun` started. Once per process.
struct MpiTable {
  TransportTable transport;
  ops::Status (*start)(int32_t* rank, int32_t* size);
  // Rank 0's bytes to all; for what must be known before other connections exist.
  ops::Status (*broadcast)(void* data, int64_t bytes);
  // Not healthy: a rank has failed, and the others are not waited for.
  void (*stop)(int32_t healthy);
};

}  // namespace duokv::dist
