// Float rows to the blocks of GGUF: the writers of every type whose readers are in quant_blocks.h.
//
// The choice of scales follows llama.cpp's searches; tokenmill/quantize/ggml is the same in torch, and the spec. Knows
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
};

// Null if there is no writer for `type`.
const BlockQuantizer* find_block_quantizer(const std::string& type);

// `rows` x `cols` values to rows x cols / block * bytes; `importance` has one value per column, or is null.
void quantize_rows(const BlockQuantizer& quantizer, const float* in, int64_t rows, int64_t cols,
                   const float* importance, uint8_t* out);

}  // namespace tokenmill
