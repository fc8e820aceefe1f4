// A weight matrix [rows, cols] packed for one instruction set, and how it multiplies.
//
// y[m, rows] = x[m, cols] * W^T (+ bias). The caller (linear op of the program, or the eager binding) quantizes the
// activations once for all weights of equal `activation_kind`, then runs the tiles of all of them in one parallel
// region. Implementations own their packed bytes; they know nothing of threads, Python or the model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tokenmill {

class Linear {
 public:
  Linear(int64_t rows, int64_t cols) : rows(rows), cols(cols) {}
  virtual ~Linear() = default;
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  const int64_t rows;  // outputs
  const int64_t cols;  // inputs

  virtual size_t bytes() const = 0;        // packed size in memory
  virtual const char* kernel() const = 0;  // for `inspect`, such as "q4_1 neon_dotprod"

  // Fill rows [begin, end) from `data`, which lies as in the file and points at row 0 of the matrix. Ranges may be
  // packed by different threads; begin is a multiple of `pack_row_block` (and so is end, unless it is `rows`).
  virtual int pack_row_block() const = 0;
  virtual void pack_rows(const void* data, int64_t begin, int64_t end) = 0;
  // One row back as float32, from the packed form (tied embeddings need no second copy).
  virtual void dequantize_row(int64_t row, float* out) const = 0;

  // Products in float32 from now on, where the kernel would multiply in less: what comes is rounded already.
  virtual void multiply_floats() {}

  // Weights with equal kind (and equal cols) can share one activation buffer for the same m.
  virtual int activation_kind(int m) const = 0;
  virtual size_t activation_bytes(int m) const = 0;
  // Prepare rows [begin, end) of x (row stride ldx floats) inside `activations`, which holds m rows. Rows are
  // independent or come in blocks of `activation_row_block`: begin is then a multiple of it.
  virtual int activation_row_block(int m) const = 0;
  // Whether the activations of m rows are those of each row by itself, of the kind and size for m = 1, one after another;
  // the size is then a multiple of 64.
  virtual bool activations_by_row(int) const { return false; }  // (m)
  virtual void quantize(const float* x, int64_t ldx, int begin, int end, int m, void* activations) const = 0;

  // Independent pieces of the product, each worth about the same time. `scratch` is private to the calling thread.
  virtual int num_tiles(int m) const = 0;
  virtual size_t scratch_bytes(int m) const = 0;
  virtual void prefetch_tile(int, int) const {}  // (tile, m): begin to fetch what the tile reads first
  virtual void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                        void* scratch) const = 0;
};

// Instruction sets, best last. `portable` is plain C++ and always there.
enum class Isa { portable, neon_dotprod, neon_i8mm, avx2, avx512_vnni, amx };

Isa best_isa();  // what this CPU can run, unless TOKENMILL_CPU_ISA names a lesser one
const char* isa_name(Isa isa);
const char* isa_missing(Isa isa);  // why it cannot run here, or null where it can

// An empty Linear for ggml type `type`, to be filled by pack_rows (from several threads if wanted).
// `precise`: activations are taken as two int8 terms instead of one, for weights whose rounding error weighs most.
std::unique_ptr<Linear> make_linear(const std::string& type, int64_t rows, int64_t cols, Isa isa, std::string* why,
                                    bool precise = false);

// make_linear and pack_rows in one: pack `rows` rows of ggml type `type` (name as in GGUF, "Q4_K"; plain "F32", "F16",
// "BF16" too) lying at `data`. Returns null when this type or shape is not supported (the caller then declines with
// `why`).
std::unique_ptr<Linear> pack_linear(const std::string& type, const void* data, int64_t rows, int64_t cols, Isa isa,
                                    std::string* why, bool precise = false);

// Codes of 2 to 6 bits with a float scale per group of columns (GPTQ, AWQ, compressed-tensors, nf4), for pack_grouped:
// w = scale * (code - zero), or scale * table[code]. Columns are in natural order: an act-order permutation is undone
// before.
struct GroupedCodes {
  int bits;
  const uint8_t* codes;  // 4 bits: [rows, cols / 2], even column in the low nibble; others: [rows, cols]
  const float* scales;   // [rows, cols / group]
  const float* zeros;    // [rows, cols / group] in units of codes, or null for the middle, 2 ^ (bits - 1)
  const float* table;    // of 4 bits: 16 values, or null; then zeros is null
  int group;             // a multiple of 32, or cols
};
std::unique_ptr<Linear> pack_grouped(const GroupedCodes& weight, int64_t rows, int64_t cols, Isa isa, std::string* why,
                                     bool precise = false);

// Signed bytes [rows, cols] with a float scale per group of columns (group = cols: one per output channel).
std::unique_ptr<Linear> pack_int8(const int8_t* codes, const float* scales, int group, int64_t rows, int64_t cols,
                                  Isa isa, std::string* why, bool precise = false);

// Codes that keep their own meaning, for pack_coded: w = multiplier * scale * value(code). Exact, multiplied in float32.
struct Coded {
  std::string element;   // "e4m3", "int8": [rows, cols] bytes; "e2m1": [rows, cols / 2], even column in the low nibble
  const uint8_t* codes;
  const float* scales;   // [rows, ceil(cols / group)]
  int64_t group;
  float multiplier;
};
std::unique_ptr<Linear> pack_coded(const Coded& weight, int64_t rows, int64_t cols, std::string* why);

// `linear` with its input rounded as the scheme says: a name of kernels/rounding.py and, for calibrated ones, the scale.
// Null, with `why`, where the kernel cannot take such inputs exactly.
std::unique_ptr<Linear> round_inputs(std::unique_ptr<Linear> linear, const std::string& rounding, float scale,
                                     std::string* why);

// Expand row `row` of a ggml-typed matrix to float32 (embedding lookup, tests).
bool dequantize_row(const std::string& type, const void* data, int64_t row, int64_t cols, float* out);

}  // namespace tokenmill
