// The block formats of GGUF, each described by one row of a table, and how a block comes apart.
//
// Every integer format here is, but for its unit, w = scale * (lut[code] or code - offset) - minimum with one scale (and minimum) per
// group of 16 or 32. `split` separates a block into codes and scales; dequantizing and packing are built on it alone.
// This file knows nothing of instruction sets; the portable kernel, the panels and the embedding lookup call it.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace tokenmill {

constexpr int kMaxBlock = 256;
constexpr int kMaxGroups = 16;

// One block taken apart. The value of element i in group g is unit * (d * scale[g] * q - dmin * minimum[g]).
struct SplitBlock {
  uint8_t code[kMaxBlock];
  float d, dmin;
  int32_t scale[kMaxGroups];
  uint8_t minimum[kMaxGroups];
};

struct QuantFormat {
  const char* name;
  int block;   // elements in a block
  int bytes;   // bytes of a block
  int bits;    // of a code; 0 for plain floats
  int group;   // elements that share a scale
  int offset;  // subtracted from a code (formats without a table)
  bool has_min;
  bool wide_scale;    // block scale exceeds the range of a half (MXFP4): keep it as bfloat16
  const int8_t* lut;  // 16 values, or null
  void (*split)(const uint8_t* block, SplitBlock& out);
  float unit = 1;  // a power of two beside d, which as a half could not be that small
  bool superblock() const { return block == kMaxBlock; }
};

// Null if `name` is not a format of this file.
const QuantFormat* find_quant_format(const std::string& name);

// `cols` elements lying at `row`, in the given format, to float32.
void dequantize(const QuantFormat& format, const void* row, int64_t cols, float* out);

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return bits_to_float(sign | ((magnitude << 13) + 0x38000000));
  const float subnormal = float(magnitude) * (1.0f / 16777216.0f);  // 2^-24
  return sign ? -subnormal : subnormal;
}

uint16_t float_to_half(float value);  // nearest even, overflow to infinity

inline float bfloat_to_float(uint16_t b) { return bits_to_float(uint32_t(b) << 16); }

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = float_to_bits(value);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace tokenmill
