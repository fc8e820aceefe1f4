// Where activations lie and which tile belongs to which weight. See product.h.
#include "product.h"

#include <algorithm>

namespace tokenmill {
namespace {

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

// The first weight of each kind stands for it; among weights of a kind, the one that needs most activations (a precise
// weight needs more than others, beginning with the same) quantizes for all.
bool Product::is_first(int i, int m) const {
  for (int earlier = 0; earlier < i; ++earlier)
    if (shares(earlier, i, m)) return false;
  return true;
}

int Product::widest(int i, int m) const {
  int best = i;
  for (int j = 0; j < size(); ++j)
    if (shares(i, j, m) && weights_[j]->activation_bytes(m) > weights_[best]->activation_bytes(m)) best = j;
  return best;
}

// Activations of the kinds lie one after another, in the order in which the kinds first appear.
size_t Product::offset(int i, int m) const {
  size_t bytes = 0;
  for (int j = 0; j < size(); ++j) {
    if (!is_first(j, m)) continue;
    if (i < size() && shares(i, j, m)) return bytes;
    bytes += aligned(weights_[widest(j, m)]->activation_bytes(m));
  }
  return bytes;
}

size_t Product::activation_bytes(int m) const { return offset(size(), m); }

size_t Product::scratch_bytes(int m) const {
  size_t bytes = 0;
  for (const Linear* weight : weights_) bytes = std::max(bytes, weight->scratch_bytes(m));
  return bytes;
}

int Product::row_block(int m) const {
  int block = 1;  // blocks are powers of two, so the largest is a multiple of all
  for (const Linear* weight : weights_) block = std::max(block, weight->activation_row_block(m));
  return block;
}

bool Product::takes_single_rows(int m) const {
  for (const Linear* weight : weights_)
    if (!weight->activations_by_row(m) || weight->activation_kind(1) != row_kind()) return false;
  return true;
}

int Product::num_tiles(int m) const {
  int tiles = 0;
  for (const Linear* weight : weights_) tiles += weight->num_tiles(m);
  return tiles;
}

void Product::quantize(const float* x, int64_t ldx, int begin, int end, int m, char* activations) const {
  for (int i = 0; i < size(); ++i)
    if (is_first(i, m)) weights_[widest(i, m)]->quantize(x, ldx, begin, end, m, activations + offset(i, m));
}

void Product::prefetch_tile(int tile, int m) const {
  for (int i = 0; i < size(); ++i) {
    const int tiles = weights_[i]->num_tiles(m);
    if (tile < tiles) return weights_[i]->prefetch_tile(tile, m);
    tile -= tiles;
  }
}

void Product::run_tile(int tile, int m, const char* activations, const ProductOutput* outputs, void* scratch) const {
  for (int i = 0; i < size(); ++i) {
    const int tiles = weights_[i]->num_tiles(m);
    if (tile < tiles) {
      const ProductOutput& out = outputs[i];
      weights_[i]->run_tile(tile, m, activations + offset(i, m), out.bias, out.y, out.ldy, scratch);
      return;
    }
    tile -= tiles;
  }
}

}  // namespace tokenmill
