// Tiling of the integer products over panels (see linear_panel.h).
//
// A tile is a run of panels (direct) or one panel and a block of rows (expanded). Every output is summed inside one
// tile, in an order that no split changes, so results do not depend on the number of threads.
#include "linear_panel.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "memory.h"

namespace tokenmill {

AlignedBytes::AlignedBytes(size_t size) : size_(size) {
  // One vector of slack, so that kernels may load past the last scale.
  block_ = allocate_huge(size + 64, &data_);
}

PanelLinear::PanelLinear(const std::string& name, const PanelLayout& layout, const QuantFormat* format, int64_t rows)
    : Linear(rows, layout.cols),
      layout(layout),
      format_(format),
      name_(name),
      storage_(size_t((rows + kPanelCols - 1) / kPanelCols * layout.panel_bytes)) {}

void PanelLinear::pack_rows(const void* data, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row += kPanelCols)
    pack_panel(layout, *format_, data, row, rows, panel(row / kPanelCols));
}

void PanelLinear::dequantize_row(int64_t row, float* out) const {
  dequantize_panel_column(layout, panel(row / kPanelCols), int(row % kPanelCols), out);
}

// Expanding a panel once per block of rows costs, so no more blocks than needed.
int64_t wanted_tiles() {
  static const int64_t wanted = std::min<int64_t>(64, 8 * std::max(1u, std::thread::hardware_concurrency()));
  return wanted;
}

namespace {

constexpr int kScaleFloats = kChunk / 32 * kBlockScales;
constexpr int64_t kTileBytes = 16384;  // direct: a tile is about a microsecond of work

// A precise weight sees each row twice: rounded, and what rounding took away, rounded in its turn. The second set of
// activations follows the first, so that plain weights can share the first.
class IntegerLinear final : public PanelLinear {
 public:
  IntegerLinear(const std::string& type, const PanelLayout& layout, const QuantFormat* format, int64_t rows,
                const PanelKernels& kernels, bool precise)
      : PanelLinear(type + " " + kernels.name + (precise ? " precise" : ""), layout, format, rows),
        kernels_(kernels),
        precise_(precise),
        direct_(kernels.direct(layout)),
        expand_(kernels.expand(layout)),
        multiply_(kernels.multiply(layout)),
        // Requantizing would round the weights instead: a precise one stays with the direct product.
        expand_from_(precise && requantizes(layout) ? std::numeric_limits<int>::max() : kernels.expand_from(layout)),
        row_form_{layout.cols, layout.superblock ? 256 : 32},
        quad_form_{layout.cols, requantizes(layout) ? kQuantBlock : 32, kernels.quad_run} {
    const int64_t by_size = std::max<int64_t>(1, kTileBytes / layout.panel_bytes);
    tile_panels_ = int(std::max<int64_t>(1, std::min(by_size, num_panels() / wanted_tiles())));
    if (kernels.tiles && !precise) tiled_from_ = kernels.tiles->from(layout);
    if (tiled_from_ != kNoTiles) tiling_ = std::make_unique<PanelTiling>(*this, *kernels.tiles);
  }

  void multiply_floats() override { tiled_from_ = kNoTiles; }  // rounded inputs are int8 codes: exact as integers

  int activation_kind(int m) const override {
    if (tiled(m)) return kTiledKind;
    return expanded(m) ? quad_kind(quad_form_.block, quad_form_.run) : int(row_form_.block);
  }
  int activation_row_block(int m) const override { return expanded(m) && !tiled(m) ? 4 : 1; }
  bool activations_by_row(int m) const override { return !expanded(m) && !tiled(m) && !precise_; }
  size_t activation_bytes(int m) const override {
    return tiled(m) ? tiling_->activation_bytes(m) : size_t(set_bytes(m)) * (precise_ ? 2 : 1);
  }

  void quantize(const float* x, int64_t ldx, int begin, int end, int m, void* activations) const override {
    if (tiled(m)) return tiling_->quantize(x, ldx, begin, end, activations);
    uint8_t* out = static_cast<uint8_t*>(activations);
    const int64_t second = set_bytes(m);
    thread_local std::vector<float> kept;
    if (precise_ && kept.size() < size_t(4 * cols)) kept.resize(size_t(4 * cols));
    float* residuals = precise_ ? kept.data() : nullptr;
    if (!expanded(m)) {
      const int block = int(row_form_.block);
      for (int row = begin; row < end; ++row) {
        uint8_t* to = out + row * row_form_.bytes();
        kernels_.quantize_row(x + row * ldx, cols, block, to, residuals);
        if (precise_) kernels_.quantize_row(residuals, cols, block, to + second, nullptr);
      }
      return;
    }
    const int block = int(quad_form_.block);
    for (int row = begin; row < end; row += 4) {
      const float *quad[4] = {}, *rest[4] = {};
      for (int t = 0; t < 4 && row + t < m; ++t) {
        quad[t] = x + (row + t) * ldx;
        rest[t] = residuals + t * cols;
      }
      uint8_t* to = out + row / 4 * quad_form_.bytes();
      kernels_.quantize_quad(quad, cols, block, to, residuals);
      if (precise_) kernels_.quantize_quad(rest, cols, block, to + second, nullptr);
    }
  }

  int num_tiles(int m) const override {
    if (tiled(m)) return tiling_->num_pieces(m);
    if (!expanded(m)) return int((num_panels() + tile_panels_ - 1) / tile_panels_);
    return int(num_panels()) * token_blocks(m);
  }

