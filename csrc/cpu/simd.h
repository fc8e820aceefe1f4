// A float vector as wide as the flags of the including file allow, through the compilers' vector extension.
//
// Everything is in an unnamed namespace on purpose: the same header is compiled for several instruction sets, and the
// linker must never merge their copies. Included only by float_kernels_impl.h and recurrent_impl.h. Half precision goes
// through intrinsics or integer arithmetic, never through __fp16 loops.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tokenmill {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__aarch64__) || defined(__AVX512F__)
constexpr int kRowBlock = 4;  // 32 vector registers: 4 x 4 accumulators
#else
constexpr int kRowBlock = 2;
#endif

typedef float vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t ivec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t uvec __attribute__((vector_size(kLanes * 4)));
typedef float vec_unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline vec load(const float* p) { return *reinterpret_cast<const vec_unaligned*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<vec_unaligned*>(p) = v; }
inline vec splat(float x) { return x - vec{}; }  // x - 0 keeps the sign of zero
inline vec load_first(const float* p, int n) {
  vec v{};
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}
inline void store_first(float* p, vec v, int n) { std::memcpy(p, &v, n * sizeof(float)); }

// a * b + c in one rounding wherever the instruction set has it. By hand where bits must not depend on the number of rows:
// compilers fuse or not by their model of the processor, and differently in two copies of one loop.
inline vec fused(vec a, vec b, vec c) {
#if defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
inline float fused(float a, float b, float c) {
#if defined(__aarch64__) || defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline vec max(vec a, vec b) {
#if defined(__aarch64__)
  return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a > b ? a : b;
#endif
}

inline float lane_sum(vec v) {
#if defined(__aarch64__)
  return vaddvq_f32((float32x4_t)v);
#else
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof(v));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

inline float lane_max(vec v) {
#if defined(__aarch64__)
  return vmaxvq_f32((float32x4_t)v);
#else
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof(v));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i + width] > lanes[i] ? lanes[i + width] : lanes[i];
  return lanes[0];
#endif
}

// out[i] = sum of lanes of v[i], i < 4.
inline void lane_sum4(const vec* v, float* out) {
#if defined(__aarch64__)
  const float32x4_t low = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
  const float32x4_t high = vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]);
  vst1q_f32(out, vpaddq_f32(low, high));
#elif defined(__x86_64__)
  __m128 quarter[4];
  for (int i = 0; i < 4; ++i) {
    __m128 part[kLanes / 4];
    std::memcpy(part, &v[i], sizeof(v[i]));
    for (int width = kLanes / 8; width > 0; width /= 2)
      for (int j = 0; j < width; ++j) part[j] = _mm_add_ps(part[j], part[j + width]);
    quarter[i] = part[0];
  }
  _MM_TRANSPOSE4_PS(quarter[0], quarter[1], quarter[2], quarter[3]);
  // In the order of lane_sum: a sum has the same bits whichever of the two computes it.
  _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(quarter[0], quarter[2]), _mm_add_ps(quarter[1], quarter[3])));
#else
  for (int i = 0; i < 4; ++i) out[i] = lane_sum(v[i]);
#endif
}

// e^x, about 1e-7 relative. Below -87.3 (the least normal number) it is exactly 0; above 88.3 it saturates near 2e38.
inline vec exp_vec(vec x) {
  const vec low = splat(-87.3f);
  const vec high = splat(88.3f);
  const ivec zeroed = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  // Adding 1.5 * 2^23 rounds to the nearest whole number and leaves it in the low mantissa bits.
  const vec shifted = x * 1.44269504088896341f + 12582912.0f;
  const vec n = shifted - 12582912.0f;
  const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const ivec bits = ((ivec)p + ((ivec)shifted << 23)) & ~zeroed;
  return (vec)bits;
}

// A constant for the multiply-add that overwrites it. On NEON it is read from memory each time: a copy of a register would
// take the pipe of a product, a read has its own.
struct alignas(16) Constant {
  float lanes[4];
  constexpr Constant(float x) : lanes{x, x, x, x} {}
  vec anew() const {
#if defined(__aarch64__)
    vec v;
    asm volatile("ldr %q0, %1" : "=w"(v) : "m"(lanes));
    return v;
#else
    return splat(lanes[0]);
#endif
  }
};
constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: added, it rounds to a whole number in the low mantissa bits
constexpr Constant kRound(kWhole), kExp[5] = {1.0f, 9.9999970198e-1f, 4.9999147654e-1f, 1.6667653620e-1f,
                                              4.1898161173e-2f};

