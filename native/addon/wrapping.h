// Handing a native resource to the constructor of its JavaScript class, and nothing else to it.
#pragma once

#include <memory>

#include "addon/errors.h"

namespace duokv::addon {

// Distinguishes our externals from those of another addon.
inline constexpr napi_type_tag kResourceTag = {0x1e5c7fb03a9d4286, 0xb7720f4d91ce83a5};

template <class R>
Napi::Object wrap(Napi::Env env, const Napi::FunctionReference& constructor, std::shared_ptr<R> resource) {
  auto external = Napi::External<std::shared_ptr<R>>::New(env, &resource);
  external.TypeTag(&kResourceTag);
  return constructor.New({external});
}

// In a constructor: the resource given to `wrap`. Throws a TypeError when JavaScript called the constructor
// itself.
template <class R>
std::shared_ptr<R> unwrap(const Napi::CallbackInfo& info, const char* made_by) {
  if (!info[0].IsExternal() || !info[0].As<Napi::External<std::shared_ptr<R>>>().CheckTypeTag(&kResourceTag))
    throw Napi::TypeError::New(info.Env(),
                               std::string("this class has no public constructor; use ") + made_by);
  return *info[0].As<Napi::External<std::shared_ptr<R>>>().Data();
}

}  // namespace duokv::addon
