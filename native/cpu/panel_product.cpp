#include "cpu/panel_product.h"

#include <algorithm>
#include <cstring>

#include "cpu/bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/panel_product.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/bf16-inl.h"

#ifndef DUOKV_CPU_PANEL_PRODUCT_ONCE
#define DUOKV_CPU_PANEL_PRODUCT_ONCE
namespace duokv::cpu {

// Part of a product that one worker computes: rows [row, row + rows) of panels [panel, panel + panels).
struct ProductChunk {
  int64_t row, rows, panel, panels;
  bool direct;  // read A where it lies
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

// c [R, P panels] = or += a [R, depth] · b, where a(r, i) is a[r * a_stride + i], or a[i * kTileRows + r] if
// Grouped.
template <int R, int P, class Panel, bool Grouped>
HWY_INLINE void tile(int64_t depth, const float* HWY_RESTRICT a, int64_t a_stride,
                     const typename Panel::Element* HWY_RESTRICT b, int64_t panel_stride,
                     float* HWY_RESTRICT c, int64_t c_stride, bool add) {
  const DF df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  VF sum[R][P * kVectors];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < P * kVectors; ++v) sum[r][v] = hn::Zero(df);
  }
  for (int64_t i = 0; i < depth; ++i) {
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
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < P * kVectors; ++v) {
      float* out = c + r * c_stride + v * lanes;
      hn::StoreU(add ? hn::Add(hn::LoadU(df, out), sum[r][v]) : sum[r][v], df, out);
    }
  }
}

template <int P, class Panel, bool Grouped>
HWY_NOINLINE void tile_of(int64_t rows, int64_t depth, const float* a, int64_t a_stride,
                          const typename Panel::Element* b, int64_t panel_stride, float* c, int64_t c_stride,
                          bool add) {
  switch (rows) {
    case 1:
      return tile<1, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, c, c_stride, add);
    case 2:
      return tile<2, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, c, c_stride, add);
    case 3:
      return tile<3, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, c, c_stride, add);
    case 4:
      return tile<4, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, c, c_stride, add);
    case 5:
      return tile<5, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, c, c_stride, add);
    default:
      return tile<6, P, Panel, Grouped>(depth, a, a_stride, b, panel_stride, c, c_stride, add);
  }
}

// As `tile`, for `rows` rows and the first `columns` of the P panels' columns.
template <int P, class Panel, bool Grouped>
HWY_INLINE void edge_tile(int64_t rows, int64_t depth, const float* a, int64_t a_stride,
                          const typename Panel::Element* b, int64_t panel_stride, float* c, int64_t c_stride,
                          int64_t columns, bool add) {
  constexpr int64_t kColumns = P * width();
  if (columns >= kColumns) {
    return tile_of<P, Panel, Grouped>(rows, depth, a, a_stride, b, panel_stride, c, c_stride, add);
  }
  alignas(64) float whole[kTileRows * kColumns] = {};
  const size_t bytes = static_cast<size_t>(columns) * sizeof(float);
  for (int64_t r = 0; add && r < rows; ++r) std::memcpy(whole + r * kColumns, c + r * c_stride, bytes);
  tile_of<P, Panel, Grouped>(rows, depth, a, a_stride, b, panel_stride, whole, kColumns, add);
  for (int64_t r = 0; r < rows; ++r) std::memcpy(c + r * c_stride, whole + r * kColumns, bytes);
}

void widen(const uint32_t* panel, int64_t depth, float* wide) {
  const DF df;
  for (int64_t i = 0; i < depth; ++i) {
    VF row[kVectors];
    NarrowPanel::load(panel + i * NarrowPanel::kRow * hn::Lanes(df), row);
    for (int v = 0; v < kVectors; ++v) hn::Store(row[v], df, wide + i * width() + v * hn::Lanes(df));
  }
}

void round_in_place(float* x, int64_t n) {
  const DF df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(round_to_bf16(df, hn::LoadU(df, x + i)), df, x + i);
  for (; i < n; ++i) x[i] = cpu::round_to_bf16(x[i]);
}

