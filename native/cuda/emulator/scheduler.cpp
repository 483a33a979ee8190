#include "cuda/emulator/scheduler.h"

#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/emulator/block.h"
#include "cuda/emulator/memory.h"

namespace duokv::simt {

Builtins builtins;

namespace {

uint64_t seed_value = 1, random_state = 0x9E3779B97F4A7C15;

const char* name(Collective kind) {
  switch (kind) {
    case Collective::kBarrier:
      return "barrier";
    case Collective::kSyncWarp:
      return "__syncwarp";
    case Collective::kShuffle:
      return "shuffle";
    case Collective::kVote:
      return "vote";
    case Collective::kReduce:
      return "warp reduction";
    case Collective::kMma:
      return "mma";
    case Collective::kLoadMatrix:
      return "ldmatrix";
  }
  return "";
}

uint32_t rotate_pick(uint32_t mask, uint32_t random) {
  const uint32_t shift = random & 31;
  return (static_cast<uint32_t>(std::countr_zero(std::rotr(mask, static_cast<int>(shift)))) + shift) & 31;
}

}  // namespace

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash ? slash + 1 : path;
}

void set_seed(uint64_t seed) {
  seed_value = seed;
  random_state = (seed + 1) * 0x9E3779B97F4A7C15;
}

uint64_t seed() { return seed_value; }

uint64_t next_random() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 0x2545F4914F6CDD1D;
}

Block& the_block() {
  static Block instance;
  return instance;
}

bool in_kernel() { return block().running != nullptr; }
bool on_own_stack(const void* address) { return block().running->stack->contains(address); }
bool in_parameters(const void* address) {
  const auto* begin = static_cast<const char*>(block().launch->parameters);
  return address >= begin && address < begin + block().launch->parameter_bytes;
}
bool in_shared_memory(const void* address) { return block().shared().region.contains(address); }
uint32_t lane_index() { return block().running->lane; }

// ---------------------------------------------------------------- faults

void fault(FaultCode code, const char* format, ...) {
  Block& b = block();
  char text[1024];
  std::va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  char where[256];
  const Builtins& v = builtins;
  std::snprintf(where, sizeof where,
                "kernel %s, block (%u,%u,%u), thread (%u,%u,%u) = warp %u lane %u, seed %llu: ",
                b.launch->kernel, v.block.x, v.block.y, v.block.z, v.thread.x, v.thread.y, v.thread.z,
                b.running->warp, b.running->lane, static_cast<unsigned long long>(seed_value));
  b.fault = {code, std::string(where) + text};
  Thread* self = b.running;
  switch_context(self->context, b.scheduler);
  __builtin_unreachable();
}

void fault_deadlock() {
  Block& b = block();
  std::string report =
      "kernel " + std::string(b.launch->kernel) + ", seed " + std::to_string(seed_value) + ": deadlock;";
  uint32_t exited = 0, listed = 0;
  for (uint32_t i = 0; i < b.thread_count; ++i) {
    const Thread& t = b.threads[i];
    if (t.state == Thread::State::kDone) ++exited;
    if (t.state != Thread::State::kWaiting) continue;
    // One line for each run of threads that wait at one place.
    const Thread* previous = i > 0 ? &b.threads[i - 1] : nullptr;
    if (previous && previous->state == t.state && previous->site.file == t.site.file &&
        previous->site.line == t.site.line)
      continue;
    if (++listed > 8) continue;
    char text[160];
    std::snprintf(text, sizeof text, " from thread %u (warp %u, lane %u) on: %s at %s:%d;", i, t.warp, t.lane,
                  name(t.kind), base_name(t.site.file), t.site.line);
    report += text;
  }
  b.fault = {FaultCode::kLaunchFailure, report + " " + std::to_string(exited) + " threads returned"};
}

// ---------------------------------------------------------------- meetings

namespace {

void make_ready(Thread& t) {
  Block& b = block();
  t.state = Thread::State::kReady;
  Warp& w = b.warps[t.warp];
  w.ready |= 1u << t.lane;
  b.ready_ranks |= 1u << w.rank;
}

void wait_until_ready(Thread& self, Collective kind, Site site) {
  self.kind = kind;
  self.site = site;
  self.state = Thread::State::kWaiting;
  switch_context(self.context, block().scheduler);
}

[[noreturn]] void fault_disagreement(Collective kind, Site site, Collective other, Site other_site,
                                     uint32_t mask) {
  fault(FaultCode::kLaunchFailure, "%s at %s:%d meets %s at %s:%d, mask %08x", name(kind),
        base_name(site.file), site.line, name(other), base_name(other_site.file), other_site.line, mask);
}

}  // namespace

