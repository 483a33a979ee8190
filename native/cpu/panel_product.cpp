#include "cpu/panel_product.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "cpu/bf16.h"
#include "cpu/prefetch.h"
#include "cpu/rows.h"
#include "ops/rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/panel_product.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/bf16-inl.h"
#include "cpu/bf16_dot-inl.h"
#include "cpu/panel_packing-inl.h"
#include "cpu/vector_math-inl.h"

#ifndef DUOKV_CPU_PANEL_PRODUCT_ONCE
#define DUOKV_CPU_PANEL_PRODUCT_ONCE
namespace duokv::cpu {

// Part of a product that one worker computes: rows [row, row + rows) of panels [panel, panel + panels).
// `a` holds the rows packed in blocks of `depth` along k, or is null where the chunk packs them itself, block
// by block. `next` are the `next_bytes` of B that this worker will probably read after the chunk.
struct ProductChunk {
  int64_t row, rows, panel, panels, depth;
  const void* a;
  const char* next;
  int64_t next_bytes;
};

// Sums that a chunk keeps: of all its outputs from block to block along k, or those of one tile of tile_rows
// by a panel where there is only one block.
inline int64_t sum_floats(bool has_blocks, int64_t rows, int64_t panels, int64_t tile_rows, int64_t width) {
  return (has_blocks ? rows * panels : tile_rows) * width;
}

}  // namespace duokv::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace duokv::cpu {
namespace HWY_NAMESPACE {
namespace {

// One row reads kJoined panels at once and two rows half of them: that many streams keep the memory busy.
constexpr int kJoined = HWY_ARCH_ARM_A64 ? 2 : 4;

// A panel in FP32: [k][width].
struct WidePanel {
  using Element = float;
  using Left = float;                                          // what A is packed as
  static constexpr int64_t kValues = 1, kRow = kBlockVectors;  // values along k and vectors of a step
  static constexpr int64_t kSteps = kChain / kValues;          // of a chain
  static HWY_INLINE void load(const float* row, VF (&b)[kBlockVectors]) {
    const DF df;
    for (int v = 0; v < kBlockVectors; ++v) b[v] = hn::Load(df, row + v * hn::Lanes(df));
  }
};

// A panel in BF16: two columns a vector apart share 32 bits, so that widening is a shift and a mask.
struct NarrowPanel : WidePanel {
  using Element = uint32_t;
  static constexpr int64_t kRow = kBlockVectors / 2;
  static HWY_INLINE void load(const uint32_t* row, VF (&b)[kBlockVectors]) {
    const DF df;
    const DU du;
    for (int v = 0; v < kBlockVectors; v += 2) {
      const auto pair = hn::Load(du, row + v / 2 * hn::Lanes(du));
      b[v] = hn::BitCast(df, hn::ShiftLeft<16>(pair));
      b[v + 1] = hn::BitCast(df, hn::And(pair, hn::Set(du, 0xFFFF0000u)));
    }
  }
};

// A panel of pairs of BF16 values: [k / 2][width].
#ifdef DUOKV_BF16_DOT
struct PairPanel {
  using Element = uint32_t;
  using Left = uint32_t;
  static constexpr int64_t kValues = 2, kRow = kBlockVectors;
  static constexpr int64_t kSteps = kPairChain / kValues;
  static HWY_INLINE void load(const uint32_t* row, Bf16Pairs (&b)[kBlockVectors]) {
    const DU du;
    for (int v = 0; v < kBlockVectors; ++v) b[v] = hn::Load(du, row + v * hn::Lanes(du));
  }
};
#endif

// Memory that will be read next: every 8 steps of a tile fetch Lines cache lines, `step` bytes apart.
struct Ahead {
  const char* data;
  int64_t step;
  HWY_INLINE Ahead after(int64_t steps, int64_t lines) const {
    return {data + steps * lines / 8 * step, step};
  }
};

// Whether reading takes longest: where nothing is widened and the tiles that share a block fetch half of the
// next one each, or more. Lines then come from memory to the second-level cache and from there, kNear steps
// ahead, to the first.
template <class Panel, int Lines>
constexpr bool kReadingBound =
    !std::is_same_v<Panel, NarrowPanel> &&
    2 * Lines * kCacheLine >= 8 * Panel::kRow * static_cast<int64_t>(4 * hn::MaxLanes(DF()));
constexpr int64_t kNear = 20;

// sums [R, P panels] = or += a · b, where a is [steps][R].
template <int R, int P, class Panel, int Lines>
HWY_INLINE void tile(int64_t steps, const typename Panel::Left* HWY_RESTRICT a,
                     const typename Panel::Element* HWY_RESTRICT b, int64_t panel_stride,
                     float* HWY_RESTRICT sums, bool add, Ahead ahead) {
  const DF df;
  const hn::ScalableTag<typename Panel::Left> left;
  const int64_t lanes = lane_count();
  VF sum[R][P * kBlockVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < P * kBlockVectors; ++v) sum[r][v] = hn::Zero(df);
  }
  constexpr bool kFetchesNear = P == 1 && kReadingBound<Panel, Lines>;
  const auto step = [&](int64_t i) HWY_ATTR {
    for (int p = 0; p < P; ++p) {
      const auto* values = b + p * panel_stride + i * Panel::kRow * lanes;
      if constexpr (kFetchesNear) prefetch(values + kNear * Panel::kRow * lanes, Panel::kRow * lanes);
      hn::Vec<decltype(left)> row[kBlockVectors];
      Panel::load(values, row);
      for (int r = 0; r < R; ++r) {
        const auto value = hn::Set(left, a[i * R + r]);
        for (int v = 0; v < kBlockVectors; ++v) {
          sum[r][p * kBlockVectors + v] = multiply_add(sum[r][p * kBlockVectors + v], value, row[v]);
        }
      }
    }
  };
  constexpr int64_t kSteps = std::max(8 / Lines, 1), kTogether = std::max(Lines / 8, 1);
  int64_t i = 0;
  for (; i + kSteps <= steps; i += kSteps) {
    // Several panels are streams enough to keep the memory busy.
    if constexpr (P == 1) {
      for (int64_t j = 0; j < kTogether; ++j) {
        prefetch_to_l2(ahead.data + (i / kSteps * kTogether + j) * ahead.step, 1);
      }
    }
#pragma GCC unroll 8
    for (int64_t j = 0; j < kSteps; ++j) step(i + j);
  }
  for (; i < steps; ++i) step(i);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < P * kBlockVectors; ++v) {
      float* out = sums + (r * P * kBlockVectors + v) * lanes;
      hn::Store(add ? hn::Add(hn::Load(df, out), sum[r][v]) : sum[r][v], df, out);
    }
  }
}

