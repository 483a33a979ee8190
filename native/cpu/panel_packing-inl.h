// The layout of panel products: both operands packed for the register block. Include inside a file
// that foreach_target.h compiles, after highway.h.

#if defined(DUOKV_CPU_PANEL_PACKING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUOKV_CPU_PANEL_PACKING_INL_H_
#undef DUOKV_CPU_PANEL_PACKING_INL_H_
#else
#define DUOKV_CPU_PANEL_PACKING_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/bf16-inl.h"
#include "cpu/bf16.h"
#include "cpu/bf16_dot-inl.h"
#include "cpu/panel_product.h"
#include "cpu/register_block-inl.h"
#include "cpu/transpose-inl.h"
#include "cpu/vector_math-inl.h"
#include "ops/rounding.h"

#ifndef DUOKV_CPU_PANEL_PACKING_ONCE
#define DUOKV_CPU_PANEL_PACKING_ONCE
namespace duokv::cpu {

// Rows of a chunk that one worker computes, at most; a multiple of every register block's.
inline constexpr int64_t kChunkRows = 96;

}  // namespace duokv::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;

constexpr int64_t width() { return kBlockVectors * static_cast<int64_t>(hn::MaxLanes(DF())); }

// Rows of a panel in memory, and their bytes.
HWY_INLINE int64_t panel_rows(const Panels& b) {
  return b.dtype == ops::DType::BF16 ? round_up(b.k, 2) : b.k;
}
HWY_INLINE int64_t row_bytes_of(const Panels& b) { return width() * (b.dtype == ops::DType::BF16 ? 2 : 4); }

// Row groups of at most kBlockRows that differ by at most one row: a group of one or two rows wastes most of
// the block.
struct RowGroups {
  explicit RowGroups(int64_t m) : rows(m), count(ceil_div(m, kBlockRows)) {}
  int64_t begin(int64_t group) const { return rows * group / count; }
  int64_t size(int64_t group) const { return begin(group + 1) - begin(group); }
  int64_t rows, count;
};

inline void copy_rounded(const float* x, int64_t n, float* rounded) {
  const DF df;
  for_each_vector(df, n, [&](int64_t i, auto span) HWY_ATTR {
    store(round_to_bf16(df, load(df, x + i, span)), df, rounded + i, span);
  });
}

// Copies `rows` rows of `count` elements, mostly kUsual, for which a copy is a few moves instead of a call.
template <int64_t kUsual, class T>
inline void copy_rows(const T* from, int64_t from_stride, int64_t rows, int64_t count, T* to,
                      int64_t to_stride) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(T);
  if (count == kUsual) {
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(to + r * to_stride, from + r * from_stride, kUsual * sizeof(T));
  } else {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_stride, from + r * from_stride, bytes);
  }
}

// Columns [i, i + depth) of the rows that `groups` divides from `row` on, by group as [depth][rows], rounded
// to BF16 if `rounds`.
inline void pack_groups(const MatrixView& a, int64_t row, const RowGroups& groups, int64_t i, int64_t depth,
                        bool rounds, float* packed) {
  if (a.transposed) {
    // A few rows of memory at a time: all of a block's share few sets of the cache.
    constexpr int64_t kRows = 8;
    for (int64_t d = 0; d < depth; d += kRows) {
      const int64_t steps = std::min(kRows, depth - d);
      const float* from = a.data + (i + d) * a.stride + row;
      for (int64_t g = 0; g < groups.count; ++g) {
        const int64_t first = groups.begin(g), rows = groups.size(g);
        copy_rows<kBlockRows>(from + first, a.stride, steps, rows, packed + first * depth + d * rows, rows);
      }
    }
  } else {
    for (int64_t g = 0; g < groups.count; ++g) {
      const float* from = a.data + (row + groups.begin(g)) * a.stride + i;
      const int64_t rows = groups.size(g);
      transpose_rows(from, a.stride, rows, depth, packed + groups.begin(g) * depth, rows);
    }
  }
  if (rounds) copy_rounded(packed, groups.rows * depth, packed);
}

#ifdef DUOKV_BF16_DOT
// Rows d and d + 1 of a matrix as pairs; zeros in place of the second if it has no more rows.
HWY_INLINE void pair_rows(const float* even, const float* odd, int64_t count, uint32_t* pairs) {
  const DF df;
  for_each_vector(df, count, [&](int64_t i, auto span) HWY_ATTR {
    const VF second = odd ? load(df, odd + i, span) : hn::Zero(df);
    store(pair_bf16(load(df, even + i, span), second), DU(), pairs + i, span);
  });
}

