// Tiling of the integer products over panels (see linear_panel.h).
//
// A tile is a run of panels (direct) or one panel and a block of rows (expanded). Every output is summed inside one
// tile, in an order that no split changes, so results do not depend on the number of threads.
#include "linear_panel.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <thread>
#include <vector>

namespace tokenmill {

AlignedBytes::AlignedBytes(size_t size) : data_(nullptr), size_(size) {
  void* memory = nullptr;
  // One vector of slack, so that kernels may load past the last scale.
  if (posix_memalign(&memory, 64, size + 64) != 0) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(memory);
}

AlignedBytes::~AlignedBytes() { std::free(data_); }

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

namespace {

constexpr int kQuadKind = 1000;     // activation kinds: block for rows, this + block for quads
constexpr int kPreciseKind = 2000;  // added where each row has a second slot for its residual
constexpr int kScaleFloats = kChunk / 32 * 2 * kPanelCols;
constexpr int64_t kTileBytes = 16384;  // direct: a tile is about a microsecond of work

// Fewer tiles than this leave threads idle. Expanding a panel once per block of rows costs, so no more blocks than
// needed.
int64_t wanted_tiles() {
  static const int64_t wanted = std::min<int64_t>(64, 8 * std::max(1u, std::thread::hardware_concurrency()));
  return wanted;
}

class IntegerLinear final : public PanelLinear {
 public:
  IntegerLinear(const std::string& type, const PanelLayout& layout, const QuantFormat* format, int64_t rows,
                const PanelKernels& kernels, bool precise)
      : PanelLinear(type + " " + kernels.name + (precise ? " precise" : ""), layout, format, rows),
        kernels_(kernels),
        slots_per_row_(precise ? 2 : 1),
        direct_(kernels.direct(layout)),
        expand_(kernels.expand(layout)),
        multiply_(kernels.multiply(layout)),
        // Requantizing would round the weights instead: a precise one stays with the direct product.
        expand_from_(precise && requantizes(layout) ? std::numeric_limits<int>::max() : kernels.expand_from(layout)),
        row_form_{layout.cols, layout.superblock ? 256 : 32},
        quad_form_{layout.cols, requantizes(layout) ? kQuantBlock : 32} {
    const int64_t by_size = std::max<int64_t>(1, kTileBytes / layout.panel_bytes);
    tile_panels_ = int(std::max<int64_t>(1, std::min(by_size, num_panels() / wanted_tiles())));
  }

  int activation_kind(int m) const override {
    const int64_t kind = expanded(m) ? kQuadKind + quad_form_.block : row_form_.block;
    return int(kind) + (slots_per_row_ - 1) * kPreciseKind;
  }
  int activation_row_block(int m) const override { return expanded(m) ? 4 / slots_per_row_ : 1; }
  size_t activation_bytes(int m) const override {
    const int slots = m * slots_per_row_;
    return size_t(expanded(m) ? (slots + 3) / 4 * quad_form_.bytes() : slots * row_form_.bytes());
  }

  void quantize(const float* x, int64_t ldx, int begin, int end, int m, void* activations) const override {
    uint8_t* out = static_cast<uint8_t*>(activations);
    const int block = int(expanded(m) ? quad_form_.block : row_form_.block);
    // A precise weight sees each row twice: rounded, and what rounding took away (rounded in its turn).
    thread_local std::vector<float> residuals;
    if (slots_per_row_ == 2 && residuals.size() < size_t(2 * cols)) residuals.resize(size_t(2 * cols));
    auto residual = [&](int row) {
      float* to = residuals.data() + row % 2 * cols;
      kernels_.residual(x + row * ldx, cols, block, to);
      return to;
    };
    if (!expanded(m)) {
      for (int row = begin; row < end; ++row) {
        uint8_t* to = out + row * slots_per_row_ * row_form_.bytes();
        kernels_.quantize_row(x + row * ldx, cols, block, to);
        if (slots_per_row_ == 2) kernels_.quantize_row(residual(row), cols, block, to + row_form_.bytes());
      }
      return;
    }
    const int step = 4 / slots_per_row_;
    for (int row = begin; row < end; row += step) {
      const float* quad[4] = {};
      for (int t = 0; t < step && row + t < m; ++t) {
        quad[t * slots_per_row_] = x + (row + t) * ldx;
        if (slots_per_row_ == 2) quad[t * 2 + 1] = residual(row + t);
      }
      kernels_.quantize_quad(quad, cols, block, out + row / step * quad_form_.bytes());
    }
  }