  size_t scratch_bytes(int m) const override {
    if (tiled(m)) return tiling_->scratch_bytes(m);
    if (!expanded(m)) return 0;
    return kChunk * kPanelCols + kScaleFloats * 4 + size_t(token_block(m)) * kPanelCols * 4 * (precise_ ? 2 : 1);
  }

  void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                void* scratch) const override {
    if (tiled(m)) return tiling_->run(tile, m, activations, bias, y, ldy, scratch);
    const uint8_t* rows_in = static_cast<const uint8_t*>(activations);
    if (expanded(m)) return run_expanded(tile, m, rows_in, bias, y, ldy, static_cast<uint8_t*>(scratch));
    const int64_t first = int64_t(tile) * tile_panels_, last = std::min(first + tile_panels_, num_panels());
    float out[8 * kPanelCols];
    for (int64_t p = first; p < last; ++p)
      for (int row = 0; row < m; row += 4) {
        const int count = std::min(4, m - row);
        const uint8_t* from = rows_in + row * row_form_.bytes();
        if (precise_ && m == 1) {
          direct_(layout, panel(p), from, 2, out);  // the two lie side by side
        } else {
          direct_(layout, panel(p), from, count, out);
          if (precise_) direct_(layout, panel(p), from + set_bytes(m), count, out + count * kPanelCols);
        }
        write(out, precise_ ? out + count * kPanelCols : nullptr, p, row, count, bias, y, ldy);
      }
  }

  void prefetch_tile(int tile, int m) const override {
    const int64_t first = tiled(m)      ? tiling_->first_panel(tile, m)
                          : expanded(m) ? tile / token_blocks(m)
                                        : int64_t(tile) * tile_panels_;
    const uint8_t* from = panel(first);
    for (int line = 0; line < 1024; line += 64) __builtin_prefetch(from + line);
  }

 private:
  bool expanded(int m) const { return m >= expand_from_; }
  bool tiled(int m) const { return m >= tiled_from_; }
  int64_t set_bytes(int m) const {
    return expanded(m) ? int64_t(m + 3) / 4 * quad_form_.bytes() : m * row_form_.bytes();
  }

  // Rows per tile: split further only where there are too few panels to go round.
  int token_block(int m) const {
    int64_t block = kTokenBlock;
    while (block > 64 && num_panels() * ((m + block - 1) / block) < wanted_tiles()) block /= 2;
    return int(std::min<int64_t>(block, (m + 3) / 4 * 4));
  }
  int token_blocks(int m) const { return (m + token_block(m) - 1) / token_block(m); }

  void write(const float* sums, const float* more, int64_t p, int row, int count, const float* bias, float* y,
             int64_t ldy) const {
    const int64_t base = p * kPanelCols;
    const int width = int(std::min<int64_t>(kPanelCols, rows - base));
    for (int t = 0; t < count; ++t, sums += kPanelCols) {
      float* out = y + (row + t) * ldy + base;
      if (more) {
        for (int c = 0; c < width; ++c) out[c] = sums[c] + more[t * kPanelCols + c] + (bias ? bias[base + c] : 0.0f);
      } else if (bias) {
        for (int c = 0; c < width; ++c) out[c] = sums[c] + bias[base + c];
      } else if (width == kPanelCols) {
        std::memcpy(out, sums, kPanelCols * sizeof(float));
      } else {
        std::copy_n(sums, width, out);
      }
    }
  }

  void run_expanded(int tile, int m, const uint8_t* quads, const float* bias, float* y, int64_t ldy,
                    uint8_t* scratch) const {
    const int64_t p = tile / token_blocks(m);
    const int first = tile % token_blocks(m) * token_block(m), last = std::min(first + token_block(m), m);
    const int num_quads = (last - first + 3) / 4;
    int8_t* w8 = reinterpret_cast<int8_t*>(scratch);
    float* scales = reinterpret_cast<float*>(scratch + kChunk * kPanelCols);
    float *sums = scales + kScaleFloats, *more = precise_ ? sums + num_quads * 4 * kPanelCols : nullptr;
    const uint8_t* from = quads + first / 4 * quad_form_.bytes();
    for (int64_t begin = 0; begin < cols; begin += kChunk) {
      const int64_t end = std::min<int64_t>(begin + kChunk, cols);
      const int8_t* codes = expand_(layout, panel(p), begin, end, w8, scales);
      const uint8_t* next = panel(p) + end * layout.panel_bytes / cols;  // the next chunk, or the panel behind this one
      const int64_t next_bytes = std::min<int64_t>(kChunk, cols) * layout.panel_bytes / cols;
      multiply_(codes, scales, begin, end, from, cols, num_quads, {next, next + next_bytes}, sums);
      if (precise_) multiply_(codes, scales, begin, end, from + set_bytes(m), cols, num_quads, {next, next}, more);
    }
    write(sums, more, p, first, last - first, bias, y, ldy);
  }

  const PanelKernels& kernels_;
  const bool precise_;
  const DirectFn direct_;
  const ExpandFn expand_;
  const MultiplyFn multiply_;
  const int expand_from_;
  const RowForm row_form_;
  const QuadForm quad_form_;
  int tile_panels_, tiled_from_ = kNoTiles;
  std::unique_ptr<PanelTiling> tiling_;
};

}  // namespace

std::unique_ptr<PanelLinear> make_panel_linear(const std::string& type, const PanelLayout& layout,
                                               const QuantFormat* format, int64_t rows, Isa isa, bool precise) {
  const PanelKernels* kernels = find_panel_kernels(isa);
  if (!kernels) return make_portable_panel_linear(type, layout, format, rows);
  return std::make_unique<IntegerLinear>(type, layout, format, rows, *kernels, precise);
}

}  // namespace tokenmill
