#include "cpu/panel_product.h"

#include <algorithm>
#include <cstring>

#include "cpu/bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/panel_product.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/bf16-inl.h"
#include "cpu/vector_math-inl.h"

#ifndef DUOKV_CPU_PANEL_PRODUCT_ONCE
#define DUOKV_CPU_PANEL_PRODUCT_ONCE
namespace duokv::cpu {

// Part of a product that one worker computes: rows [row, row + rows) of panels [panel, panel + panels).
struct ProductChunk {
  int64_t row, rows, panel, panels;
  bool packs;  // the left operand
};

inline constexpr int64_t kTileRows = 6;

}  // namespace duokv::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;

// Vectors across a panel: kTileRows rows of accumulators, one row of B and a broadcast value fill the
// register file.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif

constexpr int64_t width() { return kVectors * static_cast<int64_t>(hn::MaxLanes(DF())); }

// A panel in FP32: [k][width].
struct WidePanel {
  using Element = float;
  static constexpr int64_t kRow = kVectors;
  static HWY_INLINE void load(const float* row, VF (&b)[kVectors]) {
    const DF df;
    for (int v = 0; v < kVectors; ++v) b[v] = hn::Load(df, row + v * hn::Lanes(df));
  }
};

// A panel in BF16: two columns a vector apart share 32 bits, so that widening is a shift and a mask.
struct NarrowPanel {
  using Element = uint32_t;
  static constexpr int64_t kRow = kVectors / 2;
  static HWY_INLINE void load(const uint32_t* row, VF (&b)[kVectors]) {
    const DF df;
    const DU du;
    for (int v = 0; v < kVectors; v += 2) {
      const auto pair = hn::Load(du, row + v / 2 * hn::Lanes(du));
      b[v] = hn::BitCast(df, hn::ShiftLeft<16>(pair));
      b[v + 1] = hn::BitCast(df, hn::And(pair, hn::Set(du, 0xFFFF0000u)));
    }
  }
};

// Memory that will be read next: every kFetchSteps<Grouped> steps of a tile fetch the cache line at `data`
// and move on by `step` bytes.
struct Ahead {
  const char* data;
  int64_t step;
};

// A tile of a few rows is done before its panel could have come from memory and fetches at every step; where
// many groups share a panel, each has time to spare, and fetching less often leaves the load ports to it.
template <bool Grouped>
constexpr int64_t kFetchSteps = Grouped ? 8 : 1;

// sums [R, P panels] = or += a [R, depth] · b, where a(r, i) is a[r * a_stride + i], or a[i * kTileRows + r]
// if Grouped.
template <int R, int P, class Panel, bool Grouped>
HWY_INLINE void tile(int64_t depth, const float* HWY_RESTRICT a, int64_t a_stride,
                     const typename Panel::Element* HWY_RESTRICT b, int64_t panel_stride,
                     float* HWY_RESTRICT sums, bool add, Ahead ahead) {
  const DF df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  VF sum[R][P * kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < P * kVectors; ++v) sum[r][v] = hn::Zero(df);
  }
  const auto step = [&](int64_t i) HWY_ATTR {
    for (int p = 0; p < P; ++p) {
      VF row[kVectors];
      Panel::load(b + p * panel_stride + i * Panel::kRow * lanes, row);
      for (int r = 0; r < R; ++r) {
        const VF value = hn::Set(df, Grouped ? a[i * kTileRows + r] : a[r * a_stride + i]);
        for (int v = 0; v < kVectors; ++v) {
          sum[r][p * kVectors + v] = hn::MulAdd(value, row[v], sum[r][p * kVectors + v]);
        }
      }
    }
  };
  int64_t i = 0;
  for (; i + kFetchSteps<Grouped> <= depth; i += kFetchSteps<Grouped>) {
    // Several panels are streams enough to keep the memory busy.
    if (P == 1) hwy::Prefetch(ahead.data + i / kFetchSteps<Grouped> * ahead.step);
    for (int64_t j = 0; j < kFetchSteps<Grouped>; ++j) step(i + j);
  }
  for (; i < depth; ++i) step(i);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < P * kVectors; ++v) {
      float* out = sums + (r * P * kVectors + v) * lanes;
      hn::Store(add ? hn::Add(hn::Load(df, out), sum[r][v]) : sum[r][v], df, out);
    }
  }
}

