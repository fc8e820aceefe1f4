// How each GGUF block comes apart (see quant_blocks.h), and the dequantizer built on it.
//
// The bit layouts follow the published format; values are exact to the reference because every product of a half scale,
// a small integer scale and a code fits float32 without rounding. Called at load time and for embedding rows.
#include "quant_blocks.h"

#include "linear.h"
#include "quant_grids.h"

namespace tokenmill {
namespace {

const int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

uint16_t load16(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }
uint32_t load32(const uint8_t* p) { return load16(p) | uint32_t(load16(p + 2)) << 16; }
float load_half(const uint8_t* p) { return half_to_float(load16(p)); }

// 32 codes from 16 bytes: low nibbles first, then high nibbles.
void nibbles(const uint8_t* q, uint8_t* code) {
  for (int i = 0; i < 16; ++i) {
    code[i] = q[i] & 15;
    code[i + 16] = q[i] >> 4;
  }
}

void fifth_bits(uint32_t high, uint8_t* code) {
  for (int i = 0; i < 32; ++i) code[i] |= uint8_t((high >> i & 1) << 4);
}

void one_scale(float d, float minimum, SplitBlock& out) {
  out.d = d;
  out.dmin = -minimum;
  out.scale[0] = 1;
  out.minimum[0] = 1;
}

void split_q4_0(const uint8_t* b, SplitBlock& out) {
  one_scale(load_half(b), 0, out);
  nibbles(b + 2, out.code);
}

void split_q4_1(const uint8_t* b, SplitBlock& out) {
  one_scale(load_half(b), load_half(b + 2), out);
  nibbles(b + 4, out.code);
}

void split_q5_0(const uint8_t* b, SplitBlock& out) {
  one_scale(load_half(b), 0, out);
  nibbles(b + 6, out.code);
  fifth_bits(load32(b + 2), out.code);
}

void split_q5_1(const uint8_t* b, SplitBlock& out) {
  one_scale(load_half(b), load_half(b + 2), out);
  nibbles(b + 8, out.code);
  fifth_bits(load32(b + 4), out.code);
}

// Signed bytes become codes 0..255 with offset 128, so that all codes are unsigned.
void split_q8_0(const uint8_t* b, SplitBlock& out) {
  one_scale(load_half(b), 0, out);
  for (int i = 0; i < 32; ++i) out.code[i] = b[2 + i] ^ 0x80;
}

void split_mxfp4(const uint8_t* b, SplitBlock& out) {
  // The table holds doubled values, so the scale is 2^(e-128).
  const uint32_t e = b[0];
  one_scale(bits_to_float(e < 2 ? 0x00200000u << e : (e - 1) << 23), 0, out);
  nibbles(b + 1, out.code);
}

void split_q2_k(const uint8_t* b, SplitBlock& out) {
  for (int g = 0; g < 16; ++g) {
    out.scale[g] = b[g] & 15;
    out.minimum[g] = b[g] >> 4;
  }
  const uint8_t* q = b + 16;
  for (int half = 0; half < 2; ++half)
    for (int shift = 0; shift < 4; ++shift)
      for (int i = 0; i < 32; ++i) out.code[half * 128 + shift * 32 + i] = q[half * 32 + i] >> (2 * shift) & 3;
  out.d = load_half(b + 80);
  out.dmin = load_half(b + 82);
}

void split_q3_k(const uint8_t* b, SplitBlock& out) {
  const uint8_t *high = b, *q = b + 32, *scales = b + 96;
  for (int half = 0; half < 2; ++half)
    for (int shift = 0; shift < 4; ++shift)
      for (int i = 0; i < 32; ++i) {
        const int plane = half * 4 + shift;
        const uint8_t low = q[half * 32 + i] >> (2 * shift) & 3;
        out.code[plane * 32 + i] = uint8_t(low | (high[i] >> plane & 1) << 2);
      }
  for (int g = 0; g < 16; ++g) {
    const int low = scales[g % 8] >> (4 * (g / 8)) & 15;
    const int top = scales[8 + g % 4] >> (2 * (g / 4)) & 3;
    out.scale[g] = int16_t((low | top << 4) - 32);
    out.minimum[g] = 0;
  }
  out.d = load_half(b + 108);
  out.dmin = 0;
}

// The eight 6-bit scales and minimums of Q4_K and Q5_K, from 12 bytes. Two loops: GCC 12.2 for Arm drops the one that does both
// at -O1 and -O2.
void k_scales(const uint8_t* s, SplitBlock& out) {
  for (int g = 0; g < 4; ++g) {
    out.scale[g] = s[g] & 63;
    out.minimum[g] = s[g + 4] & 63;
  }
  for (int g = 0; g < 4; ++g) {
    out.scale[g + 4] = int16_t((s[g + 8] & 15) | (s[g] >> 6) << 4);
    out.minimum[g + 4] = uint8_t(s[g + 8] >> 4 | (s[g + 4] >> 6) << 4);
  }
}

void split_q4_k(const uint8_t* b, SplitBlock& out) {
  out.d = load_half(b);
  out.dmin = load_half(b + 2);
  k_scales(b + 4, out);
  const uint8_t* q = b + 16;
  for (int pair = 0; pair < 4; ++pair)
    for (int i = 0; i < 32; ++i) {
      out.code[pair * 64 + i] = q[pair * 32 + i] & 15;
      out.code[pair * 64 + 32 + i] = q[pair * 32 + i] >> 4;
    }
}

void split_q5_k(const uint8_t* b, SplitBlock& out) {
  out.d = load_half(b);
  out.dmin = load_half(b + 2);
  k_scales(b + 4, out);
  const uint8_t *high = b + 16, *q = b + 48;
  for (int pair = 0; pair < 4; ++pair)
    for (int i = 0; i < 32; ++i) {
      const uint8_t byte = q[pair * 32 + i];
      out.code[pair * 64 + i] = uint8_t((byte & 15) | (high[i] >> (2 * pair) & 1) << 4);
      out.code[pair * 64 + 32 + i] = uint8_t(byte >> 4 | (high[i] >> (2 * pair + 1) & 1) << 4);
    }
}

void split_q6_k(const uint8_t* b, SplitBlock& out) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t *low = b + half * 64, *high = b + 128 + half * 32;
    uint8_t* code = out.code + half * 128;
    for (int i = 0; i < 32; ++i) {
      code[i] = uint8_t((low[i] & 15) | (high[i] & 3) << 4);
      code[i + 32] = uint8_t((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      code[i + 64] = uint8_t(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      code[i + 96] = uint8_t(low[i + 32] >> 4 | high[i] >> 6 << 4);
    }
  }
  for (int g = 0; g < 16; ++g) {
    out.scale[g] = int8_t(b[192 + g]);
    out.minimum[g] = 0;
  }
  out.d = load_half(b + 208);
  out.dmin = 0;
}

void split_iq4_xs(const uint8_t* b, SplitBlock& out) {
  out.d = load_half(b);
  out.dmin = 0;
  const uint32_t high = load16(b + 2);
  for (int g = 0; g < 8; ++g) {
    const int low = b[4 + g / 2] >> (4 * (g % 2)) & 15;
    out.scale[g] = int16_t((low | (high >> (2 * g) & 3) << 4) - 32);
    out.minimum[g] = 0;
    nibbles(b + 8 + g * 16, out.code + g * 32);
  }
}

//                             name     block bytes bits group offset min   wide   lut           split
const QuantFormat kFormats[] = {{"F32", 1, 4, 0, 1, 0, false, false, nullptr, nullptr},
                                {"F16", 1, 2, 0, 1, 0, false, false, nullptr, nullptr},
                                {"BF16", 1, 2, 0, 1, 0, false, false, nullptr, nullptr},
                                {"Q4_0", 32, 18, 4, 32, 8, false, false, nullptr, split_q4_0},
                                {"Q4_1", 32, 20, 4, 32, 0, true, false, nullptr, split_q4_1},
                                {"Q5_0", 32, 22, 5, 32, 16, false, false, nullptr, split_q5_0},
                                {"Q5_1", 32, 24, 5, 32, 0, true, false, nullptr, split_q5_1},
                                {"Q8_0", 32, 34, 8, 32, 128, false, false, nullptr, split_q8_0},
                                {"Q2_K", 256, 84, 2, 16, 0, true, false, nullptr, split_q2_k},
                                {"Q3_K", 256, 110, 3, 16, 4, false, false, nullptr, split_q3_k},
                                {"Q4_K", 256, 144, 4, 32, 0, true, false, nullptr, split_q4_k},
                                {"Q5_K", 256, 176, 5, 32, 0, true, false, nullptr, split_q5_k},
                                {"Q6_K", 256, 210, 6, 16, 32, false, false, nullptr, split_q6_k},
                                {"IQ4_NL", 32, 18, 4, 32, 0, false, false, kIq4Values, split_q4_0},
                                {"IQ4_XS", 256, 136, 4, 32, 0, false, false, kIq4Values, split_iq4_xs},
                                {"MXFP4", 32, 17, 4, 32, 0, false, true, kFp4Values, split_mxfp4},
                                {"NVFP4", 64, 36, 4, 16, 0, false, false, kFp4Values, split_nvfp4},
                                {"IQ2_XXS", 256, 66, 3, 32, 0, false, false, kIq2Values, split_iq2_xxs, 0.125f},
                                {"IQ2_XS", 256, 74, 3, 16, 0, false, false, kIq2Values, split_iq2_xs, 0.125f},
                                {"IQ2_S", 256, 82, 3, 16, 0, false, false, kIq2Values, split_iq2_s, 0.125f},
                                {"IQ3_XXS", 256, 98, 4, 32, 0, false, false, kIq3XxsValues, split_iq3_xxs, 0.25f},
                                {"IQ3_S", 256, 110, 4, 32, 0, false, false, kIq3SValues, split_iq3_s},
                                {"IQ1_S", 256, 50, 3, 32, 0, false, false, kIq1Values, split_iq1_s, 0.125f},
                                {"IQ1_M", 256, 56, 3, 16, 0, false, false, kIq1Values, split_iq1_m, 0.125f},
                                {"TQ1_0", 256, 54, 2, 32, 1, false, false, nullptr, split_tq1_0},
                                {"TQ2_0", 256, 66, 2, 32, 1, false, false, nullptr, split_tq2_0}};

void dequantize_plain(const QuantFormat& format, const void* row, int64_t cols, float* out) {
  if (format.bytes == 4) {
    std::memcpy(out, row, size_t(cols) * 4);
    return;
  }
  const uint8_t* p = static_cast<const uint8_t*>(row);
  const bool half = format.name[0] == 'F';
  for (int64_t i = 0; i < cols; ++i) out[i] = half ? load_half(p + 2 * i) : bfloat_to_float(load16(p + 2 * i));
}

}  // namespace

uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 rounds the mantissa at 2^-24
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return uint16_t(sign | (float_to_bits(shifted) - 0x3f000000));
  }
  return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

const QuantFormat* find_quant_format(const std::string& name) {
  for (const QuantFormat& format : kFormats)
    if (name == format.name) return &format;
  return nullptr;
}

void dequantize(const QuantFormat& format, const void* row, int64_t cols, float* out) {
  if (format.bits == 0) return dequantize_plain(format, row, cols, out);
  const uint8_t* block = static_cast<const uint8_t*>(row);
  SplitBlock split;
  for (int64_t k = 0; k < cols; k += format.block, block += format.bytes) {
    format.split(block, split);
    const float d = split.d * format.unit, dmin = split.dmin * format.unit;
    for (int i = 0; i < format.block; ++i) {
      const int g = i / format.group;
      const float q = format.lut ? float(format.lut[split.code[i]]) : float(split.code[i] - format.offset);
      const float value = d * float(split.scale[g]) * q;
      out[k + i] = format.has_min ? value - dmin * float(split.minimum[g]) : value;
    }
  }
}

bool dequantize_row(const std::string& type, const void* data, int64_t row, int64_t cols, float* out) {
  const QuantFormat* format = find_quant_format(type);
  if (!format || cols % format->block) return false;
  const int64_t row_bytes = cols / format->block * format->bytes;
  dequantize(*format, static_cast<const uint8_t*>(data) + row * row_bytes, cols, out);
  return true;
}

}  // namespace tokenmill
