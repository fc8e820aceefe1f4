// Linear over integer panels: storage, tiling and the table of kernels that an instruction set fills in.
//
// Two ways to multiply. Direct (few rows): unpack the panel in registers, activations int8 per block of 32 (256 for
// superblock formats), scales per group; sums come in the same order for any number of rows. Expanded (many rows): each
// panel becomes int8 in the thread's scratch, then a plain integer product over quads of 4 rows. Formats with a scale
// per 32 keep codes, scales and blocks of 32 exactly, so that both ways have the same error; superblock formats, whose
// direct activations are per 256, are requantized per 128, which is closer to float32 than the direct way; so are
// groups that are that long anyway, and those of 16. Where the CPU multiplies tiles of bfloat16, many rows go a third way
// (panel_tiles.h). Knows nothing of threads or of intrinsics; arch/<isa>_*.cpp implement the table,
// linear_dispatch.cpp chooses it.
#pragma once

#include <memory>
#include <string>

#include "adapter_kernels.h"
#include "linear.h"
#include "panel_tiles.h"
#include "quant_panel.h"

// Always inlined: files of different instruction sets include this, and the linker must not pick one's copy for all.
#define TM_INLINE inline __attribute__((always_inline))

namespace tokenmill {

constexpr int kQuantBlock = 128;  // k per scale in the requantized product; the last block may be shorter
constexpr int kChunk = 1024;      // k expanded at a time: 16 columns x 1024 stay in the first-level cache
constexpr int kTokenBlock = 512;  // rows per tile of the expanded product
constexpr int kBlockScales = 3 * kPanelCols;  // floats of an expanded block: scales, minimums, scaled bases of sums

// Offsets into one row of direct activations. Block sums serve code offsets and minimums.
struct RowForm {
  int64_t cols, block;
  TM_INLINE int64_t scale() const { return cols; }                        // float [cols / block]
  TM_INLINE int64_t sum32() const { return scale() + cols / block * 4; }  // int32 [cols / 32]
  TM_INLINE int64_t extra() const {
    return sum32() + cols / 32 * 4;
  }  // block 32: float scale*sum; block 256: int32 sums of 16
  // Block 256 only: sums as 64 * high + low in bytes, per 256 the highs then the lows of 16 sums, then of 8 sums of 32.
  TM_INLINE int64_t parts16() const { return extra() + cols / 16 * 4; }
  TM_INLINE int64_t parts32() const { return parts16() + cols / 256 * 32; }
  TM_INLINE int64_t bytes() const {
    return ((block == 32 ? extra() + cols / 8 : parts32() + cols / 16) + 63) / 64 * 64;
  }
};

TM_INLINE bool requantizes(const PanelLayout& layout) { return layout.superblock || layout.coarse || layout.fine; }

// Offsets into four rows of expanded activations: int8 codes, then scales and sums per block of 32 or 128. `run` is how
// the product of an instruction set wants them: 4 or 8 consecutive k of each row in turn, codes [cols / run][4][run] and
// then float scales, int32 sums, float scale * sum, each [blocks][4]; or kRowRun: every row by itself, codes [cols] and
// then the three [blocks], so that any number of quads are rows of one pitch.
constexpr int kRowRun = 32;

struct QuadForm {
  int64_t cols, block;
  int run;
  TM_INLINE int64_t blocks() const { return (cols + block - 1) / block; }
  TM_INLINE int64_t bytes() const {
    return run == kRowRun ? 4 * pitch() : (4 * cols + blocks() * 48 + 63) / 64 * 64;
  }
  // Of kRowRun: an odd number of cache lines, so that the rows of a tile fall into different sets.
  TM_INLINE int64_t pitch() const { return ((cols + blocks() * 12 + 63) / 64 | 1) * 64; }
  // Code k of row t; consecutive k are consecutive bytes up to the next multiple of `run`.
  TM_INLINE int64_t code(int64_t k, int t) const {
    return run == kRowRun ? t * pitch() + k : k / run * run * 4 + t * run + k % run;
  }
  TM_INLINE int64_t scale(int64_t b, int t) const { return number(0, b, t); }
  TM_INLINE int64_t sum(int64_t b, int t) const { return number(1, b, t); }
  TM_INLINE int64_t scaled_sum(int64_t b, int t) const { return number(2, b, t); }