void meet_warp(Collective kind, uint32_t mask, Site site, void* operands,
               void (*combine)(void* const*, uint32_t)) {
  Block& b = block();
  Thread& self = *b.running;
  Warp& w = b.warps[self.warp];
  const uint32_t bit = 1u << self.lane;
  if (!(mask & bit)) {
    fault(FaultCode::kLaunchFailure, "%s at %s:%d: the calling lane is not in its mask %08x", name(kind),
          base_name(site.file), site.line, mask);
  }
  if (mask & ~w.present) {
    fault(FaultCode::kLaunchFailure,
          "%s at %s:%d: mask %08x has lanes that returned or do not exist (present: %08x)", name(kind),
          base_name(site.file), site.line, mask, w.present);
  }
  WarpMeeting* meeting = nullptr;
  for (uint32_t i = 0; i < w.meeting_count; ++i) {
    WarpMeeting& m = w.meetings[i];
    if (m.mask != mask) continue;  // other lanes' business, or a deadlock, which is reported as such
    if (m.kind != kind || m.site.line != site.line || std::strcmp(m.site.file, site.file) != 0)
      fault_disagreement(kind, site, m.kind, m.site, mask);
    meeting = &m;
  }
  if (!meeting) {
    meeting = &w.meetings[w.meeting_count++];
    *meeting = {kind, mask, 0, site, b.next_sync_object(), {}};
  }
  meeting->arrived |= bit;
  meeting->operands[self.lane] = operands;
  void* sync = meeting->sync;
  tsan::release(sync);
  if (meeting->arrived == mask) {
    tsan::acquire(sync);
    if (combine) combine(meeting->operands, mask);
    tsan::release(sync);
    *meeting = w.meetings[--w.meeting_count];
    for (uint32_t rest = mask & ~bit; rest; rest &= rest - 1)
      make_ready(b.threads[self.warp * kWarpSize + static_cast<uint32_t>(std::countr_zero(rest))]);
    make_ready(self);
    self.kind = kind;
    self.site = site;
    switch_context(self.context, b.scheduler);
  } else {
    wait_until_ready(self, kind, site);
  }
  tsan::acquire(sync);
}

void meet_block(uint32_t id, uint32_t count, bool wait, Site site) {
  Block& b = block();
  Thread& self = *b.running;
  const bool whole_block = count == 0;
  if (whole_block) count = b.thread_count;
  if (id >= kMaxBarriers || count % kWarpSize != 0 || count > b.thread_count) {
    fault(FaultCode::kLaunchFailure,
          "barrier %u for %u threads at %s:%d: ids are below 16, counts multiples of 32 up to %u", id, count,
          base_name(site.file), site.line, b.thread_count);
  }
  Barrier& barrier = b.barriers[id];
  if (barrier.arrived == 0) {
    barrier.count = count;
    barrier.site = site;
    barrier.sync = b.next_sync_object();
  }
  if (barrier.count != count || (whole_block && barrier.site.line != site.line)) {
    fault(FaultCode::kLaunchFailure, "barrier %u for %u threads at %s:%d meets one for %u threads at %s:%d",
          id, count, base_name(site.file), site.line, barrier.count, base_name(barrier.site.file),
          barrier.site.line);
  }
  if (whole_block && b.done_count > 0) {
    fault(FaultCode::kLaunchFailure, "barrier at %s:%d: %u threads of the block have returned",
          base_name(site.file), site.line, b.done_count);
  }
  void* sync = barrier.sync;
  tsan::release(sync);
  if (wait) barrier.waiting[barrier.waiting_count++] = static_cast<uint16_t>(self.index);
  if (++barrier.arrived == count) {
    for (uint32_t i = 0; i < barrier.waiting_count; ++i) make_ready(b.threads[barrier.waiting[i]]);
    barrier.arrived = barrier.waiting_count = 0;
    if (!wait) return;
    self.kind = Collective::kBarrier;
    self.site = site;
    switch_context(self.context, b.scheduler);
  } else {
    if (!wait) return;
    wait_until_ready(self, Collective::kBarrier, site);
  }
  tsan::acquire(sync);
}

void memory_fence() {
  // Orders more than the hardware does (all fences of a launch), so it can hide a race but not invent one.
  tsan::release(&block().fence_sync);
  tsan::acquire(&block().fence_sync);
}

// ---------------------------------------------------------------- running a grid

