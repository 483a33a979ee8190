#include "cuda/emulator/device.h"

#include <bit>

namespace duokv::simt {
namespace {

struct ShuffleOperands {
  Shuffle kind;
  int operand, width;
  uint64_t value, result;
  int missing;  // source lane that takes no part, or -1
};

void combine_shuffle(void* const* lanes, uint32_t mask) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    auto& self = *static_cast<ShuffleOperands*>(lanes[lane]);
    const int width = self.width, first = lane & ~(width - 1), last = first + width - 1;
    int source = lane;
    switch (self.kind) {
      case Shuffle::kIndex:
        source = first + (self.operand & (width - 1));
        break;
      case Shuffle::kUp:
        source = lane - self.operand < first ? lane : lane - self.operand;
        break;
      case Shuffle::kDown:
        source = lane + self.operand > last ? lane : lane + self.operand;
        break;
      case Shuffle::kXor:
        source = (lane ^ self.operand) > last ? lane : lane ^ self.operand;
        break;
    }
    self.missing = lanes[source] ? -1 : source;
    if (lanes[source]) self.result = static_cast<ShuffleOperands*>(lanes[source])->value;
  }
}

struct VoteOperands {
  bool predicate;
  uint32_t ballot;
};

void combine_vote(void* const* lanes, uint32_t mask) {
  uint32_t ballot = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (static_cast<VoteOperands*>(lanes[lane])->predicate) ballot |= 1u << lane;
  }
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    static_cast<VoteOperands*>(lanes[std::countr_zero(rest)])->ballot = ballot;
}

template <class T>
struct ReduceOperands {
  Reduction kind;
  T value;
};

template <class T>
void combine_reduction(void* const* lanes, uint32_t mask) {
  const auto operand = [&](uint32_t rest) {
    return static_cast<ReduceOperands<T>*>(lanes[std::countr_zero(rest)]);
  };
  T total = operand(mask)->value;
  for (uint32_t rest = mask & (mask - 1); rest; rest &= rest - 1) {
    const T value = operand(rest)->value;
    switch (operand(rest)->kind) {
      case Reduction::kAdd:
        total = static_cast<T>(static_cast<uint32_t>(total) + static_cast<uint32_t>(value));
        break;
      case Reduction::kMin:
        total = std::min(total, value);
        break;
      case Reduction::kMax:
        total = std::max(total, value);
        break;
      case Reduction::kAnd:
        total &= value;
        break;
      case Reduction::kOr:
        total |= value;
        break;
    }
  }
  for (uint32_t rest = mask; rest; rest &= rest - 1) operand(rest)->value = total;
}

template <class T>
T reduce(Reduction kind, uint32_t mask, T value, Site site) {
  ReduceOperands<T> operands = {kind, value};
  meet_warp(Collective::kReduce, mask, site, &operands, combine_reduction<T>);
  return operands.value;
}

}  // namespace

uint64_t shuffle(Shuffle kind, uint32_t mask, uint64_t value, int operand, int width, Site site) {
  if (width < 1 || width > 32 || !std::has_single_bit(static_cast<unsigned>(width)))
    fault(FaultCode::kLaunchFailure, "shuffle at %s:%d: width %d is no power of two up to 32",
          base_name(site.file), site.line, width);
  ShuffleOperands operands = {kind, operand, width, value, value, -1};
  meet_warp(Collective::kShuffle, mask, site, &operands, combine_shuffle);
  if (operands.missing >= 0) {
    fault(FaultCode::kLaunchFailure, "shuffle at %s:%d reads lane %d, which is not in its mask %08x",
          base_name(site.file), site.line, operands.missing, mask);
  }
  return operands.result;
}

uint32_t vote(Vote kind, uint32_t mask, bool predicate, Site site) {
  VoteOperands operands = {predicate, 0};
  meet_warp(Collective::kVote, mask, site, &operands, combine_vote);
  switch (kind) {
    case Vote::kBallot:
      return operands.ballot;
    case Vote::kAny:
      return operands.ballot != 0;
    case Vote::kAll:
      return operands.ballot == mask;
  }
  return 0;
}

uint32_t reduce_unsigned(Reduction kind, uint32_t mask, uint32_t value, Site site) {
  return reduce(kind, mask, value, site);
}
int32_t reduce_signed(Reduction kind, uint32_t mask, int32_t value, Site site) {
  return reduce(kind, mask, value, site);
}

}  // namespace duokv::simt
