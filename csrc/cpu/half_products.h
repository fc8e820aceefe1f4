// F16 weights for processors that multiply halves twice as fast as floats: how both sides lie in memory, and the products.
//
// A row of activations becomes halves times a power of two, so that its largest is at least 32 and below 64. Sums are halves
// over 128 products, each of 8 lanes over 16 of them, then lanes by pairs; floats beyond. Where the sizes of 128 weights add
// up to less than 512, none of these leaves the range of halves. Every output is added up in this order, however rows and
// tokens are blocked, so its bits depend on neither. Weights lie in panels of 4 rows, 8 columns of each in turn: one
// stream for the memory. They take as many bytes as in the file. linear_half.cpp stores and divides.
#pragma once

#include <cstdint>
#include <memory>

#include "linear.h"

namespace tokenmill {

constexpr int kHalfRows = 4, kHalfLanes = 8;  // of a panel; columns are a multiple of the lanes

// Halves from one row of activations to the next, in lines of 64 bytes: behind the row stands the float that takes its
// power of two back.
inline int64_t half_row_stride(int64_t cols) { return (cols + 2 + 31) / 32 * 32; }

struct HalfProducts {
  bool (*fits)(const uint16_t* weights, int64_t cols);  // a row, as in the file
  void (*convert_row)(const float* x, int64_t cols, uint16_t* out);
  // y[t][r] = w[r] . x[t] (+ bias[r]) for r < rows, t < tokens; w: panels, rows of y are ldy apart.
  void (*multiply)(const uint16_t* w, int64_t rows, const uint16_t* x, int tokens, int64_t cols, const float* bias,
                   float* y, int64_t ldy);
};

const HalfProducts* half_products();  // null: this CPU, or the instruction set that was asked for, has none

std::unique_ptr<Linear> make_half_linear(int64_t rows, int64_t cols, const HalfProducts& products);

}  // namespace tokenmill