namespace {

void leave_thread() {
  Block& b = block();
  Thread& self = *b.running;
  if (self.copy_count > 0)
    fault(FaultCode::kLaunchFailure, "returned with %u cp.async copies not waited for", self.copy_count);
  const uint32_t bit = 1u << self.lane;
  Warp& w = b.warps[self.warp];
  for (uint32_t i = 0; i < w.meeting_count; ++i) {
    const WarpMeeting& m = w.meetings[i];
    if (m.mask & bit) {
      fault(FaultCode::kLaunchFailure, "returned while lanes wait for it: %s at %s:%d, mask %08x",
            name(m.kind), base_name(m.site.file), m.site.line, m.mask);
    }
  }
  if (b.barriers[0].arrived > 0 && b.barriers[0].count == b.thread_count) {
    fault(FaultCode::kLaunchFailure, "returned while %u threads wait at the barrier at %s:%d",
          b.barriers[0].arrived, base_name(b.barriers[0].site.file), b.barriers[0].site.line);
  }
  w.present &= ~bit;
  ++b.done_count;
  self.state = Thread::State::kDone;
  tsan::release(&b.end_sync);
  tsan::release(&b.set->order_sync[(b.set->generation + 1) & 1]);
  switch_context(self.context, b.scheduler);
}

void enter_thread() {
  tsan::acquire(&block().start_sync);
  tsan::acquire(&block().set->order_sync[block().set->generation & 1]);
  const KernelLaunch& launch = *block().launch;
  launch.invoke(launch.parameters);
  leave_thread();
  __builtin_unreachable();
}

void start_block(Block& b) {
  const dim3& size = b.launch->block;
  b.thread_count = size.x * size.y * size.z;
  b.done_count = b.ready_ranks = 0;
  for (Barrier& barrier : b.barriers) barrier.arrived = barrier.waiting_count = 0;
  if (tsan::active()) b.sync_objects = std::make_unique<uint64_t[]>(Block::kSyncObjects);

  const uint32_t warp_count = (b.thread_count + kWarpSize - 1) / kWarpSize;
  for (uint32_t i = 0; i < warp_count; ++i) {
    // Inside-out shuffle of the ranks by which warps are preferred.
    const auto j = static_cast<uint32_t>(next_random() % (i + 1));
    b.warp_at_rank[i] = b.warp_at_rank[j];
    b.warp_at_rank[j] = i;
    b.warps[i].ready = b.warps[i].present = b.warps[i].meeting_count = 0;
  }
  for (uint32_t rank = 0; rank < warp_count; ++rank) b.warps[b.warp_at_rank[rank]].rank = rank;
  for (uint32_t i = 0; i < b.thread_count; ++i) {
    Thread& t = b.threads[i];
    t.index = i;
    t.warp = i / kWarpSize;
    t.lane = i % kWarpSize;
    t.position = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    t.copy_count = t.copy_group = 0;
    t.stack = &b.set->stacks[i];
    t.stack->prepare(t.context, enter_thread);
    if (!b.set->tsan_fibers[i]) b.set->tsan_fibers[i] = tsan::create_fiber();
    t.context.tsan_fiber = b.set->tsan_fibers[i];
    b.warps[t.warp].present |= 1u << t.lane;
    make_ready(t);
  }
}

// Runs the threads of one block until all returned or one failed.
void run_block(Block& b) {
  // Half the blocks let some warps run far ahead of others; the rest mix all threads evenly.
  const bool prefer_warps = next_random() & 1;
  while (b.ready_ranks) {
    const auto random = static_cast<uint32_t>(next_random() >> 32);
    const bool by_rank = prefer_warps && (random >> 28) != 0;
    const uint32_t rank =
        by_rank ? static_cast<uint32_t>(std::countr_zero(b.ready_ranks)) : rotate_pick(b.ready_ranks, random);
    Warp& w = b.warps[b.warp_at_rank[rank]];
    const uint32_t lane = rotate_pick(w.ready, random >> 5);
    w.ready &= ~(1u << lane);
    if (!w.ready) b.ready_ranks &= ~(1u << rank);
    Thread& t = b.threads[b.warp_at_rank[rank] * kWarpSize + lane];
    b.running = &t;
    builtins.thread = t.position;
    switch_context(b.scheduler, t.context);
    b.running = nullptr;
    if (b.fault.code != FaultCode::kNone) return;
  }
  if (b.done_count < b.thread_count) fault_deadlock();
}

}  // namespace

Fault run_kernel(const KernelLaunch& launch) {
  Block& b = block();
  install_fault_handler();
  b.launch = &launch;
  b.global = &device_memory().region;
  b.fault = {};
  b.scheduler.tsan_fiber = tsan::current_fiber();
  tsan::release(&b.start_sync);
  builtins.block_size = launch.block;
  builtins.grid_size = launch.grid;
  std::vector<uint64_t> order(uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z);
  for (uint64_t i = 0; i < order.size(); ++i) {
    const uint64_t j = next_random() % (i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  for (const uint64_t index : order) {
    builtins.block = {static_cast<unsigned>(index % launch.grid.x),
                      static_cast<unsigned>(index / launch.grid.x % launch.grid.y),
                      static_cast<unsigned>(index / launch.grid.x / launch.grid.y)};
    if (tsan::active()) b.set = b.fiber_sets + (b.set - b.fiber_sets + 1) % Block::kFiberSets;
    b.shared().start(launch.dynamic_shared, launch.shared_limit);
    start_block(b);
    run_block(b);
    ++b.set->generation;
    const std::string overrun = b.shared().finish();
    if (b.fault.code == FaultCode::kNone && !overrun.empty())
      b.fault = {FaultCode::kIllegalAddress, "kernel " + std::string(launch.kernel) + ": " + overrun};
    if (b.fault.code != FaultCode::kNone) break;
  }
  tsan::acquire(&b.end_sync);
  b.launch = nullptr;
  return b.fault;
}

}  // namespace duokv::simt
