#include "cuda/emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

// Weak, so that the same object works with and without ThreadSanitizer's runtime.
extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
__attribute__((visibility("default"))) void __tsan_on_report(
    void* report);  // called by the runtime, which is a shared library
}

namespace duokv::simt {
namespace {

constexpr size_t kPage = 4096;
int race_reports = 0;

}  // namespace

namespace tsan {

bool active() { return __tsan_create_fiber != nullptr; }
void* current_fiber() { return active() ? __tsan_get_current_fiber() : nullptr; }
void* create_fiber() { return active() ? __tsan_create_fiber(0) : nullptr; }
void acquire(void* object) {
  if (__tsan_acquire) __tsan_acquire(object);
}
void release(void* object) {
  if (__tsan_release) __tsan_release(object);
}
int reports() { return race_reports; }

}  // namespace tsan

void Stack::map() {
  void* memory = mmap(nullptr, kBytes + kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE) != 0) {
    std::perror("simt: cannot map a fiber stack");
    std::abort();
  }
  base_ = static_cast<char*>(memory) + kPage;
}

Stack::~Stack() {
  if (base_) munmap(base_ - kPage, kBytes + kPage);
}

bool Stack::guard_contains(const void* address) const {
  const char* p = static_cast<const char*>(address);
  return base_ && p >= base_ - kPage && p < base_;
}

#if defined(__x86_64__)

// Ends in pop and jmp: a ret would mispredict every time, since the return address is another fiber's.
extern "C" void duokv_simt_switch(void** save, void* load);
asm(R"(
.text
.globl duokv_simt_switch
.type duokv_simt_switch, @function
duokv_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size duokv_simt_switch, .-duokv_simt_switch
)");

void Stack::prepare(Context& context, void (*entry)()) {
  if (!base_) map();
  void** top = reinterpret_cast<void**>(base_ + kBytes);
  *--top = nullptr;  // the entry's return address: aligns its frame as after a call, and ends backtraces
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.stack_pointer = top;
}

void switch_context(Context& from, Context& to) {
  if (to.tsan_fiber) __tsan_switch_to_fiber(to.tsan_fiber, 1);  // 1: no synchronisation
  duokv_simt_switch(&from.stack_pointer, to.stack_pointer);
}

#else

void Stack::prepare(Context& context, void (*entry)()) {
  if (!base_) map();
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = base_;
  context.registers.uc_stack.ss_size = kBytes;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
}

void switch_context(Context& from, Context& to) {
  if (to.tsan_fiber) __tsan_switch_to_fiber(to.tsan_fiber, 1);
  swapcontext(&from.registers, &to.registers);
}

#endif

}  // namespace duokv::simt

extern "C" void __tsan_on_report(void*) { ++duokv::simt::race_reports; }
