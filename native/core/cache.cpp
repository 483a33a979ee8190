#include "core/cache.h"

#include <algorithm>
#include <bit>

#include "ops/rounding.h"

namespace duokv {

using ops::OpTable;

Cache::Cache(std::shared_ptr<Device> device, const Plan& plan, const SessionOptions& options)
    : device_(std::move(device)),
      plan_(plan),
      batch_(options.batch),
      capacity_(options.capacity),
      kv_width_(plan.config.kv_width()),
      dtype_(options.precision.cache),
      rows_(static_cast<size_t>(options.batch)) {
  int64_t bytes = 0;
  for (size_t b = 0; b < plan.banks.size(); ++b) {
    offsets_.push_back(bytes);
    bytes += 2 * tensor_bytes(static_cast<int32_t>(b));
  }
  // In one piece: the memory of a large buffer is faster to read than that of many small ones.
  storage_ = Buffer(device_, bytes, "key-value cache");
  document_ids_ = Buffer(device_, batch_ * capacity_ * static_cast<int64_t>(sizeof(int64_t)), "document ids");
}

int64_t Cache::tensor_bytes(int32_t bank) const {
  constexpr int64_t kAlignment = 256;
  const int64_t bytes = batch_ * kv_width_ * slots(bank) * element();
  return round_up(bytes, kAlignment);
}

int64_t Cache::slots(int32_t bank) const {
  const int64_t window = plan_.banks[static_cast<size_t>(bank)].window;
  return window == 0 ? capacity_ : std::min(capacity_, window + 1);
}

Cache::Extent Cache::extent(int32_t bank, int64_t index) const {
  const CacheRow& state = row(index);
  const int64_t window = plan_.banks[static_cast<size_t>(bank)].window;
  if (window == 0) return {0, state.length};
  const int64_t first = std::max(state.local_valid_from, state.length - std::min(window, state.length));
  return {first, state.length - first};
}

void Cache::store_document_ids(int64_t index, const std::vector<int64_t>& ids) {
  constexpr size_t kBatch = 256;
  CacheRow& state = row(index);
  state.unsent_ids.insert(state.unsent_ids.end(), ids.begin(), ids.end());
  if (state.unsent_ids.size() >= kBatch) send_document_ids(index);
}

void Cache::send_document_ids(int64_t index) const {
  const CacheRow& state = row(index);
  const int64_t count = static_cast<int64_t>(state.unsent_ids.size());
  if (count == 0) return;
  device_->upload(document_ids_.as<int64_t>() + index * capacity_ + state.sent_ids, state.unsent_ids.data(),
                  count * static_cast<int64_t>(sizeof(int64_t)));
  state.sent_ids += count;
  state.unsent_ids.clear();
}

std::vector<int64_t> Cache::document_ids(int64_t index) const {
  send_document_ids(index);
  std::vector<int64_t> ids(static_cast<size_t>(row(index).length));
  device_->download(ids.data(), document_ids_.as<int64_t>() + index * capacity_,
                    static_cast<int64_t>(ids.size() * sizeof(int64_t)));
  return ids;
}

SessionBytes Cache::bytes() const {
  SessionBytes bytes;
  for (size_t b = 0; b < plan_.banks.size(); ++b) {
    for (int64_t r = 0; r < batch_; ++r)
      bytes.part(plan_.banks[b].part) += 2 * extent(static_cast<int32_t>(b), r).count * kv_width_ * element();
  }
  for (const CacheRow& state : rows_)
    bytes.document_ids += state.length * static_cast<int64_t>(sizeof(int64_t));
  bytes.reserved = storage_.bytes() + document_ids_.bytes();
  bytes.device = bytes.total();
  return bytes;
}

std::vector<std::string> Cache::names() const {
  std::vector<std::string> names;
  for (const BankPlan& bank : plan_.banks)
    for (const char* part : {".k", ".v"}) names.push_back(bank.name + part);
  names.push_back("documentIds");
  return names;
}

Cache::Tensor Cache::find(const std::string& name) const {
  for (size_t b = 0; b < plan_.banks.size(); ++b)
    for (bool is_k : {true, false})
      if (name == plan_.banks[b].name + (is_k ? ".k" : ".v")) return {static_cast<int32_t>(b), is_k};
  throw Error("ERR_TENSOR_NAME", "this session's cache has no tensor '" + name + "'");
}

int64_t Cache::entries(const std::string& name, int64_t index) const {
  return name == "documentIds" ? row(index).length : extent(find(name).bank, index).count;
}

void Cache::read(const std::string& name, int64_t index, float* out) const {
  const Tensor tensor = find(name);
  const Extent held = extent(tensor.bank, index);
  if (held.count == 0) return;
  const int64_t slot_count = slots(tensor.bank);
  const int64_t bytes = held.count * kv_width_ * static_cast<int64_t>(sizeof(float));
  const Buffer dense(device_, bytes, "cache tensor " + name);
  device_->run(&OpTable::cache_read,
               {tensor.is_k ? k(tensor.bank, index) : v(tensor.bank, index), held.count,
                static_cast<int32_t>(held.first % slot_count), static_cast<int32_t>(slot_count),
                static_cast<int32_t>(plan_.config.kv_heads), static_cast<int32_t>(plan_.config.head_dim),
                dtype_, slot_count * plan_.config.head_dim, plan_.config.head_dim, dense.as()});
  device_->download(out, dense.as(), bytes);
}

CacheBanks::CacheBanks(Workspace& workspace, Cache& cache, const Plan& plan, std::vector<int64_t> rows,
                       int64_t count, const Suffixes& suffixes, const float* rotary_table)
    : workspace_(workspace),
      cache_(cache),
      plan_(plan),
      device_(*workspace.device()),
      rows_(std::move(rows)),
      count_(count),
      rotary_table_(rotary_table),
      staging_(plan.banks.size()) {
  for (size_t b = 0; b < plan.banks.size(); ++b) {
    const int32_t bank = static_cast<int32_t>(b);
    if (!staged(bank)) continue;
    Staging& staging = staging_[b];
    staging.length = suffixes.projection[b];
    // Earlier entries are read together with the new ones only where these start at the row's end; a shorter
    // suffix leaves a gap, and reaches back far enough for its own queries (or is approximate).
    const int64_t reach = staging.length == count ? plan.banks[b].window - 1 : 0;
    int64_t most = 0;
    for (int64_t row : rows_) {
      staging.earlier.push_back(std::min(reach, cache.extent(bank, row).count));
      most = std::max(most, staging.earlier.back());
    }
    staging.slots = most + staging.length;
    const int64_t bytes =
        static_cast<int64_t>(rows_.size()) * plan.config.kv_width() * staging.slots * cache.element();
    staging.k = workspace.take<char>(bytes);
    staging.v = workspace.take<char>(bytes);
  }
  for (size_t b = 0; b < plan.banks.size(); ++b)
    targets_.push_back(target(static_cast<int32_t>(b), suffixes.projection[b]));
  for (const LayerPlan& layer : plan.layers)
    for (const Read& read : layer.reads)
      if (!views_.contains({read.k_bank, read.v_bank})) views_[{read.k_bank, read.v_bank}] = view_of(read);
}

// Start of row r's memory in a head-major tensor of `slots` slots.
static void* row_memory(void* tensor, size_t r, int64_t kv_width, int64_t slots, int64_t element) {
  return static_cast<char*>(tensor) + static_cast<int64_t>(r) * kv_width * slots * element;
}

void CacheBanks::copy_entries(const Place& from, const Place& to, int64_t count) {
  const ModelConfig& c = plan_.config;
  ops::CacheCopyArgs copy{};
  copy.src = from.memory;
  copy.src_slot = static_cast<int32_t>(from.slot % from.slots);
  copy.src_capacity = static_cast<int32_t>(from.slots);
  copy.src_head_stride = from.slots * c.head_dim;
  copy.dst = to.memory;
  copy.dst_slot = static_cast<int32_t>(to.slot % to.slots);
  copy.dst_capacity = static_cast<int32_t>(to.slots);
  copy.dst_head_stride = to.slots * c.head_dim;
  copy.count = count;
  copy.position_stride = c.head_dim;
  copy.kv_heads = static_cast<int32_t>(c.kv_heads);
  copy.head_dim = static_cast<int32_t>(c.head_dim);
  copy.dtype = cache_.dtype();
  device_.run(&OpTable::cache_copy, copy);
}

CacheBanks::Place CacheBanks::staged_place(int32_t bank, bool is_k, size_t r, int64_t slot) const {
  const Staging& staging = staging_[static_cast<size_t>(bank)];
  return {
      row_memory(is_k ? staging.k : staging.v, r, plan_.config.kv_width(), staging.slots, cache_.element()),
      slot, staging.slots};
}

CacheBanks::Place CacheBanks::ring_place(int32_t bank, bool is_k, size_t r, int64_t position) const {
  return {is_k ? cache_.k(bank, rows_[r]) : cache_.v(bank, rows_[r]), position, cache_.slots(bank)};
}

void CacheBanks::load() {
  for (size_t b = 0; b < staging_.size(); ++b) {
    const int32_t bank = static_cast<int32_t>(b);
    for (size_t r = 0; r < staging_[b].earlier.size(); ++r) {
      const int64_t earlier = staging_[b].earlier[r];
      if (earlier == 0) continue;
      const int64_t first = cache_.row(rows_[r]).length - earlier;
      for (bool is_k : {true, false})
        copy_entries(ring_place(bank, is_k, r, first), staged_place(bank, is_k, r, 0), earlier);
    }
  }
}

void CacheBanks::store() {
  for (size_t b = 0; b < staging_.size(); ++b) {
    const int32_t bank = static_cast<int32_t>(b);
    const Staging& staging = staging_[b];
    for (size_t r = 0; r < staging.earlier.size(); ++r) {
      const int64_t held = staging.earlier[r] + staging.length;
      const int64_t kept = std::min(plan_.banks[b].window, held);
      const int64_t first = cache_.row(rows_[r]).length + count_ - kept;
      for (bool is_k : {true, false})
        copy_entries(staged_place(bank, is_k, r, held - kept), ring_place(bank, is_k, r, first), kept);
    }
  }
}

Banks::Entries CacheBanks::entries(int32_t, int64_t length) {
  const int64_t elements = static_cast<int64_t>(rows_.size()) * length * plan_.config.kv_width();
  return {workspace_.take(elements), workspace_.take(elements)};
}

CacheBanks::Target CacheBanks::target(int32_t bank, int64_t length) const {
  std::vector<ops::BankSlot> slots;
  int64_t capacity = 0;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const auto place = [&](bool is_k) {
      return staged(bank) ? staged_place(bank, is_k, r, staging_[static_cast<size_t>(bank)].earlier[r])
                          : ring_place(bank, is_k, r, cache_.row(rows_[r]).length + count_ - length);
    };
    const Place k = place(true), v = place(false);
    capacity = k.slots;
    slots.push_back(
        {k.memory, v.memory, static_cast<int32_t>(k.slot % k.slots), static_cast<int32_t>(k.slots)});
  }
  return {workspace_.upload(slots), capacity};
}

