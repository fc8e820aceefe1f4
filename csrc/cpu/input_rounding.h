// How schemes with quantized activations round the input of a product, row by row: the C++ twin of kernels/rounding.py.
//
// Where a scheme says int8 or float8 activations, that rounding is part of what the weight means; it is applied before
// (or instead of) the rounding that a kernel does for its own sake. Knows nothing of weights or threads.
#pragma once

#include <cstdint>
#include <string>

namespace tokenmill {

enum class InputRounding {
  none,
  int8_token,
  int8_static,
  llm_int8,
  fp8_token,
  fp8_static,
  fp8_group128,
  mxfp8,
  mxfp4,
  nvfp4
};

// False if `name` is not one of kernels/rounding.py.
bool find_input_rounding(const std::string& name, InputRounding* out);

// n values at x to what the product sees of them. `scale` is the calibrated one of the static kinds and nvfp4.
void round_row(const float* x, int64_t n, InputRounding kind, float scale, float* out);

// The int8 kinds without outliers as codes; returns the step, so that the rounded value is step * code.
float int8_row(const float* x, int64_t n, InputRounding kind, float scale, int8_t* codes);

}  // namespace tokenmill