// The tile of `rows` rows, at most R.
template <int R, int P, class Panel, int Lines>
HWY_INLINE void tile_up_to(int64_t rows, int64_t steps, const typename Panel::Left* a,
                           const typename Panel::Element* b, int64_t panel_stride, float* sums, bool add,
                           Ahead ahead) {
  if constexpr (R > 1) {
    if (rows < R)
      return tile_up_to<R - 1, P, Panel, Lines>(rows, steps, a, b, panel_stride, sums, add, ahead);
  }
  tile<R, P, Panel, Lines>(steps, a, b, panel_stride, sums, add, ahead);
}

template <int P, class Panel, int Lines>
HWY_NOINLINE void tile_of(int64_t rows, int64_t steps, const typename Panel::Left* a,
                          const typename Panel::Element* b, int64_t panel_stride, float* sums, bool add,
                          Ahead ahead) {
  // More than one panel only ever meets a row or two.
  constexpr int kMost = P == 1 ? kBlockRows : P * kBlockVectors <= 4 ? 2 : 1;
  tile_up_to<kMost, P, Panel, Lines>(rows, steps, a, b, panel_stride, sums, add, ahead);
}

// What blocks along k of P panels add up to: rows of C from `c` on. Until the last block the sums wait,
// [rows][P panels]; that one's become C tile by tile. Where it is the only one, all tiles have the same place
// for them.
template <int P>
struct Output {
  const PanelProduct& product;
  float* c;
  int64_t columns;
  float* sums;
  bool first, last;  // block

