// How a backend keeps exceptions on its side of the op table: what it throws, and what becomes of it.
#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "ops/ops.h"

namespace duokv::ops {

// An argument no caller should pass.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool condition, const char* message) {
  if (!condition) throw InvalidArgument(message);
}

inline thread_local std::string last_error_message;
inline const char* last_error() { return last_error_message.c_str(); }

inline Status guarded_call(void (*call)(void*), void* body) noexcept {
  const auto failed = [](Status status, const char* message) {
    last_error_message = message;
    return status;
  };
  try {
    call(body);
    return kOk;
  } catch (const InvalidArgument& error) {
    return failed(kInvalid, error.what());
  } catch (const OutOfMemory& error) {
    return failed(kOutOfMemory, error.what());
  } catch (const Unavailable& error) {
    return failed(kUnavailable, error.what());
  } catch (const std::bad_alloc&) {
    return failed(kOutOfMemory, "out of host memory");
  } catch (const std::exception& error) {
    return failed(kInternal, error.what());
  } catch (...) {
    return failed(kInternal, "unknown error");
  }
}

// Runs `body`, turning exceptions into a status and this thread's last error.
template <class Body>
Status guarded(Body&& body) noexcept {
  using B = std::remove_reference_t<Body>;
  return guarded_call([](void* b) { (*static_cast<B*>(b))(); }, &body);
}

}  // namespace duokv::ops
