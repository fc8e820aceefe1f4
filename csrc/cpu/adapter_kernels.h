// Products with the factors of adapters (LoRA), for few rows at a time: one table per instruction set.
//
// Factors are int8 panels: 16 columns x 4 consecutive k are 64 bytes, a block of 16 or 32 k is 4 or 8 of these. Rows are
// int8 too, with a scale for each block: sums within a block are exact, everything else is float32. The table is part
// of PanelKernels; arch/adapter_panels.h fills it in. Knows nothing of threads, steps or of who owns the memory.
#pragma once

#include <cstdint>

namespace tokenmill {

constexpr int kInputBlock = 32, kRankBlock = 16;  // k that share a scale: of an input, of what the first factor makes

// One row of activations in int8.
struct RoundedRow {
  int8_t* codes;    // [blocks * block]
  float* scales;    // [blocks]
  int32_t* sums;    // [blocks], of the codes
};

struct AdapterKernels {
  // `count` inputs (a multiple of kInputBlock) to int8.
  void (*round_input)(const float* x, int64_t count, const RoundedRow& out);
  // out[r] [16] = (panel x row r) * scales [16], as floats and as one block in int8; panel [blocks][32 k].
  void (*shrink)(const int8_t* panel, int64_t blocks, const float* scales, const RoundedRow* rows, int num_rows,
                 const RoundedRow* out);
  // y[r] [16 p, 16 p + 16) += factors[p] * (panel p x row r), for all panels [blocks][16 k].
  void (*expand)(const int8_t* panels, const float* factors, int64_t num_panels, int64_t blocks,
                 const RoundedRow* rows, int num_rows, float* const* y);
};

}  // namespace tokenmill
