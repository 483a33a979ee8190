// What the emulator reports: every kernel here has one fault, which must end it with the right error and
// words.
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

// Launches, waits, and compares the error and a part of the report. The device is usable again afterwards.
template <class... P, class... A>
void expect_fault(const char* name, void (*kernel)(P...), unsigned threads, size_t shared_bytes,
                  cudaError_t error, const char* report, A... arguments) {
  Stream own;
  stream().synchronize();  // the arguments' uploads
  cudaError_t got = simt::launch(name, kernel, 1, threads, shared_bytes, own, arguments...);
  if (got == cudaSuccess) got = cudaStreamSynchronize(own);
  expect(got == error, "%s: %s, expected %s", name, cudaGetErrorName(got), cudaGetErrorName(error));
  expect(std::strstr(simt::last_report(), report), "%s: the report is \"%s\", expected \"%s\"", name,
         simt::last_report(), report);
  expect(cudaDeviceSynchronize() == error, "%s: the error is not sticky", name);
  simt::reset_device();
}
#define EXPECT_FAULT(kernel, ...) expect_fault(#kernel, kernel, __VA_ARGS__)

// ---------------------------------------------------------------- divergence

__global__ void shuffle_in_both_arms(int* out) {
  int value = static_cast<int>(threadIdx.x);
  if (threadIdx.x % 2) {
    value = __shfl_xor_sync(kFullMask, value, 1);
  } else {
    value = __shfl_xor_sync(kFullMask, value, 2);
  }
  out[threadIdx.x] = value;
}
__global__ void missing_lane(int* out) {
  if (threadIdx.x != 7) out[threadIdx.x] = static_cast<int>(__ballot_sync(kFullMask, 1));
}
__global__ void lane_outside_its_mask(int* out) {
  out[threadIdx.x] = static_cast<int>(__ballot_sync(0xFFFFu, 1));
}
__global__ void early_return() {
  if (threadIdx.x == 40) return;
  __syncthreads();
}
__global__ void barriers_in_both_arms() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void barrier_nobody_completes() {
  if (threadIdx.x < 32) barrier_sync(3, 64);
}
__global__ void source_lane_outside_the_mask(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xFFFFu, 1, 20);
}
__global__ void lanes_wait_for_each_other() {
  if (threadIdx.x == 0) __syncwarp(0x3u);
  if (threadIdx.x == 1) __syncwarp(0x6u);
  if (threadIdx.x == 2) __syncwarp(0x5u);
}

DUOKV_CASE(reports_divergence) {
  Array<int> out(128);
  const cudaError_t failure = cudaErrorLaunchFailure;
  EXPECT_FAULT(early_return, 64, 0, failure, "returned");
  EXPECT_FAULT(barriers_in_both_arms, 64, 0, failure, "meets one for 64 threads at");
  EXPECT_FAULT(barrier_nobody_completes, 64, 0, failure,
               "deadlock; from thread 0 (warp 0, lane 0) on: barrier at fault_test.cu");
  EXPECT_FAULT(lanes_wait_for_each_other, 32, 0, failure,
               "deadlock; from thread 0 (warp 0, lane 0) on: __syncwarp at fault_test.cu");
}

DUOKV_CASE(reports_divergent_warp_collectives) {
  const cudaError_t failure = cudaErrorLaunchFailure;
  const auto with_output = [&](auto kernel, const char* name, const char* report) {
    Array<int> out(128);
    expect_fault(name, kernel, 32, 0, failure, report, out.data());
  };
  with_output(shuffle_in_both_arms, "shuffle_in_both_arms", "meets shuffle at fault_test.cu");
  with_output(missing_lane, "missing_lane", "return");
  with_output(lane_outside_its_mask, "lane_outside_its_mask", "not in its mask 0000ffff");
  with_output(source_lane_outside_the_mask, "source_lane_outside_the_mask", "reads lane 20");
}

// ---------------------------------------------------------------- memory

