#include "dist/libraries.h"

#include <dlfcn.h>
#include <unistd.h>

#include "core/error.h"

namespace duokv::dist {
namespace {

Finding find(const TransportTable& table) {
  FoundLibrary library{};
  if (table.find(&library) != ops::kOk) return {false, "", "", table.last_error()};
  return {true, library.version, library.path, ""};
}

}  // namespace

// Never closed: an MPI library does not survive it.
const MpiTable& load_mpi(const std::string& path) {
  if (access(path.c_str(), F_OK) != 0)
    throw Error("ERR_DISTRIBUTED", "duokv was built without MPI (there is no " + path +
                                       "): install its headers (on Debian or Ubuntu: apt-get install "
                                       "libopenmpi-dev) and build again");
  // MPI opens components of its own, which look for its symbols among the global ones.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw Error("ERR_DISTRIBUTED", std::string("MPI cannot be used: ") + dlerror());
  const auto table = reinterpret_cast<const MpiTable* (*)()>(dlsym(library, "duokv_mpi_table"));
  if (table == nullptr || table()->transport.version != kTransportVersion)
    throw Error("ERR_DISTRIBUTED", path + " was built with another version of duokv");
  return *table();
}

const TransportTable* nccl_table(const ops::OpTable& backend) {
  Dl_info place{};
  if (dladdr(&backend, &place) == 0) return nullptr;
  void* library = dlopen(place.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  const auto table = reinterpret_cast<const TransportTable* (*)()>(dlsym(library, "duokv_nccl_table"));
  return table == nullptr || table()->version != kTransportVersion ? nullptr : table();
}

Finding find_mpi(const std::string& path) {
  try {
    return find(load_mpi(path).transport);
  } catch (const Error& error) {
    return {false, "", "", error.what()};
  }
}

Finding find_nccl(const ops::OpTable& backend) {
  const TransportTable* table = nccl_table(backend);
  if (table != nullptr) return find(*table);
  return {false, "", "",
          "the CUDA library was built without NCCL's header (pip's nvidia-nccl-cu13 has it), or by another "
          "version of duokv"};
}

}  // namespace duokv::dist