 private:
  TM_INLINE int64_t number(int which, int64_t b, int t) const {
    return run == kRowRun ? t * pitch() + cols + (which * blocks() + b) * 4
                          : 4 * cols + (which * blocks() + b) * 16 + t * 4;
  }
};

// Activation kinds: the block for rows, and this for quads, whose bytes differ with the run too.
constexpr int quad_kind(int64_t block, int run) { return run * 250 + int(block); }
constexpr bool is_quad_kind(int kind) { return kind >= 1000; }
constexpr QuadForm quad_form_of(int64_t cols, int kind) { return {cols, kind % 250, kind / 250}; }

// out[t][16] = panel x row t, for t < num_rows <= 4.
using DirectFn = void (*)(const PanelLayout& layout, const uint8_t* panel, const uint8_t* rows, int num_rows,
                          float* out);
// k [begin, end) of a panel to int8, in the order that `multiply` of the same layout wants, and float scales as
// kBlockScales says. Returns the codes: w8, or the panel itself where they lie right already.
using ExpandFn = const int8_t* (*)(const PanelLayout& layout, const uint8_t* panel, int64_t begin, int64_t end,
                                   int8_t* w8, float* scales);

// sums[quad * 4 + t][16] (+)= expanded panel x quads; overwrites when begin == 0. `next` is what will be expanded after
// this: memory that the product can ask for meanwhile.
struct NextBytes {
  const uint8_t* begin;
  const uint8_t* end;
};
using MultiplyFn = void (*)(const int8_t* codes, const float* scales, int64_t begin, int64_t end, const uint8_t* quads,
                            int64_t cols, int num_quads, NextBytes next, float* sums);

struct PanelKernels {
  const char* name;
  int quad_run;  // QuadForm::run of what quantize_quad writes
  // Both also write what rounding took away to `residuals` ([cols], or [4][cols]) unless it is null.
  void (*quantize_row)(const float* x, int64_t cols, int block, uint8_t* out, float* residuals);
  void (*quantize_quad)(const float* const rows[4], int64_t cols, int block, uint8_t* out,
                        float* residuals);  // null rows are zeros
  DirectFn (*direct)(const PanelLayout& layout);
  ExpandFn (*expand)(const PanelLayout& layout);
  MultiplyFn (*multiply)(const PanelLayout& layout);
  int (*expand_from)(const PanelLayout& layout);  // number of rows from which the expanded product is faster
  int64_t (*spin_dots)(int64_t rounds);           // integer products at full speed; returns how many operations
  AdapterKernels adapters;
  const PanelTiles* tiles = nullptr;  // of many rows, where the CPU has them (panel_tiles.h)
};

class AlignedBytes {
 public:
  explicit AlignedBytes(size_t size);
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::shared_ptr<void> block_;
  uint8_t* data_ = nullptr;
  size_t size_;
};

// Storage shared by all panel linears.
class PanelLinear : public Linear {
 public:
  PanelLinear(const std::string& name, const PanelLayout& layout, const QuantFormat* format, int64_t rows);
  size_t bytes() const override { return storage_.size(); }
  const char* kernel() const override { return name_.c_str(); }
  int pack_row_block() const override { return kPanelCols; }
  void pack_rows(const void* data, int64_t begin, int64_t end) override;
  void dequantize_row(int64_t row, float* out) const override;

  int64_t num_panels() const { return (rows + kPanelCols - 1) / kPanelCols; }
  uint8_t* panel(int64_t index) const { return storage_.data() + index * layout.panel_bytes; }
  const PanelLayout layout;

 private:
  const QuantFormat* format_;
  std::string name_;
  AlignedBytes storage_;
};

// An empty PanelLinear for `isa` (portable: float32 kernel; else integer kernels). `format` may be null when the caller
// fills the panels itself.
std::unique_ptr<PanelLinear> make_panel_linear(const std::string& type, const PanelLayout& layout,
                                               const QuantFormat* format, int64_t rows, Isa isa, bool precise = false);
std::unique_ptr<PanelLinear> make_portable_panel_linear(const std::string& type, const PanelLayout& layout,
                                                        const QuantFormat* format, int64_t rows);
// F32, F16, BF16 (linear_plain.cpp).
std::unique_ptr<Linear> make_plain_linear(const QuantFormat& format, int64_t rows, int64_t cols, Isa isa);

// Fewer tiles than this leave threads idle.
int64_t wanted_tiles();

// The table of an instruction set, or null where this build has none (linear_dispatch.cpp).
const PanelKernels* find_panel_kernels(Isa isa);

}  // namespace tokenmill