__global__ void read_past_end(const float* x, float* out) { out[threadIdx.x] = x[threadIdx.x + 1]; }
__global__ void read_before_begin(const float* x, float* out) {
  out[threadIdx.x] = x[static_cast<int>(threadIdx.x) - 1];
}
__global__ void write_past_end(float* out) { out[threadIdx.x + 1] = 1; }
__global__ void write_far_past_end(float* out) { out[threadIdx.x + 100000] = 1; }
__global__ void read_unwritten(const float* x, float* out) { out[threadIdx.x] = x[threadIdx.x]; }
__global__ void misaligned_vector(float* out) { store4(out + 1, make_float4(0, 0, 0, 0)); }
__global__ void shared_past_end(float* out) {
  DUOKV_SHARED(float, tile, [32]);
  DUOKV_SHARED(float, other, [32]);
  other[threadIdx.x] = tile[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = (&tile[0])[threadIdx.x + 1] + other[threadIdx.x];
}
__global__ void shared_unwritten(float* out) {
  DUOKV_SHARED(float, tile, [32]);
  if (threadIdx.x != 9) tile[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}
__global__ void dynamic_past_end(float* out) {
  DUOKV_DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x] = 1;
  out[threadIdx.x] = tile[threadIdx.x + 32];
}
__global__ void too_much_static_shared(float* out) {
  DUOKV_SHARED(float, half, [8192]);
  DUOKV_SHARED(float, other_half, [8192]);
  out[threadIdx.x] = half[threadIdx.x] = other_half[threadIdx.x] = 1;
}
__global__ void endless_stack(float* out, int depth);
__attribute__((noinline)) float recurse(float* out, int depth) {
  volatile float frame[256];
  frame[depth % 256] = static_cast<float>(depth);
  return depth == 0 ? 0 : recurse(out, depth - 1) + frame[depth % 256];
}
__global__ void endless_stack(float* out, int depth) { out[threadIdx.x] = recurse(out, depth); }
__global__ void trap() {
  if (threadIdx.x == 3) __trap();
}

DUOKV_CASE(reports_bad_accesses) {
  const std::vector<float> x(32, 1.0f);
  const cudaError_t illegal = cudaErrorIllegalAddress;
  const auto with_arrays = [&](auto kernel, const char* name, cudaError_t error, const char* report) {
    Array<float> dev_x(x), out(32);
    expect_fault(name, kernel, 32, 0, error, report, dev_x.data(), out.data());
  };
  with_arrays(read_past_end, "read_past_end", illegal,
              "0 bytes past the end of a 128-byte device allocation");
  with_arrays(read_before_begin, "read_before_begin", illegal, "4 bytes before a 128-byte device allocation");
  const auto with_output = [&](auto kernel, const char* name, size_t shared_bytes, cudaError_t error,
                               const char* report) {
    Array<float> out(32);
    expect_fault(name, kernel, 32, shared_bytes, error, report, out.data());
  };
  with_output(write_past_end, "write_past_end", 0, illegal,
              "0 bytes past the end of a 128-byte device allocation");
  with_output(write_far_past_end, "write_far_past_end", 0, illegal, "device allocation");
  with_output(misaligned_vector, "misaligned_vector", 0, cudaErrorMisalignedAddress, "not a multiple of 16");
  with_output(shared_past_end, "shared_past_end", 0, illegal,
              "0 bytes past the end of a 128-byte static shared array");
  with_output(dynamic_past_end, "dynamic_past_end", 128, illegal,
              "past the end of a 128-byte dynamic shared array");
  with_output(shared_unwritten, "shared_unwritten", 0, cudaErrorLaunchFailure,
              "uninitialised shared memory, 36 bytes into a 128-byte");
  with_output(too_much_static_shared, "too_much_static_shared", 0, cudaErrorLaunchFailure,
              "65536 bytes of static");
}

DUOKV_CASE(reports_unwritten_host_and_freed_memory) {
  {
    Array<float> x(32), out(32);
    EXPECT_FAULT(read_unwritten, 32, 0, cudaErrorLaunchFailure, "uninitialised global memory", x.data(),
                 out.data());
  }
  {
    const std::vector<float> host(32);
    Array<float> out(32);
    EXPECT_FAULT(read_unwritten, 32, 0, cudaErrorIllegalAddress, "read of host memory", host.data(),
                 out.data());
  }
  {
    const float* freed = Array<float>(std::vector<float>(32, 1.0f)).data();
    Array<float> out(32);
    EXPECT_FAULT(read_unwritten, 32, 0, cudaErrorIllegalAddress, "freed 128-byte device allocation", freed,
                 out.data());
  }
}

DUOKV_CASE(reports_stack_overflow_and_traps) {
  Array<float> out(32);
  check(DUOKV_LAUNCH(endless_stack, 1, 32, 0, stream(), out.data(), 10));
  stream().synchronize();
  EXPECT_FAULT(endless_stack, 32, 0, cudaErrorLaunchFailure, "stack overflow", out.data(), 1000);
  EXPECT_FAULT(trap, 32, 0, cudaErrorLaunchFailure, "__trap at fault_test.cu");
}

// ---------------------------------------------------------------- asynchronous copies and tensor cores

__global__ void read_before_wait(const float* x, float* out) {
  DUOKV_SHARED(float, tile, [128]);
  copy_async16(tile + threadIdx.x * 4, x + threadIdx.x * 4);
  copy_async_commit();
  out[threadIdx.x] = tile[threadIdx.x * 4];
  copy_async_wait<0>();
}
__global__ void wait_for_too_few(const float* x, float* out) {
  DUOKV_SHARED(float, tile, [128]);
  copy_async16(tile + threadIdx.x * 4, x + threadIdx.x * 4);
  copy_async_commit();
  copy_async_wait<1>();
  out[threadIdx.x] = tile[threadIdx.x * 4];
}
__global__ void never_waited_for(const float* x, float*) {
  DUOKV_SHARED(float, tile, [128]);
  copy_async16(tile + threadIdx.x * 4, x + threadIdx.x * 4);
  copy_async_commit();
}
__global__ void misaligned_copy(const float* x, float*) {
  DUOKV_SHARED(float, tile, [132]);
  copy_async16(tile + threadIdx.x * 4, x + threadIdx.x * 4 + 1);
  copy_async_wait<0>();
}
__global__ void misaligned_matrix_row(const float*, float* out) {
  DUOKV_SHARED(uint16_t, tile, [32 * 9]);
  for (unsigned i = threadIdx.x; i < 32 * 9; i += 32) tile[i] = 0;
  __syncwarp();
  uint32_t registers[4];
  load_matrix4(registers, tile + threadIdx.x * 9);
  out[threadIdx.x] = static_cast<float>(registers[0]);
}

DUOKV_CASE(reports_misused_copies_and_matrices) {
  const std::vector<float> x(128, 1.0f);
  const auto expect_report = [&](auto kernel, const char* name, cudaError_t error, const char* report) {
    Array<float> dev_x(x), out(32);
    expect_fault(name, kernel, 32, 0, error, report, dev_x.data(), out.data());
  };
  expect_report(read_before_wait, "read_before_wait", cudaErrorLaunchFailure, "uninitialised shared memory");
  expect_report(wait_for_too_few, "wait_for_too_few", cudaErrorLaunchFailure, "uninitialised shared memory");
  expect_report(never_waited_for, "never_waited_for", cudaErrorLaunchFailure,
                "1 cp.async copies not waited for");
  expect_report(misaligned_copy, "misaligned_copy", cudaErrorMisalignedAddress, "not a multiple of 16");
  expect_report(misaligned_matrix_row, "misaligned_matrix_row", cudaErrorMisalignedAddress,
                "not a multiple of 16");
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
