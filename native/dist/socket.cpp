#include "dist/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "core/error.h"

namespace duokv::dist {
namespace {

Error failed(const std::string& what, int reason) {
  return Error("ERR_DISTRIBUTED", what + ": " + std::strerror(reason));
}

void set_option(int descriptor, int level, int name, int value) {
  setsockopt(descriptor, level, name, &value, sizeof value);
}

// A machine that vanishes without a word is noticed within about 15 seconds.
void configure(int descriptor) {
  fcntl(descriptor, F_SETFL, O_NONBLOCK);
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  set_option(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, 3);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, 15000);
}

// False where the deadline passed first.
bool wait_for(int descriptor, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd entry{descriptor, events, 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw failed("poll", errno);
  }
}

}  // namespace

Socket::~Socket() {
  if (descriptor_ >= 0) close(descriptor_);
}

Socket::Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

void Socket::send(const void* data, int64_t bytes, Clock::time_point deadline) const {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(descriptor_, next, static_cast<size_t>(bytes), MSG_NOSIGNAL);
    if (sent >= 0) {
      next += sent;
      bytes -= sent;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(descriptor_, POLLOUT, deadline)) throw failed("send", ETIMEDOUT);
    } else if (errno != EINTR) {
      throw failed("send", errno);
    }
  }
}

void Socket::receive(void* data, int64_t bytes, Clock::time_point deadline) const {
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    const int64_t received = receive_some(next, bytes);
    if (received < 0) throw failed("receive", ECONNRESET);
    if (received == 0 && !wait_for(descriptor_, POLLIN, deadline)) throw failed("receive", ETIMEDOUT);
    next += received;
    bytes -= received;
  }
}

int64_t Socket::receive_some(void* data, int64_t bytes) const {
  for (;;) {
    const ssize_t received = recv(descriptor_, data, static_cast<size_t>(bytes), 0);
    if (received > 0) return received;
    if (received == 0) return -1;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return -1;
  }
}

Listener::Listener(int port) {
  // One socket for IPv6 and IPv4 where the system has both.
  for (const int family : {AF_INET6, AF_INET}) {
    socket_ = Socket(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket_) continue;
    const int descriptor = socket_.descriptor();
    set_option(descriptor, SOL_SOCKET, SO_REUSEADDR, 1);
    sockaddr_storage address{};
    socklen_t length;
    if (family == AF_INET6) {
      set_option(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, 0);
      auto* six = reinterpret_cast<sockaddr_in6*>(&address);
      six->sin6_family = AF_INET6;
      six->sin6_addr = in6addr_any;
      six->sin6_port = htons(static_cast<uint16_t>(port));
      length = sizeof(sockaddr_in6);
    } else {
      auto* four = reinterpret_cast<sockaddr_in*>(&address);
      four->sin_family = AF_INET;
      four->sin_addr.s_addr = htonl(INADDR_ANY);
      four->sin_port = htons(static_cast<uint16_t>(port));
      length = sizeof(sockaddr_in);
    }
    if (bind(descriptor, reinterpret_cast<sockaddr*>(&address), length) != 0) {
      if (family == AF_INET6 && errno == EADDRNOTAVAIL) continue;  // IPv6 is switched off
      throw failed("rank 0 cannot listen on port " + std::to_string(port), errno);
    }
    if (listen(descriptor, SOMAXCONN) != 0) throw failed("listen", errno);
    fcntl(descriptor, F_SETFL, O_NONBLOCK);
    getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                     : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
    return;
  }
  throw failed("rank 0 cannot open a socket", errno);
}

Socket Listener::accept(Clock::time_point deadline) const {
  while (wait_for(socket_.descriptor(), POLLIN, deadline)) {
    Socket connection(::accept(socket_.descriptor(), nullptr, nullptr));
    if (!connection) continue;  // gone again
    configure(connection.descriptor());
    return connection;
  }
  return {};
}

Socket connect(const std::string& host, int port, Clock::time_point deadline, std::string& why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &first);
  if (status != 0) {
    why = host + ": " + gai_strerror(status);
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(first, freeaddrinfo);
  for (const addrinfo* a = first; a != nullptr; a = a->ai_next) {
    Socket connection(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!connection) continue;
    configure(connection.descriptor());
    int reason = ::connect(connection.descriptor(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (reason == EINPROGRESS) {
      reason = ETIMEDOUT;
      if (wait_for(connection.descriptor(), POLLOUT, deadline)) {
        socklen_t length = sizeof reason;
        getsockopt(connection.descriptor(), SOL_SOCKET, SO_ERROR, &reason, &length);
      }
    }
    if (reason == 0) return connection;
    why = host + " port " + std::to_string(port) + ": " + std::strerror(reason);
  }
  return {};
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {"127.0.0.1"};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> interfaces(first, freeifaddrs);
  for (const ifaddrs* i = first; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0) continue;
    char text[INET6_ADDRSTRLEN];
    const int family = i->ifa_addr->sa_family;
    if (family == AF_INET) {
      inet_ntop(family, &reinterpret_cast<sockaddr_in*>(i->ifa_addr)->sin_addr, text, sizeof text);
    } else if (family == AF_INET6) {
      const in6_addr& six = reinterpret_cast<sockaddr_in6*>(i->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&six)) continue;  // means something on its own interface only
      inet_ntop(family, &six, text, sizeof text);
    } else {
      continue;
    }
    const bool loopback = (i->ifa_flags & IFF_LOOPBACK) != 0;
    addresses.insert(loopback ? addresses.end() : addresses.begin(), text);
  }
  return addresses;
}

}  // namespace duokv::dist