  float* sums_of(int64_t row) const { return first && last ? sums : sums + row * P * width(); }

  // Asks for rows of C while their sums are computed: writing takes as long as reading does.
  HWY_INLINE void expect(int64_t row, int64_t rows) const {
    if (!last) return;
    for (int64_t r = row; r < row + rows; ++r) prefetch_to_write(c + r * product.b.n, columns);
  }

  // C = or += the sums.
  void finish(int64_t row, int64_t rows) const {
    if (!last) return;
    const DF df;
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = sums_of(row) + r * P * width();
      float* to = c + (row + r) * product.b.n;
      const auto step = [&](int64_t i, auto span) HWY_ATTR {
        VF value = load(df, from + i, span);
        if (product.round_output) value = round_to_bf16(df, value);
        if (product.accumulate) value = hn::Add(load(df, to + i, span), value);
        store(value, df, to + i, span);
      };
      if (columns < P * width()) {
        for_each_vector(df, columns, step);
      } else {
        for (int v = 0; v < P * kBlockVectors; ++v) step(v * lane_count(), Whole{});
      }
    }
  }
};

template <int P, class Panel, int Lines>
void multiply_groups(const RowGroups& groups, int64_t steps, const typename Panel::Left* a,
                     const typename Panel::Element* b, int64_t panel_stride, const Output<P>& out,
                     const char* next, int64_t next_bytes) {
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t r = groups.begin(g), rows = groups.size(g);
    const int64_t begin = next_bytes * g / groups.count, end = next_bytes * (g + 1) / groups.count;
    const Ahead ahead{next + begin, (end - begin) * 8 / (steps * Lines)};
    if (groups.count > 2) out.expect(r, rows);  // few rows are in the cache
    for (int64_t step = 0; step < steps; step += Panel::kSteps) {
      tile_of<P, Panel, Lines>(rows, std::min(Panel::kSteps, steps - step), a + r * steps + step * rows,
                               b + step * Panel::kRow * lane_count(), panel_stride, out.sums_of(r),
                               step > 0 || !out.first, ahead.after(step, Lines));
    }
    out.finish(r, rows);
  }
}

// One block along k of `out`, which a · b is [groups.rows, P panels] of. The groups' turns together fetch
// `next_bytes` at `next`, each cache line once: hardware prefetchers stop at the end of a page and alone
// leave the kernel waiting, and a line fetched twice takes a place that another could use.
template <int P, class Panel>
void multiply_block(const RowGroups& groups, int64_t steps, const typename Panel::Left* a,
                    const typename Panel::Element* b, int64_t panel_stride, const Output<P>& out,
                    const char* next, int64_t next_bytes) {
  if constexpr (P > 1) {
    multiply_groups<P, Panel, 8>(groups, steps, a, b, panel_stride, out, next, next_bytes);
  } else {
    const int64_t lines = ceil_div(next_bytes, kCacheLine), all = groups.count * steps;
    const auto multiply = all < lines       ? &multiply_groups<1, Panel, 16>
                          : all < 2 * lines ? &multiply_groups<1, Panel, 8>
                          : all < 4 * lines ? &multiply_groups<1, Panel, 4>
                          : all < 8 * lines ? &multiply_groups<1, Panel, 2>
                                            : &multiply_groups<1, Panel, 1>;
    multiply(groups, steps, a, b, panel_stride, out, next, next_bytes);
  }
}

void widen(const uint32_t* panel, int64_t depth, float* wide) {
  const DF df;
  for (int64_t i = 0; i < depth; ++i) {
    VF row[kBlockVectors];
    NarrowPanel::load(panel + i * NarrowPanel::kRow * hn::Lanes(df), row);
    for (int v = 0; v < kBlockVectors; ++v) hn::Store(row[v], df, wide + i * width() + v * hn::Lanes(df));
  }
}

