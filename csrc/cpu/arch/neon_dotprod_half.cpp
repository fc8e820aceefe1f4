// Attention's inner products on NEON with half-precision arithmetic. See half_kernels.h.
//
// Built with the flags of neon_dotprod, which have fp16; run only where the processor has it too (half_kernels.cpp).
#include "../half_kernels.h"

#include <arm_neon.h>

#include "neon_half.h"

namespace tokenmill {
namespace {

template <bool First, int R>
__attribute__((always_inline)) inline void add_products(float16x8_t (&sum)[R][4], const uint16_t* q, int64_t dim,
                                                        const uint16_t* const (&from)[4], int64_t d) {
  float16x8_t keys[4];
  for (int j = 0; j < 4; ++j) keys[j] = load_halves(from[j] + d);
  for (int r = 0; r < R; ++r) {
    const float16x8_t query = load_halves(q + r * dim + d);
    for (int j = 0; j < 4; ++j) multiply_add<First>(sum[r][j], query, keys[j]);
  }
}

// Lanes of the sums of four keys -> their scores in the lower half: neighbours first, then pairs, then fours.
inline float16x8_t pairs_of(const float16x8_t (&sum)[4]) {
  return vpaddq_f16(vpaddq_f16(sum[0], sum[1]), vpaddq_f16(sum[2], sum[3]));
}

constexpr int kLine = 32;  // halves that memory brings at once

// ahead: null for all but the first rows.
template <int R>
void scores_rows(const uint16_t* q, const uint16_t* const* k, int keys, int64_t dim, uint16_t* out, int64_t ldo,
                 uint8_t* bad, const uint16_t* const* ahead) {
  float16x8_t least[2] = {vdupq_n_f16(0), vdupq_n_f16(0)};
  for (int j = 0; j < keys; j += 4) {
    const uint16_t* const from[4] = {k[j], k[j + 1], k[j + 2], k[j + 3]};
    for (int64_t d = 0; ahead != nullptr && d < dim; d += kLine)
      for (int i = 0; i < 4; ++i) __builtin_prefetch(ahead[j + i] + d);
    float16x8_t sum[R][4];
    add_products<true>(sum, q, dim, from, 0);
    for (int64_t d = 8; d < dim; d += 8) add_products<false>(sum, q, dim, from, d);
    for (int pair = 0; pair < (R + 1) / 2; ++pair) {
      const int r = 2 * pair, other = r + 1 < R ? r + 1 : r;
      const float16x8_t both = vpaddq_f16(pairs_of(sum[r]), pairs_of(sum[other]));
      least[pair] = vminq_f16(least[pair], both);
      const uint16x8_t bits = vreinterpretq_u16_f16(both);
      vst1_u16(out + r * ldo + j, vget_low_u16(bits));
      if (other != r) vst1_u16(out + other * ldo + j, vget_high_u16(bits));
    }
  }
  for (int r = 0; r < R; ++r) {
    const float16x4_t own = r & 1 ? vget_high_f16(least[r / 2]) : vget_low_f16(least[r / 2]);
    if (!(vminv_f16(own) >= static_cast<float16_t>(-65504.0f))) bad[r] = 1;
  }
}

void scores(const uint16_t* q, int rows, const uint16_t* const* k, int keys, int64_t dim, uint16_t* out, int64_t ldo,
            uint8_t* bad, const uint16_t* const* ahead) {
  for (; rows >= 4; rows -= 4, q += 4 * dim, out += 4 * ldo, bad += 4, ahead = nullptr)
    scores_rows<4>(q, k, keys, dim, out, ldo, bad, ahead);
  switch (rows) {
    case 3: return scores_rows<3>(q, k, keys, dim, out, ldo, bad, ahead);
    case 2: return scores_rows<2>(q, k, keys, dim, out, ldo, bad, ahead);
    case 1: return scores_rows<1>(q, k, keys, dim, out, ldo, bad, ahead);
  }
}

float maximum(const uint16_t* scores) {
  float16x8_t top[4];
  for (int u = 0; u < 4; ++u) top[u] = vmaxq_f16(load_halves(scores + 8 * u), load_halves(scores + 32 + 8 * u));
  return static_cast<float>(vmaxvq_f16(vmaxq_f16(vmaxq_f16(top[0], top[1]), vmaxq_f16(top[2], top[3]))));
}

// A constant for the multiply-add that overwrites it, read from memory each time: see Constant in simd.h.
struct alignas(16) Halves {
  uint16_t lanes[8];
  constexpr Halves(uint16_t x) : lanes{x, x, x, x, x, x, x, x} {}
  float16x8_t anew() const {
    float16x8_t v;
    asm volatile("ldr %q0, %1" : "=w"(v) : "m"(lanes));
    return v;
  }
};
// 1.5 * 2^10 rounds to a whole number, as kWhole in simd.h. 10 more: results are 2^10 of what they should be until the
// last step, so that those below the least normal number are rounded as such.
constexpr float kRaised = 1536 + 10;
constexpr Halves kRoundRaised(0x660a), kOne(0x3c00), kSquare(0x3808);  // 1546, 1, 0.50391: near 1/2, for the cube cut off

// x[u] = e^x[u] of -16 < x <= 0, about 2^-11 relative; 0 below.
template <int N>
__attribute__((always_inline)) inline void exp_below(float16x8_t (&x)[N]) {
  float16x8_t shifted[N], p[N];
  uint16x8_t kept[N];
  for (int u = 0; u < N; ++u) kept[u] = vcgtq_f16(x[u], vdupq_n_f16(-16));
  for (int u = 0; u < N; ++u) shifted[u] = vfmaq_f16(kRoundRaised.anew(), x[u], vdupq_n_f16(1.4427f));
  for (int u = 0; u < N; ++u) p[u] = vsubq_f16(shifted[u], vdupq_n_f16(kRaised));
  for (int u = 0; u < N; ++u) x[u] = vfmsq_f16(x[u], p[u], vdupq_n_f16(0.69335938f));
  for (int u = 0; u < N; ++u) x[u] = vfmaq_f16(x[u], p[u], vdupq_n_f16(2.1219e-4f));
  for (int u = 0; u < N; ++u) p[u] = vfmaq_f16(kSquare.anew(), x[u], vdupq_n_f16(0.1646f));
  for (int u = 0; u < N; ++u) p[u] = vfmaq_f16(kOne.anew(), p[u], x[u]);
  for (int u = 0; u < N; ++u) p[u] = vfmaq_f16(kOne.anew(), p[u], x[u]);
  for (int u = 0; u < N; ++u) {
    const uint16x8_t power = vshlq_n_u16(vreinterpretq_u16_f16(shifted[u]), 10);
    const float16x8_t raised = vreinterpretq_f16_u16(vaddq_u16(vreinterpretq_u16_f16(p[u]), power));
    const float16x8_t value = vmulq_f16(raised, vdupq_n_f16(0x1p-10f));
    x[u] = vreinterpretq_f16_u16(vandq_u16(vreinterpretq_u16_f16(value), kept[u]));
  }
}

float exponentials(uint16_t* values, float max) {
  const float16x8_t top = vdupq_n_f16(static_cast<float16_t>(max));
  float16x8_t sum[2];
  for (int half = 0; half < 2; ++half) {
    float16x8_t e[4];
    for (int u = 0; u < 4; ++u) e[u] = vsubq_f16(load_halves(values + 32 * half + 8 * u), top);
    exp_below(e);
    for (int u = 0; u < 4; ++u) vst1q_u16(values + 32 * half + 8 * u, vreinterpretq_u16_f16(e[u]));
    sum[half] = vaddq_f16(vaddq_f16(e[0], e[1]), vaddq_f16(e[2], e[3]));
  }
  const float16x8_t both = vaddq_f16(sum[0], sum[1]);
  return vaddvq_f32(vaddq_f32(vcvt_f32_f16(vget_low_f16(both)), vcvt_high_f32_f16(both)));
}

// sum[r][c][Lane & 1] += (lane `Lane` of weights[r]) * values[c]: even and odd keys have sums of their own.
template <int Lane, int R, int V>
__attribute__((always_inline)) inline void add_value(float16x8_t (&sum)[R][V][2], const float16x8_t (&weights)[R],
                                                     const uint16_t* value) {
  float16x8_t values[V];
  for (int c = 0; c < V; ++c) values[c] = load_halves(value + 8 * c);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < V; ++c)
      asm("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(sum[r][c][Lane & 1]) : "w"(values[c]), "x"(weights[r]), "i"(Lane));
}

// Of R rows, their numbers [d, d + 8 V).
template <int R, int V>
void accumulate_block(const uint16_t* weights, int64_t ldw, const uint16_t* const* v, int keys, int64_t d, float* out,
                      int64_t ldo, const uint16_t* const* ahead) {
  float16x8_t sum[R][V][2];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < V; ++c) sum[r][c][0] = sum[r][c][1] = vdupq_n_f16(0);
  for (int j = 0; j < keys; j += 8) {
    for (int i = 0; ahead != nullptr && d % kLine == 0 && i < 8; ++i) __builtin_prefetch(ahead[j + i] + d);
    float16x8_t eight[R];
    for (int r = 0; r < R; ++r) eight[r] = load_halves(weights + r * ldw + j);
    add_value<0>(sum, eight, v[j] + d);
    add_value<1>(sum, eight, v[j + 1] + d);
    add_value<2>(sum, eight, v[j + 2] + d);
    add_value<3>(sum, eight, v[j + 3] + d);
    add_value<4>(sum, eight, v[j + 4] + d);
    add_value<5>(sum, eight, v[j + 5] + d);
    add_value<6>(sum, eight, v[j + 6] + d);
    add_value<7>(sum, eight, v[j + 7] + d);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < V; ++c) {
      float* to = out + r * ldo + d + 8 * c;
      const float16x8_t both = vaddq_f16(sum[r][c][0], sum[r][c][1]);
      vst1q_f32(to, vaddq_f32(vld1q_f32(to), vcvt_f32_f16(vget_low_f16(both))));
      vst1q_f32(to + 4, vaddq_f32(vld1q_f32(to + 4), vcvt_high_f32_f16(both)));
    }
  }
}

