// F32, F16 and BF16 weights in panels of columns, multiplied in float32 by whole vectors of outputs: everything but
// NEON.
//
// A panel is `columns` rows of the weight, transposed: the numbers of one k lie side by side. A pass multiplies a few
// rows of activations with two vectors of outputs and keeps their sums in registers over all of k, so that every output
// is one chain of fused products in the order of k: the same bits for any number of rows and threads.
// linear_float_panels.cpp stores the panels, float_panels_impl.h multiplies, once per instruction set.
#pragma once

#include <cstdint>
#include <memory>

#include "linear.h"
#include "quant_blocks.h"

namespace tokenmill {

// y[t][c] = panel[.][c] . x[t] (+ bias[c]) for t < m and the first `count` columns; rows of x and y are ldx and ldy
// apart.
struct PanelProduct {
  const void* panel;
  const float* x;
  int64_t ldx;
  int m;
  int64_t cols;
  const float* bias;  // or null
  int count;
  float* y;
  int64_t ldy;
};

struct FloatPanels {
  int columns;
  void (*multiply_float)(const PanelProduct& product);
  void (*multiply_half)(const PanelProduct& product);
  void (*multiply_bfloat)(const PanelProduct& product);
};

const FloatPanels& float_panels(Isa isa);
std::unique_ptr<Linear> make_float_panels(const QuantFormat& format, int64_t rows, int64_t cols,
                                          const FloatPanels& panels);

}  // namespace tokenmill