// Calls run.operator()<P>(panel) for the chunk's panels from `panel` on, as long as it has P of them. Returns
// the first that is left.
template <int P, class Run>
HWY_INLINE int64_t for_joined(const ProductChunk& chunk, int64_t panel, Run&& run) {
  for (; panel + P <= chunk.panels; panel += P) run.template operator()<P>(panel);
  return panel;
}

// Block by block along k, each for all of the chunk's panels, so that a block of A is packed once and stays
// in the cache. P panels are read at once.
template <class Panel>
void multiply_blocks(const PanelProduct& p, const ProductChunk& chunk, float* scratch) {
  constexpr bool kNarrow = std::is_same_v<Panel, NarrowPanel>;
  using Element = typename Panel::Element;
  using Left = typename Panel::Left;
  const RowGroups groups(chunk.rows);
  const int64_t k = p.b.k, most = chunk.depth, rows_of_panel = panel_rows(p.b), row_bytes = row_bytes_of(p.b);
  const int64_t panel_bytes = rows_of_panel * row_bytes;
  const bool has_blocks = k > most;
  const char* first = static_cast<const char*>(p.b.data) + chunk.panel * panel_bytes;
  float* sums = scratch;
  float* wide = sums + sum_floats(has_blocks, chunk.rows, chunk.panels, kBlockRows, width());
  float* packed = wide + most * width();
  const auto for_panels = [&](auto&& run) HWY_ATTR {
    int64_t panel = 0;
    if (chunk.rows == 1) panel = for_joined<kJoined>(chunk, panel, run);
    if (chunk.rows <= 2) panel = for_joined<kJoined / 2>(chunk, panel, run);
    for_joined<1>(chunk, panel, run);
  };
  for (int64_t i = 0; i < k; i += most) {
    const int64_t depth = std::min(most, k - i), steps = ceil_div(depth, Panel::kValues);
    const auto* a =
        reinterpret_cast<const Left*>(chunk.a ? static_cast<const float*>(chunk.a) + i * chunk.rows : packed);
    if (!chunk.a) pack_groups(p.a, chunk.row, groups, i, depth, kNarrow, reinterpret_cast<Left*>(packed));
    const int64_t after = std::min(most, rows_of_panel - i - most);  // rows of the next block
    for_panels([&]<int P>(int64_t panel) HWY_ATTR {
      const char* block = first + panel * panel_bytes + i * row_bytes;
      const char* next = block + P * panel_bytes;
      int64_t next_bytes = steps * Panel::kValues * row_bytes;
      if (panel + P == chunk.panels) {
        next = after > 0 ? first + (i + depth) * row_bytes : chunk.next;
        next_bytes = after > 0 ? after * row_bytes : chunk.next_bytes;
      }
      const int64_t column = (chunk.panel + panel) * width();
      const Output<P> out{.product = p,
                          .c = p.c + chunk.row * p.b.n + column,
                          .columns = std::min(P * width(), p.b.n - column),
                          .sums = sums + (has_blocks ? panel * chunk.rows * width() : 0),
                          .first = i == 0,
                          .last = i + depth == k};
      if constexpr (kNarrow && P == 1) {
        if (groups.count > 2) {
          widen(reinterpret_cast<const uint32_t*>(block), depth, wide);
          return multiply_block<1, WidePanel>(groups, depth, reinterpret_cast<const float*>(a), wide, 0, out,
                                              next, next_bytes);
        }
      }
      multiply_block<P, Panel>(groups, steps, a, reinterpret_cast<const Element*>(block),
                               panel_bytes / static_cast<int64_t>(sizeof(Element)), out, next, next_bytes);
    });
  }
}

