// The one exception type of the core. `code` is stable and reaches JavaScript as DuokvError.code.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace duokv {

struct Error : std::runtime_error {
  Error(std::string error_code, const std::string& message)
      : std::runtime_error(message), code(std::move(error_code)) {}
  std::string code;
};

// Code of a call that was cancelled between two layers.
inline constexpr const char* kAbortCode = "ABORT_ERR";

}  // namespace duokv