// Row groups of at most kTileRows that differ by at most one row: a group of one or two rows wastes most of
// the tile.
struct RowGroups {
  explicit RowGroups(int64_t m) : rows(m), count((m + kTileRows - 1) / kTileRows) {}
  int64_t begin(int64_t group) const { return rows * group / count; }
  int64_t size(int64_t group) const { return begin(group + 1) - begin(group); }
  int64_t rows, count;
};

// Copies columns [i, i + depth) of A's rows [row, row + groups.rows): as [row][kPanelDepth], or where A is
// transposed by group as [depth][kTileRows].
void pack_rows(const MatrixView& a, int64_t row, const RowGroups& groups, int64_t i, int64_t depth,
               float* packed) {
  if (!a.transposed) {
    for (int64_t r = 0; r < groups.rows; ++r) {
      std::memcpy(packed + r * kPanelDepth, a.data + (row + r) * a.stride + i,
                  static_cast<size_t>(depth) * sizeof(float));
    }
    return;
  }
  for (int64_t group = 0; group < groups.count; ++group) {
    const float* from = a.data + i * a.stride + row + groups.begin(group);
    float* to = packed + group * kTileRows * kPanelDepth;
    const int64_t size = groups.size(group);
    for (int64_t d = 0; d < depth; ++d) {
      const size_t bytes = static_cast<size_t>(size) * sizeof(float);
      size == kTileRows ? std::memcpy(to + d * kTileRows, from + d * a.stride, kTileRows * sizeof(float))
                        : std::memcpy(to + d * kTileRows, from + d * a.stride, bytes);
    }
  }
}

// Where a chunk's sums are collected: in C itself, or in scratch when the finished product is still to be
// rounded.
struct Sums {
  float* data;
  int64_t stride, columns;
  bool add_first;  // the first block along k is added to what is there
};

template <int P, class Panel>
void direct_panels(const PanelProduct& p, const ProductChunk& chunk, const float* a, int64_t a_stride,
                   const Sums& sums, int64_t panel) {
  const int64_t k = p.b.k, row_elements = Panel::kRow * static_cast<int64_t>(hn::Lanes(DF()));
  const int64_t panel_stride = k * row_elements;
  const auto* b = static_cast<const typename Panel::Element*>(p.b.data) + panel * panel_stride;
  const RowGroups groups(chunk.rows);
  const int64_t column = (panel - chunk.panel) * width();
  for (int64_t i = 0; i < k; i += kPanelDepth) {
    const int64_t depth = std::min(kPanelDepth, k - i);
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t r = groups.begin(g);
      edge_tile<P, Panel, false>(groups.size(g), depth, a + r * a_stride + i, a_stride, b + i * row_elements,
                                 panel_stride, sums.data + r * sums.stride + column, sums.stride,
                                 sums.columns - column, sums.add_first || i > 0);
    }
  }
}

// Few rows: each panel once along all of k, one stream of weights; A is read where it lies.
template <class Panel>
void direct_chunk(const PanelProduct& p, const ProductChunk& chunk, const float* a, int64_t a_stride,
                  const Sums& sums) {
  // One or two rows have too few accumulators to hide the latency of the additions; several panels at once
  // do.
  constexpr int kJoin1 = 8 / kVectors, kJoin2 = 4 / kVectors;
  const int64_t end = chunk.panel + chunk.panels;
  int64_t panel = chunk.panel;
  if (chunk.rows == 1) {
    for (; panel + kJoin1 <= end; panel += kJoin1)
      direct_panels<kJoin1, Panel>(p, chunk, a, a_stride, sums, panel);
  } else if (chunk.rows == 2) {
    for (; panel + kJoin2 <= end; panel += kJoin2)
      direct_panels<kJoin2, Panel>(p, chunk, a, a_stride, sums, panel);
  }
  for (; panel < end; ++panel) direct_panels<1, Panel>(p, chunk, a, a_stride, sums, panel);
}

