#include "dist/collective.h"

#include <sched.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "dist/hash.h"
#include "dist/libraries.h"

namespace duokv::dist {
namespace {

// Ranks on a cluster start minutes apart at worst; a rank that never comes should not cost an hour.
constexpr std::chrono::seconds kJoinLimit{120};
constexpr std::chrono::seconds kConnectLimit{5};

Error unavailable(const std::string& what) { return Error("ERR_DISTRIBUTED", what); }

void require_ok(const MpiTable& mpi, ops::Status status) {
  if (status != ops::kOk) throw unavailable(mpi.transport.last_error());
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

// Where rank 0 listens, as it travels over MPI.
struct Meeting {
  Token token;
  int32_t port;
  char host[256];
  char addresses[1024];  // one a line
};

Meeting make_meeting(const Listener& listener) {
  Meeting meeting{};
  if (getrandom(meeting.token.data(), meeting.token.size(), 0) != static_cast<ssize_t>(meeting.token.size()))
    throw unavailable("no random numbers for the group's token");
  meeting.port = listener.port();
  std::strncpy(meeting.host, host_name().c_str(), sizeof meeting.host - 1);
  std::string lines;
  for (const std::string& address : own_addresses())
    if (lines.size() + address.size() + 1 < sizeof meeting.addresses) lines += address + "\n";
  lines.copy(meeting.addresses, sizeof meeting.addresses - 1);
  return meeting;
}

std::unique_ptr<Links> go_to(const Meeting& meeting, int rank, int size, Clock::time_point deadline) {
  std::vector<std::string> addresses;
  for (const char* line = meeting.addresses; *line != 0;) {
    const char* end = std::strchr(line, '\n');
    addresses.emplace_back(line, end);
    line = end + 1;
  }
  // On one machine the loopback, listed last, always works.
  if (host_name() == meeting.host) std::reverse(addresses.begin(), addresses.end());
  std::string reasons;
  for (const std::string& address : addresses) {
    std::string why;
    Socket connection = connect(address, meeting.port, Clock::now() + kConnectLimit, why);
    if (!connection) {
      reasons += "; " + why;
      continue;
    }
    try {
      return std::make_unique<Links>(std::move(connection), rank, size, meeting.token, deadline);
    } catch (const Error& error) {
      reasons += "; " + address + ": " + error.what();  // another machine's private address
    }
  }
  throw unavailable("rank " + std::to_string(rank) + " cannot connect to rank 0 on " + meeting.host +
                    reasons);
}

}  // namespace

std::shared_ptr<Collective> Collective::join_mpi(const std::string& library) {
  const MpiTable& mpi = load_mpi(library);
  auto group = std::make_shared<Collective>();
  int32_t rank = 0, size = 1;
  require_ok(mpi, mpi.start(&rank, &size));
  FoundLibrary found{};
  require_ok(mpi, mpi.transport.find(&found));
  group->mpi_ = &mpi;
  group->rank_ = rank;
  group->size_ = size;
  group->description_ = std::to_string(size) + (size == 1 ? " rank, " : " ranks, ") + found.version;
  if (size == 1) return group;
  const auto deadline = Clock::now() + kJoinLimit;
  if (rank == 0) {
    const Listener listener(0);
    Meeting meeting = make_meeting(listener);
    require_ok(mpi, mpi.broadcast(&meeting, sizeof meeting));
    group->links_ = std::make_unique<Links>(listener, size, meeting.token, deadline);
  } else {
    Meeting meeting{};
    require_ok(mpi, mpi.broadcast(&meeting, sizeof meeting));
    group->links_ = go_to(meeting, rank, size, deadline);
  }
  group->find_neighbours();
  return group;
}

std::shared_ptr<Collective> Collective::join_at(const std::string& host, int port, int rank, int size) {
  auto group = std::make_shared<Collective>();
  group->rank_ = rank;
  group->size_ = size;
  if (size == 1) return group;
  group->description_ = std::to_string(size) + " ranks by " + host + " port " + std::to_string(port);
  const auto deadline = Clock::now() + kJoinLimit;
  // Keeps apart what is not duokv; two groups that were told the same port are told apart by their size only.
  constexpr Token token = {'d', 'u', 'o', 'k', 'v', ' ', 'r', 'a', 'n', 'k', 's', ' ', '1'};
  if (rank == 0) {
    group->links_ = std::make_unique<Links>(Listener(port), size, token, deadline);
  } else {
    std::string why;
    while (!group->links_) {
      if (Socket connection = connect(host, port, Clock::now() + kConnectLimit, why)) {
        group->links_ = std::make_unique<Links>(std::move(connection), rank, size, token, deadline);
        break;
      }
      // Rank 0 may not have started yet.
      if (Clock::now() > deadline)
        throw unavailable("rank " + std::to_string(rank) + " cannot connect to rank 0: " + why);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
  group->find_neighbours();
  return group;
}

Collective::~Collective() {
  try {
    close();
  } catch (const Error&) {
    // Whoever waits for this rank has been told.
  }
}

void Collective::find_neighbours() {
  const std::string host = host_name();
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  sched_getaffinity(0, sizeof cpus, &cpus);
  const int64_t host_hash = hash_bytes(host.data(), host.size());
  const std::vector<int64_t> hosts = gather(host_hash);
  const std::vector<int64_t> places = gather(hash_bytes(&cpus, sizeof cpus, host_hash));
  local_rank_ = static_cast<int>(std::count(hosts.begin(), hosts.begin() + rank_, host_hash));
  sharing_cpus_ =
      static_cast<int>(std::count(places.begin(), places.end(), places[static_cast<size_t>(rank_)]));
}

void Collective::sum(double* values, int64_t n, Stop stop) {
  const std::lock_guard lock(mutex_);
  if (links_) links_->sum(values, n, stop);
}

void Collective::sum(int64_t* values, int64_t n, Stop stop) {
  const std::lock_guard lock(mutex_);
  if (links_) links_->sum(values, n, stop);
}

void Collective::broadcast(std::vector<char>& data, int root, Stop stop) {
  const std::lock_guard lock(mutex_);
  if (links_) links_->broadcast(data, root, stop);
}

std::vector<int64_t> Collective::gather(int64_t value, Stop stop) {
  std::vector<int64_t> values(static_cast<size_t>(size_));
  values[static_cast<size_t>(rank_)] = value;
  sum(values.data(), size_, stop);
  return values;
}

void Collective::check() {
  const std::lock_guard lock(mutex_);
  if (links_) links_->check();
}

void Collective::fail(const std::string& reason) noexcept {
  if (!links_) return;
  try {
    links_->interrupt(reason);
    // Who holds the mutex waits in a call, which notices.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) links_->check();
  } catch (const std::exception&) {
    // The failure itself.
  }
}

void Collective::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  const bool healthy = links_ ? links_->leave() : size_ == 1;
  // Ending without it is what tells mpirun that something went wrong.
  if (mpi_ != nullptr) mpi_->stop(healthy ? 1 : 0);
  if (!healthy && links_) links_->check();
}

}  // namespace duokv::dist
