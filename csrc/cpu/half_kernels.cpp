// Whether this CPU multiplies halves. See half_kernels.h and half_products.h.
#include "half_kernels.h"

#include "half_products.h"
#include "linear.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tokenmill {

#if defined(TOKENMILL_HAS_NEON_DOTPROD)
const HalfKernels& neon_half_kernels();
const HalfProducts& neon_half_products();

namespace {
bool has_halves() {
  if (best_isa() == Isa::portable) return false;
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDHP;
#else
  return true;  // Apple's processors have them all
#endif
}
}  // namespace

const HalfKernels* half_kernels() {
  static const HalfKernels* const chosen = has_halves() ? &neon_half_kernels() : nullptr;
  return chosen;
}
const HalfProducts* half_products() {
  static const HalfProducts* const chosen = has_halves() ? &neon_half_products() : nullptr;
  return chosen;
}

#else
const HalfKernels* half_kernels() { return nullptr; }
const HalfProducts* half_products() { return nullptr; }
#endif

}  // namespace tokenmill
