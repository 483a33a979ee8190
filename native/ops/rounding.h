// Integer division and multiples, rounded up; operands are not negative.
#pragma once

#include <cstdint>

namespace duokv {

constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
constexpr int64_t round_up(int64_t value, int64_t unit) { return ceil_div(value, unit) * unit; }

}  // namespace duokv
