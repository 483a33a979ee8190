// TCP sockets that close themselves. Everything here throws ERR_DISTRIBUTED.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace duokv::dist {

using Clock = std::chrono::steady_clock;

class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket();
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;

  int descriptor() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

  // All `bytes`, or an error: the peer is gone, or the deadline passed.
  void send(const void* data, int64_t bytes, Clock::time_point deadline) const;
  void receive(void* data, int64_t bytes, Clock::time_point deadline) const;
  // What has arrived, up to `bytes`; 0 where nothing has, -1 where the peer has closed the connection.
  int64_t receive_some(void* data, int64_t bytes) const;

 private:
  int descriptor_ = -1;
};

// Accepts connections on every interface. Port 0: any free one.
class Listener {
 public:
  explicit Listener(int port);
  int port() const { return port_; }
  // The next connection; none where the deadline passed.
  Socket accept(Clock::time_point deadline) const;

 private:
  Socket socket_;
  int port_ = 0;
};

// Connects to a host by name or address; none, with the reason in `why`, where that fails before the
// deadline.
Socket connect(const std::string& host, int port, Clock::time_point deadline, std::string& why);

// This machine's addresses, as text, those that other machines can reach first.
std::vector<std::string> own_addresses();

}  // namespace duokv::dist
