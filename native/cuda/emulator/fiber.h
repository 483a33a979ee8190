// Stackful coroutines for CUDA threads: a stack, and a switch that saves the callee-saved registers. A switch
// costs a few nanoseconds on x86-64 (assembly) and a few hundred elsewhere (ucontext). Under ThreadSanitizer
// every fiber is a ThreadSanitizer fiber too, and a switch by itself synchronises nothing.
#pragma once

#include <cstddef>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace duokv::simt {

// A point of execution that can be resumed once.
struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
  void* tsan_fiber = nullptr;
};

void switch_context(Context& from, Context& to);

// Stack of one fiber, with an inaccessible page below it.
class Stack {
 public:
  static constexpr size_t kBytes = 64 * 1024;

  Stack() = default;
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  // A context that starts `entry` on this stack; what ran on it before is dropped. `entry` must not return.
  void prepare(Context& context, void (*entry)());
  bool contains(const void* address) const {
    const char* p = static_cast<const char*>(address);
    return p >= base_ && p < base_ + kBytes;
  }
  bool guard_contains(const void* address) const;
  void* top() const { return base_ + kBytes; }

 private:
  void map();
  char* base_ = nullptr;
};

// ThreadSanitizer's view. Without its runtime all of these do nothing.
namespace tsan {
bool active();
void* current_fiber();
void* create_fiber();
void acquire(void* object);
void release(void* object);
int reports();  // races reported so far in this process
}  // namespace tsan

}  // namespace duokv::simt
