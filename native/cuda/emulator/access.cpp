// The check of memory accesses, and the translation of page faults.
#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/emulator/block.h"

// ThreadSanitizer's or the checked build's; absent from plain builds.
extern "C" {
__attribute__((weak)) void __tsan_read_range(void* address, unsigned long bytes);
__attribute__((weak)) void __tsan_write_range(void* address, unsigned long bytes);
}

namespace duokv::simt {
namespace {

const char* verb(Access access) { return access == Access::kRead ? "read" : "write"; }

// " (rms_norm.cu:42)" where the debug information and addr2line are there, else an offset to look up.
std::string source_of(const void* pc) {
  Dl_info info;
  if (!pc || !dladdr(pc, &info) || !info.dli_fname) return "";
  char text[512];
  // The return address belongs to the next statement; one byte back is inside the call.
  const size_t offset =
      static_cast<size_t>(static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase)) - 1;
  std::snprintf(text, sizeof text, "addr2line -s -e '%s' 0x%zx 2>/dev/null", info.dli_fname, offset);
  char line[256] = "";
  if (FILE* output = popen(text, "r")) {
    if (!std::fgets(line, sizeof line, output)) line[0] = 0;
    pclose(output);
  }
  std::string source(line);
  source = source.substr(0, source.find_first_of(" \n"));
  if (!source.empty() && source[0] != '?') return " (" + source + ")";
  std::snprintf(text, sizeof text, " (%s+0x%zx)", info.dli_fname, offset);
  return text;
}

// Constants and tables of the program itself, which stand for __constant__ and immediate data.
bool in_program_image(const void* address) {
  struct Range {
    uintptr_t begin, end;
  };
  static const std::vector<Range> ranges = [] {
    std::vector<Range> found;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& segment = info->dlpi_phdr[i];
            if (segment.p_type != PT_LOAD) continue;
            const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
            static_cast<std::vector<Range>*>(data)->push_back({begin, begin + segment.p_memsz});
          }
          return 0;
        },
        &found);
    return found;
  }();
  const auto a = reinterpret_cast<uintptr_t>(address);
  for (const Range& range : ranges) {
    if (a >= range.begin && a < range.end) return true;
  }
  return false;
}

// `address` is in the region.
bool initialised(const Region& region, const void* address, size_t bytes) {
  const char* const begin = static_cast<const char*>(address);
  size_t i = 0;
  while (i < bytes && region.contains(begin + i) && region.state(begin + i) == ByteState::kInitialised) ++i;
  return i == bytes;
}

void check_states(Region& region, bool shared, const void* address, size_t bytes, Access access,
                  const void* pc) {
  const auto describe = [&](const void* p) {
    return shared ? describe_shared(p) : device_memory().describe(p);
  };
  const char* space = shared ? "shared" : "global";
  size_t bad = region.first_below(address, bytes, ByteState::kUninitialised);
  if (bad < bytes) {
    fault(FaultCode::kIllegalAddress, "%zu-byte %s of %s memory %s%s", bytes, verb(access), space,
          describe(static_cast<const char*>(address) + bad).c_str(), source_of(pc).c_str());
  }
  if (!stores_are_tracked) return;
  if (access == Access::kWrite) {
    region.mark(address, bytes, ByteState::kInitialised);
    return;
  }
  bad = region.first_below(address, bytes, ByteState::kInitialised);
  if (bad < bytes) {
    fault(FaultCode::kLaunchFailure, "%zu-byte read of uninitialised %s memory, %s%s", bytes, space,
          describe(static_cast<const char*>(address) + bad).c_str(), source_of(pc).c_str());
  }
}

