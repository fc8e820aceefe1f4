// Division of the tiled products over panels (see panel_tiles.h). Used by linear_panel.cpp.
#include <algorithm>
#include <cstring>

#include "linear_panel.h"
#include "panel_tiles.h"

namespace tokenmill {

PanelTiling::PanelTiling(const PanelLinear& weight, const PanelTiles& tiles)
    : weight_(weight), tiles_(tiles), expand_(tiles.expand(weight.layout)) {}

size_t PanelTiling::activation_bytes(int m) const {
  return size_t((m + kPanelTileRows - 1) / kPanelTileRows) * kPanelTileRows * size_t(weight_.cols) * 2;
}

int PanelTiling::num_pairs() const { return int((weight_.num_panels() + kPanelsAtOnce - 1) / kPanelsAtOnce); }

// Split further only where there are too few panels to go round: each block of rows expands the panels again.
int PanelTiling::row_block(int m) const {
  int64_t block = kTiledRowBlock;
  while (block > 128 && num_pairs() * ((m + block - 1) / block) < wanted_tiles()) block /= 2;
  return int(std::min<int64_t>(block, m));
}

size_t PanelTiling::scratch_bytes(int m) const {
  return size_t(kPanelsAtOnce * kTileChunk * kPanelCols) * 2 + size_t(row_block(m)) * kTiledSums * sizeof(float);
}

void PanelTiling::quantize(const float* x, int64_t ldx, int begin, int end, void* activations) const {
  for (int row = begin; row < end; ++row)
    tiles_.round_row(x + row * ldx, weight_.cols,
                     static_cast<uint16_t*>(activations) +
                         int64_t(row / kPanelTileRows) * kPanelTileRows * weight_.cols +
                         row % kPanelTileRows * kTileDepth);
}

void PanelTiling::run(int piece, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                      void* scratch) const {
  const int64_t panel = first_panel(piece, m), cols = weight_.cols;
  const int first = piece % row_blocks(m) * row_block(m);
  uint16_t* weights = static_cast<uint16_t*>(scratch);
  PanelTileProduct product;
  product.row_pitch = kPanelTileRows * cols;
  product.weights = weights;
  product.weight_pitch = kTileChunk * kPanelCols;
  product.tokens = std::min(row_block(m), m - first);
  product.panels = int(std::min<int64_t>(kPanelsAtOnce, weight_.num_panels() - panel));
  product.sums = reinterpret_cast<float*>(weights + kPanelsAtOnce * kTileChunk * kPanelCols);
  for (int64_t begin = 0; begin < cols; begin += kTileChunk) {
    const int64_t end = std::min(begin + kTileChunk, cols);
    for (int i = 0; i < product.panels; ++i)
      expand_(weight_.layout, weight_.panel(panel + i), begin, end, weights + i * product.weight_pitch);
    product.depth = (end - begin) / kTileDepth;
    product.rows = static_cast<const uint16_t*>(activations) + int64_t(first) * cols + begin * kPanelTileRows;
    product.add = begin > 0;
    tiles_.multiply(product);
  }
  const int64_t base = panel * kPanelCols;
  const int width = int(std::min<int64_t>(product.panels * kPanelCols, weight_.rows - base));
  const float* sums = product.sums;
  for (int t = 0; t < product.tokens; ++t, sums += kTiledSums) {
    float* out = y + (first + t) * ldy + base;
    if (bias) {
      for (int c = 0; c < width; ++c) out[c] = sums[c] + bias[base + c];
    } else {
      std::memcpy(out, sums, size_t(width) * sizeof(float));
    }
  }
}

}  // namespace tokenmill
