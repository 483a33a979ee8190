// Tensor cores: operand rounding, the lane layout of fragments (PTX ISA, "Matrix Fragments for mma"), and
// accumulation that truncates as the hardware's does.
//
// Within one group of products (Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores") the products
// and the accumulator are aligned to the largest exponent among them, truncated below 23 + extra_bits
// fraction bits, added exactly, and the sum is truncated to FP32. Group sizes along K and extra bits:
//               TF32   BF16   extra bits
//     sm_80       4      8        1
//     sm_90       8     16        2
// A group with a non-finite operand is computed in plain arithmetic.
#pragma once

#include <cstdint>

#include "cuda/emulator/scheduler.h"

namespace duokv::simt {

enum class Architecture : int { kSm80 = 80, kSm90 = 90 };
void set_architecture(Architecture architecture);
Architecture architecture();

// What ptxas makes of cvt.rna.tf32.f32: add half of the last kept bit to a finite magnitude, clear the low 13
// bits. So ties go away from zero, the largest values become Inf, and a NaN whose payload lies only in the
// low 13 bits becomes Inf.
uint32_t round_tf32(float value);

// Collective over the warp. a, b, c and d are the lane's registers; c and d may be the same.
void mma_tf32_m16n8k8(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4], Site site);
void mma_bf16_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4], Site site);

// ldmatrix of `count` (1, 2 or 4) 8x8 matrices of 16-bit elements: row r of matrix m is the 16 bytes at `row`
// of lane 8m + r.
void load_matrix(uint32_t* registers, int count, bool transposed, const void* row, Site site);

}  // namespace duokv::simt
