#include "cuda/emulator/nccl.h"

#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "cuda/emulator/device_state.h"
#include "dist/socket.h"

namespace duokv::simt {
namespace {

using dist::Clock;
using dist::Listener;
using dist::Socket;

constexpr auto kForever = Clock::time_point::max();
constexpr std::chrono::milliseconds kAbortPoll{20};
constexpr std::chrono::seconds kConnectLimit{10};

struct Sum {
  float* x;
  std::vector<float> values;
  std::atomic<bool> done{false};
};

// Where rank 0 of the ids that this process made is met, by port.
std::map<int, Listener>& listeners() {
  static std::map<int, Listener> by_port;
  return by_port;
}

ncclResult_t refuse(ncclResult_t result, const char* why) {
  std::fprintf(stderr, "simt: NCCL: %s\n", why);
  return result;
}

// What a communicator's handle and the work of its stream share: the connections, and the thread that
// exchanges values over them.
class Exchange {
 public:
  // `listener`: rank 0's.
  Exchange(int rank, int size, int port, std::optional<Listener> listener)
      : rank_(rank), size_(size), port_(port), listener_(std::move(listener)) {
    thread_ = std::thread([this] { serve(); });
  }

  ncclResult_t state() {
    const std::lock_guard lock(mutex_);
    return state_;
  }
  // Stays as it is once the state is an error.
  const std::string& error() const { return error_; }
  bool aborted() const { return aborted_; }

  void begin(std::shared_ptr<Sum> sum) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(sum));
    wake_.notify_one();
  }

  void abort() {
    {
      const std::lock_guard lock(mutex_);
      aborted_ = true;
      for (const Socket& peer : peers_) shutdown(peer.descriptor(), SHUT_RDWR);
      wake_.notify_one();
    }
    thread_.join();
  }

 private:
  void serve() {
    try {
      connect();
      while (const std::shared_ptr<Sum> sum = next()) {
        add_up(sum->values);
        sum->done = true;
      }
    } catch (const std::exception& failure) {
      const std::lock_guard lock(mutex_);
      state_ = ncclRemoteError;
      error_ = failure.what();
    }
  }

  // Rank 0 to the others, in their order; each of them to rank 0.
  void connect() {
    std::vector<Socket> connected(static_cast<size_t>(rank_ == 0 ? size_ - 1 : 1));
    if (rank_ == 0) {
      for (size_t missing = connected.size(); missing > 0 && !aborted_;) {
        Socket peer = listener_->accept(Clock::now() + kAbortPoll);
        if (!peer) continue;
        int other = 0;
        peer.receive(&other, sizeof other, Clock::now() + kConnectLimit);
        connected.at(static_cast<size_t>(other - 1)) = std::move(peer);
        --missing;
      }
      listener_.reset();
    } else {
      std::string why;
      connected[0] = dist::connect("127.0.0.1", port_, Clock::now() + kConnectLimit, why);
      if (!connected[0]) throw Error("ERR_DISTRIBUTED", why);
      connected[0].send(&rank_, sizeof rank_, kForever);
    }
    const std::lock_guard lock(mutex_);
    peers_ = std::move(connected);
    state_ = ncclSuccess;
  }

  // The next sum to exchange; none once aborted.
  std::shared_ptr<Sum> next() {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [&] { return aborted_ || !queue_.empty(); });
    if (aborted_) return nullptr;
    const std::shared_ptr<Sum> sum = std::move(queue_.front());
    queue_.pop_front();
    return sum;
  }

  void add_up(std::vector<float>& values) const {
    const auto count = static_cast<int64_t>(values.size());
    const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
    if (rank_ > 0) {
      peers_[0].send(&count, sizeof count, kForever);
      peers_[0].send(values.data(), bytes, kForever);
      return peers_[0].receive(values.data(), bytes, kForever);
    }
    std::vector<float> theirs(values.size());
    for (const Socket& peer : peers_) {
      int64_t their_count = 0;
      peer.receive(&their_count, sizeof their_count, kForever);
      if (their_count != count)
        throw Error("ERR_DISTRIBUTED",
                    "ranks sum " + std::to_string(count) + " and " + std::to_string(their_count) + " values");
      peer.receive(theirs.data(), bytes, kForever);
      for (size_t i = 0; i < values.size(); ++i) values[i] += theirs[i];
    }
    for (const Socket& peer : peers_) peer.send(values.data(), bytes, kForever);
  }

  const int rank_, size_, port_;
  std::optional<Listener> listener_;
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Sum>> queue_;
  ncclResult_t state_ = ncclInProgress;  // of connecting, and of the exchanges since
  std::string error_;
  std::vector<Socket> peers_;
  std::thread thread_;
};

