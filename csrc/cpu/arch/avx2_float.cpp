// The float kernels and the products of float panels compiled for avx2. Called through float_kernels()
// and float_panels() only, on CPUs that have it.
#include "../float_kernels_impl.h"
#include "../float_panels_impl.h"

namespace tokenmill {

const FloatKernels& avx2_float_kernels() {
  static const FloatKernels table = make_float_kernels("avx2");
  return table;
}

const FloatPanels& avx2_float_panels() { return kFloatPanels; }

}  // namespace tokenmill
