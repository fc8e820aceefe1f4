// Float rows to the blocks of GGUF: the writers of every type whose readers are in quant_blocks.h.
//
// The choice of scales follows llama.cpp's searches (those of quantize_grids.h are our own); tokenmill/quantize/ggml is the same in torch, and the spec. Knows
// nothing of files or threads: bind_quantize.cpp hands out rows.
#pragma once

#include <cstdint>
#include <string>

namespace tokenmill {

struct FourBlocks;

struct BlockQuantizer {
  const char* name;
  int block;  // values in a block
  int bytes;  // bytes of a block
  void (*encode)(const FourBlocks& in, uint8_t* const* out);
  // Instead, where four blocks have nothing to share: one of them and its importance (or null).
  void (*encode_one)(const float* x, const float* importance, uint8_t* out) = nullptr;
};

// Null if there is no writer for `type`.
const BlockQuantizer* find_block_quantizer(const std::string& type);

// `rows` x `cols` values to rows x cols / block * bytes; `importance` has one value per column, or is null.
void quantize_rows(const BlockQuantizer& quantizer, const float* in, int64_t rows, int64_t cols,
                   const float* importance, uint8_t* out);

}  // namespace tokenmill
