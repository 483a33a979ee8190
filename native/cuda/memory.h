// Device memory: a pool of large blocks from cudaMalloc, which waits for the GPU and so stays out of
// programs, handed out in pieces and counted.
//
// A piece that was released is handed out again at once: all work of a device is in the order of its stream.
// The caller sees to it that no live graph names it.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

namespace duokv::cuda {

class Memory {
 public:
  // Of the CUDA device of that index; on a planning device the addresses name nothing.
  Memory(int32_t device, bool planning) : device_(device), planning_(planning) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // 256-byte aligned, contents undefined. Throws OutOfMemory with what was asked, what is free and what is
  // held here.
  void* allocate(int64_t bytes, const char* what);
  void release(void* memory);
  // Gives the blocks of which nothing is in use back to the driver; so does an allocation that finds no
  // memory.
  void trim();

  int64_t bytes() const;     // handed out
  int64_t peak() const;      // the most that was handed out at a time
  int64_t reserved() const;  // taken from the driver
  int64_t free() const;      // that may still be allocated, from the driver or from what is reserved

 private:
  struct Piece {
    char* block;  // the address of the block that it is a piece of
    int64_t bytes;
    bool small;  // of a block for small pieces
    bool used;
  };
  using Pieces = std::map<char*, Piece>;
  // Where an idle piece is looked for: the smallest that fits, then the lowest.
  using Place = std::tuple<bool, int64_t, char*>;
  static Place place(Pieces::const_iterator piece) {
    return {piece->second.small, piece->second.bytes, piece->first};
  }

  Pieces::iterator find_idle(int64_t bytes, bool small);
  Pieces::iterator reserve(int64_t bytes, bool small, const char* what);
  void join_next(Pieces::iterator piece);
  void trim_locked();

  const int32_t device_;
  const bool planning_;
  mutable std::mutex mutex_;
  Pieces pieces_;         // by address
  std::set<Place> idle_;  // of the pieces that are not used
  int64_t bytes_ = 0, peak_ = 0, reserved_ = 0;
};

}  // namespace duokv::cuda
