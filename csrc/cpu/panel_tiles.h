// Products of integer panels with many rows on processors that multiply tiles of bfloat16 (AMX).
//
// A scale for each 32 weights ends an integer sum after 32 products, and the tile of sums must leave its register for
// it. Here the scales go into the weights instead: a thread expands its panels to bfloat16, code by code, and sums stay
// in float32 tiles over all k of a chunk. bfloat16 has half the rate of int8, and is closer to float32 than activations
// in int8: both factors are rounded to 8 bits of their own exponent. Precise weights stay with integers, which keep
// their codes. linear_panel.cpp decides when, arch/amx_panel_tiles.cpp has the kernels.
//
// Tiles are 1 KiB: 16 rows x 32 k, and 16 columns x 32 k with pairs of k side by side.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bfloat_tiles.h"
#include "quant_panel.h"

namespace tokenmill {

constexpr int kTiledKind = 8;          // activation kind: rows in tiles of bfloat16
constexpr int kNoTiles = 1 << 30;      // rows from which tiles are taken: never
constexpr int kPanelTileRows = 16;     // of activations
constexpr int kPanelsAtOnce = 2;       // of weights, in one product
constexpr int kMaxPiecePanels = 8;     // of a piece of work, for all of which activations are fetched once
constexpr int64_t kTileChunk = 512;    // k expanded at a time: the weights of two panels stay in the first-level cache
constexpr int kTiledRowBlock = 256;    // rows of a piece of work, whose activations stay in the second level
constexpr int kTiledSums = kPanelsAtOnce * kPanelCols;  // floats of a row of sums

// sums[tokens][kTiledSums] (+)= rows x weights, over `depth` tiles of k.
struct PanelTileProduct {
  const uint16_t* rows;
  int64_t row_pitch;  // values from one tile of rows to that of the next 16
  const uint16_t* weights;
  int64_t weight_pitch;  // values from panel to panel
  int64_t depth;
  int tokens, panels;
  bool add;
  float* sums;
};

// k [begin, end) of a panel as tiles, one for each 32 k.
using ExpandTilesFn = void (*)(const PanelLayout& layout, const uint8_t* panel, int64_t begin, int64_t end,
                               uint16_t* out);

struct PanelTiles {
  ExpandTilesFn (*expand)(const PanelLayout& layout);
  int (*from)(const PanelLayout& layout);  // number of rows from which tiles are taken
  void (*round_row)(const float* x, int64_t cols, uint16_t* out);  // activations to their line of each tile
  void (*multiply)(const PanelTileProduct& product);
};

class PanelLinear;

// How the tiled product of a panel linear is divided: pieces are a few panels and a block of rows.
class PanelTiling {
 public:
  PanelTiling(const PanelLinear& weight, const PanelTiles& tiles);

  size_t activation_bytes(int m) const;
  void quantize(const float* x, int64_t ldx, int begin, int end, void* activations) const;
  int num_pieces(int m) const { return division(m).pieces(); }
  size_t scratch_bytes(int m) const;
  int64_t first_panel(int piece, int m) const;
  void run(int piece, int m, const void* activations, const float* bias, float* y, int64_t ldy, void* scratch) const;

 private:
  struct Division {
    int panels, rows;  // of a piece
    int panel_blocks, row_blocks;
    int pieces() const { return panel_blocks * row_blocks; }
  };
  Division division(int m) const;

  const PanelLinear& weight_;
  const PanelTiles& tiles_;
  const ExpandTilesFn expand_;
};

}  // namespace tokenmill