// x[u] = e^x[u] of x <= 0, about 2e-7 relative and exactly 1 at 0; exactly 0 below -87.3. Two thirds of the operations of
// exp_vec, and several vectors side by side, so that they need not wait for their own results.
template <int N>
__attribute__((always_inline)) inline void exp_below(vec (&x)[N]) {
  vec shifted[N], p[N];
  ivec zeroed[N];  // what is computed for these is thrown away, and may overflow
  for (int u = 0; u < N; ++u) zeroed[u] = x[u] < splat(-87.3f);
  for (int u = 0; u < N; ++u) shifted[u] = kRound.anew() + x[u] * 1.44269504088896341f;
  for (int u = 0; u < N; ++u) p[u] = shifted[u] - kWhole;
  for (int u = 0; u < N; ++u) x[u] = (x[u] - p[u] * 0.693359375f) + p[u] * 2.12194440e-4f;
  for (int u = 0; u < N; ++u) p[u] = kExp[4].anew() + x[u] * 8.2892635837e-3f;
  for (int i = 3; i >= 0; --i)
    for (int u = 0; u < N; ++u) p[u] = kExp[i].anew() + p[u] * x[u];
  for (int u = 0; u < N; ++u) x[u] = (vec)(((uvec)p[u] + ((uvec)shifted[u] << 23)) & ~(uvec)zeroed[u]);
}

inline vec tanh_vec(vec x) {
  const vec z = x * x;
  vec p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const vec near_zero = p * z * x + x;
  const vec far = 1.0f - 2.0f / (exp_vec(x + x) + 1.0f);
  return z < 0.390625f ? near_zero : far;  // |x| < 0.625
}

#if !defined(__aarch64__) && !defined(__F16C__)
inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  uint32_t bits;
  float value;
  if (magnitude >= 0x7c00) {
    bits = 0x7f800000 | ((magnitude & 0x3ff) << 13);
    std::memcpy(&value, &bits, 4);
  } else {  // shifted into place, then rescaled by 2^112: this also normalises subnormals
    bits = magnitude << 13;
    std::memcpy(&value, &bits, 4);
    value *= 5.192296858534828e33f;
    std::memcpy(&bits, &value, 4);
  }
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds past 65504
  if (bits < 0x38800000) {  // subnormal half: let float addition round it at 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  bits += 0xc8000fff + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | (bits >> 13));
}
#endif

inline void half_row_to_float(const uint16_t* in, float* out, int64_t n) {
  int64_t i = 0;
#if defined(__aarch64__)
  for (; i + 8 <= n; i += 8) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(in + i));
    vst1q_f32(out + i, vcvt_f32_f16(vget_low_f16(h)));
    vst1q_f32(out + i + 4, vcvt_high_f32_f16(h));
  }
  for (; i < n; ++i) {
    const float16x4_t h = vreinterpret_f16_u16(vdup_n_u16(in[i]));
    out[i] = vgetq_lane_f32(vcvt_f32_f16(h), 0);
  }
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  for (; i < n; ++i) out[i] = _cvtsh_ss(in[i]);
#else
  for (; i < n; ++i) out[i] = half_to_float(in[i]);
#endif
}

inline void float_row_to_half(const float* in, uint16_t* out, int64_t n) {
  int64_t i = 0;
#if defined(__aarch64__)
  for (; i + 4 <= n; i += 4) vst1_u16(out + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(in + i))));
  for (; i < n; ++i) out[i] = vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(in[i]))), 0);
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), 0));
  for (; i < n; ++i) out[i] = _cvtss_sh(in[i], 0);
#else
  for (; i < n; ++i) out[i] = float_to_half(in[i]);
#endif
}

inline void bfloat_row_to_float(const uint16_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(in[i]) << 16;
    std::memcpy(out + i, &bits, 4);
  }
}

inline void float_row_to_bfloat(const float* in, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, in + i, 4);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    out[i] = static_cast<uint16_t>(is_nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

}  // namespace
}  // namespace tokenmill
