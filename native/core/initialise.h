// Parameter initialisation, spec/architecture.md section 6.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace duokv {

// out[i] = Normal(0, std), i < n: Box–Muller in FP64 over Philox4x32-10 keyed by SHA-256(seed + ":" + name),
// rounded once to FP32. `seed` is decimal digits. Element i does not depend on n or `threads`.
void normal_parameters(const std::string& seed, std::string_view name, double std, float* out, int64_t n,
                       int32_t threads);

}  // namespace duokv
