// AMX tiles (Sapphire Rapids and later): the table of panel kernels.
//
// Everything but the expanded product is AVX-512 VNNI. There, a tile of up to 16 rows of activations (kRowRun: the rows
// lie at one pitch) meets a tile of weights, whose rows are the vectors of a panel as they are, 16 columns x 4 k; the
// 16 x 16 sums of a block go through memory to AVX-512 registers, where they are scaled and added up in float in the
// same order as by the other kernels. Built with -mamx-tile -mamx-int8; chosen by linear_dispatch.cpp where the CPU has
// tiles and the system grants them.
#include "amx_tiles.h"
#include "avx512_vector.h"

namespace tokenmill {

const PanelTiles& amx_panel_tiles();

namespace {

struct Amx : Avx512 {
  static constexpr int kQuadRun = kRowRun;
  // Tiles multiply signed bytes: no shift by 128.
  static TM_INLINE void store_weights(int8_t* p, Bytes v) { _mm512_storeu_si512(p, v); }
};

constexpr int kTileRows = 16;

// Sums 0 and 1, so that a block need not wait for the one before; rows 2 and 3, weights 4 and 5; rows 6 and weights 7
// of a last 32 k where blocks are longer.
constexpr TileShapes product_shapes(int rows, int block) {
  const int k = block == 32 ? 32 : 64;
  const int row_bytes[8] = {64, 64, k, k, 64, 64, 32, 64};
  const int tile_rows[8] = {rows, rows, rows, rows, k / 4, k / 4, rows, 8};
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.row_bytes[i] = uint16_t(row_bytes[i]);
    shapes.rows[i] = uint8_t(tile_rows[i]);
  }
  return shapes;
}
template <int R, int B>
constexpr TileShapes kProductShapes = product_shapes(R, B);

// sums[rows][16] of a block of B; Set is 0 and 1 in turn.
template <int B, int Set>
TM_INLINE void sum_block(const int8_t* x, int64_t pitch, const int8_t* w, int32_t* sums) {
  zero_tile<Set>();
  if constexpr (B == 32) {
    load_tile<2 + Set>(x, pitch);
    load_tile<4 + Set>(w, 64);
    dot_tiles<Set, 2 + Set, 4 + Set>();
  } else {
    static_assert(B == 128, "two products of 64 k");
    load_tile<2>(x, pitch);
    load_tile<4>(w, 64);
    dot_tiles<Set, 2, 4>();
    load_tile<3>(x + 64, pitch);
    load_tile<5>(w + 64 * kPanelCols, 64);
    dot_tiles<Set, 3, 5>();
  }
  store_tile<Set>(sums, 64);
}

// The same of a last block of 32, 64 or 96 where others have 128.
TM_INLINE void sum_rest(const int8_t* x, int64_t pitch, const int8_t* w, int64_t length, int32_t* sums) {
  zero_tile<0>();
  if (length >= 64) {
    load_tile<2>(x, pitch);
    load_tile<4>(w, 64);
    dot_tiles<0, 2, 4>();
  }
  if (length % 64) {
    load_tile<6>(x + length - 32, pitch);
    load_tile<7>(w + (length - 32) * kPanelCols, 64);
    dot_tiles<0, 6, 7>();
  }
  store_tile<0>(sums, 64);
}

// What multiply_rows reads: rows of activations and where the numbers of a block lie in them.
struct TileRows {
  const uint8_t* first;  // the codes, from the first of a panel's chunk on
  const uint8_t* scale;  // of that chunk's first block; the next block's follows
  int64_t pitch;         // bytes from row to row
  int64_t to_scaled_sum;
};

// y[R] += sums[R][16] x the scales of a block.
template <int R, bool kMin>
TM_INLINE void add_scaled(const int32_t* sums, const float* scales, TileRows rows, __m512 (&y)[R]) {
  const __m512 w_scale = _mm512_loadu_ps(scales), w_min = _mm512_loadu_ps(scales + kPanelCols);
  unroll<R>([&](auto row) {
    constexpr int t = row.value;
    const __m512 total = _mm512_cvtepi32_ps(_mm512_load_si512(sums + t * kPanelCols));
    const float scale = *reinterpret_cast<const float*>(rows.scale);
    if constexpr (kMin) {
      const float scaled_sum = *reinterpret_cast<const float*>(rows.scale + rows.to_scaled_sum);
      y[t] = _mm512_fmadd_ps(w_min, _mm512_set1_ps(scaled_sum), y[t]);
    }
    y[t] = _mm512_fmadd_ps(total, _mm512_mul_ps(w_scale, _mm512_set1_ps(scale)), y[t]);
    rows.scale += rows.pitch;
  });
}

// R rows x 16 columns x `length` k, added to `sums` unless these are the first.
template <int R, int B, bool kMin>
TM_INLINE void multiply_rows(const int8_t* w8, const float* scales, int64_t length, TileRows rows, bool first,
                             float* sums) {
  constexpr int kWeights = B * kPanelCols, kScales = kBlockScales;  // of a block
  alignas(64) int32_t block_sums[2][R * kPanelCols];
  const int8_t* x = reinterpret_cast<const int8_t*>(rows.first);
  __m512 y[R];
  unroll<R>([&](auto t) { y[t.value] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + t.value * kPanelCols); });
  for (; length >= 2 * B; length -= 2 * B, x += 2 * B, w8 += 2 * kWeights, scales += 2 * kScales) {
    sum_block<B, 0>(x, rows.pitch, w8, block_sums[0]);
    sum_block<B, 1>(x + B, rows.pitch, w8 + kWeights, block_sums[1]);
    add_scaled<R, kMin>(block_sums[0], scales, rows, y);
    rows.scale += 4;
    add_scaled<R, kMin>(block_sums[1], scales + kScales, rows, y);
    rows.scale += 4;
  }
  for (; length > 0; length -= B, x += B, w8 += kWeights, scales += kScales, rows.scale += 4) {
    if (length >= B) {
      sum_block<B, 0>(x, rows.pitch, w8, block_sums[0]);
    } else {
      sum_rest(x, rows.pitch, w8, length, block_sums[0]);
    }
    add_scaled<R, kMin>(block_sums[0], scales, rows, y);
  }
  unroll<R>([&](auto t) { _mm512_storeu_ps(sums + t.value * kPanelCols, y[t.value]); });
}

