#include "cpu/attention.h"

#include <cmath>

#include "cpu/device.h"
#include "cpu/operations.h"

namespace duokv::cpu {

namespace {

// Up to this many queries a row, reading the banks costs more than the products.
constexpr int64_t kStreamedQueries = 4;

}  // namespace

AttentionCall::AttentionCall(const ops::AttentionArgs& arguments)
    : args(arguments),
      group(arguments.query_heads / std::max(1, arguments.kv_heads)),
      padded(round_up(arguments.head_dim, kPadding)),
      bf16(arguments.mode == ops::ProductMode::BF16) {}

void check_attention(const ops::AttentionArgs& args) {
  require(args.batch >= 0 && args.queries >= 0, "attention: batch or queries is negative");
  require(args.head_dim > 0 && args.kv_heads > 0 && args.query_heads > 0, "attention: an empty head");
  require(args.query_heads % args.kv_heads == 0, "attention: query_heads is not a multiple of kv_heads");
  require(args.scale > 0 && std::isfinite(args.scale), "attention: scale is not above 0");
  require(args.bank_count == 1 || args.bank_count == 2, "attention: bank_count is neither 1 nor 2");
  for (int32_t bank = 0; bank < args.bank_count; ++bank) {
    require(args.banks[bank].window >= 0, "attention: a window is negative");
    for (int64_t row = 0; row < args.batch; ++row) {
      const ops::BankRow& r = args.banks[bank].rows[row];
      require(r.first >= 0 && r.count >= 0 && r.count <= INT32_MAX - r.first, "attention: a row's positions");
      require(r.count <= r.capacity, "attention: a row holds more entries than its capacity");
      require(r.count == 0 || (r.slot >= 0 && r.slot < r.capacity), "attention: a slot outside the capacity");
    }
  }
  for (int64_t row = 0; row < args.batch; ++row) {
    require(args.positions[row] >= 0 && args.queries <= INT32_MAX - args.positions[row],
            "attention: a query's position");
  }
}

Status attention_forward(Device* device, const ops::AttentionArgs* args) {
  return guarded([&] {
    check_attention(*args);
    const AttentionCall call(*args);
    if (args->queries <= kStreamedQueries) {
      streamed_attention(device, call);
    } else {
      tiled_attention(device, call);
    }
  });
}

}  // namespace duokv::cpu
