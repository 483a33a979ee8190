// Gradient sums over NCCL, part of the CUDA backend's library. NCCL itself is opened at run time: a machine
// with one GPU need not have it. Under g++ its calls are the emulator's (cuda/emulator/nccl.h), unless
// DUOKV_NCCL names a library.
//
// Sums run on a stream of their own, so that they overlap with the kernels of the backward pass; events order
// the two. Nothing here blocks for longer than it is told to, because a rank that dies leaves the others'
// kernels waiting for it, and only a host that is awake can abort them.
#include <dlfcn.h>

#ifdef __CUDACC__
#include <nccl.h>
#else
#include "cuda/emulator/nccl.h"
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device.h"
#include "cuda/library_paths.h"
#include "dist/transport.h"

namespace duokv::dist {
namespace {

using Clock = std::chrono::steady_clock;

// Between two looks at what is under way.
constexpr std::chrono::microseconds kPoll{100};

#define DUOKV_NCCL_CALLS(X) \
  X(ncclGetVersion)         \
  X(ncclGetUniqueId)        \
  X(ncclCommInitRankConfig) \
  X(ncclCommGetAsyncError)  \
  X(ncclCommAbort)          \
  X(ncclGetErrorString)     \
  X(ncclGetLastError)       \
  X(ncclAllReduce)

// Looks a function up by name in what was opened; null stands for the emulator.
void* symbol(void* library, const char* name) {
#ifndef __CUDACC__
  if (library == nullptr) return simt::nccl_symbol(name);
#endif
  return dlsym(library, name);
}

// The calls in use, with the types that the header declares.
class Nccl {
 public:
  // Opened on the first call. Throws cuda::Unavailable with the places that were tried.
  static const Nccl& get() {
    static const Nccl library;
    return library;
  }
#define DUOKV_DECLARE(function) decltype(&::function) function = nullptr;
  DUOKV_NCCL_CALLS(DUOKV_DECLARE)
#undef DUOKV_DECLARE

  // "NCCL 2.27.3", and the file.
  std::string version, path;

  // In a non-blocking communicator "in progress" is no error.
  void check(ncclResult_t result, ncclComm_t comm, const char* what) const {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char* detail = comm == nullptr ? "" : ncclGetLastError(comm);
    throw std::runtime_error(std::string(what) + ": " + ncclGetErrorString(result) +
                             (*detail == '\0' ? "" : std::string(" (") + detail + ")"));
  }

 private:
  Nccl() {
    std::string reasons;
    if (cuda::kEmulated && cuda::environment("DUOKV_NCCL").empty()) {
      bind(nullptr, "", reasons);
      version = "NCCL (emulated)";
      return;
    }
    for (const std::string& candidate :
         cuda::library_paths("DUOKV_NCCL", {"libnccl.so.2"}, false, {"nccl"})) {
      if (open(candidate.c_str(), reasons)) return;
    }
    throw cuda::Unavailable(
        "NCCL cannot be used (install pip's nvidia-nccl-cu13, or set DUOKV_NCCL to the path of libnccl.so):" +
        reasons);
  }

  bool open(const char* candidate, std::string& reasons) {
    void* library = dlopen(candidate, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      reasons += std::string("\n  ") + dlerror();
      return false;
    }
    if (!bind(library, candidate, reasons)) return false;
    int number = 0;
    check(ncclGetVersion(&number), nullptr, "ncclGetVersion");
    version = "NCCL " + std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
              std::to_string(number % 100);
    Dl_info place = {};
    dladdr(reinterpret_cast<void*>(ncclGetVersion), &place);
    path = place.dli_fname ? place.dli_fname : candidate;
    return true;
  }