template <bool Grouped>
void packed_chunk(const PanelProduct& p, const ProductChunk& chunk, const Sums& sums, float* scratch) {
  const RowGroups groups(chunk.rows);
  const int64_t k = p.b.k;
  const bool narrow = p.b.dtype == ops::DType::BF16;
  float* a = scratch;
  float* wide = a + groups.count * kTileRows * kPanelDepth;
  for (int64_t i = 0; i < k; i += kPanelDepth) {
    const int64_t depth = std::min(kPanelDepth, k - i);
    pack_rows(p.a, chunk.row, groups, i, depth, a);
    if (narrow) round_in_place(a, groups.count * kTileRows * kPanelDepth);
    for (int64_t j = 0; j < chunk.panels; ++j) {
      const int64_t offset = ((chunk.panel + j) * k + i) * width();
      const float* b = static_cast<const float*>(p.b.data) + offset;
      if (narrow) {
        widen(static_cast<const uint32_t*>(p.b.data) + offset / 2, depth, wide);
        b = wide;
      }
      for (int64_t g = 0; g < groups.count; ++g) {
        const int64_t r = groups.begin(g);
        edge_tile<1, WidePanel, Grouped>(groups.size(g), depth,
                                         a + (Grouped ? g * kTileRows : r) * kPanelDepth, kPanelDepth, b, 0,
                                         sums.data + r * sums.stride + j * width(), sums.stride,
                                         sums.columns - j * width(), sums.add_first || i > 0);
      }
    }
  }
}

void run_chunk(const PanelProduct& p, const ProductChunk& chunk, float* scratch) {
  const int64_t n = p.b.n, columns = std::min(chunk.panels * width(), n - chunk.panel * width());
  float* c = p.c + chunk.row * n + chunk.panel * width();
  Sums sums{c, n, columns, p.accumulate};
  if (p.round_output) {
    sums = {scratch, chunk.panels * width(), chunk.panels * width(), false};
    scratch += chunk.rows * sums.stride;
  }
  if (!chunk.direct) {
    p.a.transposed ? packed_chunk<true>(p, chunk, sums, scratch)
                   : packed_chunk<false>(p, chunk, sums, scratch);
  } else if (p.b.dtype == ops::DType::F32) {
    direct_chunk<WidePanel>(p, chunk, p.a.data + chunk.row * p.a.stride, p.a.stride, sums);
  } else {
    const int64_t k = p.b.k;
    for (int64_t r = 0; r < chunk.rows; ++r) {
      std::memcpy(scratch + r * k, p.a.data + (chunk.row + r) * p.a.stride,
                  static_cast<size_t>(k) * sizeof(float));
    }
    round_in_place(scratch, chunk.rows * k);
    direct_chunk<NarrowPanel>(p, chunk, scratch, k, sums);
  }
  if (!p.round_output) return;
  for (int64_t r = 0; r < chunk.rows; ++r) {
    float* rounded = sums.data + r * sums.stride;
    float* out = c + r * n;
    round_in_place(rounded, columns);
    for (int64_t j = 0; j < columns; ++j) out[j] = p.accumulate ? out[j] + rounded[j] : rounded[j];
  }
}

