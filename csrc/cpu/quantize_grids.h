// Float blocks of 256 to the formats below 4 bits: IQ2_XXS .. IQ3_S and TQ1_0, TQ2_0.
//
// The same as quantize/ggml/grid_search.py and grid_blocks.py, bit for bit; the tables of near points are made on first
// use. Called by the table of quantize_blocks.cpp, one block at a time.
#pragma once

#include <cstdint>

namespace tokenmill {

// `importance` has 256 values, or is null.
void encode_iq2_xxs(const float* x, const float* importance, uint8_t* out);
void encode_iq2_xs(const float* x, const float* importance, uint8_t* out);
void encode_iq2_s(const float* x, const float* importance, uint8_t* out);
void encode_iq3_xxs(const float* x, const float* importance, uint8_t* out);
void encode_iq3_s(const float* x, const float* importance, uint8_t* out);
void encode_tq1_0(const float* x, const float* importance, uint8_t* out);
void encode_tq2_0(const float* x, const float* importance, uint8_t* out);

}  // namespace tokenmill
