#include <algorithm>
#include <iterator>
#include <limits>
#include <string>

#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/memory.h"

namespace duokv::cuda {
namespace {

constexpr int64_t kAlignment = 256;
// Pieces below this come from blocks of their own, so that they do not break up the large ones.
constexpr int64_t kSmall = int64_t{1} << 20;
constexpr int64_t kBlock = int64_t{2} << 20;

}  // namespace

Memory::~Memory() {
  if (planning_) return;
  for (const auto& [address, piece] : pieces_)
    if (address == piece.block) cudaFree(address);
}

void* Memory::allocate(int64_t bytes, const char* what) {
  if (bytes < 0)
    throw InvalidArgument(std::string(what) + ": bytes is " + std::to_string(bytes) +
                          ", must not be negative");
  const std::lock_guard lock(mutex_);
  // What no address can be given to is no size to round.
  const int64_t size = round_up(std::clamp<int64_t>(bytes, 1, int64_t{1} << 60), kAlignment);
  const bool small = size < kSmall;
  Pieces::iterator piece = find_idle(size, small);
  if (piece == pieces_.end()) piece = reserve(size, small, what);
  // What is left over of a large block is for other large pieces.
  if (const int64_t rest = piece->second.bytes - size; rest >= (small ? kAlignment : kSmall)) {
    Piece next = piece->second;
    next.bytes = rest;
    piece->second.bytes = size;
    idle_.insert(place(pieces_.emplace(piece->first + size, next).first));
  }
  piece->second.used = true;
  bytes_ += piece->second.bytes;
  peak_ = std::max(peak_, bytes_);
  return piece->first;
}

// Takes an idle piece out of the index.
Memory::Pieces::iterator Memory::find_idle(int64_t bytes, bool small) {
  const auto found = idle_.lower_bound({small, bytes, nullptr});
  if (found == idle_.end() || std::get<bool>(*found) != small) return pieces_.end();
  const Pieces::iterator piece = pieces_.find(std::get<char*>(*found));
  idle_.erase(found);
  return piece;
}

// A new block as one piece.
Memory::Pieces::iterator Memory::reserve(int64_t bytes, bool small, const char* what) {
  const int64_t size = small ? kBlock : round_up(bytes, kBlock);
  void* block = nullptr;
  if (planning_) {
    // Addresses that no device memory has.
    const Pieces::const_iterator last = pieces_.empty() ? pieces_.end() : std::prev(pieces_.end());
    block =
        last == pieces_.end() ? reinterpret_cast<char*>(int64_t{1} << 61) : last->first + last->second.bytes;
  } else {
    cudaError_t error = cudaMalloc(&block, static_cast<size_t>(size));
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      trim_locked();
      error = cudaMalloc(&block, static_cast<size_t>(size));
    }
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      size_t free = 0, total = 0;
      check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
      throw OutOfMemory("out of memory on cuda:" + std::to_string(device_) + ": " + std::to_string(bytes) +
                        " bytes asked for (" + what + "), " + std::to_string(free) + " of " +
                        std::to_string(total) + " bytes free, " + std::to_string(bytes_) +
                        " in use by this device object, " + std::to_string(reserved_ - bytes_) +
                        " reserved by it");
    }
    check(error, what);
  }
  reserved_ += size;
  char* const address = static_cast<char*>(block);
  return pieces_.emplace(address, Piece{address, size, small, false}).first;
}

void Memory::release(void* memory) {
  const std::lock_guard lock(mutex_);
  const Pieces::iterator piece = pieces_.find(static_cast<char*>(memory));
  if (piece == pieces_.end() || !piece->second.used) return;
  piece->second.used = false;
  bytes_ -= piece->second.bytes;
  Pieces::iterator first = piece;
  join_next(first);
  if (first != pieces_.begin()) {
    const Pieces::iterator before = std::prev(first);
    if (!before->second.used && before->second.block == first->second.block) {
      idle_.erase(place(before));
      before->second.bytes += first->second.bytes;
      pieces_.erase(first);
      first = before;
    }
  }
  idle_.insert(place(first));
}

void Memory::join_next(Pieces::iterator piece) {
  const Pieces::iterator next = std::next(piece);
  if (next == pieces_.end() || next->second.used || next->second.block != piece->second.block) return;
  idle_.erase(place(next));
  piece->second.bytes += next->second.bytes;
  pieces_.erase(next);
}

void Memory::trim() {
  const std::lock_guard lock(mutex_);
  trim_locked();
}

void Memory::trim_locked() {
  for (Pieces::iterator piece = pieces_.begin(); piece != pieces_.end();) {
    const Pieces::iterator next = std::next(piece);
    const bool whole = piece->first == piece->second.block &&
                       (next == pieces_.end() || next->second.block != piece->second.block);
    if (whole && !piece->second.used) {
      if (!planning_) check(cudaFree(piece->first), "cudaFree");
      reserved_ -= piece->second.bytes;
      idle_.erase(place(piece));
      pieces_.erase(piece);
    }
    piece = next;
  }
}

int64_t Memory::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

int64_t Memory::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

int64_t Memory::reserved() const {
  const std::lock_guard lock(mutex_);
  return reserved_;
}

int64_t Memory::free() const {
  if (planning_) return std::numeric_limits<int64_t>::max();
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(free) + reserved_ - bytes_;
}

}  // namespace duokv::cuda
