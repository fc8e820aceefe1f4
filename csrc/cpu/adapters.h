// Adapters (LoRA, DoRA) of one product: packed factors, the rows of a step by adapter, and how threads share the work.
//
// y[row] += B (A x[row]) for rows that name an adapter, in any order and of any number of adapters; other rows cost
// nothing. A of all matrices of a product is multiplied first ("shrink"), beside the tiles of the base, then after a
// barrier every thread adds its share of all columns ("expand"). Where the base is quantized the factors are int8 and
// are streamed once for all rows of their adapter; where it is float they stay float32. Used by the program and by an
// eager binding; knows nothing of Python, stages or slots' owners.
#pragma once

#include <memory>
#include <vector>

#include "linear_panel.h"
#include "memory.h"
#include "product.h"

namespace tokenmill {

// What an adapter does to one matrix [outputs, inputs] of a product: y = gain * y + shift + B A x, or whole x + bias.
struct AdapterPart {
  int64_t outputs = 0;
  int rank = 0;          // 0: no factors
  int first_block = 0;   // of its ranks among those of the product, in blocks of kRankBlock
  int blocks = 0;
  std::unique_ptr<AlignedBytes> a, b;  // int8 panels: [blocks][inputs / 32][32 k], [outputs / 16][blocks][16 k]
  std::vector<float> a_scales;         // [16 * blocks]: B's largest value of each rank is in them
  std::vector<float> b_factors;        // [outputs / 16]
  std::vector<float> a_exact, b_exact;  // instead: [rank][inputs], [rank][outputs]
  std::vector<float> gain, shift, whole, bias;

  bool empty() const { return rank == 0 && gain.empty() && whole.empty(); }
  int64_t num_panels() const { return (outputs + kPanelCols - 1) / kPanelCols; }
};

// Numbers as they arrive; null where there are none.
struct PartValues {
  const float* a = nullptr;  // [rank, inputs]
  const float* b = nullptr;  // [outputs, rank]
  int rank = 0;
  const float* gain = nullptr;
  const float* shift = nullptr;
  const float* whole = nullptr;
  const float* bias = nullptr;
};

class ProductAdapter {
 public:
  // `outputs`: of each matrix. `exact`: keep float32.
  ProductAdapter(int64_t inputs, const std::vector<int64_t>& outputs, const std::vector<PartValues>& values, bool exact);

  const int64_t inputs;
  const bool exact;
  std::vector<AdapterPart> parts;
  int blocks = 0;  // of all parts
  size_t bytes() const;
};

// Rows of a step by the slot that they name.
class AdapterRows {
 public:
  struct Group {
    int slot, begin, end;  // places in `rows`
  };
  // `picked`: row i of the product is row picked[i] of `slots`; null: row i. Allocates nothing after `reserve`.
  void reserve(int max_rows) { rows.reserve(max_rows), slots.reserve(max_rows), groups.reserve(max_rows); }
  void build(const int32_t* slots, const int64_t* picked, int count);

  std::vector<int> rows;     // ascending within a group
  std::vector<int> slots;    // of every row of the product
  std::vector<Group> groups;
};

// The adapters of one product, by slot; null where a slot has none here.
using AdapterSlots = std::vector<std::shared_ptr<const ProductAdapter>>;

// Factors that a thread will read next, fetched while it multiplies by the base: few rows leave a product of the base
// waiting for arithmetic, and those of adapters waiting for memory.
class AdapterPrefetch {
 public:
  void add(const void* begin, size_t bytes);
  void spread(int pieces);  // over so many calls of `some`
  void some();

 private:
  struct Range {
    const char *begin, *end;
  };
  static constexpr int kMaxRanges = 128;  // beyond this the hardware's own prefetching must do
  static constexpr size_t kMaxLines = 20;  // asked for at once: about what a core can wait for without stalling
  Range ranges_[kMaxRanges];
  int count_ = 0, at_ = 0;
  size_t lines_ = 0, each_ = 0;
};

// Memory between shrink and expand, and the work itself. All threads of a step use one.
class AdapterWorkspace {
 public:
  void reserve(int max_rows, int64_t max_inputs);
  void take(const ProductAdapter& adapter);  // make room for its ranks; not while a step runs
  size_t bytes() const { return bytes_; }

  // Whether any row of the step has something to do here.
  static bool any(const AdapterSlots& slots, const AdapterRows& rows);
  // Prepare one input row for its adapter. Each row once, before `shrink`, a barrier between.
  void round_row(const AdapterSlots& slots, const AdapterRows& rows, int row, const float* x) const;
  // A x of this thread's share; a barrier, then B of its share of columns of every output.
  void shrink(const AdapterSlots& slots, const AdapterRows& rows, const float* x, int64_t ldx, int thread,
              int threads) const;
  void expand(const AdapterSlots& slots, const AdapterRows& rows, const float* x, int64_t ldx,
              const ProductOutput* outputs, int thread, int threads) const;
  // What the two will read in this thread.
  static void ask_for_shrink(const AdapterSlots& slots, const AdapterRows& rows, int thread, int threads,
                             AdapterPrefetch& ahead);
  static void ask_for_expand(const AdapterSlots& slots, const AdapterRows& rows, int thread, int threads,
                             AdapterPrefetch& ahead);

 private:
  RoundedRow input_row(int row) const;
  RoundedRow rank_block(int row, int block) const;
  float* rank_floats(int row) const { return reinterpret_cast<float*>(floats_.get()) + int64_t(row) * blocks_ * 16; }
  void shrink_rounded(const ProductAdapter& adapter, const AdapterPart& part, int block, const int* rows,
                      int count) const;
  void expand_rounded(const AdapterPart& part, const int* rows, int count, const ProductOutput& out, int64_t first,
                      int64_t last) const;
  void allocate_ranks();

  int max_rows_ = 0;
  int64_t max_inputs_ = 0;  // a multiple of kInputBlock
  int blocks_ = 0;
  AlignedBuffer codes_, scales_, sums_;                   // of inputs
  AlignedBuffer rank_codes_, rank_scales_, rank_sums_, floats_;
  size_t bytes_ = 0;
};

// Rows of an embedding as an adapter changes them: base + b[id] a, or rows of another table.
struct EmbeddingAdapter {
  int rank = 0;
  int64_t width = 0;
  std::vector<float> a, b, whole;  // [rank, width], [vocabulary, rank], [vocabulary, width]

  void apply(int64_t id, float* row) const;
};

}  // namespace tokenmill
