// Races that ThreadSanitizer must report, and orders it must accept. Built in the race variant only.
#include "cuda/test/harness.h"

namespace duokv::cuda::test {
namespace {

template <class... P, class... A>
int reports(void (*kernel)(P...), unsigned blocks, unsigned threads, A... arguments) {
  const int before = races();
  check(simt::launch("kernel", kernel, blocks, threads, 0, stream(), arguments...));
  stream().synchronize();
  const int found = races() - before;
  accepted_races += found;
  return found;
}

__global__ void same_element(int* x) { x[0] = 1; }
__global__ void neighbour_without_barrier(int* x) {
  DUOKV_SHARED(int, tile, [64]);
  tile[threadIdx.x] = 1;
  x[threadIdx.x] = tile[(threadIdx.x + 1) % 64];
}
__global__ void neighbour_with_warp_barrier_only(int* x) {
  DUOKV_SHARED(int, tile, [64]);
  tile[threadIdx.x] = 1;
  __syncwarp();
  x[threadIdx.x] = tile[(threadIdx.x + 32) % 64];
}
__global__ void tile_overwritten_early(int* x) {
  DUOKV_SHARED(int, tile, [64]);
  for (int i = 0; i < 3; ++i) {
    tile[threadIdx.x] = i;
    __syncthreads();
    x[threadIdx.x] = tile[(threadIdx.x + 33) % 64];
  }
}
__global__ void same_element_of_two_blocks(int* x) {
  if (threadIdx.x == 0) x[0] = static_cast<int>(blockIdx.x);
}
__global__ void flag_without_fence(int* x) {
  if (threadIdx.x == 0) x[1] = 5;
  if (threadIdx.x == 0) atomicExch(x, 1);
  if (threadIdx.x == 32 && atomicAdd(x, 0) == 0) x[1] = 6;
}
__global__ void matrix_row_without_barrier(int* x) {
  DUOKV_SHARED(int, tile, [2 * 128]);
  uint32_t registers[4];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = 0; i < 4; ++i) tile[warp * 128 + lane * 4 + i] = 0;
  __syncwarp();
  load_matrix4(registers, tile + (1 - warp) * 128 + lane * 4);
  x[threadIdx.x] = static_cast<int>(registers[0]);
}

DUOKV_CASE(reports_races) {
  Array<int> x(std::vector<int>(64, 0));
  stream().synchronize();
  expect(reports(same_element, 1, 64, x.data()) > 0, "threads that write one element");
  expect(reports(neighbour_without_barrier, 1, 64, x.data()) > 0, "a missing barrier");
  expect(reports(neighbour_with_warp_barrier_only, 1, 64, x.data()) > 0, "a warp barrier between warps");
  expect(reports(tile_overwritten_early, 1, 64, x.data()) > 0, "a missing second barrier");
  expect(reports(same_element_of_two_blocks, 2, 32, x.data()) > 0, "blocks that write one element");
  expect(reports(flag_without_fence, 1, 64, x.data()) > 0, "an atomic flag without a fence");
  expect(reports(matrix_row_without_barrier, 1, 64, x.data()) > 0, "ldmatrix of another warp's rows");
}

__global__ void neighbour_with_barriers(int* x) {
  DUOKV_SHARED(int, tile, [64]);
  for (int i = 0; i < 3; ++i) {
    tile[threadIdx.x] = i;
    __syncthreads();
    x[threadIdx.x] = tile[(threadIdx.x + 33) % 64];
    __syncthreads();
  }
}
__global__ void neighbour_in_the_warp(int* x) {
  DUOKV_SHARED(int, tile, [64]);
  tile[threadIdx.x] = 1;
  __syncwarp();
  x[threadIdx.x] = tile[threadIdx.x ^ 5u];
}
__global__ void own_block_row(int* x) { x[blockIdx.x * 32 + threadIdx.x] += 1; }
__global__ void count(int* x) { atomicAdd(x, 1); }
__global__ void copied_by_a_neighbour(int* x) {
  DUOKV_SHARED(int, tile, [256]);
  copy_async16(tile + threadIdx.x * 4, x);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  x[4 + threadIdx.x] = tile[(threadIdx.x * 4 + 40) % 256];
}

DUOKV_CASE(accepts_what_is_ordered) {
  Array<int> x(std::vector<int>(128, 0));
  stream().synchronize();
  for (int i = 0; i < 3; ++i) {  // also from one kernel to the next
    expect(reports(neighbour_with_barriers, 1, 64, x.data()) == 0, "two barriers");
    expect(reports(neighbour_in_the_warp, 1, 64, x.data()) == 0, "a warp barrier within the warp");
    expect(reports(own_block_row, 4, 32, x.data()) == 0, "blocks with rows of their own");
    expect(reports(count, 2, 64, x.data()) == 0, "atomics");
    expect(reports(copied_by_a_neighbour, 1, 64, x.data()) == 0, "asynchronous copies and a barrier");
  }
}

}  // namespace
}  // namespace duokv::cuda::test

DUOKV_MAIN
