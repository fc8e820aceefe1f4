// Attention's inner products in half precision, for processors that multiply halves twice as fast as floats.
//
// Keys, values and queries are halves; sums are halves over at most 32 products, floats beyond. Every sum has one order,
// however rows and keys are blocked. What does not fit into a half becomes an infinity or a NaN, never a wrong number:
// attention_half.cpp looks for those and computes such rows again in floats.
#pragma once

#include <cstdint>

namespace tokenmill {

constexpr int kMaxHalfDim = 256;  // of a head: lanes of a half sum dim / 8 products

struct HalfKernels {
  // scores[r][j] = q[r] . k[j] over dim, a multiple of 8, at most kMaxHalfDim; keys: a multiple of 4, k[j] is a row. A row
  // of which a product fell below the range of halves has bad[r] set. ahead: as many rows that come next, for the memory to
  // fetch meanwhile; asked for at once they would hold up the rows at hand.
  void (*scores)(const uint16_t* q, int rows, const uint16_t* const* k, int keys, int64_t dim, uint16_t* scores,
                 int64_t lds, uint8_t* bad, const uint16_t* const* ahead);
  float (*maximum)(const uint16_t* scores);  // of 64
  // values[j] = e^(values[j] - max) of 64, none above max, those below e^-16 as 0; returns their sum.
  float (*exponentials)(uint16_t* values, float max);
  // out[r][d] += sum_j weights[r][j] * v[j][d]; keys: a multiple of 8, at most 64; v[j] is a row.
  void (*accumulate)(const uint16_t* weights, int64_t ldw, int rows, const uint16_t* const* v, int keys, int64_t dim,
                     float* out, int64_t ldo, const uint16_t* const* ahead);
};

const HalfKernels* half_kernels();  // null: this CPU, or the instruction set that was asked for, has none
// Whether attention over heads of this size computes in halves where its pages are such.
inline bool multiplies_halves(int64_t dim) { return dim % 8 == 0 && dim <= kMaxHalfDim && half_kernels() != nullptr; }

}  // namespace tokenmill
