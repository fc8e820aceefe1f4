// Storage of float weights in panels, the baseline table of their products and the choice between the tables built in.
//
// See float_panels.h. The wider x86 tables live in arch/<isa>_float.cpp.
#include <algorithm>

#include "float_panels_impl.h"
#include "float_rows.h"
#include "linear_panel.h"

namespace tokenmill {

#if defined(TOKENMILL_HAS_AVX2)
const FloatPanels& avx2_float_panels();
#endif
#if defined(TOKENMILL_HAS_AVX512_VNNI)
const FloatPanels& avx512_float_panels();
#endif

namespace {

class FloatPanelLinear final : public WithFloatRows<Linear> {
 public:
  FloatPanelLinear(const QuantFormat& format, int64_t rows, int64_t cols, const FloatPanels& panels)
      : WithFloatRows<Linear>(rows, cols),
        format_(format),
        panels_(panels),
        name_(std::string(format.name) + " float32"),
        storage_(size_t((rows + panels.columns - 1) / panels.columns * panels.columns * cols) * size_t(format.bytes)) {}

  size_t bytes() const override { return storage_.size(); }
  const char* kernel() const override { return name_.c_str(); }

  int pack_row_block() const override { return panels_.columns; }
  void pack_rows(const void* data, int64_t begin, int64_t end) override {
    if (format_.bytes == 4) return pack(static_cast<const float*>(data), begin, end);
    pack(static_cast<const uint16_t*>(data), begin, end);
  }
  void dequantize_row(int64_t row, float* out) const override {
    if (format_.bytes == 4) return unpack(row, static_cast<const float*>(panel(row)), [](float v) { return v; }, out);
    const auto* words = static_cast<const uint16_t*>(panel(row));
    if (is_bfloat()) return unpack(row, words, [](uint16_t v) { return bfloat_to_float(v); }, out);
    unpack(row, words, [](uint16_t v) { return half_to_float(v); }, out);
  }

  int num_tiles(int) const override { return int((rows + panels_.columns - 1) / panels_.columns); }
  size_t scratch_bytes(int) const override { return 0; }
  void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                void*) const override {
    const int64_t row = int64_t(tile) * panels_.columns;
    const int count = int(std::min<int64_t>(panels_.columns, rows - row));
    const PanelProduct product{panel(row), static_cast<const float*>(activations), cols, m, cols,
                               bias ? bias + row : nullptr, count, y + row, ldy};
    if (format_.bytes == 4) return panels_.multiply_float(product);
    is_bfloat() ? panels_.multiply_bfloat(product) : panels_.multiply_half(product);
  }

 private:
  bool is_bfloat() const { return format_.name[0] == 'B'; }
  // The panel that has `row`.
  void* panel(int64_t row) const {
    return storage_.data() + size_t(row / panels_.columns * panels_.columns * cols) * size_t(format_.bytes);
  }

  template <class Word>
  void pack(const Word* data, int64_t begin, int64_t end) {
    constexpr int64_t kStep = 64 / sizeof(Word);  // a cache line of a row at a time
    const int columns = panels_.columns;
    for (int64_t row = begin; row < end; row += columns) {
      Word* out = static_cast<Word*>(panel(row));
      for (int64_t k = 0; k < cols; k += kStep)
        for (int c = 0; c < columns; ++c)
          for (int64_t i = k; i < std::min(cols, k + kStep); ++i)
            out[i * columns + c] = row + c < rows ? data[(row + c) * cols + i] : Word(0);
    }
  }

  template <class Word, class Function>
  void unpack(int64_t row, const Word* panel, Function to_float, float* out) const {
    const int64_t column = row % panels_.columns;
    for (int64_t k = 0; k < cols; ++k) out[k] = to_float(panel[k * panels_.columns + column]);
  }

  const QuantFormat& format_;
  const FloatPanels& panels_;
  std::string name_;
  AlignedBytes storage_;
};

}  // namespace

const FloatPanels& float_panels(Isa isa) {
  (void)isa;
#if defined(TOKENMILL_HAS_AVX512_VNNI)
  if (isa == Isa::avx512_vnni || isa == Isa::amx) return avx512_float_panels();
#endif
#if defined(TOKENMILL_HAS_AVX2)
  if (isa == Isa::avx2) return avx2_float_panels();
#endif
  return kFloatPanels;
}

std::unique_ptr<Linear> make_float_panels(const QuantFormat& format, int64_t rows, int64_t cols,
                                          const FloatPanels& panels) {
  return std::make_unique<FloatPanelLinear>(format, rows, cols, panels);
}

}  // namespace tokenmill
