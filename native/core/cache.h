// The complete cache of a session: every bank's K and V, the document ids, and what each row holds of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/documents.h"
#include "core/layers.h"
#include "core/session.h"

namespace duokv {

struct CacheRow {
  int64_t length = 0;  // positions stored
  int64_t local_valid_from =
      0;  // local banks hold no position before this one (an approximate prefill left a gap)
  bool exact = true;
  RowDocuments documents;
};

// Storage is head-major, [batch, kv_heads, slots, head_dim] per K and V tensor. Full banks have a slot per
// position. A local bank is a ring with one slot more than its window: the step that is being computed has a
// place of its own, so that nothing is overwritten before the step commits.
class Cache {
 public:
  Cache(std::shared_ptr<Device> device, const Plan& plan, const SessionOptions& options);

  CacheRow& row(int64_t index) { return rows_[static_cast<size_t>(index)]; }
  const CacheRow& row(int64_t index) const { return rows_[static_cast<size_t>(index)]; }
  int64_t capacity() const { return capacity_; }
  ops::DType dtype() const { return dtype_; }
  int64_t element() const { return dtype_ == ops::DType::BF16 ? 2 : 4; }

  int64_t slots(int32_t bank) const;
  void* k(int32_t bank, int64_t row) const { return at(storage_[static_cast<size_t>(bank)].k, bank, row); }
  void* v(int32_t bank, int64_t row) const { return at(storage_[static_cast<size_t>(bank)].v, bank, row); }

  // Entries a row's bank holds: absolute positions first … first+count-1, position p in slot p % slots(bank).
  struct Extent {
    int64_t first, count;
  };
  Extent extent(int32_t bank, int64_t row) const;

  void store_document_ids(int64_t row, const std::vector<int64_t>& ids);  // appended after row.length
  SessionBytes bytes() const;
  std::vector<std::string> names() const;
  int64_t entries(const std::string& name, int64_t row) const;
  void read(const std::string& name, int64_t row, float* out) const;
  std::vector<int64_t> document_ids(int64_t row) const;

 private:
  void* at(const Buffer& buffer, int32_t bank, int64_t row) const {
    return buffer.as<char>() + row * kv_width_ * slots(bank) * element();
  }
  struct Tensor {
    int32_t bank;
    bool is_k;
  };
  Tensor find(const std::string& name) const;

  std::shared_ptr<Device> device_;
  const Plan& plan_;
  int64_t batch_, capacity_, kv_width_;
  ops::DType dtype_;
  struct Storage {
    Buffer k, v;
  };
  std::vector<Storage> storage_;
  Buffer document_ids_;  // int64 [batch, capacity]
  std::vector<CacheRow> rows_;
};

// Banks of a pass that appends `count` positions to some rows of a cache. Full banks are written in place,
// beyond each row's length. Local entries are staged in the workspace after the earlier entries they are read
// together with; a single position goes straight to its free slot of the ring. Nothing counts until `commit`.
class CacheBanks : public Banks {
 public:
  CacheBanks(Workspace& workspace, Cache& cache, const Plan& plan, std::vector<int64_t> rows, int64_t count,
             const Suffixes& suffixes);
  Entries entries(int32_t bank, int64_t length) override;
  void write(int32_t bank, const Entries& entries, int64_t length) override;
  ops::Bank view(const Read& read) override;

  void commit(bool exact);

 private:
  struct Staging {
    void* k = nullptr;
    void* v = nullptr;
    int64_t slots = 0;             // per row and head
    int64_t length = 0;            // appended entries
    std::vector<int64_t> earlier;  // [rows] entries in front of them
  };
  bool staged(int32_t bank) const { return plan_.banks[static_cast<size_t>(bank)].window != 0 && count_ > 1; }
  // A run of slots in one row's memory; `slot` is taken modulo `slots`.
  struct Place {
    void* memory = nullptr;
    int64_t slot = 0, slots = 0;
  };
  Place staged_place(int32_t bank, bool is_k, size_t r, int64_t slot) const;
  Place ring_place(int32_t bank, bool is_k, size_t r, int64_t position) const;
  void copy_entries(const Place& from, const Place& to, int64_t count);
  void stage_earlier(int32_t bank);

  Workspace& workspace_;
  Cache& cache_;
  const Plan& plan_;
  Device& device_;
  std::vector<int64_t> rows_;
  int64_t count_;
  std::vector<Staging> staging_;  // by bank
};

}  // namespace duokv