Fault read_input(Exchange& exchange, const std::shared_ptr<Sum>& sum) {
  const DeviceMemory& memory = device_memory();
  const size_t bytes = sum->values.size() * sizeof(float);
  if (!memory.owns(sum->x, bytes))
    return {FaultCode::kIllegalAddress, "sum over ranks of memory " + memory.describe(sum->x)};
  const size_t bad = memory.region.first_below(sum->x, bytes, ByteState::kInitialised);
  if (stores_are_tracked && bad < bytes)
    return {FaultCode::kLaunchFailure, "sum over ranks of bytes nobody wrote, " +
                                           memory.describe(reinterpret_cast<const char*>(sum->x) + bad)};
  raw_copy(sum->values.data(), sum->x, bytes);
  exchange.begin(sum);
  return {};
}

// Two items of the stream: one reads, and the other, once the ranks have exchanged, writes. After an abort
// both run, without a result.
cudaError_t enqueue_sum(const std::shared_ptr<Exchange>& exchange, float* x, size_t count,
                        cudaStream_t stream) {
  const auto sum = std::make_shared<Sum>();
  sum->x = x;
  sum->values.resize(count);
  CUstream_st::Item reading, writing;
  reading.run = [=]() -> Fault { return exchange->aborted() ? Fault{} : read_input(*exchange, sum); };
  writing.ready = [=] { return sum->done || exchange->aborted(); };
  writing.run = [=]() -> Fault {
    if (sum->done) raw_copy(sum->x, sum->values.data(), sum->values.size() * sizeof(float));
    return {};
  };
  const cudaError_t error = enqueue(stream, std::move(reading));
  return error == cudaSuccess ? enqueue(stream, std::move(writing)) : error;
}

}  // namespace
}  // namespace duokv::simt

using namespace duokv::simt;

struct ncclComm {
  std::shared_ptr<Exchange> exchange;
  std::function<cudaError_t()> in_progress;  // a call that has not reached its stream
};

ncclResult_t ncclGetVersion(int* version) {
  *version = 0;  // the emulator is no version
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard lock(Device::mutex);
  Listener listener(0);
  const int port = listener.port();
  *id = {};
  std::memcpy(id->internal, &port, sizeof port);
  listeners().emplace(port, std::move(listener));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const std::lock_guard lock(Device::mutex);
  if (!comm || rank < 0 || rank >= ranks) return refuse(ncclInvalidArgument, "no comm, or no such rank");
  if (!config || config->blocking != 0)
    return refuse(ncclInvalidUsage, "only communicators that do not block are emulated");
  int port = 0;
  std::memcpy(&port, id.internal, sizeof port);
  std::optional<Listener> listener;
  if (rank == 0) {
    auto mine = listeners().extract(port);
    if (!mine) return refuse(ncclInvalidArgument, "rank 0 must have made the id, which serves once");
    listener = std::move(mine.mapped());
  }
  *comm = new ncclComm{std::make_shared<Exchange>(rank, ranks, port, std::move(listener)), nullptr};
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const std::lock_guard lock(Device::mutex);
  // A call in progress reaches its stream now, or later.
  if (comm->in_progress && next_random() % 2 == 0) {
    const auto call = std::exchange(comm->in_progress, nullptr);
    if (call() != cudaSuccess) return ncclUnhandledCudaError;
  }
  *state = comm->exchange->state();
  if (*state == ncclSuccess && comm->in_progress) *state = ncclInProgress;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->exchange->abort();
  delete comm;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}

const char* ncclGetLastError(ncclComm_t comm) { return comm->exchange->error().c_str(); }

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  const std::lock_guard lock(Device::mutex);
  if (type != ncclFloat32 || op != ncclSum || send != receive)
    return refuse(ncclInvalidArgument, "only sums of FP32 in place are emulated");
  if (check_stream(stream, "ncclAllReduce") != cudaSuccess) return ncclUnhandledCudaError;
  if (stream && stream->capture) return refuse(ncclInvalidUsage, "sums are not captured");
  if (const ncclResult_t state = comm->exchange->state(); state != ncclSuccess)
    return state == ncclInProgress ? refuse(ncclInvalidUsage, "the ranks are not connected yet") : state;
  if (comm->in_progress) return refuse(ncclInvalidUsage, "the call before has not reached its stream");
  comm->in_progress = [exchange = comm->exchange, x = static_cast<float*>(receive), count, stream] {
    return enqueue_sum(exchange, x, count, stream);
  };
  return ncclInProgress;
}

void* duokv::simt::nccl_symbol(const char* name) {
#define DUOKV_SYMBOL(function) \
  if (std::string_view(name) == #function) return reinterpret_cast<void*>(&::function);
  DUOKV_SYMBOL(ncclGetVersion)
  DUOKV_SYMBOL(ncclGetUniqueId)
  DUOKV_SYMBOL(ncclCommInitRankConfig)
  DUOKV_SYMBOL(ncclCommGetAsyncError)
  DUOKV_SYMBOL(ncclCommAbort)
  DUOKV_SYMBOL(ncclGetErrorString)
  DUOKV_SYMBOL(ncclGetLastError)
  DUOKV_SYMBOL(ncclAllReduce)
#undef DUOKV_SYMBOL
  return nullptr;
}
