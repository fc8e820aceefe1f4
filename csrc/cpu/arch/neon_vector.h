// The vector type of the NEON kernels with dot product: one register is 4 columns x 4 k.
//
// Included by neon_dotprod_kernels.cpp and, with a wider product on top, neon_i8mm_kernels.cpp (each with its own
// flags).
#pragma once

#include <arm_neon.h>

#include "../linear_panel.h"
#include "neon_block.h"
#include "neon_expand.h"
#include "panel_kernels.h"

namespace tokenmill {
namespace {

struct Neon {
  using Bytes = int8x16_t;
  using Ints = int32x4_t;
  using Floats = float32x4_t;
  using Table = int8x16_t;
  using X = int8x16_t;
  static constexpr int kLanes = 4, kDirectRegs = 2, kWideRegs = 2, kQuads = 1, kSignedBias = 0;
  static constexpr int kQuadRun = 4, kDotOperations = 32;
  // Asking for some lines only makes the hardware prefetcher of a Neoverse-N1 lose the stream: worse than asking for none.
  static constexpr bool kBlocks = true, kByteFactors = true, kAskForLines = true;

  static TM_INLINE Bytes load(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
  static TM_INLINE Table load_table(const int8_t* p) { return vld1q_s8(p); }
  static TM_INLINE Bytes lookup(Table table, Bytes b) { return vqtbl1q_s8(table, vreinterpretq_u8_s8(b)); }
  static TM_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }

  template <int Shift, int Mask>
  static TM_INLINE Bytes field(Bytes b) {
    uint8x16_t u = vreinterpretq_u8_s8(b);
    if constexpr (Shift > 0) u = vshrq_n_u8(u, Shift);
    if constexpr (Mask << Shift < 128) u = vandq_u8(u, vdupq_n_u8(Mask));
    return vreinterpretq_s8_u8(u);
  }
  template <int Shift, int Mask>
  static TM_INLINE Bytes insert(Bytes low, Bytes b) {
    uint8x16_t u = vreinterpretq_u8_s8(b);
    if constexpr (Shift > 0) u = vshlq_n_u8(u, Shift);
    if constexpr (Shift < 0) u = vshrq_n_u8(u, -Shift);
    return vbslq_s8(vdupq_n_u8(Mask), vreinterpretq_s8_u8(u), low);
  }

  static TM_INLINE X load_x(const int8_t* p) { return vld1q_s8(p); }
  template <int Lane>
  static TM_INLINE Ints dot_signed(Ints acc, Bytes w, X x) {
    return vdotq_laneq_s32(acc, w, x, Lane);
  }
  template <int Lane>
  static TM_INLINE Ints dot_unsigned(Ints acc, Bytes w, X x) {
    return vdotq_laneq_s32(acc, w, x, Lane);
  }
  template <int Lane>
  static TM_INLINE Ints dot_stored(Ints acc, Bytes w, X x) {
    return vdotq_laneq_s32(acc, w, x, Lane);
  }