// Calls run(a panel of b's type).
template <class Run>
HWY_INLINE void with_panel(const Panels& b, Run&& run) {
#ifdef DUOKV_BF16_DOT
  if (b.pairs) return run(PairPanel());
#endif
  b.dtype == ops::DType::BF16 ? run(NarrowPanel()) : run(WidePanel());
}

void multiply_chunk(const PanelProduct& p, const ProductChunk& chunk, float* scratch) {
  with_panel(p.b, [&]<class Panel>(Panel) { multiply_blocks<Panel>(p, chunk, scratch); });
}

// Columns [i, i + depth) of rows [row, row + rows) of A, where their packed memory wants that block.
void pack_rows(const PanelProduct& p, int64_t row, int64_t rows, int64_t i, int64_t depth, float* packed) {
  with_panel(p.b, [&]<class Panel>(Panel) {
    pack_groups(p.a, row, RowGroups(rows), i, depth, p.b.dtype == ops::DType::BF16,
                reinterpret_cast<typename Panel::Left*>(packed + i * rows));
  });
}

// Panels that this many rows read at once.
int64_t joined_panels(int64_t rows) { return rows > 2 ? 1 : kJoined / rows; }

int64_t target_width() { return width(); }
int64_t target_tile_rows() { return kBlockRows; }
bool target_multiplies_pairs() {
#ifdef DUOKV_BF16_DOT
  return has_bf16_dot();
#else
  return false;
#endif
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace duokv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace duokv::cpu {
namespace {

HWY_EXPORT(joined_panels);
HWY_EXPORT(multiply_chunk);
HWY_EXPORT(pack_block);
HWY_EXPORT(pack_rows);
HWY_EXPORT(target_multiplies_pairs);
HWY_EXPORT(target_tile_rows);
HWY_EXPORT(target_width);

constexpr int64_t kBlockColumns = 1024;
constexpr int64_t kChunksOfThread = 4;
constexpr int64_t kColumnsWorthPacking = 192;  // packing A costs as much as multiplying it with about 16
constexpr int64_t kWorthSharing = int64_t{1} << 15;   // elements of A that threads pack together
constexpr int64_t kSmallestChunk = int64_t{1} << 16;  // elements of B; about 10 µs of memory traffic
constexpr int64_t kPackedPanels = 8;  // packed together: they share the cache lines and pages of B

// Who packs A: every thread all of it for itself, as a few rows reach it sooner from another's cache than
// packed by another; threads together before they multiply; every chunk what it multiplies.
enum class Packing { ByThread, Together, ByChunk };

// How products of the same rows are divided, which no result depends on: blocks of rows of equal size by as
// many panels as leave enough chunks. With one block of rows B is read once and time goes into that, so
// chunks are as small as one turn reads, `joined` panels, and threads go through neighbouring ones.
struct Chunks {
  Chunks(int64_t threads, int64_t m, int64_t k, int64_t n, int64_t joined)
      : width(panel_width()),
        row_blocks(ceil_div(m, kChunkRows)),
        block_rows(round_up(ceil_div(m, row_blocks), HWY_DYNAMIC_DISPATCH(target_tile_rows)())) {
    const int64_t most = kBlockColumns / width;
    const int64_t fewest = std::min(most, ceil_div(kSmallestChunk, k * width));
    const int64_t shared = ceil_div(n, width) * row_blocks / (kChunksOfThread * threads);
    panels = row_blocks == 1 ? joined : std::clamp(shared, fewest, most);
    packing = row_blocks == 1 && m * k <= kWorthSharing                  ? Packing::ByThread
              : row_blocks == 1 || panels * width < kColumnsWorthPacking ? Packing::Together
                                                                         : Packing::ByChunk;
  }
  int64_t width, row_blocks, block_rows;
  int64_t panels;  // at most, of a chunk
  Packing packing;
};

// What a thread needs to take part in products of one A, in one piece: what another one wrote reaches it
// slowly.
struct ProductJob {
  ProductJob(ops::Device& device_, std::span<const PanelProduct> all, float* activation_)
      : device(&device_),
        activation(activation_),
        parts(activation ? static_cast<int64_t>(all.size()) : 1),
        m(all[0].m),
        k(all[0].b.k),
        chunks(device->pool.threads(), m, k, width_of(all), HWY_DYNAMIC_DISPATCH(joined_panels)(m)),
        depth(chunks.row_blocks > 1 ? kPanelDepth
              : all[0].b.pairs      ? kPairChain
                                    : kChain),
        depth_blocks(ceil_div(k, depth)) {
    std::copy(all.begin(), all.end(), products.begin());
    for (const PanelProduct& p : all) columns += columns_of(p);
    columns /= parts;
    own_rows = chunks.packing == Packing::ByThread ? round_up(m * k, kCacheLine / 4) : 0;
    const int64_t chunk_rows = chunks.packing == Packing::ByChunk ? chunks.block_rows * depth : 0;
    const int64_t sums = sum_floats(depth_blocks > 1, chunks.block_rows, chunks.panels,
                                    HWY_DYNAMIC_DISPATCH(target_tile_rows)(), chunks.width);
    scratch = own_rows + sums + depth * chunks.width + chunk_rows;
  }

  static int64_t width_of(std::span<const PanelProduct> all) {
    int64_t n = 0;
    for (const PanelProduct& p : all) n += p.b.n;
    return n;
  }

  // A chunk's panels and where they begin.
  struct Place {
    const PanelProduct* product;
    int64_t panel, panels;
    const char* data;
  };

  int64_t panels_of(const PanelProduct& p) const { return ceil_div(p.b.n, chunks.width); }
  int64_t columns_of(const PanelProduct& p) const { return ceil_div(panels_of(p), chunks.panels); }
  int64_t rows_at(int64_t row) const { return std::min(chunks.block_rows, m - row); }
  int64_t bytes(int64_t depth, int64_t panels) const {
    return panel_bytes(depth, panels * chunks.width, products[0].b.dtype);
  }
  // Of the first block along k.
  int64_t first_bytes() const { return bytes(std::min(k, depth), 1); }
  // `column` of the products from `part` on.
  Place place(int64_t column, int64_t part) const {
    const PanelProduct* p = products.data() + part;
    for (; column >= columns_of(*p); ++p) column -= columns_of(*p);
    const int64_t begin = panels_of(*p) * column / columns_of(*p);
    return {p, begin, panels_of(*p) * (column + 1) / columns_of(*p) - begin,
            static_cast<const char*>(p->b.data) + bytes(k, begin)};
  }
  float* scratch_of(int32_t worker) const {
    return device->worker_scratch[static_cast<size_t>(worker)].take<float>(scratch);
  }

  // One block along k of one block of rows, into memory for all of A.
  void pack(int64_t row, int64_t depth_block, float* memory) const {
    const int64_t i = depth_block * depth;
    HWY_DYNAMIC_DISPATCH(pack_rows)
    (products[0], row, rows_at(row), i, std::min(depth, k - i), memory + row * k);
  }

  // `a`: the packed rows, or null. `memory`: of a thread, after its own rows.
  void multiply(int64_t index, int64_t next, const float* a, float* memory) const {
    const int64_t row = index % chunks.row_blocks * chunks.block_rows, column = index / chunks.row_blocks;
    for (int64_t part = 0; part < parts; ++part) {
      const Place at = place(column, part);
      ProductChunk chunk{row, rows_at(row), at.panel, at.panels, depth, a ? a + row * k : nullptr, nullptr,
                         0};
      const bool last = part + 1 == parts;
      if (!last || next >= 0) {
        chunk.next = last ? place(next, 0).data : place(column, part + 1).data;
        chunk.next_bytes = first_bytes();
      }
      HWY_DYNAMIC_DISPATCH(multiply_chunk)(*at.product, chunk, memory);
    }
    if (activation) activate(row, place(column, 0));
  }

  void activate(int64_t row, const Place& at) const {
    const int64_t n = products[0].b.n, column = at.panel * chunks.width, first = row * n + column;
    swiglu_rows(products[0].c + first, parts > 1 ? products[1].c + first : nullptr, rows_at(row),
                std::min(at.panels * chunks.width, n - column), n, activation + first);
  }

  // With one block of rows.
  void operator()(const ThreadPool::Turn& turn) const {
    float* memory = scratch_of(turn.worker);
    if (!packed && turn.first) {
      prefetch_to_l2(place(turn.chunk, 0).data, first_bytes());
      for (int64_t block = 0; block < depth_blocks; ++block) pack(0, block, memory);
    }
    multiply(turn.chunk, turn.next, packed ? packed : memory, memory + own_rows);
  }

  ops::Device* device;
  float* activation;
  int64_t parts;  // products whose columns a chunk computes, all where there is an activation
  std::array<PanelProduct, kMostProducts> products;
  int64_t m, k;
  Chunks chunks;
  int64_t depth, depth_blocks;    // of a block along k, at most, and how many there are
  int64_t columns = 0;            // of chunks
  int64_t own_rows, scratch;      // floats of a thread: rows of A that it packs, and all
  const float* packed = nullptr;  // A where threads don't each pack it
};

}  // namespace

int64_t panel_width() { return HWY_DYNAMIC_DISPATCH(target_width)(); }

int64_t panel_bytes(int64_t k, int64_t n, ops::DType dtype) {
  return round_up(n, panel_width()) * (dtype == ops::DType::F32 ? 4 * k : 2 * round_up(k, 2));
}

Panels pack_panels(ops::Device& device, const MatrixView& b, int64_t k, int64_t n, ops::DType dtype,
                   void* memory) {
  const Panels packed{memory, k, n, dtype,
                      dtype == ops::DType::BF16 && HWY_DYNAMIC_DISPATCH(target_multiplies_pairs)()};
  const int64_t panels = ceil_div(n, panel_width()), groups = ceil_div(panels, kPackedPanels);
  device.pool.run(groups * ceil_div(k, kPanelDepth), [&](int64_t index, int32_t) {
    const int64_t i = index / groups * kPanelDepth, panel = index % groups * kPackedPanels;
    HWY_DYNAMIC_DISPATCH(pack_block)
    (b, packed, i, std::min(kPanelDepth, k - i), panel, std::min(kPackedPanels, panels - panel), memory);
  });
  return packed;
}

int64_t panel_workspace_bytes(const ops::Device& device, int64_t m, int64_t k, int64_t n) {
  return Chunks(device.pool.threads(), m, k, n, 1).packing == Packing::Together ? round_up(m * k * 4, 64) : 0;
}

bool panel_products(ops::Device& device, std::span<const PanelProduct> products, float* activation,
                    void* workspace) {
  const PanelProduct& first = products[0];
  // Panels that are read together are streams, which turns of two matrices would cut short.
  const bool apart = HWY_DYNAMIC_DISPATCH(joined_panels)(first.m) > 1;
  ProductJob job(device, products, apart ? nullptr : activation);
  const Chunks& chunks = job.chunks;
  const bool is_packed = job.m == 1 && first.b.dtype == ops::DType::F32 && !first.a.transposed;
  if (is_packed) {
    job.packed = first.a.data;
  } else if (chunks.packing == Packing::Together) {
    auto* memory = static_cast<float*>(workspace);
    device.pool.run(chunks.row_blocks * job.depth_blocks, [&](int64_t index, int32_t) {
      job.pack(index / job.depth_blocks * chunks.block_rows, index % job.depth_blocks, memory);
    });
    job.packed = memory;
  }
  device.reserve_workers<float>(job.scratch);
  if (chunks.row_blocks == 1) {
    device.pool.run_neighbours(job.columns, job);
  } else {
    device.pool.run(chunks.row_blocks * job.columns, [&](int64_t index, int32_t worker) {
      job.multiply(index, -1, job.packed, job.scratch_of(worker));
    });
  }
  return job.activation != nullptr;
}

}  // namespace duokv::cpu
#endif