template <int P, class Panel, bool Grouped>
HWY_NOINLINE void tile_of(int64_t rows, int64_t depth, const float* a, int64_t a_stride,
                          const typename Panel::Element* b, int64_t panel_stride, float* sums, bool add,
                          Ahead ahead) {
  if constexpr (P * kVectors <= 4) {
    switch (rows) {
      case 6:
        return tile<6, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, sums, add, ahead);
      case 5:
        return tile<5, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, sums, add, ahead);
      case 4:
        return tile<4, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, sums, add, ahead);
      case 3:
        return tile<3, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, sums, add, ahead);
      case 2:
        return tile<2, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, sums, add, ahead);
    }
  }
  tile<1, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, sums, add, ahead);
}

// Row groups of at most kTileRows that differ by at most one row: a group of one or two rows wastes most of
// the tile.
struct RowGroups {
  explicit RowGroups(int64_t m) : rows(m), count((m + kTileRows - 1) / kTileRows) {}
  int64_t begin(int64_t group) const { return rows * group / count; }
  int64_t size(int64_t group) const { return begin(group + 1) - begin(group); }
  int64_t rows, count;
};

// sums [groups.rows, P panels] = or += a · b for one block along k. The groups' turns together fetch
// `next_bytes` at `next`: hardware prefetchers stop at the end of a page and alone leave the kernel waiting.
template <int P, class Panel, bool Grouped>
void multiply_block(const RowGroups& groups, int64_t depth, const float* a, int64_t a_stride,
                    const typename Panel::Element* b, int64_t panel_stride, float* sums, bool add,
                    const char* next, int64_t next_bytes) {
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t r = groups.begin(g);
    const Ahead ahead{next + next_bytes * g / groups.count,
                      next_bytes * kFetchSteps<Grouped> / groups.count / depth};
    tile_of<P, Panel, Grouped>(groups.size(g), depth,
                               a + (Grouped ? g * kTileRows * kPanelDepth : r * a_stride), a_stride, b,
                               panel_stride, sums + r * P * width(), add, ahead);
  }
}

void widen(const uint32_t* panel, int64_t depth, float* wide) {
  const DF df;
  for (int64_t i = 0; i < depth; ++i) {
    VF row[kVectors];
    NarrowPanel::load(panel + i * NarrowPanel::kRow * hn::Lanes(df), row);
    for (int v = 0; v < kVectors; ++v) hn::Store(row[v], df, wide + i * width() + v * hn::Lanes(df));
  }
}

void copy_rounded(const float* x, int64_t n, float* rounded) {
  const DF df;
  for_each_vector(df, n, [&](int64_t i, auto span) HWY_ATTR {
    store(round_to_bf16(df, load(df, x + i, span)), df, rounded + i, span);
  });
}

// C [rows, columns] = or += sums, of which a row is `stride` long.
void finish(const PanelProduct& p, const float* sums, int64_t stride, int64_t rows, int64_t columns,
            float* c) {
  const DF df;
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = sums + r * stride;
    float* to = c + r * p.b.n;
    for_each_vector(df, columns, [&](int64_t i, auto span) HWY_ATTR {
      VF value = load(df, from + i, span);
      if (p.round_output) value = round_to_bf16(df, value);
      if (p.accumulate) value = hn::Add(load(df, to + i, span), value);
      store(value, df, to + i, span);
    });
  }
}

// P panels for all rows of a chunk, along all of k: one stream of weights. A is read where it lies.
template <int P>
void multiply_panels(const PanelProduct& p, const ProductChunk& chunk, const float* a, int64_t a_stride,
                     int64_t panel, float* scratch) {
  const RowGroups groups(chunk.rows);
  const int64_t k = p.b.k;
  const bool narrow = p.b.dtype == ops::DType::BF16;
  const int64_t row_bytes = width() * (narrow ? 2 : 4);
  const char* data = static_cast<const char*>(p.b.data);
  const char* end = data + (chunk.panel + chunk.panels) * k * row_bytes;
  float* sums = scratch;
  float* wide = sums + chunk.rows * P * width();
  for (int64_t i = 0; i < k; i += kPanelDepth) {
    const int64_t depth = std::min(kPanelDepth, k - i);
    const char* block = data + (panel * k + i) * row_bytes;
    const char* next = block + depth * row_bytes;
    const int64_t next_bytes = std::min(kPanelDepth * row_bytes, end - next);
    if (!narrow) {
      multiply_block<P, WidePanel, false>(groups, depth, a + i, a_stride,
                                          reinterpret_cast<const float*>(block), k * width(), sums, i > 0,
                                          next, next_bytes);
      continue;
    }
    const auto* b = reinterpret_cast<const uint32_t*>(block);
    if (groups.count <= 2) {
      multiply_block<P, NarrowPanel, false>(groups, depth, a + i, a_stride, b, k * width() / 2, sums, i > 0,
                                            next, next_bytes);
    } else {
      widen(b, depth, wide);
      multiply_block<1, WidePanel, false>(groups, depth, a + i, a_stride, wide, 0, sums, i > 0, next,
                                          next_bytes);
    }
  }
  const int64_t column = panel * width();
  finish(p, sums, P * width(), chunk.rows, std::min(P * width(), p.b.n - column),
         p.c + chunk.row * p.b.n + column);
}

