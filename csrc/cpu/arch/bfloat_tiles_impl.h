// The products of bfloat_tiles.h over the tile instructions of amx_tiles.h. Plain C++ besides, so that a test can run
// it with emulated tiles. Included by amx_bfloat.cpp and test/tiles_test.cpp.
#pragma once

#include <cmath>
#include <cstring>

#include "../bfloat_tiles.h"
#include "amx_tiles.h"

namespace tokenmill {
namespace {

TM_INLINE uint32_t rounded_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

TM_INLINE void split_value(float value, uint16_t* term, uint16_t* rest) {
  const uint32_t high = rounded_bfloat(value), bits = high << 16;
  float kept;
  std::memcpy(&kept, &bits, 4);
  *term = uint16_t(high);
  // Nothing is left of an infinity, and infinity - infinity is not 0.
  *rest = (bits & 0x7f800000) == 0x7f800000 ? uint16_t(0) : uint16_t(rounded_bfloat(value - kept));
}

void split_row(const float* x, int64_t cols, uint16_t* out) {
  int64_t k = 0;
  for (; k + kTileDepth <= cols; k += kTileDepth, out += kTileValues)
    for (int i = 0; i < kTileDepth; ++i) split_value(x[k + i], out + i, out + kTileDepth + i);
  if (k == cols) return;
  std::memset(out, 0, 4 * kTileDepth);
  for (int i = 0; k + i < cols; ++i) split_value(x[k + i], out + i, out + kTileDepth + i);
}

// Sums 0 to 3 (of rows a and outputs b: 2 a + b), rows 4 and 5, weights 6 and 7.
constexpr int kRowTile = 4, kWeightTile = 6;

inline TileShapes bfloat_shapes(int tokens) {
  TileShapes shapes;
  const int first = tokens < kTileTokens ? tokens : kTileTokens;
  const int second = tokens > kTileTokens ? tokens - kTileTokens : 1;
  const int lines[8] = {2 * first, 2 * first, 2 * second, 2 * second, 2 * first, 2 * second, 16, 16};
  for (int i = 0; i < 8; ++i) {
    shapes.row_bytes[i] = 64;
    shapes.rows[i] = uint8_t(lines[i]);
  }
  return shapes;
}

// Sums of up to 8 rows and 16 outputs from a tile to y.
template <int Tile>
TM_INLINE void add_terms(int tokens, int outputs, const float* bias, float* y, int64_t ldy) {
  alignas(64) float sums[2 * kTileTokens * kTileOutputs];
  store_tile<Tile>(sums, 64);
  for (int t = 0; t < tokens; ++t, y += ldy) {
    const float *term = sums + 2 * t * kTileOutputs, *rest = term + kTileOutputs;
    float out[kTileOutputs];
    for (int i = 0; i < kTileOutputs; ++i) out[i] = term[i] + rest[i];
    if (outputs == kTileOutputs) {
      if (bias)
        for (int i = 0; i < kTileOutputs; ++i) out[i] += bias[i];
      std::memcpy(y, out, sizeof(out));
    } else {
      for (int i = 0; i < outputs; ++i) y[i] = bias ? out[i] + bias[i] : out[i];
    }
  }
}

// Asks for the weights of a few tiles later: one or two streams, but in bursts of 16 lines.
TM_INLINE void ask_for(const uint16_t* weights) {
  for (int line = 0; line < 16; ++line) __builtin_prefetch(weights + 4 * kTileValues + line * 32);
}

// A tiles of rows x B tiles of outputs; `tokens` and `outputs` are counts of the last ones too.
template <int A, int B>
void multiply_block(const TileProduct& p, int tokens, int outputs) {
  const int64_t pitch = p.depth * kTileValues;
  const uint16_t *rows = p.rows, *weights = p.weights;
  zero_tile<0>();
  if constexpr (B == 2) zero_tile<1>();
  if constexpr (A == 2) zero_tile<2>();
  if constexpr (A == 2 && B == 2) zero_tile<3>();
  for (int64_t k = 0; k < p.depth; ++k, rows += kTileValues, weights += kTileValues) {
    if constexpr (A == 1) {  // bound by memory
      ask_for(weights);
      if constexpr (B == 2) ask_for(weights + pitch);
    }
    load_tile<kWeightTile>(weights, 64);
    if constexpr (B == 2) load_tile<kWeightTile + 1>(weights + pitch, 64);
    load_tile<kRowTile>(rows, 64);
    if constexpr (A == 2) load_tile<kRowTile + 1>(rows + pitch, 64);
    dot_bfloat_tiles<0, kRowTile, kWeightTile>();
    if constexpr (B == 2) dot_bfloat_tiles<1, kRowTile, kWeightTile + 1>();
    if constexpr (A == 2) dot_bfloat_tiles<2, kRowTile + 1, kWeightTile>();
    if constexpr (A == 2 && B == 2) dot_bfloat_tiles<3, kRowTile + 1, kWeightTile + 1>();
  }
  const int first = A == 2 ? kTileTokens : tokens, last = outputs - (B - 1) * kTileOutputs;
  float* below = p.y + kTileTokens * p.ldy;
  const float* bias = p.bias ? p.bias + kTileOutputs : nullptr;
  add_terms<0>(first, B == 2 ? kTileOutputs : last, p.bias, p.y, p.ldy);
  if constexpr (B == 2) add_terms<1>(first, last, bias, p.y + kTileOutputs, p.ldy);
  if constexpr (A == 2) add_terms<2>(tokens - kTileTokens, B == 2 ? kTileOutputs : last, p.bias, below, p.ldy);
  if constexpr (A == 2 && B == 2) add_terms<3>(tokens - kTileTokens, last, bias, below + kTileOutputs, p.ldy);
}

// 32 outputs at a time of up to 16 rows, for which the tiles have been configured.
void multiply_tokens(TileProduct p, int tokens) {
  for (int left = p.outputs; left > 0; left -= 2 * kTileOutputs) {
    const int outputs = left < 2 * kTileOutputs ? left : 2 * kTileOutputs;
    const bool wide = outputs > kTileOutputs, tall = tokens > kTileTokens;
    if (tall && wide) multiply_block<2, 2>(p, tokens, outputs);
    if (tall && !wide) multiply_block<2, 1>(p, tokens, outputs);
    if (!tall && wide) multiply_block<1, 2>(p, tokens, outputs);
    if (!tall && !wide) multiply_block<1, 1>(p, tokens, outputs);
    p.weights += 2 * p.depth * kTileValues;
    p.y += 2 * kTileOutputs;
    if (p.bias) p.bias += 2 * kTileOutputs;
  }
}

void multiply_bfloat_tiles(const TileProduct& product) {
  TileProduct p = product;
  int configured = 0;
  for (int left = p.tokens; left > 0; left -= 2 * kTileTokens) {
    const int tokens = left < 2 * kTileTokens ? left : 2 * kTileTokens;
    if (tokens != configured) configure_tiles(bfloat_shapes(configured = tokens));
    multiply_tokens(p, tokens);
    p.rows += 2 * p.depth * kTileValues;
    p.y += 2 * kTileTokens * p.ldy;
  }
  release_tiles();
}

}  // namespace
}  // namespace tokenmill
