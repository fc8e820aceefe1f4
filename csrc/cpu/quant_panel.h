// How integer weights lie in memory: panels of 16 rows of W (columns of the product), interleaved for integer dot
// products.
//
// One layout serves every instruction set: a vector V_j holds 16 columns x 4 consecutive k (64 bytes), a group of 32 k
// is V_0..V_7, and codes of fewer than 8 bits share bytes:
//   nibble plane   P_j = V_j | V_{j+4} << 4, j = 0..3         (256 bytes; 4, 5 and 6 bits)
//   pair planes    H_i = two bits of V_{4i+s} at bit 2s        (128 bytes; high bits of 6, low bits of 2 and 3)
//   bit plane      B   = one bit of V_j at bit j               ( 64 bytes; high bit of 5 and 3)
// in that order, then the scales. Plain formats: 16 half (or bfloat) scales, then 16 minimums (or the 16 scales of the
// second half of a fine group), after each group.
// Superblock formats (256 k): 16 half d first (and 16 dmin, and the byte minimums as [groups / 4][16 columns][4], a
// vector like those of the codes), then per group codes and 16 byte scales per sub-group.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant_blocks.h"

namespace tokenmill {

constexpr int kPanelCols = 16;

struct PanelLayout {
  int bits = 4;
  int offset = 0;           // subtracted from unsigned codes; 8-bit codes are stored signed, without offset
  bool superblock = false;  // byte scales under a half scale per 256
  bool fine = false;        // scales per 16 instead of 32
  bool has_min = false;
  bool wide_scale = false;  // bfloat16 instead of half
  bool has_lut = false;
  bool coarse = false;  // groups of 128 or more share a scale (int8 channel): blocks of 128 lose nothing on this side
  float unit = 1;       // a power of two that all scales of a superblock format have in common
  int8_t lut[16] = {};
  int64_t cols = 0;
  int code_bytes = 0;   // of a group of 32
  int group_bytes = 0;  // codes and scales of a group of 32
  int head_bytes = 0;   // what precedes the groups of a superblock
  int64_t panel_bytes = 0;
};

PanelLayout make_layout(const QuantFormat& format, int64_t cols);
void finish_layout(PanelLayout& layout, int64_t cols);  // derive the sizes from the flags

// One group of 32 of 16 columns, still as plain numbers: what the packers hand over.
struct PanelGroup {
  uint8_t code[kPanelCols][32];                  // 8-bit codes with offset 128
  float scale[kPanelCols], minimum[kPanelCols];  // plain formats: w = scale * q + minimum
  float second_scale[kPanelCols];                // plain and fine
  int8_t sub_scale[2][kPanelCols];               // superblock formats
};
void store_group(const PanelLayout& layout, const PanelGroup& group, uint8_t* out);

// Rows [begin, begin + 16) of a file-format matrix (rows past `rows` become zeros) into one panel.
void pack_panel(const PanelLayout& layout, const QuantFormat& format, const void* data, int64_t begin, int64_t rows,
                uint8_t* panel);

// Column `column` of a panel back to float32.
void dequantize_panel_column(const PanelLayout& layout, const uint8_t* panel, int column, float* out);

}  // namespace tokenmill
