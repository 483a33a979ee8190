// The ranks of a data-parallel run: one process each, all of them running the same program. A group of one
// needs no network, and its calls do nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dist/links.h"
#include "dist/transport.h"

namespace duokv::dist {

class Collective {
 public:
  // A group of one.
  Collective() = default;
  // The ranks that `mpirun` or `srun` started. `library`: path of duokv_mpi.so. All throw ERR_DISTRIBUTED.
  static std::shared_ptr<Collective> join_mpi(const std::string& library);
  // Ranks that were told who they are: rank 0 listens at `host`:`port`.
  static std::shared_ptr<Collective> join_at(const std::string& host, int port, int rank, int size);
  // Leaves, as close() does.
  ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Among the ranks on this machine, and how many of them may run on the same CPUs as this one.
  int local_rank() const { return local_rank_; }
  int sharing_cpus() const { return sharing_cpus_; }
  // "2 ranks, Open MPI 4.1.4"
  const std::string& description() const { return description_; }

  // Collective calls, on host values: all ranks make the same ones in the same order. They throw
  // ERR_DISTRIBUTED naming the rank that failed, left, or made another call. `stop` as in Links.
  void sum(double* values, int64_t n, Stop stop = nullptr);
  void sum(int64_t* values, int64_t n, Stop stop = nullptr);
  void broadcast(std::vector<char>& data, int root, Stop stop = nullptr);
  void barrier(Stop stop = nullptr) { sum(static_cast<double*>(nullptr), 0, stop); }
  // [size]: `value` of every rank.
  std::vector<int64_t> gather(int64_t value, Stop stop = nullptr);

  // Throws where a rank is known to have failed; waits for nothing.
  void check();
  // Tells the others that this rank cannot go on. Their calls throw, and so do this rank's from now on, as
  // does one that waits in another thread.
  void fail(const std::string& reason) noexcept;
  // Waits until every rank leaves; nothing can be called afterwards. Throws where one failed. Idempotent.
  void close();

  // Null where the group was not joined through MPI.
  const MpiTable* mpi() const { return mpi_; }

 private:
  void find_neighbours();

  std::mutex mutex_;  // a device's engine thread and the group's own may call at the same time
  std::unique_ptr<Links> links_;
  const MpiTable* mpi_ = nullptr;
  int rank_ = 0, size_ = 1, local_rank_ = 0, sharing_cpus_ = 1;
  bool closed_ = false;
  std::string description_ = "1 rank";
};

}  // namespace duokv::dist
