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
  // Document ids of the last positions, which the device does not hold yet, and how many it holds.
  mutable std::vector<int64_t> unsent_ids;
  mutable int64_t sent_ids = 0;
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
  void* k(int32_t bank, int64_t row) const { return at(bank, row, 0); }
  void* v(int32_t bank, int64_t row) const { return at(bank, row, tensor_bytes(bank)); }

  // Entries a row's bank holds: absolute positions first … first+count-1, position p in slot p % slots(bank).
  struct Extent {
    int64_t first, count;
  };
  Extent extent(int32_t bank, int64_t row) const;

  // Appends to the ids of a row. They travel to the device in batches, or when they are read.
  void store_document_ids(int64_t row, const std::vector<int64_t>& ids);
  SessionBytes bytes() const;
  std::vector<std::string> names() const;
  int64_t entries(const std::string& name, int64_t row) const;
  void read(const std::string& name, int64_t row, float* out) const;
  std::vector<int64_t> document_ids(int64_t row) const;

 private:
  int64_t tensor_bytes(int32_t bank) const;  // of K, or of V
  void* at(int32_t bank, int64_t row, int64_t tensor) const {
    return storage_.as<char>() + offsets_[static_cast<size_t>(bank)] + tensor +
           row * kv_width_ * slots(bank) * element();
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
  Buffer storage_;                // every bank's K, then its V, [batch, kv_heads, slots, head_dim] each
  std::vector<int64_t> offsets_;  // [banks] in storage_
  Buffer document_ids_;           // int64 [batch, capacity]
  void send_document_ids(int64_t row) const;
  std::vector<CacheRow> rows_;
};

// Banks of a pass that appends `count` positions to some rows of a cache. Full banks are written in place,
// beyond each row's length. Local entries are staged in the workspace after the earlier entries they are read
// together with, and `store` moves them to their rings; a single position goes straight to its free slot of
// the ring. Nothing counts until `commit`.
class CacheBanks : public Banks {
 public:
  CacheBanks(Workspace& workspace, Cache& cache, const Plan& plan, std::vector<int64_t> rows, int64_t count,
             const Suffixes& suffixes, const float* rotary_table);
  Entries entries(int32_t bank, int64_t length) override;
  void write(int32_t bank, const Entries& entries, int64_t length, const int32_t* positions) override;
  ops::Bank view(const Read& read) override { return views_.at({read.k_bank, read.v_bank}); }

  // Copies earlier local entries to the staging that needs them: before the layers run.
  void load();
  // Copies staged local entries to their rings: after the layers have run.
  void store();
  void commit(bool exact);

  // Entries that the attention launches of a one-position pass over `length` stored positions are sized for:
  // the next power of two, so that the same launches serve many steps.
  static int64_t launch_entries(int64_t length);

 private:
  struct Staging {
    void* k = nullptr;
    void* v = nullptr;
    int64_t slots = 0;             // per row and head
    int64_t length = 0;            // appended entries
    std::vector<int64_t> earlier;  // [rows] entries in front of them
  };
  struct Target {
    const ops::BankSlot* rows;  // [rows] device
    int64_t slots;
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
  Target target(int32_t bank, int64_t length) const;
  ops::Bank view_of(const Read& read) const;

  Workspace& workspace_;
  Cache& cache_;
  const Plan& plan_;
  Device& device_;
  std::vector<int64_t> rows_;
  int64_t count_;
  const float* rotary_table_;
  std::vector<Staging> staging_;  // by bank
  std::vector<Target> targets_;   // by bank
  BankViews views_;
};

}  // namespace duokv
