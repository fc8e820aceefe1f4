// Products of F16 weights on NEON with half-precision arithmetic. See half_products.h.
//
// Built with the flags of neon_dotprod, which have fp16; run only where the processor has it too (half_kernels.cpp).
#include "../half_products.h"

#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "neon_half.h"

namespace tokenmill {
namespace {

constexpr int64_t kSummed = 128;  // columns that are summed as halves
// Of the sizes of so many weights: inputs are below 64, so their products sum to less than 2^15, half of what a half holds.
constexpr float kLargestSum = 512;

bool fits(const uint16_t* weights, int64_t cols) {
  for (int64_t begin = 0; begin < cols; begin += kSummed) {
    float32x4_t sums[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int64_t k = begin; k < std::min(begin + kSummed, cols); k += 8) {
      const float16x8_t sizes = vabsq_f16(load_halves(weights + k));
      sums[0] = vaddq_f32(sums[0], vcvt_f32_f16(vget_low_f16(sizes)));
      sums[1] = vaddq_f32(sums[1], vcvt_high_f32_f16(sizes));
    }
    if (!(vaddvq_f32(vaddq_f32(sums[0], sums[1])) < kLargestSum)) return false;
  }
  return true;
}

void convert_row(const float* x, int64_t cols, uint16_t* out) {
  float32x4_t largest[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
  for (int64_t k = 0; k < cols; k += 8)
    for (int u = 0; u < 2; ++u) largest[u] = vmaxq_f32(largest[u], vabsq_f32(vld1q_f32(x + k + 4 * u)));
  const float peak = vmaxvq_f32(vmaxq_f32(largest[0], largest[1]));
  // Zeros and what is no number stay as they are; the power of the smallest would not be a float.
  int exponent = 6;
  if (peak > 0 && std::isfinite(peak)) std::frexp(peak, &exponent);
  exponent = std::max(exponent, -100);
  const float raise = std::ldexp(1.0f, 6 - exponent), lower = std::ldexp(1.0f, exponent - 6);
  for (int64_t k = 0; k < cols; k += 8) {
    const float16x4_t low = vcvt_f16_f32(vmulq_n_f32(vld1q_f32(x + k), raise));
    vst1q_u16(out + k, vreinterpretq_u16_f16(vcvt_high_f16_f32(low, vmulq_n_f32(vld1q_f32(x + k + 4), raise))));
  }
  std::memcpy(out + cols, &lower, sizeof lower);
}

// sums[t][r] += products of eight columns. Indices are constants: the compiler would keep sums in memory for a loop.
template <bool First, int t, int T>
__attribute__((always_inline)) inline void add_token(float16x8_t (&sums)[T][kHalfRows],
                                                     const float16x8_t (&weights)[kHalfRows], const uint16_t* x,
                                                     int64_t stride) {
  const float16x8_t token = load_halves(x + t * stride);
  multiply_add<First>(sums[t][0], weights[0], token);
  multiply_add<First>(sums[t][1], weights[1], token);
  multiply_add<First>(sums[t][2], weights[2], token);
  multiply_add<First>(sums[t][3], weights[3], token);
  if constexpr (t + 1 < T) add_token<First, t + 1>(sums, weights, x, stride);
}

template <bool First, int T>
__attribute__((always_inline)) inline void add_eight(float16x8_t (&sums)[T][kHalfRows], const uint16_t* w,
                                                     const uint16_t* x, int64_t stride) {
  const float16x8_t weights[kHalfRows] = {load_halves(w), load_halves(w + 8), load_halves(w + 16), load_halves(w + 24)};
  add_token<First, 0>(sums, weights, x, stride);
}

// Lanes of four rows by pairs, until each row has two numbers.
__attribute__((always_inline)) inline float16x8_t twos(const float16x8_t (&sums)[kHalfRows]) {
  return vpaddq_f16(vpaddq_f16(sums[0], sums[1]), vpaddq_f16(sums[2], sums[3]));
}

template <int t, int T>
__attribute__((always_inline)) inline void add_up(const float16x8_t (&sums)[T][kHalfRows], float32x4_t (&totals)[T]) {
  constexpr int other = t + 1 < T ? t + 1 : t;
  const float16x8_t both = vpaddq_f16(twos(sums[t]), twos(sums[other]));
  totals[t] = vaddq_f32(totals[t], vcvt_f32_f16(vget_low_f16(both)));
  if constexpr (other != t) totals[other] = vaddq_f32(totals[other], vcvt_high_f32_f16(both));
  if constexpr (t + 2 < T) add_up<t + 2>(sums, totals);
}

// A panel with T rows of activations; the first `rows` of its four are stored.
template <int T>
void block(const uint16_t* w, int64_t rows, const uint16_t* x, int64_t cols, const float* bias, float* y, int64_t ldy) {
  const int64_t stride = half_row_stride(cols);
  float32x4_t totals[T];
  for (int t = 0; t < T; ++t) totals[t] = vdupq_n_f32(0);
  for (int64_t k = 0; k < cols;) {
    const int64_t end = std::min(k + kSummed, cols);
    float16x8_t sums[T][kHalfRows];
    add_eight<true>(sums, w + k * kHalfRows, x + k, stride);
#pragma GCC unroll 1  // of more steps the loads come first, and sums go to memory
    for (k += 8; k < end; k += 8) add_eight<false>(sums, w + k * kHalfRows, x + k, stride);
    add_up<0>(sums, totals);
  }
  for (int t = 0; t < T; ++t) {
    float lower, four[kHalfRows];
    std::memcpy(&lower, x + t * stride + cols, sizeof lower);
    vst1q_f32(four, vmulq_n_f32(totals[t], lower));
    for (int64_t r = 0; r < rows; ++r) y[t * ldy + r] = four[r] + (bias ? bias[r] : 0.0f);
  }
}

void multiply(const uint16_t* w, int64_t rows, const uint16_t* x, int tokens, int64_t cols, const float* bias, float* y,
              int64_t ldy) {
  const int64_t stride = half_row_stride(cols);
  for (int64_t r = 0; r < rows; r += kHalfRows) {
    const auto* panel = w + r * cols;
    const int64_t valid = std::min<int64_t>(kHalfRows, rows - r);
    const float* add = bias ? bias + r : nullptr;
    int t = 0;
    for (; t + 4 <= tokens; t += 4) block<4>(panel, valid, x + t * stride, cols, add, y + t * ldy + r, ldy);
    const uint16_t* rest = x + t * stride;
    float* to = y + t * ldy + r;
    switch (tokens - t) {
      case 3: block<3>(panel, valid, rest, cols, add, to, ldy); break;
      case 2: block<2>(panel, valid, rest, cols, add, to, ldy); break;
      case 1: block<1>(panel, valid, rest, cols, add, to, ldy); break;
    }
  }
}

}  // namespace

const HalfProducts& neon_half_products() {
  static const HalfProducts products = {fits, convert_row, multiply};
  return products;
}

}  // namespace tokenmill