// x [count] as BF16 values and, to make pairs of them, a zero.
HWY_INLINE void narrow_row(const float* x, int64_t count, uint32_t* pairs) {
  const DF df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  auto* to = reinterpret_cast<char*>(pairs);
  int64_t d = 0;
  for (; d + lanes <= count; d += lanes)
    store_narrow(hn::LoadU(df, x + d), reinterpret_cast<uint16_t*>(to + 2 * d));
  for (; d < round_up(count, 2); ++d) {
    const uint16_t value = d < count ? bf16_from_float(x[d]) : 0;
    std::memcpy(to + 2 * d, &value, sizeof(value));
  }
}

// The same as pairs of BF16 values along k, by group as [depth / 2][rows]; past an odd depth comes a zero.
inline void pack_groups(const MatrixView& a, int64_t row, const RowGroups& groups, int64_t i, int64_t depth,
                        bool, uint32_t* packed) {
  const int64_t steps = ceil_div(depth, 2);
  if (a.transposed) {
    // A few rows of memory at a time, as above; a step is two of them.
    constexpr int64_t kSteps = 8;
    uint32_t pairs[kSteps * kChunkRows];
    for (int64_t step = 0; step < steps; step += kSteps) {
      const int64_t count = std::min(kSteps, steps - step);
      for (int64_t s = 0; s < count; ++s) {
        const int64_t d = 2 * (step + s);
        const float* even = a.data + (i + d) * a.stride + row;
        pair_rows(even, d + 1 < depth ? even + a.stride : nullptr, groups.rows, pairs + s * kChunkRows);
      }
      for (int64_t g = 0; g < groups.count; ++g) {
        const int64_t first = groups.begin(g), rows = groups.size(g);
        copy_rows<kBlockRows>(pairs + first, kChunkRows, count, rows, packed + first * steps + step * rows,
                              rows);
      }
    }
    return;
  }
  uint32_t pairs[kBlockRows * kPanelDepth / 2];
  for (int64_t g = 0; g < groups.count; ++g) {
    for (int64_t r = 0; r < groups.size(g); ++r)
      narrow_row(a.data + (row + groups.begin(g) + r) * a.stride + i, depth, pairs + r * steps);
    transpose_rows(pairs, steps, groups.size(g), steps, packed + groups.begin(g) * steps, groups.size(g));
  }
}
#endif

// out [depth, width] = rows [i, i + depth) and columns [column, column + columns) of b, zero in the other
// columns.
inline void copy_block(const MatrixView& b, int64_t i, int64_t depth, int64_t column, int64_t columns,
                       float* out) {
  if (columns < width()) std::fill_n(out, depth * width(), 0.0f);
  if (!b.transposed) {
    copy_rows<width()>(b.data + i * b.stride + column, b.stride, depth, columns, out, width());
    return;
  }
  transpose_rows(b.data + column * b.stride + i, b.stride, columns, depth, out, width());
}

// Rows [i, i + depth) of `count` panels from `panel` on.
inline void pack_block(const MatrixView& b, const Panels& panels, int64_t i, int64_t depth, int64_t panel,
                       int64_t count, void* memory) {
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(DF())), kRows = 16;
  const DF df;
  const DU du;
  for (int64_t row = i; row < i + depth; row += kRows) {
    const int64_t rows = std::min(kRows, i + depth - row);
    for (int64_t j = panel; j < panel + count; ++j) {
      const int64_t column = j * width(), columns = std::min(width(), panels.n - column);
      const int64_t offset = (j * panel_rows(panels) + row) * width();
      if (panels.dtype == ops::DType::F32) {
        copy_block(b, row, rows, column, columns, static_cast<float*>(memory) + offset);
        continue;
      }
      alignas(64) float block[kRows * width()];
      copy_block(b, row, rows, column, columns, block);
      uint32_t* out = static_cast<uint32_t*>(memory) + offset / 2;
#ifdef DUOKV_BF16_DOT
      if (panels.pairs) {
        if (rows % 2 != 0) std::fill_n(block + rows * width(), width(), 0.0f);
        for (int64_t r = 0; r < rows; r += 2, out += width()) {
          for (int64_t v = 0; v < width(); v += kLanes) {
            const float* pair = block + r * width() + v;
            hn::Store(pair_bf16(hn::Load(df, pair), hn::Load(df, pair + width())), du, out + v);
          }
        }
        continue;
      }
#endif
      for (int64_t v = 0; v < rows * kBlockVectors; v += 2) {
        const auto low = bf16_in_upper_half(df, hn::Load(df, block + v * kLanes));
        const auto high = bf16_in_upper_half(df, hn::Load(df, block + (v + 1) * kLanes));
        hn::Store(hn::Or(hn::ShiftRight<16>(low), hn::And(high, hn::Set(du, 0xFFFF0000u))), du,
                  out + v / 2 * kLanes);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#endif
