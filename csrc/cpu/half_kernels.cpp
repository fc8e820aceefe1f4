// Whether this CPU multiplies halves. See half_kernels.h.
#include "half_kernels.h"

#include "linear.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tokenmill {

#if defined(TOKENMILL_HAS_NEON_DOTPROD)
const HalfKernels& neon_half_kernels();
#endif

const HalfKernels* half_kernels() {
  static const HalfKernels* const chosen = []() -> const HalfKernels* {
#if defined(TOKENMILL_HAS_NEON_DOTPROD)
    if (best_isa() == Isa::portable) return nullptr;
#if defined(__linux__)
    if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDHP)) return nullptr;
#endif
    return &neon_half_kernels();  // Apple's processors have them all
#else
    return nullptr;
#endif
  }();
  return chosen;
}

}  // namespace tokenmill
