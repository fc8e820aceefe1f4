// Four rows x eight columns of the expanded product, scheduled by hand for NEON with dot product.
//
// A block of 32 k is 64 dot products and 16 (with minimums 24) multiply-adds that bring their sums to float. On the Neoverse-N1 a
// dot product that follows a multiply-add waits, because both would write their results in the same cycle, so all the
// multiply-adds of a block come together; the second four columns lag two steps behind the first, so that their start
// does not wait for sums. Loads that repeat are cheaper than copies of registers. Included by neon_vector.h only.
#pragma once

#include <cstdint>

namespace tokenmill {
namespace {

// v0-v3, v4-v7: integer sums of the first and second columns, by row; v8-v11, v12-v15: their float sums; v16-v19 weights;
// v20-v23 rows; v28, v29 scales of the columns, v30 of the rows, v31 scaled code sums of the rows. At the end of a block
// v24-v27 and what is free of the others take the scaled sums, v21 and v22 the minimums.
#define TM_DOT(acc, w, x, row) "sdot v" #acc ".4s, v" #w ".16b, v" #x ".4b[" #row "]\n"
#define TM_FIRST(w, x) TM_DOT(0, w, x, 0) TM_DOT(1, w, x, 1) TM_DOT(2, w, x, 2) TM_DOT(3, w, x, 3)
#define TM_SECOND(w, x) TM_DOT(4, w, x, 0) TM_DOT(5, w, x, 1) TM_DOT(6, w, x, 2) TM_DOT(7, w, x, 3)
#define TM_LOAD(reg, from, at) "ldr q" #reg ", [%[" #from "], #" #at "]\n"
#define TM_CODES(reg, step, half) "ldr q" #reg ", [%[w], #(" #step " * %c[step] + " #half ")]\n"
#define TM_LOAD4(a, b, c, d, from, at) TM_LOAD(a, from, at) TM_LOAD(b, from, at) TM_LOAD(c, from, at) TM_LOAD(d, from, at)
#define TM_SCALE(to, sum, scale) "fmla v" #to ".4s, v" #sum ".4s, v" #scale ".4s\n"
#define TM_ADD(to, sum, scales, row) "fmla v" #to ".4s, v" #sum ".4s, v" #scales ".s[" #row "]\n"
#define TM_ADD4(a, b, c, d, sa, sb, sc, sd, scales) \
  TM_ADD(a, sa, scales, 0) TM_ADD(b, sb, scales, 1) TM_ADD(c, sc, scales, 2) TM_ADD(d, sd, scales, 3)
// clang-format off
#define TM_START TM_LOAD4(0, 1, 2, 3, base, 0) TM_LOAD4(4, 5, 6, 7, base, 0)
#define TM_DOTS                                                                                         \
  TM_LOAD(20, x, 0) TM_CODES(16, 0, 0) TM_LOAD(21, x, 16) TM_CODES(17, 1, 0)                            \
  TM_FIRST(16, 20) TM_LOAD(22, x, 32) TM_CODES(18, 0, 16) TM_CODES(16, 2, 0)                            \
  TM_FIRST(17, 21) TM_CODES(19, 1, 16) TM_CODES(17, 3, 0) TM_SECOND(18, 20)                             \
  TM_FIRST(16, 22) TM_LOAD(23, x, 48) TM_CODES(18, 2, 16) TM_CODES(16, 4, 0) TM_SECOND(19, 21)          \
  TM_FIRST(17, 23) TM_LOAD(20, x, 64) TM_CODES(19, 3, 16) TM_CODES(17, 5, 0) TM_SECOND(18, 22)          \
  TM_FIRST(16, 20) TM_LOAD(21, x, 80) TM_CODES(18, 4, 16) TM_CODES(16, 6, 0) TM_SECOND(19, 23)          \
  TM_FIRST(17, 21) TM_LOAD(22, x, 96) TM_CODES(19, 5, 16) TM_CODES(17, 7, 0) TM_SECOND(18, 20)          \
  TM_FIRST(16, 22) TM_LOAD(23, x, 112) TM_CODES(18, 6, 16) TM_SECOND(19, 21)                            \
  TM_FIRST(17, 23) TM_CODES(19, 7, 16) TM_SECOND(18, 22) TM_SECOND(19, 23)                              \
  "prfm pldl2keep, [%[next]]\n add %[next], %[next], #64\n"                                             \
  "add %[w], %[w], #%c[group]\n add %[x], %[x], #128\n"
#define TM_FLOATS(load_minimums, add_minimums)                                                          \
  TM_LOAD(28, scales, 0) TM_LOAD4(24, 25, 26, 27, scales, 128) load_minimums                            \
  TM_LOAD(29, scales, 16) TM_LOAD4(16, 17, 18, 20, scales, 144) TM_LOAD(30, row_scales, 0)              \
  TM_SCALE(24, 0, 28) TM_SCALE(25, 1, 28) TM_SCALE(26, 2, 28) TM_SCALE(27, 3, 28) add_minimums          \
  TM_SCALE(16, 4, 29) TM_SCALE(17, 5, 29) TM_SCALE(18, 6, 29) TM_SCALE(20, 7, 29)                       \
  TM_ADD4(8, 9, 10, 11, 24, 25, 26, 27, 30) TM_ADD4(12, 13, 14, 15, 16, 17, 18, 20, 30)                 \
  "add %[scales], %[scales], #192\n add %[row_scales], %[row_scales], #16\n"                            \
  "add %[row_sums], %[row_sums], #16\n"
#define TM_MINIMUMS TM_LOAD(31, row_sums, 0) TM_LOAD(21, scales, 64) TM_LOAD(22, scales, 80)
#define TM_ADD_MINIMUMS TM_ADD4(8, 9, 10, 11, 21, 21, 21, 21, 31) TM_ADD4(12, 13, 14, 15, 22, 22, 22, 22, 31)
#define TM_ONE_GROUP "subs %[groups], %[groups], #1\n b.ne 1b\n"
// The last block may have fewer groups.
#define TM_NEXT_BLOCK "mov %[left], #4\n cmp %[groups], #4\n csel %[left], %[groups], %[left], lt\n" \
  "sub %[groups], %[groups], %[left]\n"
#define TM_NEXT_GROUP "subs %[left], %[left], #1\n b.ne 2b\n"
#define TM_ASM(loop)                                                                                    \
  asm volatile("ldp q8, q12, [%[y]]\n ldp q9, q13, [%[y], #64]\n"                                       \
               "ldp q10, q14, [%[y], #128]\n ldp q11, q15, [%[y], #192]\n" loop                         \
               "stp q8, q12, [%[y]]\n stp q9, q13, [%[y], #64]\n"                                       \
               "stp q10, q14, [%[y], #128]\n stp q11, q15, [%[y], #192]\n"                              \
               : [w] "+r"(w), [x] "+r"(x), [scales] "+r"(scales), [row_scales] "+r"(row_scales),        \
                 [row_sums] "+r"(row_sums), [groups] "+r"(groups), [next] "+r"(next), [left] "=&r"(left) \
               : [base] "r"(base), [y] "r"(sums), [step] "i"(kStep), [group] "i"(kGroup)                \
               : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",     \
                 "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22",    \
                 "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")
// clang-format on

// sums[4][16 apart][8] += products of `groups` groups of 32 k, with a scale per kBlock k: 32 or 128. `scales` is laid out
// as kBlockScales says. kStep: bytes from 4 k of the weights to the next, kGroup: from group to group. A line from `next`
// on is asked for with each group.
template <int kBlock, bool kMin, int kStep, int kGroup>
TM_INLINE void multiply_blocks(const int8_t* w, const int8_t* x, const float* scales, const uint8_t* row_scales,
                               const uint8_t* row_sums, int64_t groups, const uint8_t* next, const int32_t* base,
                               float* sums) {
  int64_t left;
  if constexpr (kBlock == 128) {
    TM_ASM("1:\n" TM_NEXT_BLOCK TM_START "2:\n" TM_DOTS TM_NEXT_GROUP TM_FLOATS("", "") "cbnz %[groups], 1b\n");
  } else if constexpr (kMin) {
    TM_ASM("1:\n" TM_START TM_DOTS TM_FLOATS(TM_MINIMUMS, TM_ADD_MINIMUMS) TM_ONE_GROUP);
  } else {
    TM_ASM("1:\n" TM_START TM_DOTS TM_FLOATS("", "") TM_ONE_GROUP);
  }
}

#undef TM_DOT
#undef TM_FIRST
#undef TM_SECOND
#undef TM_LOAD
#undef TM_CODES
#undef TM_LOAD4
#undef TM_SCALE
#undef TM_ADD
#undef TM_ADD4
#undef TM_START
#undef TM_DOTS
#undef TM_FLOATS
#undef TM_MINIMUMS
#undef TM_ADD_MINIMUMS
#undef TM_ONE_GROUP
#undef TM_NEXT_BLOCK
#undef TM_NEXT_GROUP
#undef TM_ASM

}  // namespace
}  // namespace tokenmill
