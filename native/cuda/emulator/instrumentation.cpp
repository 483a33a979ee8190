// The checked build: kernels are compiled with -fsanitize=thread, which makes the compiler call a function
// before every access, but linked with the functions below instead of ThreadSanitizer's runtime. So every
// access of a kernel is checked against the state of its bytes, by any compiler that has that option, at a
// cost of a few nanoseconds each.
#include "cuda/emulator/memory.h"

using duokv::simt::Access;
using duokv::simt::check_access;

extern "C" {

void __tsan_init() { duokv::simt::stores_are_tracked = true; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define DUOKV_ACCESS_HOOKS(bytes)                                               \
  void __tsan_read##bytes(void* p) {                                            \
    check_access(p, bytes, bytes, Access::kRead, __builtin_return_address(0));  \
  }                                                                             \
  void __tsan_write##bytes(void* p) {                                           \
    check_access(p, bytes, bytes, Access::kWrite, __builtin_return_address(0)); \
  }                                                                             \
  void __tsan_unaligned_read##bytes(void* p) {                                  \
    check_access(p, bytes, 1, Access::kRead, __builtin_return_address(0));      \
  }                                                                             \
  void __tsan_unaligned_write##bytes(void* p) {                                 \
    check_access(p, bytes, 1, Access::kWrite, __builtin_return_address(0));     \
  }                                                                             \
  void __tsan_volatile_read##bytes(void* p) {                                   \
    check_access(p, bytes, bytes, Access::kRead, __builtin_return_address(0));  \
  }                                                                             \
  void __tsan_volatile_write##bytes(void* p) {                                  \
    check_access(p, bytes, bytes, Access::kWrite, __builtin_return_address(0)); \
  }
DUOKV_ACCESS_HOOKS(1)
DUOKV_ACCESS_HOOKS(2)
DUOKV_ACCESS_HOOKS(4)
DUOKV_ACCESS_HOOKS(8)
DUOKV_ACCESS_HOOKS(16)
#undef DUOKV_ACCESS_HOOKS

void __tsan_read_range(void* p, unsigned long bytes) {
  check_access(p, bytes, 1, Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
  check_access(p, bytes, 1, Access::kWrite, __builtin_return_address(0));
}

// Host code beside the kernels: guards of local statics, virtual tables.
unsigned char __tsan_atomic8_load(const volatile unsigned char* p, int) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}

}  // extern "C"
