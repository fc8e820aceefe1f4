// NEON with int8 matrix products (Armv8.6, and 8.2 with i8mm): the table of panel kernels.
//
// The direct product is that of neon_vector.h, where few rows leave nothing to pair. The expanded one goes by 2 rows x
// 2 columns x 8 k: weights are zipped when they are expanded and rows when they are quantized, so that the inner loop
// only loads and multiplies. Built with +i8mm; chosen by linear_dispatch.cpp where the CPU says so.
#include "neon_vector.h"

namespace tokenmill {
namespace {

struct NeonI8mm : Neon {
  static constexpr int kQuadRun = 8, kDotOperations = 64;
  static constexpr bool kBlocks = false;

  // 4 columns x 4 k twice, to columns 0 and 1 x 8 k, then columns 2 and 3.
  static TM_INLINE void store_pairs(int8_t* p, Bytes first, Bytes second) {
    const int32x4_t low = vreinterpretq_s32_s8(first), high = vreinterpretq_s32_s8(second);
    vst1q_s8(p, vreinterpretq_s8_s32(vzip1q_s32(low, high)));
    vst1q_s8(p + 16, vreinterpretq_s8_s32(vzip2q_s32(low, high)));
  }
  static TM_INLINE Ints dot_pairs(Ints acc, X rows, Bytes w) { return vmmlaq_s32(acc, rows, w); }
  static TM_INLINE void split_pairs(Ints left, Ints right, Ints& even, Ints& odd) {
    const int64x2_t a = vreinterpretq_s64_s32(left), b = vreinterpretq_s64_s32(right);
    even = vreinterpretq_s32_s64(vzip1q_s64(a, b));
    odd = vreinterpretq_s32_s64(vzip2q_s64(a, b));
  }
};

}  // namespace

const PanelKernels* neon_i8mm_kernels() {
  static const PanelKernels kernels = make_kernels<NeonI8mm>("neon_i8mm", expand_from);
  return &kernels;
}

}  // namespace tokenmill
