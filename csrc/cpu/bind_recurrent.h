// Recurrent ops as they arrive from Python: the op and the memory of its states.
#pragma once

#include <memory>

#include "bind.h"
#include "recurrent.h"

namespace tokenmill {

using States3 = Tensor<float, nb::ndim<3>, nb::c_contig>;
using States4 = Tensor<float, nb::ndim<4>, nb::c_contig>;

struct BoundRecurrence {
  std::shared_ptr<const Recurrence> op;
  float* states;  // [slots, op->state_floats()]
  int64_t num_slots;
};

// weight: one row for each group of a row, or a single one for all groups.
GatedNorm gated_norm_of(ConstMatrix weight, int64_t width, float eps, bool norm_first, float gate_scale);

}  // namespace tokenmill
