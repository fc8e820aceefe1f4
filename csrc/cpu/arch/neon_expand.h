// Superblocks of 4, 5 and 6 bits to int8, by products of bytes: what expand_requantized does, in two thirds of the time.
//
// Products of 16-bit numbers hold the one pipe that multiplies for two cycles a vector; products of bytes hold it for one and
// widen by themselves. So codes are taken at the top of their bytes, and the factor of a group has 8 bits. The middle of
// the code range is kept exactly, so the ends are off by a quarter of a unit at most, where rounding itself takes
// half of one. Included by neon_vector.h only.
#pragma once

#include <arm_neon.h>

#include "panel_kernels.h"

namespace tokenmill {
namespace {

// The planes of a group for 4 columns (see quant_panel.h). All are loaded before a result is stored, which the compiler could
// not do: it must suppose that results overwrite them.
template <class T>
struct Planes {
  static constexpr int kHigh = T::kBits - 4;
  uint8x16_t nibbles[4], high[kHigh > 0 ? kHigh : 1];

  TM_INLINE Planes(const uint8_t* group) {
    for (int j = 0; j < 4; ++j) nibbles[j] = vld1q_u8(group + j * 64);
    for (int j = 0; j < kHigh; ++j) high[j] = vld1q_u8(group + 256 + j * 64);
  }

