// Connections between rank 0 and every other rank. Small host values travel over them, and so does the news
// that a rank has failed: a process that dies closes its connection, however it dies, so the others learn of
// it while they wait, whatever library moves the gradients.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "dist/socket.h"

namespace duokv::dist {

// Null, or a flag that tells a waiting call to stop.
using Stop = const std::atomic<bool>*;
// What strangers who connect to rank 0 do not know.
using Token = std::array<unsigned char, 16>;

class Links {
 public:
  // Rank 0: waits for the `size - 1` others. Throws ERR_DISTRIBUTED naming those that did not come.
  Links(const Listener& listener, int size, const Token& token, Clock::time_point deadline);
  // Any other rank, over its connection to rank 0.
  Links(Socket connection, int rank, int size, const Token& token, Clock::time_point deadline);

  // Every rank makes the same calls in the same order. They throw ERR_DISTRIBUTED, naming the rank, where one
  // has failed, has left or makes another call; from then on every call throws that. A call whose `stop` has
  // been set for a few seconds fails the group.
  //
  // values[i] = the sum over all ranks, added in the order of ranks; every rank gets the same bits.
  template <class T>
  void sum(T* values, int64_t n, Stop stop);
  // `data` becomes what rank `root` has there.
  void broadcast(std::vector<char>& data, int root, Stop stop);
  // Throws where a rank is known to have failed; waits for nothing.
  void check();

  // Tells the others that this rank cannot go on; their calls throw `reason`.
  void fail(const std::string& reason) noexcept;
  // The same from another thread than the one that makes the calls: done by its next call or, where it waits
  // in one, within a moment.
  void interrupt(const std::string& reason);
  // Waits until all ranks leave. False where one has failed instead.
  bool leave() noexcept;

 private:
  enum class Kind : uint32_t { SumDouble, SumInteger, Broadcast, Failure, Goodbye };
  struct Header {
    Kind kind;
    int32_t rank;  // of the sender; for a failure, of the rank that failed
    int64_t sequence, bytes;
  };
  struct Message {
    Header header;
    std::vector<char> data;
  };
  struct Peer {
    int rank;
    Socket socket;
    std::vector<char> input;  // not a whole message yet
    std::deque<Message> messages;
    bool closed = false, goodbye = false;
  };

  static const char* name(Kind kind);
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank_ == 0 ? rank - 1 : 0)]; }
  void send(Peer& peer, Kind kind, int failed_rank, const void* data, int64_t bytes);
  // The message of `rank` that belongs to the current call.
  Message take(int rank, Kind kind, int64_t bytes, Stop stop);
  // Reads what has arrived, or waits for something to.
  void pump(int milliseconds);
  void parse(Peer& peer);
  void throw_if_broken();
  // Remembers the first failure, and rank 0 passes it on.
  void record_failure(int failed_rank, const std::string& what) noexcept;
  [[noreturn]] void throw_failure() const;

  int rank_, size_;
  int64_t sequence_ = 0;
  std::vector<Peer> peers_;  // rank 0: ranks 1, 2, ...; others: rank 0
  std::string failure_;      // empty: none

  std::atomic<bool> interrupted_{false};
  std::mutex interruption_mutex_;
  std::string interruption_;
};

}  // namespace duokv::dist
