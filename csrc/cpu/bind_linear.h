// The Python object that owns a packed weight; shared by the eager binding and the recorder.
#pragma once

#include <memory>

#include "linear.h"

namespace tokenmill {

struct PackedLinear {
  std::unique_ptr<Linear> linear;
};

}  // namespace tokenmill
