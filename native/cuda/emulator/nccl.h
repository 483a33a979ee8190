// The calls of NCCL that the backend uses, under its names and with its error codes, between processes of one
// machine over sockets.
//
// A sum is work of a stream. It reads its input when the stream comes to it; a thread of the communicator
// exchanges the values with the other ranks, whose processes may be late or gone; and the stream goes on once
// that is done, which only a host that does not wait in a synchronising call can cut short, by ncclCommAbort.
// Communicators do not block: a call may be in progress when it returns, and reaches the stream in a later
// ncclCommGetAsyncError. Rank 0 adds in the order of ranks, so every rank gets the same bits.
#pragma once

#include <cstddef>

#include "cuda/emulator/runtime.h"

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};
enum ncclDataType_t { ncclFloat32 = 7 };
enum ncclRedOp_t { ncclSum = 0 };
struct ncclUniqueId {
  char internal[128];
};
struct ncclConfig_t {
  int blocking;
};
#define NCCL_CONFIG_INITIALIZER \
  { 1 }
struct ncclComm;
using ncclComm_t = ncclComm*;

ncclResult_t ncclGetVersion(int* version);
ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state);
ncclResult_t ncclCommAbort(ncclComm_t comm);
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);

namespace duokv::simt {

// The function of that name, for a caller that looks names up in the library; null for an unknown one.
void* nccl_symbol(const char* name);

}  // namespace duokv::simt