  // Vector V_J, each code in the highest bits of its byte and zeros below.
  template <int J>
  TM_INLINE uint8x16_t codes() const {
    constexpr uint8_t kMask = uint8_t(0xFF << (8 - T::kBits)), kHighMask = uint8_t(0xFF << (8 - kHigh));
    if constexpr (T::kBits == 4) {
      return J < 4 ? vshlq_n_u8(nibbles[J % 4], 4) : vandq_u8(nibbles[J % 4], vdupq_n_u8(kMask));
    } else {
      constexpr int kUp = T::kBits == 6 ? 6 - J % 4 * 2 : 7 - J;
      uint8x16_t top = high[kHigh == 2 ? J / 4 : 0];
      if constexpr (kUp > 0) top = vshlq_n_u8(top, kUp);
      if constexpr (J < 4) return vbslq_u8(vdupq_n_u8(kHighMask), top, vshlq_n_u8(nibbles[J % 4], 8 - T::kBits));
      return vandq_u8(vsriq_n_u8(top, nibbles[J % 4], kHigh), vdupq_n_u8(kMask));
    }
  }
};

// A load each time: where a sum overwrites it, a copy of a register would take a vector slot, and loads have their own.
template <class R>
TM_INLINE R anew(const R& from) {
  R v;
  asm volatile("ldr %q0, %1" : "=w"(v) : "m"(from));
  return v;
}

// Adding this to a float rounds it, to a whole number in its low bits. Conversions would hold the multiplying pipe for two
// cycles each.
constexpr float kWhole = 12582912.0f;

// Bytes `kFirst`, + kStride, ... as floats, plus kWhole.
template <int kFirst, int kStride>
TM_INLINE float32x4_t whole_floats(uint8x16_t bytes, const float32x4_t& whole) {
  constexpr uint8_t kNone = 255, k0 = kFirst, k1 = k0 + kStride, k2 = k1 + kStride, k3 = k2 + kStride;
  const uint8x16_t index = {k0, kNone, kNone, kNone, k1, kNone, kNone, kNone,
                            k2, kNone, kNone, kNone, k3, kNone, kNone, kNone};
  return vreinterpretq_f32_u8(vqtbx1q_u8(vreinterpretq_u8_f32(anew(whole)), bytes, index));
}

// How the codes of 4 columns in a group (or half of one) become int8: (code * factor + start) >> 8.
struct ByteMap {
  uint8x16_t factor, flip;     // one byte for each code; flip: for a falling scale the codes count from the other end
  uint16x8_t start, start_up;  // of columns 0 and 1, 2 and 3
};

template <class T>
struct ByteRange {
  static constexpr float kCodes = 1 << T::kBits, kMiddle = (kCodes - 1) / 2, kStep = 1 << (8 - T::kBits);
  static constexpr float kTop = 127 * (kCodes - 1) / kCodes;  // the largest result, so that factors stay below 256
};

// `slope` is what a code is worth and `middle` the value of the middle of the codes plus a half, in 1/256 of the result.
template <class T>
TM_INLINE ByteMap byte_map(float32x4_t slope, float32x4_t middle, const float32x4_t& kept) {
  using Range = ByteRange<T>;
  ByteMap map;
  if constexpr (!T::kMin) {
    map.flip = vandq_u8(vreinterpretq_u8_u32(vcltzq_f32(slope)), vdupq_n_u8(uint8_t(0xFF << (8 - T::kBits))));
    slope = vabsq_f32(slope);
  }
  const float32x4_t whole = vfmaq_n_f32(anew(kept), slope, 1 / Range::kStep);
  const float32x4_t start =
      vfmsq_n_f32(middle, vsubq_f32(whole, vdupq_n_f32(kWhole)), Range::kMiddle * Range::kStep);
  const uint8x16_t words = vreinterpretq_u8_f32(vaddq_f32(start, vdupq_n_f32(kWhole)));
  const uint8x16_t each = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
  const uint8x16_t two = {0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5};
  map.factor = vqtbl1q_u8(vreinterpretq_u8_f32(whole), each);
  map.start = vreinterpretq_u16_u8(vqtbl1q_u8(words, two));
  map.start_up = vreinterpretq_u16_u8(vqtbl1q_u8(words, vaddq_u8(two, vdupq_n_u8(8))));
  return map;
}

// 128 k of a panel, from group `first` of a superblock on. Scales of the superblock must not be negative where there are
// minimums.
template <class V, class T>
TM_INLINE void expand_block(const uint8_t* head, size_t first, int64_t pitch, int8_t* w8, float* scales) {
  using Range = ByteRange<T>;
  constexpr int kSubs = T::kFine ? 2 : 1, kMaps = kQuantBlock / 32 * kSubs, kWide = V::kWideRegs * 16;
  constexpr int kCodeBytes = 64 * T::kBits, kGroupBytes = kCodeBytes + kSubs * 16;
  constexpr int kHeadBytes = T::kMin ? 64 + kSubs * 128 : 32;
  const uint8_t *codes = head + kHeadBytes + first * kGroupBytes, *minimums = head + 64 + first * kSubs * 16;
  const float32x4_t whole = vdupq_n_f32(kWhole), half = vdupq_n_f32(128);
  // Step by step for all columns at once: a chain of instructions that wait for each other leaves room for three more.
  float32x4_t scale[kMaps][4], least[kMaps][4], d[4], dmin[4], high[4], low[4];  // least: the value of code 0
  float32x4_t d_whole[4], dmin_whole[4];
  unroll<4>([&](auto i) {
    const float16_t* halves = reinterpret_cast<const float16_t*>(head) + i.value * 4;
    d[i.value] = vcvt_f32_f16(vld1_f16(halves));
    high[i.value] = low[i.value] = vdupq_n_f32(0);
    if constexpr (T::kMin) {
      dmin[i.value] = vcvt_f32_f16(vld1_f16(halves + 16));
      d_whole[i.value] = vmulq_n_f32(d[i.value], -kWhole), dmin_whole[i.value] = vmulq_n_f32(dmin[i.value], kWhole);
    }
  });
  unroll<kMaps>([&](auto n) {
    const uint8_t* p = codes + n.value / kSubs * kGroupBytes + kCodeBytes + n.value % kSubs * 16;
    uint8x16_t bytes = vld1q_u8(p);
    if constexpr (!T::kMin) bytes = veorq_u8(bytes, vdupq_n_u8(128));  // signed
    unroll<4>([&](auto i) {
      float32x4_t& one = scale[n.value][i.value];
      const float32x4_t units = whole_floats<i.value * 4, 1>(bytes, whole);
      if constexpr (T::kMin) {
        // Both products are exact: halves by bytes and by kWhole, which has two bits.
        one = vfmaq_f32(anew(d_whole[i.value]), units, d[i.value]);
        const uint8x16_t four = vld1q_u8(minimums + n.value / 4 * 64 + i.value * 16);
        const float32x4_t steps = whole_floats<n.value % 4, 4>(four, whole);
        const float32x4_t bottom = vfmsq_f32(anew(dmin_whole[i.value]), steps, dmin[i.value]);
        least[n.value][i.value] = bottom;
        low[i.value] = vminq_f32(low[i.value], bottom);
        high[i.value] = vmaxq_f32(high[i.value], vfmaq_n_f32(bottom, one, Range::kCodes - 1));
      } else {
        one = vmulq_f32(vsubq_f32(units, vdupq_n_f32(kWhole + 128)), d[i.value]);
        low[i.value] = vminq_f32(low[i.value], one);
        high[i.value] = vmaxq_f32(high[i.value], one);
      }
    });
  });
  float32x4_t inverse[4];
  unroll<4>([&](auto i) {
    // The floor keeps the inverse finite; a block that small is zero in the product anyway.
    float32x4_t peak = vmaxq_f32(vmaxq_f32(high[i.value], vnegq_f32(low[i.value])), vdupq_n_f32(1e-30f));
    if constexpr (!T::kMin) peak = vmulq_n_f32(peak, Range::kCodes / 2);
    store_scale<V>(scales + i.value * 4, vmulq_n_f32(peak, 1 / Range::kTop));
    inverse[i.value] = vdivq_f32(vdupq_n_f32(Range::kTop * 256), peak);
  });
  ByteMap maps[kMaps][4];
  unroll<kMaps>([&](auto n) {
    unroll<4>([&](auto i) {
      const float32x4_t slope = vmulq_f32(scale[n.value][i.value], inverse[i.value]);
      // Without minimums, code 0 is half of all codes below zero.
      constexpr float kCenter = Range::kMiddle - (T::kMin ? 0 : Range::kCodes / 2);
      float32x4_t middle = vfmaq_n_f32(anew(half), slope, kCenter);
      if constexpr (T::kMin) middle = vfmaq_f32(middle, least[n.value][i.value], inverse[i.value]);
      maps[n.value][i.value] = byte_map<T>(slope, middle, whole);
    });
  });
  for (int g = 0; g < kQuantBlock / 32; ++g, codes += kGroupBytes, w8 += 8 * kWide)
    unroll<4>([&](auto i) {
      // The product between two expansions leaves the hardware prefetcher no stream to follow.
      for (int line = i.value * 64; line < kGroupBytes; line += 256) V::prefetch(codes + 4 * kGroupBytes + line);
      constexpr int kAt = i.value * 16;
      const Planes<T> planes(codes + kAt);
      const ByteMap *map = &maps[g * kSubs][i.value], *last = &maps[g * kSubs + kSubs - 1][i.value];
      const uint8x16_t factors[2] = {map->factor, last->factor};
      store_expanded<V>(w8 + kAt / kWide * pitch, kAt % kWide, [&](auto step) {
        constexpr int kHalf = step.value / 4;
        const ByteMap& one = kHalf ? *last : *map;
        uint8x16_t code = planes.template codes<step.value>();
        if constexpr (!T::kMin) code = veorq_u8(code, one.flip);
        const uint16x8_t left = vmlal_u8(anew(one.start), vget_low_u8(code), vget_low_u8(factors[kHalf]));
        const uint16x8_t right = vmlal_high_u8(anew(one.start_up), code, factors[kHalf]);
        return vreinterpretq_s8_u8(vuzp2q_u8(vreinterpretq_u8_u16(left), vreinterpretq_u8_u16(right)));
      });
    });
}

template <class V, class T>
const int8_t* expand_by_bytes(const PanelLayout& layout, const uint8_t* panel, int64_t begin, int64_t end, int8_t* w8,
                              float* scales) {
  const int64_t super_bytes = layout.head_bytes + 8 * layout.group_bytes;
  if constexpr (T::kMin) {
    // No quantizer writes negative scales beside minimums, but a file may have them.
    uint16x8_t signs = vdupq_n_u16(0);
    for (int64_t k = begin; k < end; k += 256)
      for (int byte = 0; byte < 64; byte += 16)
        signs = vorrq_u16(signs, vreinterpretq_u16_u8(vld1q_u8(panel + k / 256 * super_bytes + byte)));
    if (vmaxvq_u16(signs) >> 15) return expand_requantized<V, T>(layout, panel, begin, end, w8, scales);
  }
  constexpr int kWide = V::kWideRegs * V::kLanes;  // bytes of one k
  for (int64_t k = begin; k < end; k += kQuantBlock, scales += kBlockScales)
    expand_block<V, T>(panel + k / 256 * super_bytes, size_t(k) % 256 / 32, (end - begin) * kWide,
                       w8 + (k - begin) * kWide, scales);
  return w8;
}

}  // namespace
}  // namespace tokenmill
