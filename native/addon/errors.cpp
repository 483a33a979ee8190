#include "addon/errors.h"

#include <new>

namespace duokv::addon {

Failure current_failure() {
  try {
    throw;
  } catch (const Error& error) {
    return {error.code, error.what()};
  } catch (const std::bad_alloc&) {
    return {"ERR_DEVICE_MEMORY", "the host is out of memory"};
  } catch (const std::exception& error) {
    return {"ERR_INTERNAL", error.what()};
  } catch (...) {
    return {"ERR_INTERNAL", "an exception of unknown type"};
  }
}

Napi::Error to_error(Napi::Env env, const Failure& failure) {
  Napi::Error error = Napi::Error::New(env, failure.message);
  error.Value().Set("code", failure.code);
  return error;
}

}  // namespace duokv::addon
