// What kernels in half precision have in common on NEON.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace tokenmill {
namespace {

inline float16x8_t load_halves(const uint16_t* p) { return vreinterpretq_f16_u16(vld1q_u16(p)); }

// By hand, as in float_kernels_impl.h: the compiler would copy sums from register to register.
template <bool First>
__attribute__((always_inline)) inline void multiply_add(float16x8_t& sum, float16x8_t a, float16x8_t b) {
  if constexpr (First) {
    asm("fmul %0.8h, %1.8h, %2.8h" : "=w"(sum) : "w"(a), "w"(b));
  } else {
    asm("fmla %0.8h, %1.8h, %2.8h" : "+w"(sum) : "w"(a), "w"(b));
  }
}

}  // namespace
}  // namespace tokenmill
