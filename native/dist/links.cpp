#include "dist/links.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "core/error.h"

namespace duokv::dist {
namespace {

using std::chrono::seconds;

// How long a peer may take to read what was sent to it.
constexpr seconds kSendLimit{60};
// A rank that fails does not wait long for the others to listen.
constexpr seconds kFailureLimit{2};
// Between the moment when a waiting call is told to stop and the moment when it gives the group up.
constexpr seconds kStopGrace{5};
constexpr seconds kHelloLimit{5};
constexpr int64_t kLargestMessage = int64_t{1} << 30;

struct Hello {
  Token token;
  int32_t rank, size;
};

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

Links::Links(const Listener& listener, int size, const Token& token, Clock::time_point deadline)
    : rank_(0), size_(size) {
  std::vector<Socket> arrived(static_cast<size_t>(size));
  for (int missing = size - 1; missing > 0;) {
    Socket connection = listener.accept(deadline);
    if (!connection) {
      std::string names;
      for (int r = 1; r < size; ++r)
        if (!arrived[static_cast<size_t>(r)]) names += (names.empty() ? "" : ", ") + rank_name(r);
      throw Error("ERR_DISTRIBUTED", names + " did not connect to rank 0 in time");
    }
    Hello hello{};
    try {
      connection.receive(&hello, sizeof hello, std::min(deadline, Clock::now() + kHelloLimit));
    } catch (const Error&) {
      continue;  // a port scanner, or a rank that will be missed
    }
    if (hello.token != token) continue;
    if (hello.size != size || hello.rank < 1 || hello.rank >= size ||
        arrived[static_cast<size_t>(hello.rank)])
      throw Error("ERR_DISTRIBUTED", "rank " + std::to_string(hello.rank) + " of " +
                                         std::to_string(hello.size) + " connected to a group of " +
                                         std::to_string(size) +
                                         " in which that rank does not exist or is already there");
    connection.send(&token, sizeof token, deadline);
    arrived[static_cast<size_t>(hello.rank)] = std::move(connection);
    --missing;
  }
  for (int r = 1; r < size; ++r) {
    peers_.emplace_back();
    peers_.back().rank = r;
    peers_.back().socket = std::move(arrived[static_cast<size_t>(r)]);
  }
}

Links::Links(Socket connection, int rank, int size, const Token& token, Clock::time_point deadline)
    : rank_(rank), size_(size) {
  const Hello hello{token, rank, size};
  Token answer{};
  connection.send(&hello, sizeof hello, deadline);
  connection.receive(&answer, sizeof answer, deadline);
  if (answer != token) throw Error("ERR_DISTRIBUTED", "what listens at rank 0's address is not rank 0");
  peers_.emplace_back();
  peers_.back().rank = 0;
  peers_.back().socket = std::move(connection);
}

const char* Links::name(Kind kind) {
  switch (kind) {
    case Kind::SumDouble:
      return "a sum";
    case Kind::SumInteger:
      return "a sum of integers";
    case Kind::Broadcast:
      return "a broadcast";
    case Kind::Failure:
      return "a failure";
    case Kind::Goodbye:
      return "leaving";
  }
  return "an unknown call";
}

template <class T>
void Links::sum(T* values, int64_t n, Stop stop) {
  constexpr Kind kind = std::is_same_v<T, double> ? Kind::SumDouble : Kind::SumInteger;
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  ++sequence_;
  check();
  if (rank_ == 0) {
    for (int r = 1; r < size_; ++r) {
      const Message message = take(r, kind, bytes, stop);
      for (int64_t i = 0; i < n; ++i) {
        T value;
        std::memcpy(&value, message.data.data() + static_cast<size_t>(i) * sizeof value, sizeof value);
        if constexpr (std::is_integral_v<T>)  // modulo 2^64
          values[i] = static_cast<T>(static_cast<uint64_t>(values[i]) + static_cast<uint64_t>(value));
        else
          values[i] += value;
      }
    }
    for (Peer& p : peers_) send(p, kind, rank_, values, bytes);
    return;
  }
  send(peers_[0], kind, rank_, values, bytes);
  const Message message = take(0, kind, bytes, stop);
  std::copy(message.data.begin(), message.data.end(), reinterpret_cast<char*>(values));
}
template void Links::sum(double*, int64_t, Stop);
template void Links::sum(int64_t*, int64_t, Stop);

void Links::broadcast(std::vector<char>& data, int root, Stop stop) {
  ++sequence_;
  check();
  const auto size_of = [](const std::vector<char>& bytes) { return static_cast<int64_t>(bytes.size()); };
  if (rank_ != 0) {
    send(peers_[0], Kind::Broadcast, rank_, data.data(), rank_ == root ? size_of(data) : 0);
    data = take(0, Kind::Broadcast, -1, stop).data;
    return;
  }
  for (int r = 1; r < size_; ++r) {
    Message message = take(r, Kind::Broadcast, -1, stop);
    if (r == root) data = std::move(message.data);
  }
  for (Peer& p : peers_) send(p, Kind::Broadcast, rank_, data.data(), size_of(data));
}

void Links::check() {
  pump(0);
  throw_if_broken();
}

void Links::throw_if_broken() {
  if (interrupted_.exchange(false)) {
    const std::lock_guard lock(interruption_mutex_);
    fail(interruption_);
  }
  if (failure_.empty())
    for (const Peer& p : peers_)
      if (p.goodbye) record_failure(p.rank, rank_name(p.rank) + " left the group");
  if (!failure_.empty()) throw_failure();
}

void Links::fail(const std::string& reason) noexcept {
  if (failure_.empty()) record_failure(rank_, rank_name(rank_) + " failed: " + reason);
}

void Links::interrupt(const std::string& reason) {
  const std::lock_guard lock(interruption_mutex_);
  interruption_ = reason;
  interrupted_ = true;
}

bool Links::leave() noexcept {
  try {
    if (interrupted_) throw_if_broken();
    if (rank_ != 0) send(peers_[0], Kind::Goodbye, rank_, nullptr, 0);
    const auto all_leave = [&] {
      return std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.goodbye; });
    };
    while (failure_.empty() && !all_leave()) {
      pump(1000);
      for (const Peer& p : peers_)
        if (!p.messages.empty())
          record_failure(rank_,
                         rank_name(rank_) + " left the group while " + rank_name(p.rank) + " calls it");
    }
    if (rank_ == 0 && failure_.empty())
      for (Peer& p : peers_) send(p, Kind::Goodbye, rank_, nullptr, 0);
  } catch (const Error&) {
    return false;
  }
  const bool healthy = failure_.empty();
  if (healthy) failure_ = "the group was closed";
  return healthy;
}

