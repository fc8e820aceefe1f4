// Several weights that multiply the same activations: quantize once per activation kind, then all tiles in one region.
//
// Sits between Linear (which knows no threads) and its callers, the eager binding and the program. Allocates nothing after
// construction: the caller provides one activation buffer and one scratch per thread.
#pragma once

#include <vector>

#include "linear.h"

namespace tokenmill {

constexpr int kMaxProductWeights = 8;

struct ProductOutput {
  const float* bias = nullptr;
  float* y = nullptr;
  int64_t ldy = 0;
};

class Product {
 public:
  explicit Product(std::vector<const Linear*> weights) : weights_(std::move(weights)) {}

  int size() const { return static_cast<int>(weights_.size()); }
  const Linear& weight(int i) const { return *weights_[i]; }

  size_t activation_bytes(int m) const;  // of all kinds together
  size_t scratch_bytes(int m) const;
  int row_block(int m) const;  // rows that must be quantized together
  int num_tiles(int m) const;
  // Whether rows can be quantized one by one, for any product of the same `row_kind`, and put together afterwards.
  bool takes_single_rows(int m) const;
  int row_kind() const { return weights_[0]->activation_kind(1); }

  // Rows [begin, end) of x for every kind; begin is a multiple of row_block(m). `x` points at row 0.
  void quantize(const float* x, int64_t ldx, int begin, int end, int m, char* activations) const;
  void prefetch_tile(int tile, int m) const;  // begin to fetch what the tile reads first
  void run_tile(int tile, int m, const char* activations, const ProductOutput* outputs, void* scratch) const;

 private:
  bool is_first(int i, int m) const;
  int widest(int i, int m) const;
  size_t offset(int i, int m) const;  // of weight i's activations in the buffer
  bool shares(int i, int j, int m) const { return weights_[i]->activation_kind(m) == weights_[j]->activation_kind(m); }

  std::vector<const Linear*> weights_;  // all with the same cols
};

}  // namespace tokenmill
