// The float kernels compiled for avx512_vnni. Called through float_kernels() only, on CPUs that have it.
#include "../float_kernels_impl.h"

namespace tokenmill {

const FloatKernels& avx512_float_kernels() {
  static const FloatKernels table = make_float_kernels("avx512");
  return table;
}

}  // namespace tokenmill
