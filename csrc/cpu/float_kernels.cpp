// The baseline table of float kernels (NEON on aarch64, SSE2 on x86-64) and the choice between the tables built in.
//
// Called once through float_kernels(). The wider x86 tables live in arch/<isa>_float.cpp.
#include "float_kernels.h"

#include "float_kernels_impl.h"
#include "linear.h"

namespace tokenmill {

#if defined(TOKENMILL_HAS_AVX2)
const FloatKernels& avx2_float_kernels();
#endif
#if defined(TOKENMILL_HAS_AVX512_VNNI)
const FloatKernels& avx512_float_kernels();
#endif

const FloatKernels& float_kernels() {
  static const FloatKernels& chosen = []() -> const FloatKernels& {
    const Isa isa = best_isa();
    (void)isa;
#if defined(TOKENMILL_HAS_AVX512_VNNI)
    if (isa == Isa::avx512_vnni || isa == Isa::amx) return avx512_float_kernels();
#endif
#if defined(TOKENMILL_HAS_AVX2)
    if (isa == Isa::avx2) return avx2_float_kernels();
#endif
    static const FloatKernels baseline = make_float_kernels(kLanes == 4 ? "baseline" : "wide baseline");
    return baseline;
  }();
  return chosen;
}

}  // namespace tokenmill
