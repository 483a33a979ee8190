// Writes K (rotated on its way) and V into cache banks, reads a bank, and copies entries from bank to bank.
// Slots wrap at the end of a ring.
//
// A thread has one pair of a head, elements i and i + head_dim / 2, of K and of V: what is rotated together
// is loaded together.
//
// Roofline (bandwidth; H100: 3.35 TB/s), 1,792 entries of 4 heads of 64: write 2 (4 + stored bytes) an
// element = 7.3 MB in FP32: 2.2 µs; read and copy half of that. All are smaller than a launch.
#include "cuda/launch.h"
#include "cuda/operations.h"
#include "cuda/rotary.cuh"

namespace duokv::cuda {
namespace {

constexpr int kThreads = 256;

DUOKV_DEVICE float widen(float x) { return x; }
DUOKV_DEVICE float widen(bf16 x) { return __bfloat162float(x); }
DUOKV_DEVICE void store(float x, float* to) { *to = x; }
DUOKV_DEVICE void store(float x, bf16* to) { *to = __float2bfloat16_rn(x); }

// Where a thread's pair is: entry, head and element of the lower half.
struct Place {
  int64_t entry;
  int head, element;
};
DUOKV_DEVICE Place place_of(int64_t i, int heads, int half) {
  const int64_t head = i / half;
  return {head / heads, static_cast<int>(head % heads), static_cast<int>(i % half)};
}

template <class Stored>
__global__ void __launch_bounds__(kThreads)
    cache_write_kernel(const float* k, const float* v, int64_t batch, int64_t count, int heads, int half,
                       const int* positions, const float* table, int64_t head_stride, int64_t position_stride,
                       const ops::BankSlot* rows) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= batch * count * heads * half) return;
  const Place at = place_of(i, heads, half);
  const ops::BankSlot row = rows[at.entry / count];
  const int64_t entry = at.entry % count;
  // A later entry of the same slot replaces this one.
  if (entry + row.capacity < count) return;
  const int64_t source = (at.entry * heads + at.head) * 2 * half + at.element;
  const int64_t slot = (row.slot + entry) % row.capacity;
  const int64_t target = at.head * head_stride + slot * position_stride + at.element;
  const float2 angle = load2(table + (int64_t{positions[at.entry]} * half + at.element) * 2);
  const Pair rotated = rotate({k[source], k[source + half]}, angle.x, angle.y);
  auto* const stored_k = static_cast<Stored*>(row.k);
  auto* const stored_v = static_cast<Stored*>(row.v);
  store(rotated.low, stored_k + target);
  store(rotated.high, stored_k + target + half);
  store(v[source], stored_v + target);
  store(v[source + half], stored_v + target + half);
}

template <class Stored>
__global__ void __launch_bounds__(kThreads)
    cache_read_kernel(const Stored* bank, int64_t elements, int slot, int capacity, int heads, int head_dim,
                      int64_t head_stride, int64_t position_stride, float* dst) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= elements) return;
  const Place at = place_of(i, heads, head_dim);
  dst[i] = widen(bank[at.head * head_stride + (slot + at.entry) % capacity * position_stride + at.element]);
}

template <class Stored>
__global__ void __launch_bounds__(kThreads)
    cache_copy_kernel(const Stored* src, int src_slot, int src_capacity, int64_t src_head_stride, Stored* dst,
                      int dst_slot, int dst_capacity, int64_t dst_head_stride, int64_t elements,
                      int64_t position_stride, int heads, int head_dim) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= elements) return;
  const Place at = place_of(i, heads, head_dim);
  const int64_t from = (src_slot + at.entry) % src_capacity, to = (dst_slot + at.entry) % dst_capacity;
  dst[at.head * dst_head_stride + to * position_stride + at.element] =
      src[at.head * src_head_stride + from * position_stride + at.element];
}

template <class Stored>
cudaError_t launch_read(const ops::CacheReadArgs& args, cudaStream_t stream) {
  const int64_t elements = args.count * args.kv_heads * args.head_dim;
  return DUOKV_LAUNCH((cache_read_kernel<Stored>), grid_of(elements, kThreads), kThreads, 0, stream,
                      static_cast<const Stored*>(args.bank), elements, args.slot, args.capacity,
                      args.kv_heads, args.head_dim, args.head_stride, args.position_stride, args.dst);
}

template <class Stored>
cudaError_t launch_copy(const ops::CacheCopyArgs& args, cudaStream_t stream) {
  const int64_t elements = args.count * args.kv_heads * args.head_dim;
  return DUOKV_LAUNCH((cache_copy_kernel<Stored>), grid_of(elements, kThreads), kThreads, 0, stream,
                      static_cast<const Stored*>(args.src), args.src_slot, args.src_capacity,
                      args.src_head_stride, static_cast<Stored*>(args.dst), args.dst_slot, args.dst_capacity,
                      args.dst_head_stride, elements, args.position_stride, args.kv_heads, args.head_dim);
}

}  // namespace

cudaError_t cache_write(const ops::CacheWriteArgs& args, cudaStream_t stream) {
  const int half = args.head_dim / 2;
  const int64_t threads = args.batch * args.count * args.kv_heads * half;
  if (threads == 0) return cudaSuccess;
  const auto kernel = args.dtype == ops::DType::F32 ? cache_write_kernel<float> : cache_write_kernel<bf16>;
  return DUOKV_LAUNCH(kernel, grid_of(threads, kThreads), kThreads, 0, stream, args.k, args.v, args.batch,
                      args.count, args.kv_heads, half, args.positions, args.table, args.head_stride,
                      args.position_stride, args.rows);
}

cudaError_t cache_read(const ops::CacheReadArgs& args, cudaStream_t stream) {
  if (args.count == 0) return cudaSuccess;
  return args.dtype == ops::DType::F32 ? launch_read<float>(args, stream) : launch_read<bf16>(args, stream);
}

cudaError_t cache_copy(const ops::CacheCopyArgs& args, cudaStream_t stream) {
  if (args.count == 0) return cudaSuccess;
  return args.dtype == ops::DType::F32 ? launch_copy<float>(args, stream) : launch_copy<bf16>(args, stream);
}

}  // namespace duokv::cuda