template <int R>
void accumulate_rows(const uint16_t* weights, int64_t ldw, const uint16_t* const* v, int keys, int64_t dim, float* out,
                     int64_t ldo, const uint16_t* const* ahead) {
  constexpr int V = R == 3 ? 2 : 4;
  int64_t d = 0;
  for (; d + 8 * V <= dim; d += 8 * V) accumulate_block<R, V>(weights, ldw, v, keys, d, out, ldo, ahead);
  for (; d < dim; d += 8) accumulate_block<R, 1>(weights, ldw, v, keys, d, out, ldo, ahead);
}

void accumulate(const uint16_t* weights, int64_t ldw, int rows, const uint16_t* const* v, int keys, int64_t dim,
                float* out, int64_t ldo, const uint16_t* const* ahead) {
  if (rows == 3) return accumulate_rows<3>(weights, ldw, v, keys, dim, out, ldo, ahead);
  for (; rows >= 2; rows -= 2, weights += 2 * ldw, out += 2 * ldo, ahead = nullptr)
    accumulate_rows<2>(weights, ldw, v, keys, dim, out, ldo, ahead);
  if (rows > 0) accumulate_rows<1>(weights, ldw, v, keys, dim, out, ldo, ahead);
}

}  // namespace

const HalfKernels& neon_half_kernels() {
  static const HalfKernels kernels = {scores, maximum, exponentials, accumulate};
  return kernels;
}

}  // namespace tokenmill
