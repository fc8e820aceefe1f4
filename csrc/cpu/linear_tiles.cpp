// Storage of BF16 weights in tiles and their division among threads. See bfloat_tiles.h.
#include <algorithm>
#include <string>

#include "bfloat_tiles.h"
#include "linear_panel.h"

namespace tokenmill {
namespace {

constexpr int kTileKind = 7;  // activation kind: two terms in tiles
constexpr int kTokensAtOnce = 128;

class BfloatTileLinear final : public Linear {
 public:
  BfloatTileLinear(int64_t rows, int64_t cols, const BfloatTiles& tiles)
      : Linear(rows, cols),
        tiles_(tiles),
        name_(std::string("BF16 ") + tiles.name),
        depth_((cols + kTileDepth - 1) / kTileDepth),
        storage_(size_t((rows + kTileOutputs - 1) / kTileOutputs * depth_ * kTileValues) * 2) {}

  size_t bytes() const override { return storage_.size(); }
  const char* kernel() const override { return name_.c_str(); }

  int pack_row_block() const override { return kTileOutputs; }
  void pack_rows(const void* data, int64_t begin, int64_t end) override {
    const auto* from = static_cast<const uint16_t*>(data);
    for (int64_t row = begin; row < end; row += kTileOutputs)
      for (int64_t k = 0; k < depth_ * kTileDepth; k += kTileDepth)
        for (int n = 0; n < kTileOutputs; ++n)
          for (int64_t i = k; i < k + kTileDepth; ++i)
            weights()[place(row + n, i)] = row + n < rows && i < cols ? from[(row + n) * cols + i] : uint16_t(0);
  }
  void dequantize_row(int64_t row, float* out) const override {
    for (int64_t k = 0; k < cols; ++k) out[k] = bfloat_to_float(weights()[place(row, k)]);
  }

  int activation_kind(int) const override { return kTileKind; }
  int activation_row_block(int) const override { return 1; }
  size_t activation_bytes(int m) const override {
    return size_t((m + kTileTokens - 1) / kTileTokens * depth_ * kTileValues) * 2;
  }
  void quantize(const float* x, int64_t ldx, int begin, int end, int, void* activations) const override {
    auto* out = static_cast<uint16_t*>(activations);
    for (int row = begin; row < end; ++row)
      tiles_.split_row(x + row * ldx, cols,
                       out + row / kTileTokens * depth_ * kTileValues + row % kTileTokens * 2 * kTileDepth);
  }

  // Blocks of outputs, each with blocks of rows: the weights of a block stay in the second-level cache for all rows.
  int num_tiles(int m) const override { return int((rows + outputs(m) - 1) / outputs(m)) * token_blocks(m); }
  size_t scratch_bytes(int) const override { return 0; }
  void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                void*) const override {
    const int64_t row = int64_t(tile / token_blocks(m)) * outputs(m);
    const int token = tile % token_blocks(m) * kTokensAtOnce;
    TileProduct product;
    product.rows = static_cast<const uint16_t*>(activations) + token / kTileTokens * depth_ * kTileValues;
    product.weights = weights() + row / kTileOutputs * depth_ * kTileValues;
    product.depth = depth_;
    product.tokens = std::min(kTokensAtOnce, m - token);
    product.outputs = int(std::min<int64_t>(outputs(m), rows - row));
    product.bias = bias ? bias + row : nullptr;
    product.y = y + token * ldy + row;
    product.ldy = ldy;
    tiles_.multiply(product);
  }

 private:
  // Of a piece of work: more for many rows, whose activations come from afar for each piece.
  static int outputs(int m) { return m >= 256 ? 128 : m >= 64 ? 64 : 32; }
  static int token_blocks(int m) { return (m + kTokensAtOnce - 1) / kTokensAtOnce; }

  uint16_t* weights() const { return reinterpret_cast<uint16_t*>(storage_.data()); }
  int64_t place(int64_t row, int64_t k) const {
    const int64_t tile = row / kTileOutputs * depth_ + k / kTileDepth;
    return tile * kTileValues + k % kTileDepth / 2 * 2 * kTileOutputs + row % kTileOutputs * 2 + k % 2;
  }

  const BfloatTiles& tiles_;
  std::string name_;
  const int64_t depth_;
  AlignedBytes storage_;
};

}  // namespace

std::unique_ptr<Linear> make_bfloat_tiles(int64_t rows, int64_t cols, const BfloatTiles& tiles) {
  return std::make_unique<BfloatTileLinear>(rows, cols, tiles);
}

}  // namespace tokenmill