template <int R, int B, bool kMin>
void multiply_last(const int8_t* w8, const float* scales, int64_t length, TileRows rows, bool first, float* sums) {
  configure_tiles(kProductShapes<R, B>);
  multiply_rows<R, B, kMin>(w8, scales, length, rows, first, sums);
}

template <int B, bool kMin>
void multiply_tiles(const int8_t* w8, const float* scales, int64_t begin, int64_t end, const uint8_t* quads,
                    int64_t cols, int num_quads, NextBytes, float* sums) {
  const QuadForm form{cols, B, kRowRun};
  TileRows rows{quads + begin, quads + form.scale(begin / B, 0), form.pitch(),
                form.scaled_sum(0, 0) - form.scale(0, 0)};
  int left = num_quads * 4;
  if (left >= kTileRows) configure_tiles(kProductShapes<kTileRows, B>);
  for (; left >= kTileRows; left -= kTileRows, sums += kTileRows * kPanelCols) {
    multiply_rows<kTileRows, B, kMin>(w8, scales, end - begin, rows, begin == 0, sums);
    rows.first += kTileRows * rows.pitch;
    rows.scale += kTileRows * rows.pitch;
  }
  if (left == 4) multiply_last<4, B, kMin>(w8, scales, end - begin, rows, begin == 0, sums);
  if (left == 8) multiply_last<8, B, kMin>(w8, scales, end - begin, rows, begin == 0, sums);
  if (left == 12) multiply_last<12, B, kMin>(w8, scales, end - begin, rows, begin == 0, sums);
  release_tiles();
}

MultiplyFn choose_tiles(const PanelLayout& layout) {
  if (requantizes(layout)) return multiply_tiles<kQuantBlock, false>;
  return layout.has_min ? multiply_tiles<32, true> : multiply_tiles<32, false>;
}

// Full tiles, four sums in turn to hide the latency: the ceiling that benchmarks quote.
int64_t spin_tiles(int64_t rounds) {
  configure_tiles(kProductShapes<kTileRows, kQuantBlock>);
  unroll<6>([](auto tile) { zero_tile<tile.value>(); });
  rounds = rounds / 16 + 1;  // one is as much work as many products of registers
  for (int64_t round = 0; round < rounds; ++round) unroll<4>([](auto tile) { dot_tiles<tile.value, 4, 5>(); });
  release_tiles();
  return rounds * 4 * kTileRows * kPanelCols * 64 * 2;
}

}  // namespace

const PanelKernels* amx_kernels() {
  static const PanelKernels kernels = [] {
    PanelKernels all = make_kernels<Amx>("amx", expand_from, choose_tiles, spin_tiles);
    all.tiles = &amx_panel_tiles();
    return all;
  }();
  return &kernels;
}

}  // namespace tokenmill
