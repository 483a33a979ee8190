// Values that are not finite, and where results may hold them: for the tests of all backends.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace duokv::test {

inline constexpr float kNonFinite[] = {std::numeric_limits<float>::infinity(),
                                       -std::numeric_limits<float>::infinity(),
                                       std::numeric_limits<float>::quiet_NaN()};

// What is wrong, or "": the elements that are not finite must be those of `where`, which ascends.
inline std::string wrong_non_finite(const std::vector<float>& got, const std::vector<size_t>& where) {
  std::vector<size_t> found;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) found.push_back(i);
  }
  const auto [at, wanted] = std::mismatch(found.begin(), found.end(), where.begin(), where.end());
  if (at == found.end() && wanted == where.end()) return "";
  const bool lost = at == found.end() || (wanted != where.end() && *wanted < *at);
  return "element " + std::to_string(lost ? *wanted : *at) + (lost ? " is finite" : " is not finite");
}

}  // namespace duokv::test
