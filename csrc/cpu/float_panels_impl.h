// The products of float_panels.h, compiled once per instruction set, each of which exports one table.
//
// All in an unnamed namespace: the linker must never merge the copies. TOKENMILL_PANEL_LANES: tests run the blocks of a
// wider instruction set than the machine has.
#pragma once

#include <cstdint>
#include <cstring>

#include "float_panels.h"
#include "linear_panel.h"
#if defined(__x86_64__)
// gcc 12 warns of its own _mm512_undefined_*.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

namespace tokenmill {
namespace {

#if defined(TOKENMILL_PANEL_LANES)
constexpr int kPanelLanes = TOKENMILL_PANEL_LANES;
#elif defined(__AVX512F__)
constexpr int kPanelLanes = 16;
#elif defined(__AVX2__)
constexpr int kPanelLanes = 8;
#else
constexpr int kPanelLanes = 4;
#endif
constexpr int kColumns = 2 * kPanelLanes;
// Rows of a pass: 16 sums in 32 registers, 12 in 16. Two products per cycle that take four each need 8 sums to be busy.
constexpr int kPassRows = kPanelLanes == 16 ? 8 : 6;

typedef float Wide __attribute__((vector_size(kPanelLanes * 4)));
typedef uint32_t WideBits __attribute__((vector_size(kPanelLanes * 4)));
typedef uint16_t Narrow __attribute__((vector_size(kPanelLanes * 2)));

// a * b + c in one rounding wherever the instruction set has it, by hand: see `fused` of simd.h.
TM_INLINE Wide wide_fused(Wide a, Wide b, Wide c) {
#if defined(__AVX512F__) && !defined(TOKENMILL_PANEL_LANES)
  return (Wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && !defined(TOKENMILL_PANEL_LANES)
  return (Wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// How a vector of stored weights becomes floats.
struct FromFloat {
  using Storage = float;
  static TM_INLINE Wide load(const float* p) {
    Wide v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
};
struct FromBfloat {
  using Storage = uint16_t;
  static TM_INLINE Wide load(const uint16_t* p) {
    Narrow v;
    std::memcpy(&v, p, sizeof(v));
    return (Wide)(__builtin_convertvector(v, WideBits) << 16);
  }
};
struct FromHalf {
  using Storage = uint16_t;
  static TM_INLINE Wide load(const uint16_t* p) {
#if defined(__AVX512F__) && !defined(TOKENMILL_PANEL_LANES)
    return (Wide)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && !defined(TOKENMILL_PANEL_LANES)
    return (Wide)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    Narrow v;
    std::memcpy(&v, p, sizeof(v));
    const WideBits half = __builtin_convertvector(v, WideBits), magnitude = half & 0x7fff;
    // Shifted into place and rescaled by 2^112, which also normalises subnormals; infinities keep their exponent.
    const WideBits finite = (WideBits)((Wide)(magnitude << 13) * 5.192296858534828e33f);
    const WideBits other = 0x7f800000u | magnitude << 13;
    const WideBits above = (WideBits)(magnitude >= 0x7c00);
    return (Wide)((half & 0x8000) << 16 | (above & other) | (~above & finite));
#endif
  }
};

// Two vectors of sums to their row. Out of line, so that its branches do not touch the registers of a pass.
__attribute__((noinline)) void store_sums(const float* sums, const float* bias, int count, float* y) {
  for (int i = 0; i < count; ++i) y[i] = bias ? sums[i] + bias[i] : sums[i];
}

template <class From, int R>
void pass(const PanelProduct& product, int first) {
  const auto* panel = static_cast<const typename From::Storage*>(product.panel);
  const int64_t ldx = product.ldx, cols = product.cols;
  const float* x = product.x + first * ldx;
  Wide sums[R][2] = {};
  for (int64_t k = 0; k < cols; ++k, panel += kColumns) {
    const Wide one = From::load(panel), two = From::load(panel + kPanelLanes);
    for (int t = 0; t < R; ++t) {
      const Wide value = x[t * ldx + k] - Wide{};  // the number in every lane
      sums[t][0] = wide_fused(one, value, sums[t][0]);
      sums[t][1] = wide_fused(two, value, sums[t][1]);
    }
  }
  for (int t = 0; t < R; ++t) {
    float* y = product.y + (first + t) * product.ldy;
    if (product.count == kColumns && !product.bias) {
      std::memcpy(y, &sums[t][0], sizeof(Wide));
      std::memcpy(y + kPanelLanes, &sums[t][1], sizeof(Wide));
      continue;
    }
    float out[kColumns];
    std::memcpy(out, &sums[t][0], sizeof(Wide));
    std::memcpy(out + kPanelLanes, &sums[t][1], sizeof(Wide));
    store_sums(out, product.bias, product.count, y);
  }
}

// The last rows, fewer than `R + 1`.
template <class From, int R>
void pass_rest(const PanelProduct& product, int first) {
  if constexpr (R > 0) {
    if (product.m - first == R) return pass<From, R>(product, first);
    pass_rest<From, R - 1>(product, first);
  }
}

template <class From>
void multiply_panel(const PanelProduct& product) {
  int t = 0;
  for (; t + kPassRows <= product.m; t += kPassRows) pass<From, kPassRows>(product, t);
  pass_rest<From, kPassRows - 1>(product, t);
}

constexpr FloatPanels kFloatPanels = {kColumns, multiply_panel<FromFloat>, multiply_panel<FromHalf>,
                                      multiply_panel<FromBfloat>};

}  // namespace
}  // namespace tokenmill
