// NEON with dot product (Armv8.2 and later): the table of panel kernels.
//
// Built with -march=armv8.2-a+dotprod; chosen by linear_dispatch.cpp where the CPU says so.
#include "neon_vector.h"

namespace tokenmill {

const PanelKernels* neon_dotprod_kernels() {
  static const PanelKernels kernels = make_kernels<Neon>("neon_dotprod", expand_from);
  return &kernels;
}

}  // namespace tokenmill
