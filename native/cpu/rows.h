// How elementwise and row-wise operations are cut into chunks for the thread pool: by shape only, so that
// results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/device.h"
#include "cpu/thread_pool.h"
#include "ops/rounding.h"

namespace duokv::cpu {

// 128 KiB of FP32: long enough to stream, short enough to balance.
inline constexpr int64_t kChunkElements = int64_t{1} << 15;

// Calls body(first, count, chunk) for chunks that cover [0, n).
template <class Body>
void for_elements(ThreadPool& pool, int64_t n, Body&& body) {
  pool.run(ceil_div(n, kChunkElements), [&](int64_t chunk, int32_t) {
    const int64_t first = chunk * kChunkElements;
    body(first, std::min(kChunkElements, n - first), chunk);
  });
}

// Calls body(first, count) for chunks of whole rows that cover [0, rows).
template <class Body>
void for_rows(ThreadPool& pool, int64_t rows, int64_t row_elements, Body&& body) {
  const int64_t step = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, row_elements));
  pool.run(ceil_div(rows, step), [&](int64_t chunk, int32_t) {
    const int64_t first = chunk * step;
    body(first, std::min(step, rows - first));
  });
}

// y += x on the calling thread (add.cpp).
void add_values(const float* x, float* y, int64_t n);

// y = x, on the pool (add.cpp).
void copy_values(ThreadPool& pool, const float* x, int64_t n, float* y);

// h = silu(gate) · up, or silu(gate) where up is null (swiglu.cpp): n values on the pool, and on the calling
// thread rows of `columns` values that are `stride` apart.
void swiglu(ThreadPool& pool, const float* gate, const float* up, int64_t n, float* h);
void swiglu_rows(const float* gate, const float* up, int64_t rows, int64_t columns, int64_t stride, float* h);

// y [m, d] = norm(x) (rms_norm.cpp).
void normalise_rows(ops::Device& device, const float* x, const ops::Norm& norm, int64_t m, int64_t d,
                    float* y);

// Rotates x [heads, head_dim] by the angles of one position, table [head_dim / 2, 2], on the calling thread
// (rotary.cpp).
void rotate_values(float* x, int64_t heads, int64_t head_dim, const float* table);

}  // namespace duokv::cpu
