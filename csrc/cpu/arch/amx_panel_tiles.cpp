// Integer panels as tiles of bfloat16, and the products of those, by AMX. See panel_tiles.h.
//
// Expanding works on one register of 16 columns x 4 k at a time: each byte becomes a float by being placed into the
// mantissa of 256.0, one multiply-add takes the 256 out again and applies scale and minimum, and pairs of k are rounded
// to bfloat16 side by side: as long for 512 weights as their tiles take for some 100 rows.
#include "../panel_tiles.h"
#include "amx_tiles.h"
#include "avx512_vector.h"

namespace tokenmill {
namespace {

// ---- weights

// w = code * scale + base of columns x 2 k as bfloat16, the two k of a column side by side.
TM_INLINE void store_pair(uint16_t* to, __m512i even, __m512i odd, __m512 scale, __m512 base) {
  const __m512 low = _mm512_fmadd_ps(_mm512_castsi512_ps(even), scale, base);
  const __m512 high = _mm512_fmadd_ps(_mm512_castsi512_ps(odd), scale, base);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, halves));
}

// 256 + the byte at bits 15 to 22.
TM_INLINE __m512i on_256(__m512i word) {
  return _mm512_ternarylogic_epi32(word, _mm512_set1_epi32(0x7f8000), _mm512_set1_epi32(0x43800000), 0xea);
}

template <class T>
void expand_tiles(const PanelLayout& layout, const uint8_t* panel, int64_t begin, int64_t end, uint16_t* out) {
  using V = Avx512;
  constexpr int kSubs = T::kFine ? 2 : 1;
  const V::Table table = V::load_table(layout.lut);
  const V::Floats less = V::splat(T::kSigned ? -384.0f : -256.0f);  // signed codes are shifted by 128
  for (int64_t k = begin; k < end; k += 32, out += kTileValues) {
    const int64_t index = k / 32;
    const uint8_t *head = nullptr, *codes = panel + index * layout.group_bytes;
    if constexpr (T::kSuper) {
      head = panel + index / 8 * (layout.head_bytes + 8 * layout.group_bytes);
      codes = head + layout.head_bytes + index % 8 * layout.group_bytes;
    }
    for (int line = 0; line < layout.group_bytes; line += 64) V::prefetch(codes + 4 * layout.group_bytes + line);
    V::Floats scale[kSubs], base[kSubs];
    for (int s = 0; s < kSubs; ++s) {
      GroupScales<V> group;
      load_group_scales<V, T>(layout, head, codes + layout.code_bytes, int(index % 8), s, group);
      scale[s] = group.scale[0];
      base[s] = V::fma(group.scale[0], less, group.minimum[0]);
    }
    unroll<8>([&](auto step) {
      // The two halves of a group alternate, so that a byte is loaded once for both its nibbles.
      constexpr int kStep = step.value % 2 * 4 + step.value / 2, kSub = kStep / 4 * (kSubs - 1);
      V::Bytes code = decode<V, T, kStep>(codes, 0, table);
      if constexpr (T::kSigned) code = V::shifted(code);
      uint16_t* to = out + kStep * 64;
      store_pair(to, on_256(_mm512_slli_epi32(code, 15)), on_256(_mm512_slli_epi32(code, 7)), scale[kSub], base[kSub]);
      store_pair(to + 32, on_256(_mm512_srli_epi32(code, 1)), on_256(_mm512_srli_epi32(code, 9)), scale[kSub],
                 base[kSub]);
    });
  }
}

template <class T>
struct PickTiles {
  static ExpandTilesFn get() { return expand_tiles<T>; }
};

ExpandTilesFn choose_tiles(const PanelLayout& layout) { return choose<PickTiles>(layout); }

// Weights with a scale for each 32 have the same bits for few rows as for one by the other products: batches of
// sequences that decode stay below this. Those that are requantized leave their tiles of int8 every 128 k only, which
// is as fast.
int tiles_from(const PanelLayout& layout) { return requantizes(layout) ? kNoTiles : 64; }

