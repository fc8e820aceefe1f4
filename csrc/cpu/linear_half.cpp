// Storage of F16 weights in panels and their division among threads. See half_products.h.
//
// Where weights are too large for sums of halves, or the input is rounded already, four rows at a time are widened and
// multiplied in float32.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "float_block.h"
#include "float_rows.h"
#include "half_products.h"
#include "linear_panel.h"

namespace tokenmill {
namespace {

constexpr int kHalfKind = 8;  // activation kind: halves
constexpr int kTokens = 64;   // activations multiplied at a time, which stay near while all rows of a tile pass over them

class HalfLinear final : public WithFloatRows<Linear> {
 public:
  HalfLinear(int64_t rows, int64_t cols, const HalfProducts& products)
      : WithFloatRows<Linear>(rows, cols),
        products_(products),
        storage_(size_t((rows + kHalfRows - 1) / kHalfRows * kHalfRows) * size_t(cols) * 2) {}

  size_t bytes() const override { return storage_.size(); }
  const char* kernel() const override { return halves() ? "F16 float16" : "F16 float32"; }

  int pack_row_block() const override { return kHalfRows; }
  void pack_rows(const void* data, int64_t begin, int64_t end) override {
    const auto* from = static_cast<const uint16_t*>(data);
    for (int64_t row = begin; row < end; row += kHalfRows) {
      const int64_t valid = std::min<int64_t>(kHalfRows, rows - row);
      for (int64_t k = 0; k < cols; k += kHalfLanes)
        for (int64_t r = 0; r < valid; ++r)
          std::memcpy(panel(row) + k * kHalfRows + r * kHalfLanes, from + (row + r) * cols + k, kHalfLanes * 2);
      for (int64_t r = row; r < row + valid; ++r)
        if (!products_.fits(from + r * cols, cols)) multiply_floats();
    }
  }
  void dequantize_row(int64_t row, float* out) const override {
    const uint16_t* from = panel(row) + row % kHalfRows * kHalfLanes;
    for (int64_t k = 0; k < cols; k += kHalfLanes)
      float_kernels().half_to_float(from + k * kHalfRows, out + k, kHalfLanes);
  }
  void multiply_floats() override { halves_.store(false, std::memory_order_relaxed); }

  int activation_kind(int m) const override { return halves() ? kHalfKind : WithFloatRows::activation_kind(m); }
  bool activations_by_row(int) const override { return halves(); }
  size_t activation_bytes(int m) const override {
    return halves() ? size_t(m) * size_t(half_row_stride(cols)) * 2 : WithFloatRows::activation_bytes(m);
  }
  void quantize(const float* x, int64_t ldx, int begin, int end, int m, void* activations) const override {
    if (!halves()) return WithFloatRows::quantize(x, ldx, begin, end, m, activations);
    auto* out = static_cast<uint16_t*>(activations);
    for (int row = begin; row < end; ++row)
      products_.convert_row(x + row * ldx, cols, out + row * half_row_stride(cols));
  }

  int num_tiles(int) const override { return int((rows + tile_rows() - 1) / tile_rows()); }
  size_t scratch_bytes(int) const override { return halves() ? 0 : size_t(kHalfRows * cols) * 4; }
  void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                void* scratch) const override {
    const int64_t row = tile * tile_rows(), end = std::min(row + tile_rows(), rows);
    const auto add = [&](int64_t r) { return bias ? bias + r : nullptr; };
    for (int t = 0; t < m; t += kTokens) {
      const int count = std::min(kTokens, m - t);
      float* to = y + t * ldy;
      if (halves()) {
        const auto* x = static_cast<const uint16_t*>(activations) + t * half_row_stride(cols);
        products_.multiply(panel(row), end - row, x, count, cols, add(row), to + row, ldy);
        continue;
      }
      const float* x = static_cast<const float*>(activations) + t * cols;
      auto* wide = static_cast<float*>(scratch);
      for (int64_t r = row; r < end; r += kHalfRows) {
        const int64_t valid = std::min<int64_t>(kHalfRows, end - r);
        for (int64_t i = 0; i < valid; ++i) dequantize_row(r + i, wide + i * cols);
        if (valid == kHalfRows) {
          rows_of<AsFloat, kHalfRows>(wide, x, count, cols, add(r), to + r, ldy);
        } else {
          for (int64_t i = 0; i < valid; ++i)
            rows_of<AsFloat, 1>(wide + i * cols, x, count, cols, add(r + i), to + r + i, ldy);
        }
      }
    }
  }

 private:
  bool halves() const { return halves_.load(std::memory_order_relaxed); }
  int64_t tile_rows() const { return rows >= 1024 ? 64 : 32; }
  uint16_t* panel(int64_t row) const {
    return reinterpret_cast<uint16_t*>(storage_.data()) + row / kHalfRows * kHalfRows * cols;
  }

  const HalfProducts& products_;
  AlignedBytes storage_;
  std::atomic<bool> halves_{true};
};

}  // namespace

std::unique_ptr<Linear> make_half_linear(int64_t rows, int64_t cols, const HalfProducts& products) {
  return std::make_unique<HalfLinear>(rows, cols, products);
}

}  // namespace tokenmill
