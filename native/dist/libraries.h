// The libraries that move gradients between ranks: opening them, and saying what was found.
#pragma once

#include <string>

#include "dist/transport.h"

namespace duokv::dist {

// A library as it was found here, or why it cannot be used.
struct Finding {
  bool found = false;
  std::string version, path;  // "Open MPI v4.1.4", and its file; empty where it is missing
  std::string why;            // empty where it was found
};

// The table of duokv_mpi.so at `path`. Throws ERR_DISTRIBUTED.
const MpiTable& load_mpi(const std::string& path);
// NCCL's calls beside the op table of a backend's library; null where it has none, or those of another duokv.
const TransportTable* nccl_table(const ops::OpTable& backend);

// `path`: of duokv_mpi.so.
Finding find_mpi(const std::string& path);
Finding find_nccl(const ops::OpTable& backend);

}  // namespace duokv::dist