// ---- activations

void round_row(const float* x, int64_t cols, uint16_t* out) {
  for (int64_t k = 0; k < cols; k += 32, out += kTileValues)
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + k + 16), _mm512_loadu_ps(x + k)));
}

// ---- products

// Sums 0 to 3 (of rows a and panel b: 2 a + b), rows 4 and 5, weights 6 and 7.
TileShapes tile_shapes(int tokens) {
  const int first = tokens < kPanelTileRows ? tokens : kPanelTileRows;
  const int second = tokens > kPanelTileRows ? tokens - kPanelTileRows : 1;
  const int lines[8] = {first, first, second, second, first, second, 16, 16};
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.row_bytes[i] = 64;
    shapes.rows[i] = uint8_t(lines[i]);
  }
  return shapes;
}

constexpr int64_t kSumPitch = kTiledSums * int64_t(sizeof(float));

template <int Tile>
TM_INLINE void begin_sums(bool add, const float* sums) {
  if (add) {
    load_tile<Tile>(sums, kSumPitch);
  } else {
    zero_tile<Tile>();
  }
}

// A tiles of rows x B panels.
template <int A, int B>
void multiply_tiles(const PanelTileProduct& p, const uint16_t* rows, float* sums) {
  const uint16_t* weights = p.weights;
  float* below = sums + kPanelTileRows * kTiledSums;
  begin_sums<0>(p.add, sums);
  if constexpr (B == 2) begin_sums<1>(p.add, sums + kPanelCols);
  if constexpr (A == 2) begin_sums<2>(p.add, below);
  if constexpr (A == 2 && B == 2) begin_sums<3>(p.add, below + kPanelCols);
  for (int64_t k = 0; k < p.depth; ++k, rows += kTileValues, weights += kTileValues) {
    load_tile<6>(weights, 64);
    if constexpr (B == 2) load_tile<7>(weights + p.weight_pitch, 64);
    load_tile<4>(rows, 64);
    if constexpr (A == 2) load_tile<5>(rows + p.row_pitch, 64);
    dot_bfloat_tiles<0, 4, 6>();
    if constexpr (B == 2) dot_bfloat_tiles<1, 4, 7>();
    if constexpr (A == 2) dot_bfloat_tiles<2, 5, 6>();
    if constexpr (A == 2 && B == 2) dot_bfloat_tiles<3, 5, 7>();
  }
  store_tile<0>(sums, kSumPitch);
  if constexpr (B == 2) store_tile<1>(sums + kPanelCols, kSumPitch);
  if constexpr (A == 2) store_tile<2>(below, kSumPitch);
  if constexpr (A == 2 && B == 2) store_tile<3>(below + kPanelCols, kSumPitch);
}

void multiply(const PanelTileProduct& p) {
  const uint16_t* rows = p.rows;
  float* sums = p.sums;
  int configured = 0;
  for (int left = p.tokens; left > 0; left -= 2 * kPanelTileRows) {
    const int tokens = left < 2 * kPanelTileRows ? left : 2 * kPanelTileRows;
    if (tokens != configured) configure_tiles(tile_shapes(configured = tokens));
    const bool tall = tokens > kPanelTileRows, wide = p.panels == 2;
    if (tall && wide) multiply_tiles<2, 2>(p, rows, sums);
    if (tall && !wide) multiply_tiles<2, 1>(p, rows, sums);
    if (!tall && wide) multiply_tiles<1, 2>(p, rows, sums);
    if (!tall && !wide) multiply_tiles<1, 1>(p, rows, sums);
    rows += 2 * p.row_pitch;
    sums += 2 * kPanelTileRows * kTiledSums;
  }
  release_tiles();
}

}  // namespace

const PanelTiles& amx_panel_tiles() {
  static const PanelTiles tiles = {choose_tiles, tiles_from, round_row, multiply};
  return tiles;
}

}  // namespace tokenmill
