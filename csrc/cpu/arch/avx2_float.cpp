// The float kernels compiled for avx2. Called through float_kernels() only, on CPUs that have it.
#include "../float_kernels_impl.h"

namespace tokenmill {

const FloatKernels& avx2_float_kernels() {
  static const FloatKernels table = make_float_kernels("avx2");
  return table;
}

}  // namespace tokenmill
