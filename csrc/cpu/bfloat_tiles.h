// BF16 weights for processors that multiply tiles of bfloat16 (AMX): how both sides lie in memory, and the products.
//
// Activations become two bfloat16 terms, the rounded value and the rounded rest, so that 2^-17 of a value is lost at
// most. Everything is in tiles of 1 KiB: of activations 8 rows as 16 lines of 32 k, the two terms of a row in turn; of
// weights 16 outputs x 32 k, pairs of k side by side, as the processor wants its second operand. A tile of sums, 16
// lines of 16 outputs in float32, stays in its register over all of k, and the two lines of a row are added at the end.
// A row goes the same way alone and among others, so its bits do not depend on their number. Weights take as many bytes
// as in the file. linear_tiles.cpp stores and divides, arch/bfloat_tiles_impl.h multiplies.
#pragma once

#include <cstdint>
#include <memory>

#include "linear.h"

namespace tokenmill {

constexpr int kTileTokens = 8, kTileOutputs = 16, kTileDepth = 32;
constexpr int64_t kTileValues = 512;  // of a tile: 1 KiB

// y[t][n] = weights[n] . rows[t] (+ bias[n]) for t < tokens, n < outputs; rows of y are ldy apart.
struct TileProduct {
  const uint16_t* rows;     // tiles [ceil(tokens / 8)][depth]
  const uint16_t* weights;  // tiles [ceil(outputs / 16)][depth]
  int64_t depth;            // tiles along k
  int tokens, outputs;
  const float* bias;  // or null
  float* y;
  int64_t ldy;
};

struct BfloatTiles {
  const char* name;
  // The two lines of a row in each of its tiles; `out` is the first of the first tile.
  void (*split_row)(const float* x, int64_t cols, uint16_t* out);
  void (*multiply)(const TileProduct& product);
};

std::unique_ptr<Linear> make_bfloat_tiles(int64_t rows, int64_t cols, const BfloatTiles& tiles);

}  // namespace tokenmill
