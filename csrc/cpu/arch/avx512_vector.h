// The vector type of the AVX-512 VNNI kernels: one register is 16 columns x 4 k, a whole V_j of a panel.
//
// dpbusd multiplies unsigned by signed bytes: codes are unsigned already; signed weights are shifted by 128, which the
// block sums of the activations take out again (kSignedBias). Included by avx512_vnni_kernels.cpp and amx_kernels.cpp.
#pragma once

// gcc 12 warns of its own _mm512_undefined_*.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "panel_kernels.h"

namespace tokenmill {
namespace {

struct Avx512 {
  using Bytes = __m512i;
  using Ints = __m512i;
  using Floats = __m512;
  using Table = __m512i;
  using X = const int8_t*;
  static constexpr int kLanes = 16, kDirectRegs = 1, kWideRegs = 1, kQuads = 3, kSignedBias = 128;
  static constexpr int kQuadRun = 4, kDotOperations = 128;

  static TM_INLINE __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static TM_INLINE __m256i load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static TM_INLINE Bytes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static TM_INLINE Table load_table(const int8_t* p) { return _mm512_broadcast_i32x4(load16(p)); }
  static TM_INLINE Bytes lookup(Table table, Bytes b) { return _mm512_shuffle_epi8(table, b); }
  static TM_INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

  template <int Shift, int Mask>
  static TM_INLINE Bytes field(Bytes b) {
    return _mm512_and_si512(_mm512_srli_epi16(b, Shift), _mm512_set1_epi8(Mask));
  }
  template <int Shift, int Mask>
  static TM_INLINE Bytes insert(Bytes low, Bytes b) {
    if constexpr (Shift > 0) b = _mm512_slli_epi16(b, Shift);
    if constexpr (Shift < 0) b = _mm512_srli_epi16(b, -Shift);
    return _mm512_ternarylogic_epi32(low, b, _mm512_set1_epi8(Mask), 0xf8);  // low | (b & mask)
  }

  static TM_INLINE X load_x(const int8_t* p) { return p; }
  template <int Lane>
  static TM_INLINE __m512i four(X x) {
    int32_t word;
    __builtin_memcpy(&word, x + 4 * Lane, 4);
    return _mm512_set1_epi32(word);
  }
  static TM_INLINE Bytes shifted(Bytes w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
  template <int Lane>
  static TM_INLINE Ints dot_unsigned(Ints acc, Bytes w, X x) {
    return _mm512_dpbusd_epi32(acc, w, four<Lane>(x));
  }
  template <int Lane>
  static TM_INLINE Ints dot_signed(Ints acc, Bytes w, X x) {
    return _mm512_dpbusd_epi32(acc, shifted(w), four<Lane>(x));
  }
  template <int Lane>
  static TM_INLINE Ints dot_stored(Ints acc, Bytes w, X x) {
    return _mm512_dpbusd_epi32(acc, w, four<Lane>(x));
  }

  static TM_INLINE Ints splat_i(int32_t v) { return _mm512_set1_epi32(v); }
  static TM_INLINE Ints add_scaled_i(Ints acc, Ints a, Ints b) {
    return _mm512_add_epi32(acc, _mm512_mullo_epi32(a, b));
  }
  static TM_INLINE Ints load_i8(const uint8_t* p) { return _mm512_cvtepi8_epi32(load16(p)); }
  static TM_INLINE Ints load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(load16(p)); }
  static TM_INLINE Ints load_byte_of(const uint8_t* p, int byte) {
    return _mm512_and_si512(_mm512_srl_epi32(load(p), _mm_cvtsi32_si128(8 * byte)), _mm512_set1_epi32(255));
  }

  static constexpr bool kBlocks = false, kByteFactors = false, kAskForLines = false;
  static constexpr int32_t kFloatBase = 0;  // converting is as cheap as anything here
  static TM_INLINE Floats based_to_float(Ints v) { return to_float(v); }
  static TM_INLINE Floats to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
  static TM_INLINE Floats splat(float v) { return _mm512_set1_ps(v); }
  static TM_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static TM_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static TM_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static TM_INLINE Floats max_abs(Floats a, Floats b) { return _mm512_max_ps(a, _mm512_abs_ps(b)); }
  static TM_INLINE Floats load_half(const uint8_t* p) { return _mm512_cvtph_ps(load32(p)); }
  static TM_INLINE Floats load_bfloat(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load32(p)), 16));
  }
  static TM_INLINE Floats load_f(const float* p) { return _mm512_loadu_ps(p); }
  static TM_INLINE void store_f(float* p, Floats v) { _mm512_storeu_ps(p, v); }

  struct Fixed {
    __m512i low, high;  // columns 0 to 7, 8 to 15
  };
  static TM_INLINE Fixed fixed(Floats v) {
    const __m512i words = _mm512_cvtps_epi32(v);
    const __m512i twice = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13));
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    return {_mm512_shuffle_epi8(_mm512_permutexvar_epi32(first, words), twice),
            _mm512_shuffle_epi8(_mm512_permutexvar_epi32(second, words), twice)};
  }
  static TM_INLINE __m256i scale16(__m256i code, __m512i a, __m512i b) {
    const __m512i wide = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_cvtepi8_epi16(code), a), b);
    return _mm512_cvtepi16_epi8(_mm512_srai_epi16(wide, 8));
  }
  static TM_INLINE Bytes requantize(Bytes code, Fixed a, Fixed b) {
    const __m256i low = scale16(_mm512_castsi512_si256(code), a.low, b.low);
    const __m256i high = scale16(_mm512_extracti64x4_epi64(code, 1), a.high, b.high);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  static TM_INLINE Bytes splat_bytes(int v) { return _mm512_set1_epi8(char(v)); }
  static TM_INLINE Bytes sub_bytes(Bytes a, Bytes b) { return _mm512_sub_epi8(a, b); }
  static TM_INLINE void store_weights(int8_t* p, Bytes v) { _mm512_storeu_si512(p, shifted(v)); }

  static TM_INLINE float peak(const float* x, int n) {
    Floats m0 = splat(0), m1 = m0;
    for (int i = 0; i < n; i += 32) {
      m0 = max_abs(m0, load_f(x + i));
      m1 = max_abs(m1, load_f(x + i + 16));
    }
    return _mm512_reduce_max_ps(_mm512_max_ps(m0, m1));
  }
  static TM_INLINE float rounding_error(const float* x, int n, float inverse) {
    Floats error = splat(0);
    for (int i = 0; i < n; i += 16) {
      const Floats a = mul(load_f(x + i), splat(inverse));
      const Floats d = _mm512_sub_ps(a, _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      error = fma(d, d, error);
    }
    return _mm512_reduce_add_ps(error);
  }
  static TM_INLINE void rounding_errors(const float* x, int n, const float* inverse, float* error) {
    for (int i = 0; i < 4; ++i) error[i] = rounding_error(x, n, inverse[i]);
  }
  static TM_INLINE int32_t quantize16(const float* x, float inverse, int8_t* out) {
    const __m512i words = _mm512_cvtps_epi32(mul(load_f(x), splat(inverse)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(words));
    return _mm512_reduce_add_epi32(words);
  }
};

[[maybe_unused]] int expand_from(const PanelLayout&) { return 13; }

}  // namespace
}  // namespace tokenmill
