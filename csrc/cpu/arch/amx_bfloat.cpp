// Products of BF16 tiles by AMX. Called through linear_plain.cpp only, on CPUs that have it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 warns of its own intrinsics
#endif
#include <immintrin.h>

#include <limits>

#include "bfloat_tiles_impl.h"

namespace tokenmill {
namespace {

// As split_row, which does the rest: whole tiles of 32 values. Infinities and NaNs leave no rest.
void split_fast(const float* x, int64_t cols, uint16_t* out) {
  const auto widen = [](__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  };
  const auto rest = [](__m512 value, __m512 kept) {
    const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
    const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(kept), infinity, _CMP_LT_OQ);
    return _mm512_maskz_sub_ps(finite, value, kept);
  };
  int64_t k = 0;
  for (; k + kTileDepth <= cols; k += kTileDepth, out += kTileValues) {
    const __m512 low = _mm512_loadu_ps(x + k), high = _mm512_loadu_ps(x + k + 16);
    const __m512i term = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    const __m512 low_rest = rest(low, widen(_mm512_castsi512_si256(term)));
    const __m512 high_rest = rest(high, widen(_mm512_extracti64x4_epi64(term, 1)));
    _mm512_storeu_si512(out, term);
    _mm512_storeu_si512(out + kTileDepth, (__m512i)_mm512_cvtne2ps_pbh(high_rest, low_rest));
  }
  if (k < cols) split_row(x + k, cols - k, out);
}

}  // namespace

const BfloatTiles& amx_bfloat_tiles() {
  static const BfloatTiles tiles = {"amx", split_fast, multiply_bfloat_tiles};
  return tiles;
}

}  // namespace tokenmill