  static TM_INLINE Ints splat_i(int32_t v) { return vdupq_n_s32(v); }
  static TM_INLINE Ints add_scaled_i(Ints acc, Ints a, Ints b) { return vmlaq_s32(acc, a, b); }
  static TM_INLINE Ints load_i8(const uint8_t* p) {
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)))));  // reads 8 bytes
  }
  static TM_INLINE Ints load_u8(const uint8_t* p) {
    // A table lookup widens in one step: indices past the table give zero. Reads 16 bytes.
    const uint8x16_t index = {0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255, 255};
    return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(p), index));
  }
  static TM_INLINE Ints load_byte_of(const uint8_t* p, int byte) {
    const uint32x4_t words = vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(p)), vdupq_n_s32(-8 * byte));
    return vreinterpretq_s32_u32(vandq_u32(words, vdupq_n_u32(255)));
  }

  // A sum below 2^22 that starts from the bits of 1.5 * 2^23 is a float already, but for that number, which a
  // multiply-add takes out: a conversion would take one pipe twice.
  static constexpr int32_t kFloatBase = 0x4B400000;
  static constexpr float kFloatBaseValue = kWhole;
  static TM_INLINE Floats based_to_float(Ints v) { return vsubq_f32(as_float(v), vdupq_n_f32(kFloatBaseValue)); }
  static TM_INLINE Floats as_float(Ints v) { return vreinterpretq_f32_s32(v); }
  template <int kBlock, bool kMin, int kStep, int kGroup>
  static TM_INLINE void multiply_blocks(const int8_t* w, const int8_t* x, const float* scales, const uint8_t* row_scales,
                                        const uint8_t* row_sums, int64_t groups, const uint8_t* next, float* sums) {
    tokenmill::multiply_blocks<kBlock, kMin, kStep, kGroup>(w, x, scales, row_scales, row_sums, groups, next, kBases,
                                                            sums);
  }
  alignas(16) static constexpr int32_t kBases[4] = {kFloatBase, kFloatBase, kFloatBase, kFloatBase};
  // Loads that stay loads: the compiler's copies of one register each take a vector slot, where loads have their own.
  static TM_INLINE Ints float_base() {
    return vreinterpretq_s32_f32(load_anew(reinterpret_cast<const float*>(kBases)));
  }
  static TM_INLINE Floats load_anew(const float* p) { return anew(*reinterpret_cast<const Floats*>(p)); }
  static TM_INLINE Floats fma_lane(Floats a, Floats four, int lane, Floats c) {
    switch (lane) {
      case 0: asm("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(c) : "w"(a), "w"(four)); break;
      case 1: asm("fmla %0.4s, %1.4s, %2.s[1]" : "+w"(c) : "w"(a), "w"(four)); break;
      case 2: asm("fmla %0.4s, %1.4s, %2.s[2]" : "+w"(c) : "w"(a), "w"(four)); break;
      default: asm("fmla %0.4s, %1.4s, %2.s[3]" : "+w"(c) : "w"(a), "w"(four)); break;
    }
    return c;
  }
  static TM_INLINE Floats to_float(Ints v) { return vcvtq_f32_s32(v); }
  static TM_INLINE Floats splat(float v) { return vdupq_n_f32(v); }
  static TM_INLINE Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
  static TM_INLINE Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static TM_INLINE Floats load_half(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
  static TM_INLINE Floats load_bfloat(const uint8_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
  }
  static TM_INLINE Floats load_f(const float* p) { return vld1q_f32(p); }
  static TM_INLINE void store_f(float* p, Floats v) { vst1q_f32(p, v); }

  static TM_INLINE Floats max_abs(Floats a, Floats b) { return vmaxq_f32(a, vabsq_f32(b)); }
  static TM_INLINE Floats div(Floats a, Floats b) { return vdivq_f32(a, b); }

  template <class V, class T>
  static ExpandFn by_bytes() {
    return expand_by_bytes<V, T>;
  }

  struct Fixed {
    uint16x8_t low, high;  // columns 0 and 1, 2 and 3
  };
  static TM_INLINE Fixed fixed(Floats v) {
    const int8x16_t words = vreinterpretq_s8_s32(vcvtnq_s32_f32(v));
    const uint8x16_t first = {0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5};
    const uint8x16_t second = vaddq_u8(first, vdupq_n_u8(8));
    return {vreinterpretq_u16_s8(vqtbl1q_s8(words, first)), vreinterpretq_u16_s8(vqtbl1q_s8(words, second))};
  }
  static TM_INLINE Bytes requantize(Bytes code, Fixed a, Fixed b) {
    // Unsigned, because the product alone may wrap around; the sum with b is in range again.
    const uint16x8_t low = vmulq_u16(vreinterpretq_u16_s16(vmovl_s8(vget_low_s8(code))), a.low);
    const uint16x8_t high = vmulq_u16(vreinterpretq_u16_s16(vmovl_high_s8(code)), a.high);
    return vreinterpretq_s8_u8(vaddhn_high_u16(vaddhn_u16(low, b.low), high, b.high));
  }
  static TM_INLINE Bytes splat_bytes(int v) { return vdupq_n_s8(int8_t(v)); }
  static TM_INLINE Bytes sub_bytes(Bytes a, Bytes b) { return vsubq_s8(a, b); }
  static TM_INLINE void store_weights(int8_t* p, Bytes v) { vst1q_s8(p, v); }

  static TM_INLINE float peak(const float* x, int n) {
    float32x4_t m0 = vdupq_n_f32(0), m1 = m0, m2 = m0, m3 = m0;
    for (int i = 0; i < n; i += 16) {
      m0 = vmaxq_f32(m0, vabsq_f32(vld1q_f32(x + i)));
      m1 = vmaxq_f32(m1, vabsq_f32(vld1q_f32(x + i + 4)));
      m2 = vmaxq_f32(m2, vabsq_f32(vld1q_f32(x + i + 8)));
      m3 = vmaxq_f32(m3, vabsq_f32(vld1q_f32(x + i + 12)));
    }
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(m0, m1), vmaxq_f32(m2, m3)));
  }
  // error[i]: sum of squared distances of x * inverse[i] to whole numbers.
  static TM_INLINE void rounding_errors(const float* x, int n, const float* inverse, float* error) {
    // Adding and taking away 1.5 * 2^23 rounds; it runs on both pipes, where frintn has one.
    const float32x4_t magic = vdupq_n_f32(kWhole), four = vld1q_f32(inverse);
    float32x4_t e[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int i = 0; i < n; i += 4) {
      const float32x4_t v = vld1q_f32(x + i);
      const float32x4_t r0 = vsubq_f32(vfmaq_laneq_f32(magic, v, four, 0), magic);
      const float32x4_t r1 = vsubq_f32(vfmaq_laneq_f32(magic, v, four, 1), magic);
      const float32x4_t r2 = vsubq_f32(vfmaq_laneq_f32(magic, v, four, 2), magic);
      const float32x4_t r3 = vsubq_f32(vfmaq_laneq_f32(magic, v, four, 3), magic);
      const float32x4_t d0 = vfmsq_laneq_f32(r0, v, four, 0), d1 = vfmsq_laneq_f32(r1, v, four, 1);
      const float32x4_t d2 = vfmsq_laneq_f32(r2, v, four, 2), d3 = vfmsq_laneq_f32(r3, v, four, 3);
      e[0] = vfmaq_f32(e[0], d0, d0);
      e[1] = vfmaq_f32(e[1], d1, d1);
      e[2] = vfmaq_f32(e[2], d2, d2);
      e[3] = vfmaq_f32(e[3], d3, d3);
    }
    vst1q_f32(error, vpaddq_f32(vpaddq_f32(e[0], e[1]), vpaddq_f32(e[2], e[3])));
  }
  static TM_INLINE int32_t quantize16(const float* x, float inverse, int8_t* out) {
    const int32x4_t q0 = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x), inverse));
    const int32x4_t q1 = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4), inverse));
    const int32x4_t q2 = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 8), inverse));
    const int32x4_t q3 = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 12), inverse));
    const int16x8_t low = vmovn_high_s32(vmovn_s32(q0), q1), high = vmovn_high_s32(vmovn_s32(q2), q3);
    vst1q_s8(out, vmovn_high_s16(vmovn_s16(low), high));
    return vaddvq_s32(vaddq_s32(vaddq_s32(q0, q1), vaddq_s32(q2, q3)));
  }
};

// Measured on a Neoverse-N1: from here on, unpacking once for all rows beats group scales in the product.
int expand_from(const PanelLayout& layout) {
  if (layout.superblock) return layout.bits != 4 ? 9 : layout.has_lut ? 20 : 12;
  return layout.bits == 8 ? 9 : 8;
}

}  // namespace
}  // namespace tokenmill
