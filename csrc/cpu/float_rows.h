// Activations of kernels that multiply in float32: the rows of x as they are, one after another.
#pragma once

#include <algorithm>

#include "linear.h"

namespace tokenmill {

// What such a Linear says of its activations; Base is Linear or a class of it.
template <class Base>
class WithFloatRows : public Base {
 public:
  using Base::Base;
  int activation_kind(int) const override { return 0; }
  int activation_row_block(int) const override { return 1; }
  size_t activation_bytes(int m) const override { return size_t(m) * size_t(Base::cols) * 4; }
  void quantize(const float* x, int64_t ldx, int begin, int end, int, void* activations) const override {
    float* out = static_cast<float*>(activations);
    for (int row = begin; row < end; ++row) std::copy_n(x + row * ldx, Base::cols, out + row * Base::cols);
  }
};

}  // namespace tokenmill
