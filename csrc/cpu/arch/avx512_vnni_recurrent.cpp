// The row kernels of recurrent layers compiled for avx512_vnni. Called through recurrent_kernels() only, on CPUs that
// have it.
#include "../recurrent_impl.h"

namespace tokenmill {

const RecurrentKernels& avx512_recurrent_kernels() {
  static const RecurrentKernels table = make_recurrent_kernels();
  return table;
}

}  // namespace tokenmill
