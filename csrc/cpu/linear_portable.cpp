// The kernels that run everywhere: each panel is dequantized to float32 in the thread's scratch and multiplied.
//
// Correct for every format and shape, fast for none; it is what other instruction sets are compared with. Activations
// stay float32.
#include <algorithm>

#include "float_rows.h"
#include "linear_panel.h"

namespace tokenmill {
namespace {

constexpr int kLanes = 8;  // partial sums, so that the compiler may vectorize without reordering anything

float dot(const float* a, const float* b, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  float sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (int l = 0; l < kLanes; ++l) sum += lanes[l];
  return sum;
}

class PortableLinear final : public WithFloatRows<PanelLinear> {
 public:
  PortableLinear(const std::string& type, const PanelLayout& layout, const QuantFormat* format, int64_t rows)
      : WithFloatRows<PanelLinear>(type + " portable", layout, format, rows) {}

  int num_tiles(int) const override { return int(num_panels()); }
  size_t scratch_bytes(int) const override { return size_t(cols) * 4; }

  void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                void* scratch) const override {
    const float* x = static_cast<const float*>(activations);
    float* weights = static_cast<float*>(scratch);
    const int64_t first = int64_t(tile) * kPanelCols, last = std::min(first + kPanelCols, rows);
    for (int64_t row = first; row < last; ++row) {
      dequantize_row(row, weights);
      for (int t = 0; t < m; ++t) y[t * ldy + row] = dot(weights, x + t * cols, cols) + (bias ? bias[row] : 0.0f);
    }
  }
};

}  // namespace

std::unique_ptr<PanelLinear> make_portable_panel_linear(const std::string& type, const PanelLayout& layout,
                                                        const QuantFormat* format, int64_t rows) {
  return std::make_unique<PortableLinear>(type, layout, format, rows);
}

}  // namespace tokenmill
