// NEON with dot product (Armv8.2 and later): the table of panel kernels.
//
// Built with -march=armv8.2-a+dotprod; chosen by linear_dispatch.cpp where the CPU says so.
#include "neon_vector.h"

namespace tokenmill {
namespace {

// Measured on a Neoverse-N1: from here on, unpacking once for all rows beats group scales in the product.
int expand_from(const PanelLayout& layout) {
  if (layout.superblock) return layout.bits == 6 || layout.bits <= 3 ? 9 : layout.bits == 5 ? 11 : 16;
  if (layout.bits == 5) return 8;
  return layout.bits == 8 || layout.has_min || layout.has_lut ? 9 : 12;
}

}  // namespace

const PanelKernels* neon_dotprod_kernels() {
  static const PanelKernels kernels = make_kernels<Neon>("neon_dotprod", expand_from);
  return &kernels;
}

}  // namespace tokenmill