void Links::send(Peer& p, Kind kind, int failed_rank, const void* data, int64_t bytes) {
  const Header header{kind, failed_rank, sequence_, bytes};
  const auto deadline = Clock::now() + (kind == Kind::Failure ? kFailureLimit : kSendLimit);
  try {
    p.socket.send(&header, sizeof header, deadline);
    p.socket.send(data, bytes, deadline);
  } catch (const Error&) {
    if (kind == Kind::Failure) throw;
    // Why it is gone may have arrived before it went.
    pump(0);
    record_failure(p.rank, "the connection to " + rank_name(p.rank) + " broke: its process has ended");
    throw_failure();
  }
}

Links::Message Links::take(int rank, Kind kind, int64_t bytes, Stop stop) {
  Peer& p = peer(rank);
  auto stopped_at = Clock::time_point::max();
  while (p.messages.empty()) {
    throw_if_broken();
    if (stop != nullptr && stop->load(std::memory_order_relaxed)) {
      stopped_at = std::min(stopped_at, Clock::now());
      if (Clock::now() - stopped_at > kStopGrace) {
        fail("it was told to stop while it waited for " + rank_name(rank));
        throw_failure();
      }
    }
    pump(100);
  }
  Message message = std::move(p.messages.front());
  p.messages.pop_front();
  const Header& h = message.header;
  if (h.kind != kind || h.sequence != sequence_ || (bytes >= 0 && h.bytes != bytes)) {
    fail(rank_name(h.rank) + " makes " + name(h.kind) + " of " + std::to_string(h.bytes) + " bytes where " +
         rank_name(rank_) + " makes " + name(kind) + " of " + std::to_string(bytes) +
         "; all ranks must make the same calls in the same order");
    throw_failure();
  }
  return message;
}

void Links::pump(int milliseconds) {
  std::vector<pollfd> entries;
  for (const Peer& p : peers_)
    if (!p.closed) entries.push_back({p.socket.descriptor(), POLLIN, 0});
  if (poll(entries.data(), entries.size(), milliseconds) <= 0) return;
  size_t next = 0;
  for (Peer& p : peers_) {
    if (p.closed || entries[next++].revents == 0) continue;
    char buffer[65536];
    int64_t received;
    while ((received = p.socket.receive_some(buffer, sizeof buffer)) > 0)
      p.input.insert(p.input.end(), buffer, buffer + received);
    p.closed = received < 0;
    parse(p);
    if (p.closed && !p.goodbye)
      record_failure(p.rank, rank_name(p.rank) + " ended without leaving the group");
  }
}

void Links::parse(Peer& p) {
  size_t at = 0;
  while (p.input.size() - at >= sizeof(Header)) {
    Header header;
    std::memcpy(&header, p.input.data() + at, sizeof header);
    if (header.bytes < 0 || header.bytes > kLargestMessage) {
      p.closed = true;
      return record_failure(p.rank, rank_name(p.rank) + " sent what is no message");
    }
    const size_t end = at + sizeof header + static_cast<size_t>(header.bytes);
    if (p.input.size() < end) break;
    const char* data = p.input.data() + at + sizeof header;
    if (header.kind == Kind::Failure)
      record_failure(header.rank, std::string(data, static_cast<size_t>(header.bytes)));
    else if (header.kind == Kind::Goodbye)
      p.goodbye = true;
    else
      p.messages.push_back({header, std::vector<char>(data, data + header.bytes)});
    at = end;
  }
  p.input.erase(p.input.begin(), p.input.begin() + static_cast<std::ptrdiff_t>(at));
}

void Links::record_failure(int failed_rank, const std::string& what) noexcept {
  if (!failure_.empty()) return;
  failure_ = what;
  for (Peer& p : peers_) {
    // Other ranks only speak for themselves.
    if (p.closed || (rank_ != 0 && failed_rank != rank_)) continue;
    try {
      send(p, Kind::Failure, failed_rank, what.data(), static_cast<int64_t>(what.size()));
    } catch (const Error&) {
      // It is gone too.
    }
  }
}

void Links::throw_failure() const { throw Error("ERR_DISTRIBUTED", failure_); }

}  // namespace duokv::dist