void multiply_rows(const PanelProduct& p, const ProductChunk& chunk, float* scratch) {
  const float* a = p.a.data + chunk.row * p.a.stride;
  int64_t a_stride = p.a.stride;
  if (p.b.dtype == ops::DType::BF16) {
    for (int64_t r = 0; r < chunk.rows; ++r) copy_rounded(a + r * a_stride, p.b.k, scratch + r * p.b.k);
    a = scratch;
    a_stride = p.b.k;
    scratch += (chunk.rows * p.b.k + 15) / 16 * 16;
  }
  // One or two rows have too few accumulators to hide the latency of an addition; several panels at once do.
  constexpr int kJoin1 = 8 / kVectors, kJoin2 = 4 / kVectors;
  const int64_t end = chunk.panel + chunk.panels;
  int64_t panel = chunk.panel;
  if (chunk.rows == 1) {
    for (; panel + kJoin1 <= end; panel += kJoin1)
      multiply_panels<kJoin1>(p, chunk, a, a_stride, panel, scratch);
  } else if (chunk.rows == 2) {
    for (; panel + kJoin2 <= end; panel += kJoin2)
      multiply_panels<kJoin2>(p, chunk, a, a_stride, panel, scratch);
  }
  for (; panel < end; ++panel) multiply_panels<1>(p, chunk, a, a_stride, panel, scratch);
}

// Copies `rows` rows of `count` elements, mostly kUsual, for which a copy is a few moves instead of a call.
template <int64_t kUsual>
void copy_rows(const float* from, int64_t from_stride, int64_t rows, int64_t count, float* to,
               int64_t to_stride) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  if (count == kUsual) {
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(to + r * to_stride, from + r * from_stride, kUsual * sizeof(float));
  } else {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_stride, from + r * from_stride, bytes);
  }
}

// out(j, i) = in(i, j) for 4 × 4 elements, rows a stride apart.
HWY_INLINE void transpose_4x4(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 4; ++j) out[j * out_stride + i] = in[i * in_stride + j];
  }
#else
  const hn::FixedTag<float, 4> d;
  const hn::RepartitionToWide<decltype(d)> pairs;
  const auto row0 = hn::LoadU(d, in), row1 = hn::LoadU(d, in + in_stride);
  const auto row2 = hn::LoadU(d, in + 2 * in_stride), row3 = hn::LoadU(d, in + 3 * in_stride);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, row0, row1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, row2, row3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, row0, row1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, row2, row3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, out);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, out + out_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, out + 2 * out_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, out + 3 * out_stride);
#endif
}

// Columns [i, i + depth) of the rows that `groups` divides from `row` on, by group as [depth][kTileRows].
void pack_groups(const MatrixView& a, int64_t row, const RowGroups& groups, int64_t i, int64_t depth,
                 float* packed) {
  if (a.transposed) {
    // A few rows of memory at a time: all of a block's share few sets of the cache.
    constexpr int64_t kRows = 8;
    for (int64_t d = 0; d < depth; d += kRows) {
      const int64_t rows = std::min(kRows, depth - d);
      const float* from = a.data + (i + d) * a.stride + row;
      for (int64_t g = 0; g < groups.count; ++g) {
        copy_rows<kTileRows>(from + groups.begin(g), a.stride, rows, groups.size(g),
                             packed + (g * kPanelDepth + d) * kTileRows, kTileRows);
      }
    }
    return;
  }
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t rows = groups.size(g);
    const float* from = a.data + (row + groups.begin(g)) * a.stride + i;
    float* to = packed + g * kTileRows * kPanelDepth;
    int64_t d = 0;
    if (rows >= 4) {
      // The first four rows and the last four: what lies in both is written twice.
      for (; d + 4 <= depth; d += 4) {
        transpose_4x4(from + d, a.stride, to + d * kTileRows, kTileRows);
        transpose_4x4(from + (rows - 4) * a.stride + d, a.stride, to + d * kTileRows + rows - 4, kTileRows);
      }
    }
    for (; d < depth; ++d) {
      for (int64_t r = 0; r < rows; ++r) to[d * kTileRows + r] = from[r * a.stride + d];
    }
  }
}

