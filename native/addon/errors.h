// From C++ exceptions to JavaScript errors: one shape, { code, message }.
#pragma once

#include <string>
#include <utility>

#include "addon/napi_setup.h"
#include "core/error.h"

namespace duokv::addon {

// An exception as data, so that it can travel between threads.
struct Failure {
  std::string code;
  std::string message;
};

// The exception being handled. Call inside a catch block only.
Failure current_failure();

// An Error with the property `code`.
Napi::Error to_error(Napi::Env env, const Failure& failure);

// Runs `body` and throws whatever leaves it as a JavaScript error with a code.
template <class Body>
auto guarded(Napi::Env env, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const Napi::Error&) {
    throw;
  } catch (...) {
    throw to_error(env, current_failure());
  }
}

}  // namespace duokv::addon