// Packs panel `panel` of b.
void pack_panel(const MatrixView& b, int64_t k, int64_t n, ops::DType dtype, int64_t panel, void* memory) {
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(DF()));
  constexpr int64_t kBlock = 16;  // a cache line of each column
  const int64_t column = panel * width(), columns = std::min(width(), n - column);
  alignas(64) float block[kBlock * width()] = {};
  for (int64_t i = 0; i < k; i += kBlock) {
    const int64_t depth = std::min(kBlock, k - i);
    if (b.transposed) {
      for (int64_t j = 0; j < columns; ++j) {
        const float* from = b.data + (column + j) * b.stride + i;
        for (int64_t d = 0; d < depth; ++d) block[d * width() + j] = from[d];
      }
    } else {
      for (int64_t d = 0; d < depth; ++d) {
        std::memcpy(block + d * width(), b.data + (i + d) * b.stride + column,
                    static_cast<size_t>(columns) * sizeof(float));
      }
    }
    const int64_t offset = (panel * k + i) * width();
    if (dtype == ops::DType::F32) {
      std::memcpy(static_cast<float*>(memory) + offset, block,
                  static_cast<size_t>(depth * width()) * sizeof(float));
      continue;
    }
    const DF df;
    const DU du;
    uint32_t* out = static_cast<uint32_t*>(memory) + offset / 2;
    for (int64_t v = 0; v < depth * kVectors; v += 2) {
      const auto low = bf16_in_upper_half(df, hn::Load(df, block + v * kLanes));
      const auto high = bf16_in_upper_half(df, hn::Load(df, block + (v + 1) * kLanes));
      hn::Store(hn::Or(hn::ShiftRight<16>(low), hn::And(high, hn::Set(du, 0xFFFF0000u))), du,
                out + v / 2 * kLanes);
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

HWY_EXPORT(run_chunk);
HWY_EXPORT(pack_panel);
HWY_EXPORT(target_width);

constexpr int64_t kBlockRows = 96;  // a block of A, 96 KiB, and its part of C stay in the L2 cache
constexpr int64_t kBlockColumns = 512;
constexpr int64_t kChunksWanted = 32;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

}  // namespace

int64_t panel_width() { return HWY_DYNAMIC_DISPATCH(target_width)(); }

int64_t panel_bytes(int64_t k, int64_t n, ops::DType dtype) {
  return round_up(n, panel_width()) * k * (dtype == ops::DType::F32 ? 4 : 2);
}

Panels pack_panels(ops::Device& device, const MatrixView& b, int64_t k, int64_t n, ops::DType dtype,
                   void* memory) {
  device.pool.run(divide_up(n, panel_width()), [&](int64_t panel, int32_t) {
    HWY_DYNAMIC_DISPATCH(pack_panel)(b, k, n, dtype, panel, memory);
  });
  return {memory, k, n, dtype};
}

void panel_product(ops::Device& device, const PanelProduct& p) {
  const int64_t panels = divide_up(p.b.n, panel_width());
  const bool direct = !p.a.transposed && p.m <= kDirectRows;
  // Chunks depend on the shape alone.
  const int64_t row_blocks = divide_up(p.m, kBlockRows);
  const int64_t block_rows = round_up(divide_up(p.m, row_blocks), kTileRows);
  const int64_t fewest = divide_up(int64_t{1} << 18, 4 * p.b.k * panel_width());  // 256 KiB of weights
  const int64_t most = kBlockColumns / panel_width();
  const int64_t chunk_panels = std::clamp(panels * row_blocks / kChunksWanted, std::min(fewest, most), most);
  const int64_t column_blocks = divide_up(panels, chunk_panels);
  // The copy of A, one panel widened from BF16, and sums that are to be rounded. Groups of fewer than
  // kTileRows rows take the room of whole ones: at most twice the rows.
  const int64_t a_elements = direct ? p.m * p.b.k : 2 * block_rows * kPanelDepth;
  const int64_t columns = divide_up(panels, column_blocks) * panel_width();
  const int64_t scratch = a_elements + kPanelDepth * panel_width() + block_rows * columns;
  device.pool.run(row_blocks * column_blocks, [&](int64_t index, int32_t worker) {
    const int64_t column = index / row_blocks, row = index % row_blocks * block_rows;
    const int64_t begin = panels * column / column_blocks, end = panels * (column + 1) / column_blocks;
    const ProductChunk chunk{row, std::min(block_rows, p.m - row), begin, end - begin, direct};
    float* memory = device.worker_scratch[static_cast<size_t>(worker)].take<float>(scratch);
    HWY_DYNAMIC_DISPATCH(run_chunk)(p, chunk, memory);
  });
}

}  // namespace duokv::cpu
#endif
