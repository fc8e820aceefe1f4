// The block formats of GGUF below 4 bits: points of a grid (IQ1, IQ2, IQ3), three levels (TQ); and NVFP4.
//
// How each block comes apart into codes that index a small table of values (quant_blocks.h): a code is the level of a
// weight in its point, and its sign (or shift) above it. The rows of the table in quant_blocks.cpp name these.
#pragma once

#include <cstdint>

#include "quant_blocks.h"

namespace tokenmill {

// A grid as in the file format: for each point its levels, lowest bits first.
struct Grid {
  const uint16_t* points;
  int count;
  int bits;    // of a level
  int length;  // levels in a point
};
const Grid* find_grid(const char* type);  // null if `type` has none

// Values of the codes: 16 of each, so that every table has the same size.
extern const int8_t kIq2Values[16], kIq3XxsValues[16], kIq3SValues[16], kIq1Values[16], kFp4Values[16];

void split_iq2_xxs(const uint8_t* block, SplitBlock& out);
void split_iq2_xs(const uint8_t* block, SplitBlock& out);
void split_iq2_s(const uint8_t* block, SplitBlock& out);
void split_iq3_xxs(const uint8_t* block, SplitBlock& out);
void split_iq3_s(const uint8_t* block, SplitBlock& out);
void split_iq1_s(const uint8_t* block, SplitBlock& out);
void split_iq1_m(const uint8_t* block, SplitBlock& out);
void split_tq1_0(const uint8_t* block, SplitBlock& out);
void split_tq2_0(const uint8_t* block, SplitBlock& out);
void split_nvfp4(const uint8_t* block, SplitBlock& out);

}  // namespace tokenmill