  int num_tiles(int m) const override {
    if (!expanded(m)) return int((num_panels() + tile_panels_ - 1) / tile_panels_);
    return int(num_panels()) * token_blocks(m * slots_per_row_);
  }

  size_t scratch_bytes(int m) const override {
    if (!expanded(m)) return 0;
    return kChunk * kPanelCols + kScaleFloats * 4 + size_t(token_block(m * slots_per_row_)) * kPanelCols * 4;
  }

  void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                void* scratch) const override {
    const uint8_t* rows_in = static_cast<const uint8_t*>(activations);
    if (expanded(m))
      return run_expanded(tile, m * slots_per_row_, rows_in, bias, y, ldy, static_cast<uint8_t*>(scratch));
    const int64_t first = int64_t(tile) * tile_panels_, last = std::min(first + tile_panels_, num_panels());
    float out[4 * kPanelCols];
    const int slots = m * slots_per_row_;
    for (int64_t p = first; p < last; ++p)
      for (int slot = 0; slot < slots; slot += 4) {
        const int count = std::min(4, slots - slot);
        direct_(layout, panel(p), rows_in + slot * row_form_.bytes(), count, out);
        write(out, p, slot, count, bias, y, ldy);
      }
  }

 private:
  bool expanded(int m) const { return m * slots_per_row_ >= expand_from_; }

  // Slots per tile: split further only where there are too few panels to go round.
  int token_block(int slots) const {
    int64_t block = kTokenBlock;
    while (block > 64 && num_panels() * ((slots + block - 1) / block) < wanted_tiles()) block /= 2;
    return int(std::min<int64_t>(block, (slots + 3) / 4 * 4));
  }
  int token_blocks(int slots) const { return (slots + token_block(slots) - 1) / token_block(slots); }

  void write(const float* sums, int64_t p, int slot, int count, const float* bias, float* y, int64_t ldy) const {
    const int64_t base = p * kPanelCols;
    const int width = int(std::min<int64_t>(kPanelCols, rows - base));
    for (int t = 0; t < count; t += slots_per_row_, sums += slots_per_row_ * kPanelCols) {
      float* out = y + (slot + t) / slots_per_row_ * ldy + base;
      if (slots_per_row_ == 2) {
        for (int c = 0; c < width; ++c) out[c] = sums[c] + sums[kPanelCols + c] + (bias ? bias[base + c] : 0.0f);
      } else if (bias) {
        for (int c = 0; c < width; ++c) out[c] = sums[c] + bias[base + c];
      } else if (width == kPanelCols) {
        std::copy_n(sums, kPanelCols, out);
      } else {
        std::copy_n(sums, width, out);
      }
    }
  }

  void run_expanded(int tile, int slots, const uint8_t* quads, const float* bias, float* y, int64_t ldy,
                    uint8_t* scratch) const {
    const int64_t p = tile / token_blocks(slots);
    const int first = tile % token_blocks(slots) * token_block(slots), last = std::min(first + token_block(slots), slots);
    int8_t* w8 = reinterpret_cast<int8_t*>(scratch);
    float* scales = reinterpret_cast<float*>(scratch + kChunk * kPanelCols);
    float* sums = scales + kScaleFloats;
    for (int64_t begin = 0; begin < cols; begin += kChunk) {
      const int64_t end = std::min<int64_t>(begin + kChunk, cols);
      expand_(layout, panel(p), begin, end, w8, scales);
      multiply_(w8, scales, begin, end, quads + first / 4 * quad_form_.bytes(), cols, (last - first + 3) / 4, sums);
    }
    write(sums, p, first, last - first, bias, y, ldy);
  }

  const PanelKernels& kernels_;
  const int slots_per_row_;
  const DirectFn direct_;
  const ExpandFn expand_;
  const MultiplyFn multiply_;
  const int expand_from_;
  const RowForm row_form_;
  const QuadForm quad_form_;
  int tile_panels_;
};

}  // namespace

std::unique_ptr<PanelLinear> make_panel_linear(const std::string& type, const PanelLayout& layout,
                                               const QuantFormat* format, int64_t rows, Isa isa, bool precise) {
  const PanelKernels* kernels = find_panel_kernels(isa);
  if (!kernels) return make_portable_panel_linear(type, layout, format, rows);
  return std::make_unique<IntegerLinear>(type, layout, format, rows, *kernels, precise);
}

}  // namespace tokenmill
