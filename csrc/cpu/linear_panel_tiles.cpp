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

// Pieces become smaller only where there are too few to go round: narrower ones fetch activations more often, fewer rows
// expand the panels more often.
PanelTiling::Division PanelTiling::division(int m) const {
  const int panels = int(weight_.num_panels());
  Division d{kMaxPiecePanels, kTiledRowBlock, 0, 0};
  for (;;) {
    d.panel_blocks = (panels + d.panels - 1) / d.panels;
    d.row_blocks = (m + d.rows - 1) / d.rows;
    if (d.pieces() >= wanted_tiles() || (d.panels == kPanelsAtOnce && d.rows == 128)) return d;
    (d.panels > kPanelsAtOnce ? d.panels : d.rows) /= 2;
  }
}

int64_t PanelTiling::first_panel(int piece, int m) const {
  const Division d = division(m);
  return int64_t(piece / d.row_blocks) * d.panels;
}

size_t PanelTiling::scratch_bytes(int m) const {
  const Division d = division(m);
  return size_t(kPanelsAtOnce * kPanelCols * kTileChunk) * 2 +
         size_t(d.panels * kPanelCols) * size_t(std::min(d.rows, m)) * sizeof(float);
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
  const Division d = division(m);
  const int64_t cols = weight_.cols, panel = int64_t(piece / d.row_blocks) * d.panels;
  const int panels = int(std::min<int64_t>(d.panels, weight_.num_panels() - panel));
  const int first = piece % d.row_blocks * d.rows, tokens = std::min(d.rows, m - first);
  uint16_t* weights = static_cast<uint16_t*>(scratch);
  float* sums = reinterpret_cast<float*>(weights + kPanelsAtOnce * kTileChunk * kPanelCols);
  PanelTileProduct product;
  product.weights = weights;
  product.row_pitch = kPanelTileRows * cols;
  product.weight_pitch = kTileChunk * kPanelCols;
  product.tokens = tokens;
  for (int64_t begin = 0; begin < cols; begin += kTileChunk) {
    const int64_t end = std::min(begin + kTileChunk, cols);
    product.depth = (end - begin) / kTileDepth;
    product.rows = static_cast<const uint16_t*>(activations) + int64_t(first) * cols + begin * kPanelTileRows;
    product.add = begin > 0;
    for (int i = 0; i < panels; i += kPanelsAtOnce) {
      product.panels = std::min(kPanelsAtOnce, panels - i);
      for (int j = 0; j < product.panels; ++j)
        expand_(weight_.layout, weight_.panel(panel + i + j), begin, end, weights + j * product.weight_pitch);
      product.sums = sums + i / kPanelsAtOnce * tokens * kTiledSums;
      tiles_.multiply(product);
    }
  }
  for (int i = 0; i < panels; i += kPanelsAtOnce, sums += tokens * kTiledSums) {
    const int64_t base = (panel + i) * kPanelCols;
    const int width = int(std::min<int64_t>(std::min(kPanelsAtOnce, panels - i) * kPanelCols, weight_.rows - base));
    for (int t = 0; t < tokens; ++t) {
      const float* from = sums + t * kTiledSums;
      float* out = y + (first + t) * ldy + base;
      if (bias) {
        for (int c = 0; c < width; ++c) out[c] = from[c] + bias[base + c];
      } else {
        std::memcpy(out, from, size_t(width) * sizeof(float));
      }
    }
  }
}

}  // namespace tokenmill
