// Codes of KV rows to floats, compiled once per instruction set. See kv_rows.h for who calls them and for the formats.
//
// Included by float_kernels_impl.h only; all in an unnamed namespace, see simd.h. Loops are written for the compiler to
// vectorize; only the table lookup needs instructions of its own.
#pragma once

#include "simd.h"

namespace tokenmill {
namespace {

void int8_row_to_float(const int8_t* in, float factor, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i]) * factor;
}

// Exponent and mantissa move to their places in a float; below 8 they are a subnormal, an eighth of 2^-6 each.
void e4m3_row_to_float(const uint8_t* in, float factor, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = in[i] & 0x7f;
    const uint32_t bits = magnitude == 0x7f ? 0x7fc00000 : (magnitude << 20) + (120u << 23);
    float normal;
    std::memcpy(&normal, &bits, 4);
    const float value = magnitude < 8 ? static_cast<float>(static_cast<int32_t>(magnitude)) * 0.001953125f : normal;
    out[i] = (in[i] & 0x80 ? -value : value) * factor;
  }
}

void e5m2_row_to_float(const uint8_t* in, float factor, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = in[i] & 0x7f;
    const uint32_t bits = magnitude > 0x7c ? 0x7fc00000 : (magnitude << 21) + (112u << 23);
    float normal;
    std::memcpy(&normal, &bits, 4);
    const float value = magnitude < 4 ? static_cast<float>(static_cast<int32_t>(magnitude)) * 1.52587890625e-5f : normal;
    out[i] = (in[i] & 0x80 ? -value : value) * factor;
  }
}

void codes_row_to_float(const uint8_t* codes, float factor, float offset, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<int32_t>(codes[i])) * factor + offset;
}

// As codes_row_to_float, with separate factors and offsets for even and odd indices.
void paired_row_to_float(const uint8_t* codes, const float* factors, const float* offsets, float* out, int64_t n) {
  constexpr int kLanes = 16;
  float by[kLanes], from[kLanes];
  for (int j = 0; j < kLanes; ++j) by[j] = factors[j & 1], from[j] = offsets[j & 1];
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j)
      out[i + j] = static_cast<float>(static_cast<int32_t>(codes[i + j])) * by[j] + from[j];
  for (; i < n; ++i) out[i] = static_cast<float>(static_cast<int32_t>(codes[i])) * by[i & 1] + from[i & 1];
}

// out[i] = table[codes[i]] * factor, with a table of 16.
void look_up_row(const uint8_t* codes, const float* table, float factor, float* out, int64_t n) {
  int64_t i = 0;
#if defined(__aarch64__)
  const uint8x16x4_t planes = vld4q_u8(reinterpret_cast<const uint8_t*>(table));  // byte b of all entries in plane b
  for (; i + 16 <= n; i += 16) {
    const uint8x16_t code = vld1q_u8(codes + i);
    const uint8x16_t p0 = vqtbl1q_u8(planes.val[0], code), p1 = vqtbl1q_u8(planes.val[1], code);
    const uint8x16_t p2 = vqtbl1q_u8(planes.val[2], code), p3 = vqtbl1q_u8(planes.val[3], code);
    const uint16x8_t low[2] = {vreinterpretq_u16_u8(vzip1q_u8(p0, p1)), vreinterpretq_u16_u8(vzip2q_u8(p0, p1))};
    const uint16x8_t high[2] = {vreinterpretq_u16_u8(vzip1q_u8(p2, p3)), vreinterpretq_u16_u8(vzip2q_u8(p2, p3))};
    for (int half = 0; half < 2; ++half) {
      const float32x4_t first = vreinterpretq_f32_u16(vzip1q_u16(low[half], high[half]));
      const float32x4_t second = vreinterpretq_f32_u16(vzip2q_u16(low[half], high[half]));
      vst1q_f32(out + i + 8 * half, vmulq_n_f32(first, factor));
      vst1q_f32(out + i + 8 * half + 4, vmulq_n_f32(second, factor));
    }
  }
#elif defined(__AVX512F__)
  const __m512 entries = _mm512_mul_ps(_mm512_loadu_ps(table), _mm512_set1_ps(factor));
  for (; i + 16 <= n; i += 16) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
    _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(code, entries));
  }
#elif defined(__AVX2__)
  const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8), by = _mm256_set1_ps(factor);
  for (; i + 8 <= n; i += 8) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m256 from_low = _mm256_permutevar8x32_ps(low, code), from_high = _mm256_permutevar8x32_ps(high, code);
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // bit 3 of the code becomes the sign
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_blendv_ps(from_low, from_high, upper), by));
  }
#endif
  for (; i < n; ++i) out[i] = table[codes[i]] * factor;
}

}  // namespace
}  // namespace tokenmill
