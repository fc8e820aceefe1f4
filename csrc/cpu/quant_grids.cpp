// The formats of quant_grids.h, taken apart. Bit layouts follow the published format; called at load time.
#include "quant_grids.h"

#include <cstring>

namespace tokenmill {
namespace {

const uint16_t kPoints[] = {
#include "../../tokenmill/kernels/ggml_grids.inc"
};
const uint16_t *const kIq2Xxs = kPoints, *const kIq2Xs = kIq2Xxs + 256, *const kIq2S = kIq2Xs + 512,
                      *const kIq1S = kIq2S + 1024, *const kIq3Xxs = kIq1S + 2048, *const kIq3S = kIq3Xxs + 256;
static_assert(sizeof(kPoints) / sizeof(kPoints[0]) == 256 + 512 + 1024 + 2048 + 256 + 512, "a point is missing");

uint32_t load16(const uint8_t* p) { return uint32_t(p[0] | p[1] << 8); }
uint32_t load32(const uint8_t* p) { return load16(p) | load16(p + 2) << 16; }

// Seven sign bits: the eighth makes the number of minus signs even.
unsigned even_signs(unsigned seven) {
  unsigned parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  return seven | ((parity ^ parity >> 1) & 1) << 7;
}

// Eight codes of a point of 2-bit levels, with a bit of `signs` above each.
void eight(unsigned point, unsigned signs, uint8_t* code) {
  for (int i = 0; i < 8; ++i) code[i] = uint8_t((point >> (2 * i) & 3) | (signs >> i & 1) << 2);
}

void four(unsigned point, unsigned signs, uint8_t* code) {
  for (int i = 0; i < 4; ++i) code[i] = uint8_t((point >> (3 * i) & 7) | (signs >> i & 1) << 3);
}

void no_minimum(SplitBlock& out, float d) {
  out.d = d;
  out.dmin = 0;
  std::memset(out.minimum, 0, sizeof out.minimum);
}

float load_half(const uint8_t* p) { return half_to_float(uint16_t(load16(p))); }

}  // namespace

const Grid* find_grid(const char* type) {
  static const struct {
    const char* name;
    Grid grid;
  } kGrids[] = {{"IQ2_XXS", {kIq2Xxs, 256, 2, 8}}, {"IQ2_XS", {kIq2Xs, 512, 2, 8}},
                {"IQ2_S", {kIq2S, 1024, 2, 8}},    {"IQ1_S", {kIq1S, 2048, 2, 8}},
                {"IQ3_XXS", {kIq3Xxs, 256, 3, 4}}, {"IQ3_S", {kIq3S, 512, 3, 4}}};
  for (const auto& entry : kGrids)
    if (!std::strcmp(entry.name, type)) return &entry.grid;
  return nullptr;
}

// A level, then its negative; the unused fourth level repeats the third. Twice, for formats of 3 bits.
const int8_t kIq2Values[16] = {8, 25, 43, 43, -8, -25, -43, -43, 8, 25, 43, 43, -8, -25, -43, -43};
const int8_t kIq3XxsValues[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
const int8_t kIq3SValues[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
// Eight times -1, 0, 1, plus one; then minus one.
const int8_t kIq1Values[16] = {-7, 1, 9, 9, -9, -1, 7, 7, -7, 1, 9, 9, -9, -1, 7, 7};
// Twice the values of a 4-bit float.
const int8_t kFp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void split_iq2_xxs(const uint8_t* b, SplitBlock& out) {
  no_minimum(out, load_half(b));
  for (int g = 0; g < 8; ++g) {
    const uint8_t* p = b + 2 + g * 8;
    const uint32_t signs = load32(p + 4);
    out.scale[g] = int(2 * (signs >> 28) + 1);
    for (int i = 0; i < 4; ++i)
      eight(kIq2Xxs[p[i]], even_signs(signs >> (7 * i) & 127), out.code + g * 32 + i * 8);
  }
}

void split_iq2_xs(const uint8_t* b, SplitBlock& out) {
  no_minimum(out, load_half(b));
  for (int i = 0; i < 32; ++i) {
    const uint32_t word = load16(b + 2 + 2 * i);
    eight(kIq2Xs[word & 511], even_signs(word >> 9), out.code + i * 8);
  }
  for (int g = 0; g < 16; ++g) out.scale[g] = 2 * (b[66 + g / 2] >> (4 * (g % 2)) & 15) + 1;
}

void split_iq2_s(const uint8_t* b, SplitBlock& out) {
  no_minimum(out, load_half(b));
  for (int i = 0; i < 32; ++i) {
    const int high = b[66 + i / 4] >> (2 * (i % 4)) & 3;
    eight(kIq2S[b[2 + i] | high << 8], b[34 + i], out.code + i * 8);
  }
  for (int g = 0; g < 16; ++g) out.scale[g] = 2 * (b[74 + g / 2] >> (4 * (g % 2)) & 15) + 1;
}

void split_iq3_xxs(const uint8_t* b, SplitBlock& out) {
  no_minimum(out, load_half(b));
  for (int g = 0; g < 8; ++g) {
    const uint32_t word = load32(b + 66 + 4 * g);
    out.scale[g] = int(2 * (word >> 28) + 1);
    for (int i = 0; i < 8; ++i) {
      const unsigned signs = even_signs(word >> (i / 2 * 7) & 127) >> (i % 2 * 4);
      four(kIq3Xxs[b[2 + g * 8 + i]], signs, out.code + g * 32 + i * 4);
    }
  }
}

void split_iq3_s(const uint8_t* b, SplitBlock& out) {
  no_minimum(out, load_half(b));
  for (int i = 0; i < 64; ++i) {
    const int high = b[66 + i / 8] >> (i % 8) & 1;
    four(kIq3S[b[2 + i] | high << 8], unsigned(b[74 + i / 2] >> (i % 2 * 4)), out.code + i * 4);
  }
  for (int g = 0; g < 8; ++g) out.scale[g] = 2 * (b[106 + g / 2] >> (4 * (g % 2)) & 15) + 1;
}

void split_iq1_s(const uint8_t* b, SplitBlock& out) {
  no_minimum(out, load_half(b));
  for (int g = 0; g < 8; ++g) {
    const uint32_t high = load16(b + 34 + 2 * g);
    out.scale[g] = int(2 * (high >> 12 & 7) + 1);
    for (int i = 0; i < 4; ++i)
      eight(kIq1S[b[2 + g * 4 + i] | (high >> (3 * i) & 7) << 8], high >> 15 ? 255 : 0, out.code + g * 32 + i * 8);
  }
}

void split_iq1_m(const uint8_t* b, SplitBlock& out) {
  unsigned d = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = load16(b + 48 + 2 * i);
    d |= (word >> 12) << (4 * i);
    for (int s = 0; s < 4; ++s) out.scale[i * 4 + s] = int(2 * (word >> (3 * s) & 7) + 1);
  }
  no_minimum(out, half_to_float(uint16_t(d)));
  for (int i = 0; i < 32; ++i) {
    const unsigned high = b[32 + i / 2] >> (4 * (i % 2)) & 15u;
    eight(kIq1S[b[i] | (high & 7) << 8], high >> 3 ? 255 : 0, out.code + i * 8);
  }
}

// Five digits of three in a byte, or four: the byte times 3^i, and of its low 8 bits the three thirds.
void split_tq1_0(const uint8_t* b, SplitBlock& out) {
  no_minimum(out, load_half(b + 52));
  for (int g = 0; g < 8; ++g) out.scale[g] = 1;
  uint8_t* code = out.code;
  const auto digits = [&code](const uint8_t* p, int run, int count) {
    for (int i = 0, power = 1; i < count; ++i, power *= 3)
      for (int k = 0; k < run; ++k) *code++ = uint8_t(uint8_t(p[k] * power) * 3 >> 8);
  };
  digits(b, 32, 5);
  digits(b + 32, 16, 5);
  digits(b + 48, 4, 4);
}

void split_tq2_0(const uint8_t* b, SplitBlock& out) {
  no_minimum(out, load_half(b + 64));
  for (int g = 0; g < 8; ++g) out.scale[g] = 1;
  for (int i = 0; i < 256; ++i) out.code[i] = b[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3;
}

// Scales of 8 bits (E4M3 without a sign, 127: zero), in units of half of the smallest.
void split_nvfp4(const uint8_t* b, SplitBlock& out) {
  no_minimum(out, 1.0f / 1024);
  for (int g = 0; g < 4; ++g) {
    const int exponent = b[g] >> 3 & 15, fraction = b[g] & 7;
    out.scale[g] = b[g] == 127 ? 0 : exponent == 0 ? fraction : (8 + fraction) << (exponent - 1);
    for (int i = 0; i < 8; ++i) {
      const uint8_t pair = b[4 + g * 8 + i];
      out.code[g * 16 + i] = pair & 15;
      out.code[g * 16 + 8 + i] = pair >> 4;
    }
  }
}

}  // namespace tokenmill