void check_in_detail(const void* address, size_t bytes, size_t alignment, Access access, const void* pc) {
  if (!in_kernel()) {
    if (all_device_memory().contains(address)) {
      std::fprintf(stderr, "simt: host code accesses device memory: %zu-byte %s%s\n", bytes, verb(access),
                   source_of(pc).c_str());
      std::abort();
    }
    return;
  }
  Region& global = device_memory().region;
  const bool shared = block().shared().region.contains(address);
  if (!shared && !global.contains(address)) {
    if (in_parameters(address) || in_program_image(address)) return;
    fault(FaultCode::kIllegalAddress, "%zu-byte %s of %s memory at %p%s", bytes, verb(access),
          all_device_memory().contains(address) ? "another device's" : "host", address,
          source_of(pc).c_str());
  }
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0) {
    fault(FaultCode::kMisalignedAddress, "%zu-byte %s of %s memory at %p, which is not a multiple of %zu%s",
          bytes, verb(access), shared ? "shared" : "global", address, alignment, source_of(pc).c_str());
  }
  check_states(shared ? block().shared().region : global, shared, address, bytes, access, pc);
}

}  // namespace

void check_access(const void* address, size_t bytes, size_t alignment, Access access, const void* pc) {
  static const Region& every = all_device_memory();
  Block& b = block();
  if (b.running) {
    if (on_own_stack(address)) return;
    // Most accesses are of initialised bytes.
    const Region& shared = b.shared().region;
    const Region& region = shared.contains(address) ? shared : *b.global;
    if (region.contains(address) && (reinterpret_cast<uintptr_t>(address) & (alignment - 1)) == 0 &&
        initialised(region, address, bytes))
      return;
  } else if (!every.contains(address)) {
    return;
  }
  check_in_detail(address, bytes, alignment, access, pc);
}

void note_access(const void* address, size_t bytes, size_t alignment, Access access) {
  check_access(address, bytes, alignment, access, nullptr);
  if (!tsan::active()) return;
  if (access == Access::kRead) {
    __tsan_read_range(const_cast<void*>(address), bytes);
  } else {
    __tsan_write_range(const_cast<void*>(address), bytes);
  }
}

// ---------------------------------------------------------------- page faults

namespace {

const void* faulting_address = nullptr;

void report_page_fault() {
  const void* p = faulting_address;
  if (block().running->stack->guard_contains(p))
    fault(FaultCode::kLaunchFailure, "stack overflow: locals past 64 KiB");
  const bool shared = block().shared().region.contains(p);
  fault(FaultCode::kIllegalAddress, "access to %s memory %s", shared ? "shared" : "global",
        shared ? describe_shared(p).c_str() : device_memory().describe(p).c_str());
}

// Resumes the thread in report_page_fault instead of at the faulting instruction, outside the signal handler.
void on_page_fault(int signal, siginfo_t* info, void* context) {
  const void* p = info->si_addr;
  const bool ours =
      in_kernel() && (device_memory().region.contains(p) || block().shared().region.contains(p) ||
                      block().running->stack->guard_contains(p));
  if (!ours) {
    struct sigaction restore = {};
    restore.sa_handler = SIG_DFL;
    sigaction(signal, &restore, nullptr);
    return;
  }
  faulting_address = p;
  auto* registers = static_cast<ucontext_t*>(context);
  const auto landing = reinterpret_cast<uintptr_t>(&report_page_fault);
  const uintptr_t top = reinterpret_cast<uintptr_t>(block().running->stack->top()) & ~uintptr_t{15};
#if defined(__x86_64__)
  registers->uc_mcontext.gregs[REG_RIP] = static_cast<greg_t>(landing);
  registers->uc_mcontext.gregs[REG_RSP] = static_cast<greg_t>(top - 8);
#elif defined(__aarch64__)
  registers->uc_mcontext.pc = landing;
  registers->uc_mcontext.sp = top;
#else
#error "the emulator runs on x86-64 and arm64"
#endif
}

}  // namespace

void install_fault_handler() {
  static const bool installed = [] {
    static char alternate_stack[64 * 1024];
    stack_t stack = {};
    stack.ss_sp = alternate_stack;
    stack.ss_size = sizeof alternate_stack;
    sigaltstack(&stack, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_page_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    return true;
  }();
  static_cast<void>(installed);
}

}  // namespace duokv::simt
