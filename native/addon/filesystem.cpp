#include "addon/filesystem.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "addon/arguments.h"

namespace duokv::addon {
namespace {

constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE of linux/fs.h

Napi::Value exchange_paths(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    const std::string a = to_text(info[0], "a"), b = to_text(info[1], "b");
    // The system call itself: its wrapper in the C library is younger than the systems a prebuilt package
    // runs on.
    if (syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), kExchange) == 0)
      return Napi::Boolean::New(env, true);
    if (errno == EINVAL || errno == ENOSYS || errno == EXDEV || errno == ENOTSUP || errno == EPERM)
      return Napi::Boolean::New(env, false);
    throw Error("ERR_INTERNAL", "cannot exchange " + a + " and " + b + ": " + std::strerror(errno));
  });
}

}  // namespace

void define_filesystem_functions(Napi::Env env, Napi::Object exports) {
  exports.Set("exchangePaths", Napi::Function::New<exchange_paths>(env, "exchangePaths"));
}

}  // namespace duokv::addon
