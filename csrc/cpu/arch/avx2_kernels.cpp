// AVX2 with FMA and F16C: the vector type (8 columns x 4 k) and the table of panel kernels.
//
// Built with -mavx2 -mfma -mf16c; chosen by linear_dispatch.cpp where the CPU says so. Unsigned codes go through
// maddubs as they are (6 bits times 7 bits cannot saturate); signed weights pass their sign to the activations first.
#include <immintrin.h>

#include "panel_kernels.h"

namespace tokenmill {
namespace {

struct Avx2 {
  using Bytes = __m256i;
  using Ints = __m256i;
  using Floats = __m256;
  using Table = __m256i;
  using X = const int8_t*;
  static constexpr int kLanes = 8, kDirectRegs = 1, kWideRegs = 2, kQuads = 1, kSignedBias = 0;
  static constexpr int kQuadRun = 4, kDotOperations = 64;

  static TM_INLINE Bytes load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static TM_INLINE __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static TM_INLINE __m128i load8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  static TM_INLINE Table load_table(const int8_t* p) { return _mm256_broadcastsi128_si256(load16(p)); }
  static TM_INLINE Bytes lookup(Table table, Bytes b) { return _mm256_shuffle_epi8(table, b); }
  static TM_INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

  template <int Shift, int Mask>
  static TM_INLINE Bytes field(Bytes b) {
    return _mm256_and_si256(_mm256_srli_epi16(b, Shift), _mm256_set1_epi8(Mask));
  }
  template <int Shift, int Mask>
  static TM_INLINE Bytes insert(Bytes low, Bytes b) {
    if constexpr (Shift > 0) b = _mm256_slli_epi16(b, Shift);
    if constexpr (Shift < 0) b = _mm256_srli_epi16(b, -Shift);
    return _mm256_or_si256(low, _mm256_and_si256(b, _mm256_set1_epi8(Mask)));
  }

  static TM_INLINE X load_x(const int8_t* p) { return p; }
  template <int Lane>
  static TM_INLINE __m256i four(X x) {
    int32_t word;
    __builtin_memcpy(&word, x + 4 * Lane, 4);
    return _mm256_set1_epi32(word);
  }
  static TM_INLINE Ints add_products(Ints acc, __m256i u, __m256i s) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
  }
  template <int Lane>
  static TM_INLINE Ints dot_unsigned(Ints acc, Bytes w, X x) {
    return add_products(acc, w, four<Lane>(x));
  }
  template <int Lane>
  static TM_INLINE Ints dot_signed(Ints acc, Bytes w, X x) {
    return add_products(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(four<Lane>(x), w));
  }
  template <int Lane>
  static TM_INLINE Ints dot_stored(Ints acc, Bytes w, X x) {
    return dot_signed<Lane>(acc, w, x);
  }

  static TM_INLINE Ints splat_i(int32_t v) { return _mm256_set1_epi32(v); }
  static TM_INLINE Ints add_scaled_i(Ints acc, Ints a, Ints b) {
    return _mm256_add_epi32(acc, _mm256_mullo_epi32(a, b));
  }
  static TM_INLINE Ints load_i8(const uint8_t* p) { return _mm256_cvtepi8_epi32(load8(p)); }
  static TM_INLINE Ints load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(load8(p)); }
  static TM_INLINE Ints load_byte_of(const uint8_t* p, int byte) {
    return _mm256_and_si256(_mm256_srl_epi32(load(p), _mm_cvtsi32_si128(8 * byte)), _mm256_set1_epi32(255));
  }

  static constexpr bool kBlocks = false, kByteFactors = false, kAskForLines = false;
  static constexpr int32_t kFloatBase = 0;  // converting is as cheap as anything here
  static TM_INLINE Floats based_to_float(Ints v) { return to_float(v); }
  static TM_INLINE Floats to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
  static TM_INLINE Floats splat(float v) { return _mm256_set1_ps(v); }
  static TM_INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static TM_INLINE Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static TM_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static TM_INLINE Floats absolute(Floats v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
  static TM_INLINE Floats max_abs(Floats a, Floats b) { return _mm256_max_ps(a, absolute(b)); }
  static TM_INLINE Floats load_half(const uint8_t* p) { return _mm256_cvtph_ps(load16(p)); }
  static TM_INLINE Floats load_bfloat(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
  }
  static TM_INLINE Floats load_f(const float* p) { return _mm256_loadu_ps(p); }
  static TM_INLINE void store_f(float* p, Floats v) { _mm256_storeu_ps(p, v); }

  struct Fixed {
    __m256i low, high;  // columns 0 to 3, 4 to 7
  };
  static TM_INLINE Fixed fixed(Floats v) {
    const __m256i words = _mm256_cvtps_epi32(v);
    const __m256i twice =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13));
    const __m256i low = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    const __m256i high = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
    return {_mm256_shuffle_epi8(low, twice), _mm256_shuffle_epi8(high, twice)};
  }
  static TM_INLINE __m256i scale16(__m128i code, __m256i a, __m256i b) {
    return _mm256_srai_epi16(_mm256_add_epi16(_mm256_mullo_epi16(_mm256_cvtepi8_epi16(code), a), b), 8);
  }
  static TM_INLINE Bytes requantize(Bytes code, Fixed a, Fixed b) {
    const __m256i low = scale16(_mm256_castsi256_si128(code), a.low, b.low);
    const __m256i high = scale16(_mm256_extracti128_si256(code, 1), a.high, b.high);
    return _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
  }
  static TM_INLINE Bytes splat_bytes(int v) { return _mm256_set1_epi8(char(v)); }
  static TM_INLINE Bytes sub_bytes(Bytes a, Bytes b) { return _mm256_sub_epi8(a, b); }
  static TM_INLINE void store_weights(int8_t* p, Bytes v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }

  static TM_INLINE float peak(const float* x, int n) {
    Floats m0 = splat(0), m1 = m0;
    for (int i = 0; i < n; i += 16) {
      m0 = max_abs(m0, load_f(x + i));
      m1 = max_abs(m1, load_f(x + i + 8));
    }
    m0 = _mm256_max_ps(m0, m1);
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(m0), _mm256_extractf128_ps(m0, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  static TM_INLINE float rounding_error(const float* x, int n, float inverse) {
    Floats error = splat(0);
    for (int i = 0; i < n; i += 8) {
      const Floats a = mul(load_f(x + i), splat(inverse));
      const Floats d = _mm256_sub_ps(a, _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      error = fma(d, d, error);
    }
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(error), _mm256_extractf128_ps(error, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  }
  static TM_INLINE void rounding_errors(const float* x, int n, const float* inverse, float* error) {
    for (int i = 0; i < 4; ++i) error[i] = rounding_error(x, n, inverse[i]);
  }
  static TM_INLINE int32_t quantize16(const float* x, float inverse, int8_t* out) {
    const __m256i a = _mm256_cvtps_epi32(mul(load_f(x), splat(inverse)));
    const __m256i b = _mm256_cvtps_epi32(mul(load_f(x + 8), splat(inverse)));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(low, high));
    __m128i sum = _mm_madd_epi16(_mm_add_epi16(low, high), _mm_set1_epi16(1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
  }
};

int expand_from(const PanelLayout&) { return 9; }

}  // namespace

const PanelKernels* avx2_kernels() {
  static const PanelKernels kernels = make_kernels<Avx2>("avx2", expand_from);
  return &kernels;
}

}  // namespace tokenmill
