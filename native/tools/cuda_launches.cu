// Calls the launchers of the CUDA backend so that each of its kernels is launched, at the shapes of the 126M
// model. Linked with cuda_launches_runtime.cpp, which launches nothing, it prints how each kernel is
// launched; scripts/cuda/kernels.mjs reads that.
#include <cstdio>
#include <cstdlib>

#include "cuda/operations.h"

namespace duokv::cuda {
namespace {

constexpr int64_t kRows = 8192, kHidden = 768, kFfn = 2048, kVocab = 32768;
constexpr int32_t kQueryHeads = 12, kKvHeads = 4, kHeadDim = 64;
constexpr ops::ProductMode kModes[] = {ops::ProductMode::FP32, ops::ProductMode::BF16,
                                       ops::ProductMode::TF32x3};
const cudaStream_t kStream = nullptr;

// An address that launchers see, and never read.
template <class T = float>
T* memory(size_t offset = 0) {
  return reinterpret_cast<T*>(uintptr_t{1} << 20 | offset);
}

void succeed(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "cuda_launches: a launcher refused its arguments (CUDA error %d)\n", error);
  std::exit(1);
}

ops::AttentionArgs attention(int64_t queries, int32_t head_dim, ops::DType dtype, ops::ProductMode mode) {
  ops::AttentionArgs args = {};
  args.batch = 1, args.queries = queries;
  args.query_heads = kQueryHeads, args.kv_heads = kKvHeads, args.head_dim = head_dim;
  args.q = memory(), args.out = memory();
  args.bank_count = 1;
  args.banks[0].longest = 4096, args.banks[0].dtype = dtype;
  args.banks[0].head_stride = head_dim, args.banks[0].position_stride = kKvHeads * head_dim;
  args.mode = mode;
  return args;
}

void attend() {
  for (const int32_t head_dim : {16, 32, 64, 128}) {
    for (const ops::ProductMode mode : kModes) {
      for (const ops::DType dtype : {ops::DType::F32, ops::DType::BF16})
        succeed(attention_forward(attention(1024, head_dim, dtype, mode), memory<void>(), kStream));
      ops::AttentionBackwardArgs args = {};
      args.forward = attention(1024, head_dim, ops::DType::F32, mode);
      args.dout = memory(), args.dq = memory(), args.grads[0] = {memory(), memory()};
      succeed(attention_backward(args, memory<void>(), kStream));
    }
    succeed(attention_decode(attention(1, head_dim, ops::DType::F32, ops::ProductMode::FP32), memory<void>(),
                             kStream));
  }
}

ops::LinearArgs linear(int64_t m, int64_t n, int64_t k) {
  ops::LinearArgs args = {};
  args.x = memory(), args.m = m, args.count = 1;
  args.w[0] = {memory(), n, k, 0, nullptr};
  args.y[0] = memory();
  return args;
}

// Depths with and without loads of 16 bytes; heights of 1 to 16 rows; few and many columns.
void multiply() {
  const void* const weights[3] = {memory(), memory(), memory()};
  for (const int64_t depth : {kHidden, kHidden + 1}) {
    for (int tile = 0; tile < kFp32Tiles; ++tile)
      succeed(fp32_product(linear(kRows, kHidden, depth), kStream, tile));
    for (int64_t m = 1; m <= 16; m *= 2) {
      for (const int64_t n : {kHidden, kVocab}) {
        for (const bool bf16_weights : {false, true})
          succeed(skinny_product(linear(m, n, depth), weights, bf16_weights, kStream));
      }
    }
  }
}

// Rows of `width` values, which 16 bytes do or do not divide.
void row_wise(int64_t width) {
  succeed(embedding_forward({memory<int32_t>(), kRows, width, memory(), memory()}, kStream));
  succeed(embedding_backward({memory<int32_t>(), kRows, width, kVocab, memory(), memory()}, memory<void>(),
                             kStream));
  const ops::RmsNormArgs norm = {memory(), memory(), kRows, width, 1e-6f, memory(), memory()};
  succeed(rms_norm_forward(norm, kStream));
  succeed(rms_norm_forward_bf16(norm, memory<bf16>(), kStream));
  succeed(rms_norm_backward({memory(), memory(), memory(), memory(), kRows, width, memory(), false, memory()},
                            memory<void>(), kStream));
  succeed(suffix_rows({memory(), 1, kRows, 1, width, false, memory()}, kStream));
  for (bf16* dlogits : {static_cast<bf16*>(nullptr), memory<bf16>()}) {
    succeed(cross_entropy({memory(), kRows, width, memory<int32_t>(), memory(), memory(), dlogits}, kStream));
  }
}

// `n` values, which 16 bytes do or do not divide, from an address that is or is not a multiple of 16.
void elementwise(int64_t n, size_t offset) {
  float* const x = memory(offset);
  bf16* const y = memory<bf16>(offset);
  succeed(add({x, n, x}, kStream));
  succeed(to_bf16(x, n, y, kStream));
  succeed(from_bf16(y, n, nullptr, x, kStream));
  succeed(swiglu_forward({x, x, n, x}, kStream));
  succeed(swiglu_forward_bf16(y, y, n, x, x, y, kStream));
  succeed(swiglu_backward({x, x, x, n, x, x}, kStream));
  succeed(sum_squares(x, n, memory<double>(), memory<void>(), kStream));
  succeed(adamw({x, x, x, x, n, 1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 1}, kStream));
}

void others() {
  const ops::FuseArgs fuse = {memory(), memory(), memory(), kRows, kQueryHeads, kHeadDim, memory()};
  succeed(fuse_forward(fuse, kStream));
  succeed(fuse_backward({fuse, memory(), memory(), memory(), memory()}, memory<void>(), kStream));
  succeed(rotary({memory(), kRows, kQueryHeads, kHeadDim, memory<int32_t>(), memory(), false}, kStream));
  for (const ops::DType dtype : {ops::DType::F32, ops::DType::BF16}) {
    succeed(cache_write({memory(), memory(), 1, kRows, kKvHeads, kHeadDim, memory<int32_t>(), memory(), dtype,
                         kHeadDim, kKvHeads * kHeadDim, memory<ops::BankSlot>()},
                        kStream));
    succeed(cache_read(
        {memory(), kRows, 0, kRows, kKvHeads, kHeadDim, dtype, kHeadDim, kKvHeads * kHeadDim, memory()},
        kStream));
    succeed(cache_copy({memory(), 0, kRows, kHeadDim, memory(), 0, kRows, kHeadDim, kRows,
                        kKvHeads * kHeadDim, kKvHeads, kHeadDim, dtype},
                       kStream));
  }
  succeed(sample({memory(), 1, kVocab, memory<ops::SampleRow>(), memory<int32_t>(), memory()}, kStream));
}

}  // namespace
}  // namespace duokv::cuda

int main() {
  using namespace duokv::cuda;
  attend();
  multiply();
  row_wise(kHidden);
  row_wise(kHidden + 1);
  elementwise(kRows * kFfn, 0);
  elementwise(kRows * kFfn - 1, 4);
  others();
}
