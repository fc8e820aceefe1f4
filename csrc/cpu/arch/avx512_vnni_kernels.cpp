// AVX-512 with VNNI: the table of panel kernels.
//
// Built with -mavx512f -mavx512bw -mavx512vl -mavx512vnni; chosen by linear_dispatch.cpp where the CPU says so.
#include "avx512_vector.h"

namespace tokenmill {

const PanelKernels* avx512_vnni_kernels() {
  static const PanelKernels kernels = make_kernels<Avx512>("avx512_vnni", expand_from);
  return &kernels;
}

}  // namespace tokenmill