// A packed block by block along k, each block for all of the chunk's panels, whose sums, as
// [panel][rows][width], wait in the L2 cache for the last block.
void multiply_packed(const PanelProduct& p, const ProductChunk& chunk, float* scratch) {
  const RowGroups groups(chunk.rows);
  const int64_t k = p.b.k;
  const bool narrow = p.b.dtype == ops::DType::BF16;
  const int64_t row_bytes = width() * (narrow ? 2 : 4);
  float* sums = scratch;
  float* a = sums + chunk.panels * chunk.rows * width();
  float* wide = a + groups.count * kTileRows * kPanelDepth;
  for (int64_t i = 0; i < k; i += kPanelDepth) {
    const int64_t depth = std::min(kPanelDepth, k - i);
    pack_groups(p.a, chunk.row, groups, i, depth, a);
    if (narrow) copy_rounded(a, groups.count * kTileRows * kPanelDepth, a);
    for (int64_t j = 0; j < chunk.panels; ++j) {
      const char* block = static_cast<const char*>(p.b.data) + ((chunk.panel + j) * k + i) * row_bytes;
      const bool last = j + 1 == chunk.panels;
      const float* b = reinterpret_cast<const float*>(block);
      if (narrow) {
        widen(reinterpret_cast<const uint32_t*>(block), depth, wide);
        b = wide;
      }
      multiply_block<1, WidePanel, true>(groups, depth, a, 0, b, 0, sums + j * chunk.rows * width(), i > 0,
                                         last ? block : block + k * row_bytes, last ? 0 : depth * row_bytes);
    }
  }
  for (int64_t j = 0; j < chunk.panels; ++j) {
    const int64_t column = (chunk.panel + j) * width();
    finish(p, sums + j * chunk.rows * width(), width(), chunk.rows, std::min(width(), p.b.n - column),
           p.c + chunk.row * p.b.n + column);
  }
}

void multiply_chunk(const PanelProduct& p, const ProductChunk& chunk, float* scratch) {
  chunk.packs ? multiply_packed(p, chunk, scratch) : multiply_rows(p, chunk, scratch);
}

// out [depth, width] = rows [i, i + depth) and columns [column, column + columns) of b, zero in the other
// columns.
void copy_block(const MatrixView& b, int64_t i, int64_t depth, int64_t column, int64_t columns, float* out) {
  if (columns < width()) std::fill_n(out, depth * width(), 0.0f);
  if (!b.transposed) {
    copy_rows<width()>(b.data + i * b.stride + column, b.stride, depth, columns, out, width());
    return;
  }
  const float* from = b.data + column * b.stride + i;
  int64_t d = 0;
  for (; d + 4 <= depth; d += 4) {
    int64_t j = 0;
    for (; j + 4 <= columns; j += 4)
      transpose_4x4(from + j * b.stride + d, b.stride, out + d * width() + j, width());
    for (; j < columns; ++j) {
      for (int64_t e = d; e < d + 4; ++e) out[e * width() + j] = from[j * b.stride + e];
    }
  }
  for (; d < depth; ++d) {
    for (int64_t j = 0; j < columns; ++j) out[d * width() + j] = from[j * b.stride + d];
  }
}