void CacheBanks::write(int32_t bank, const Entries& entries, int64_t length, const int32_t* positions) {
  const ModelConfig& c = plan_.config;
  const Target& target = targets_[static_cast<size_t>(bank)];
  device_.run(&OpTable::cache_write,
              {entries.k, entries.v, static_cast<int64_t>(rows_.size()), length,
               static_cast<int32_t>(c.kv_heads), static_cast<int32_t>(c.head_dim), positions, rotary_table_,
               cache_.dtype(), target.slots * c.head_dim, c.head_dim, target.rows});
}

int64_t CacheBanks::launch_entries(int64_t length) {
  constexpr uint64_t kSmallest = 256;
  return static_cast<int64_t>(std::bit_ceil(std::max(kSmallest, static_cast<uint64_t>(length))));
}

ops::Bank CacheBanks::view_of(const Read& read) const {
  const ModelConfig& c = plan_.config;
  std::vector<ops::BankRow> rows;
  int64_t slots = 0, longest = 0;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const int64_t end = cache_.row(rows_[r]).length + count_;
    int64_t first;
    Place k, v;
    if (staged(read.k_bank)) {
      const Staging& staging = staging_[static_cast<size_t>(read.k_bank)];
      first = end - staging.earlier[r] - staging.length;
      k = staged_place(read.k_bank, true, r, 0);
      v = staged_place(read.v_bank, false, r, 0);
    } else {
      first = cache_.extent(read.k_bank, rows_[r]).first;
      k = ring_place(read.k_bank, true, r, first);
      v = ring_place(read.v_bank, false, r, first);
    }
    slots = k.slots;
    longest = std::max(longest, end - first);
    rows.push_back({k.memory, v.memory, static_cast<int32_t>(first), static_cast<int32_t>(end - first),
                    static_cast<int32_t>(k.slot % slots), static_cast<int32_t>(slots)});
  }
  if (count_ == 1) longest = std::min(slots, launch_entries(longest));
  return {workspace_.upload(rows),
          static_cast<int32_t>(longest),
          cache_.dtype(),
          slots * c.head_dim,
          c.head_dim,
          0,
          nullptr};
}

void CacheBanks::commit(bool exact) {
  int64_t shortest = count_;  // appended local entries that every bank has
  for (size_t b = 0; b < staging_.size(); ++b)
    if (staged(static_cast<int32_t>(b))) shortest = std::min(shortest, staging_[b].length);
  for (int64_t index : rows_) {
    CacheRow& row = cache_.row(index);
    row.length += count_;
    if (shortest < count_) row.local_valid_from = row.length - shortest;
    row.exact = row.exact && exact;
  }
}

}  // namespace duokv
