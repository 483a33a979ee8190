// Times operations by the op table alone: device memory with values, and the time of one call among many that
// are queued together.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "tools/bench.h"

namespace duokv::tools {

// Device memory of `count` elements of T.
template <class T>
class Values {
 public:
  Values(const std::shared_ptr<Device>& device, const std::vector<T>& host)
      : buffer_(device, std::max<int64_t>(static_cast<int64_t>(host.size() * sizeof(T)), 1), "benchmark") {
    device->upload(buffer_.template as<T>(), host.data(), static_cast<int64_t>(host.size() * sizeof(T)));
  }
  T* data() const { return buffer_.template as<T>(); }

 private:
  Buffer buffer_;
};

// Uniform in [-scale * sqrt(3), scale * sqrt(3)): of that standard deviation. Never zeros, on which some
// hardware is faster.
std::vector<float> random_values(int64_t count, float scale, uint64_t seed);

inline Values<float> random_array(const std::shared_ptr<Device>& device, int64_t count, float scale = 1) {
  return Values<float>(device, random_values(count, scale, static_cast<uint64_t>(count)));
}

// What one call must do at least.
struct Work {
  double flops = 0;
  double bytes = 0;  // each input read once, each output written once
};

class KernelBench {
 public:
  KernelBench(Campaign& campaign, const char* section);

  // Times call(i), i counting up, of which `distinct` in a row touch different memory. Recorded as one graph
  // where the backend has them, so that launches leave no gaps; the row says whether.
  void run(const std::string& op, Json shape, const Work& work, int distinct,
           const std::function<void(int)>& call);
  // The same for what cannot be recorded.
  void run_unrecorded(const std::string& op, Json shape, const Work& work,
                      const std::function<void(int)>& call);

  const std::shared_ptr<Device>& device() const { return campaign_.device; }
  bool tiny() const { return campaign_.tiny(); }

 private:
  void synchronize();
  void time(const std::string& op, Json shape, const Work& work, int calls, bool recorded,
            const std::function<void(int)>& call);

  Campaign& campaign_;
  const char* section_;
  Values<float> flag_;
};

// How many weights or caches of `bytes` each are used in turn, so that no cache of the device holds them.
inline int copies_of(double bytes, bool tiny) {
  return tiny ? 2 : static_cast<int>(std::clamp(256e6 / std::max(bytes, 1.0), 1.0, 64.0));
}

const char* mode_name(ops::ProductMode mode);

}  // namespace duokv::tools