  bool bind(void* library, const char* candidate, std::string& reasons) {
#define DUOKV_FIND(function)                                                    \
  function = reinterpret_cast<decltype(function)>(symbol(library, #function));  \
  if (function == nullptr) {                                                    \
    reasons += std::string("\n  ") + candidate + " has no function " #function; \
    return false;                                                               \
  }
    DUOKV_NCCL_CALLS(DUOKV_FIND)
#undef DUOKV_FIND
    return true;
  }
};

}  // namespace

struct Transport {
  explicit Transport(ops::Device* device_) : device(device_) {
    cuda::check(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming), "cudaEventCreate");
    cuda::check(cudaEventCreateWithFlags(&summed, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~Transport() {
    for (cudaEvent_t event : {ready, summed})
      if (event != nullptr) cudaEventDestroy(event);
  }
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  ncclResult_t state() const {
    ncclResult_t result = ncclSuccess;
    nccl.check(nccl.ncclCommGetAsyncError(comm, &result), comm, "ncclCommGetAsyncError");
    nccl.check(result, comm, "NCCL");
    return result;
  }

  const Nccl& nccl = Nccl::get();
  ops::Device* device;
  ncclComm_t comm = nullptr;
  cuda::Stream stream{/*planning=*/false};
  cudaEvent_t ready = nullptr;   // the device's stream has computed what is to be summed
  cudaEvent_t summed = nullptr;  // `stream` has summed all that was begun
};

namespace {

static_assert(sizeof(ncclUniqueId) <= kIdBytes);

ops::Status find(FoundLibrary* found) {
  return cuda::guarded([&] {
    const Nccl& nccl = Nccl::get();
    std::snprintf(found->version, sizeof found->version, "%s", nccl.version.c_str());
    std::snprintf(found->path, sizeof found->path, "%s", nccl.path.c_str());
  });
}

ops::Status make_id(void* id) {
  return cuda::guarded([&] {
    const Nccl& nccl = Nccl::get();
    ncclUniqueId made;
    nccl.check(nccl.ncclGetUniqueId(&made), nullptr, "ncclGetUniqueId");
    std::memcpy(id, &made, sizeof made);
  });
}

ops::Status open(ops::Device* device, const void* id, int32_t rank, int32_t size, Transport** transport) {
  return cuda::guarded(device, [&] {
    auto opened = std::make_unique<Transport>(device);
    ncclUniqueId meeting;
    std::memcpy(&meeting, id, sizeof meeting);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const Nccl& nccl = opened->nccl;
    nccl.check(nccl.ncclCommInitRankConfig(&opened->comm, size, meeting, rank, &config), nullptr,
               "ncclCommInitRankConfig");
    *transport = opened.release();
  });
}

ops::Status sum(Transport* transport, float* x, int64_t n) {
  return cuda::guarded(transport->device, [&] {
    const Transport& t = *transport;
    cuda::check(cudaEventRecord(t.ready, t.device->stream), "cudaEventRecord");
    cuda::check(cudaStreamWaitEvent(t.stream, t.ready, 0), "cudaStreamWaitEvent");
    t.nccl.check(t.nccl.ncclAllReduce(x, x, static_cast<size_t>(n), ncclFloat32, ncclSum, t.comm, t.stream),
                 t.comm, "ncclAllReduce");
    // A call that is in progress has not reached the stream yet. That takes microseconds once connections
    // stand, and `wait` has seen them stand.
    while (t.state() == ncclInProgress) std::this_thread::yield();
    cuda::check(cudaEventRecord(t.summed, t.stream), "cudaEventRecord");
  });
}

ops::Status wait(Transport* transport, int32_t milliseconds, int32_t* complete) {
  return cuda::guarded(transport->device, [&] {
    const auto deadline = Clock::now() + std::chrono::milliseconds(milliseconds);
    for (;;) {
      bool done = transport->state() == ncclSuccess;
      if (done) {
        const cudaError_t summed = cudaEventQuery(transport->summed);
        if (summed != cudaErrorNotReady) cuda::check(summed, "NCCL's sum");
        done = summed == cudaSuccess;
      }
      *complete = done ? 1 : 0;
      if (done || Clock::now() >= deadline) return;
      std::this_thread::sleep_for(kPoll);
    }
  });
}

// Aborting waits for no other rank, whose trainer may live longer; there is nothing under way to lose, but
// after a failure, and then what is under way would never end.
void close(Transport* transport) {
  if (transport == nullptr) return;
  cuda::guarded(transport->device, [&] {
    const std::unique_ptr<Transport> closing(transport);
    if (closing->comm != nullptr) closing->nccl.ncclCommAbort(closing->comm);
  });
}

}  // namespace
}  // namespace duokv::dist

extern "C" __attribute__((visibility("default"))) const duokv::dist::TransportTable* duokv_nccl_table() {
  using namespace duokv::dist;
  static const TransportTable table = {
      kTransportVersion, duokv::cuda::last_error, find, make_id, open, sum, wait, close};
  return &table;
}