// Rows [i, i + depth) of `count` panels from `panel` on.
void pack_block(const MatrixView& b, const Panels& panels, int64_t i, int64_t depth, int64_t panel,
                int64_t count, void* memory) {
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(DF())), kRows = 16;
  const DF df;
  const DU du;
  for (int64_t row = i; row < i + depth; row += kRows) {
    const int64_t rows = std::min(kRows, i + depth - row);
    for (int64_t j = panel; j < panel + count; ++j) {
      const int64_t column = j * width(), columns = std::min(width(), panels.n - column);
      const int64_t offset = (j * panels.k + row) * width();
      if (panels.dtype == ops::DType::F32) {
        copy_block(b, row, rows, column, columns, static_cast<float*>(memory) + offset);
        continue;
      }
      alignas(64) float block[kRows * width()];
      copy_block(b, row, rows, column, columns, block);
      uint32_t* out = static_cast<uint32_t*>(memory) + offset / 2;
      for (int64_t v = 0; v < rows * kVectors; v += 2) {
        const auto low = bf16_in_upper_half(df, hn::Load(df, block + v * kLanes));
        const auto high = bf16_in_upper_half(df, hn::Load(df, block + (v + 1) * kLanes));
        hn::Store(hn::Or(hn::ShiftRight<16>(low), hn::And(high, hn::Set(du, 0xFFFF0000u))), du,
                  out + v / 2 * kLanes);
      }
    }
  }
}

int64_t target_width() { return width(); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {
namespace {

HWY_EXPORT(multiply_chunk);
HWY_EXPORT(pack_block);
HWY_EXPORT(target_width);

constexpr int64_t kBlockRows = 96;
constexpr int64_t kBlockColumns = 512;
constexpr int64_t kChunksWanted = 32;
constexpr int64_t kColumnsWorthPacking = 192;  // packing A costs as much as multiplying it with about 16
constexpr int64_t kSmallestChunk = int64_t{1} << 16;  // elements of B; about 10 µs of memory traffic
constexpr int64_t kPackedPanels = 8;  // packed together: they share the cache lines and pages of B

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

}  // namespace

int64_t panel_width() { return HWY_DYNAMIC_DISPATCH(target_width)(); }

int64_t panel_bytes(int64_t k, int64_t n, ops::DType dtype) {
  return round_up(n, panel_width()) * k * (dtype == ops::DType::F32 ? 4 : 2);
}

Panels pack_panels(ops::Device& device, const MatrixView& b, int64_t k, int64_t n, ops::DType dtype,
                   void* memory) {
  const Panels packed{memory, k, n, dtype};
  const int64_t panels = divide_up(n, panel_width()), groups = divide_up(panels, kPackedPanels);
  device.pool.run(groups * divide_up(k, kPanelDepth), [&](int64_t index, int32_t) {
    const int64_t i = index / groups * kPanelDepth, panel = index % groups * kPackedPanels;
    HWY_DYNAMIC_DISPATCH(pack_block)
    (b, packed, i, std::min(kPanelDepth, k - i), panel, std::min(kPackedPanels, panels - panel), memory);
  });
  return packed;
}

void panel_product(ops::Device& device, const PanelProduct& p) {
  const int64_t k = p.b.k, width = panel_width(), panels = divide_up(p.b.n, width);
  // Chunks depend on the shape alone: blocks of rows of equal size by as many panels as leave enough chunks.
  const int64_t row_blocks = divide_up(p.m, kBlockRows);
  const int64_t block_rows = round_up(divide_up(p.m, row_blocks), kTileRows);
  const int64_t most = kBlockColumns / width, fewest = std::min(most, divide_up(kSmallestChunk, k * width));
  const int64_t column_blocks =
      divide_up(panels, std::clamp(panels * row_blocks / kChunksWanted, fewest, most));
  // Sums, one block or all of A's rows, one widened panel.
  const int64_t chunk_panels = divide_up(panels, column_blocks);
  const bool packs = p.a.transposed || chunk_panels * width >= kColumnsWorthPacking;
  const int64_t a_elements = packs ? 2 * block_rows * kPanelDepth : round_up(block_rows * k, 16);
  const int64_t scratch =
      block_rows * std::max<int64_t>(chunk_panels, 8) * width + a_elements + kPanelDepth * width;
  device.reserve_workers<float>(scratch);
  device.pool.run(row_blocks * column_blocks, [&](int64_t index, int32_t worker) {
    const int64_t column = index / row_blocks, row = index % row_blocks * block_rows;
    const int64_t begin = panels * column / column_blocks, end = panels * (column + 1) / column_blocks;
    const ProductChunk chunk{row, std::min(block_rows, p.m - row), begin, end - begin, packs};
    float* memory = device.worker_scratch[static_cast<size_t>(worker)].take<float>(scratch);
    HWY_DYNAMIC_DISPATCH(multiply_chunk)(p, chunk, memory);
  });
}

}  // namespace duokv::cpu
#endif
