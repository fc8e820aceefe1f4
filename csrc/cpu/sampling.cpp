// Argmax by blocks, and top-k by a heap that most values never reach: a block whose maximum is below the heap's least
// member is skipped whole. See sampling.h.
#include "sampling.h"

#include <algorithm>

#include "float_kernels.h"

namespace tokenmill {
namespace {

constexpr int64_t kBlock = 512;

}  // namespace

int64_t argmax(const float* values, int64_t n) {
  float best = values[0];
  int64_t block = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    const float top = float_kernels().maximum(values + i, std::min(kBlock, n - i));
    if (top > best) best = top, block = i;
  }
  for (int64_t i = block; i < n; ++i)
    if (values[i] == best) return i;
  return 0;  // only with NaN in the row
}

void top_k(const float* values, int64_t n, int64_t k, float* best, int64_t* indices) {
  if (k <= 0) return;
  // `indices` is a heap whose front is the worst kept: `better` as the order puts the worst on top.
  const auto better = [values](int64_t a, int64_t b) {
    return values[a] != values[b] ? values[a] > values[b] : a < b;
  };
  for (int64_t i = 0; i < k; ++i) indices[i] = i;
  std::make_heap(indices, indices + k, better);
  for (int64_t begin = k; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    if (!(float_kernels().maximum(values + begin, end - begin) > values[indices[0]])) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (!(values[i] > values[indices[0]])) continue;
      std::pop_heap(indices, indices + k, better);
      indices[k - 1] = i;
      std::push_heap(indices, indices + k, better);
    }
  }
  std::sort_heap(indices, indices + k, better);
  for (int64_t i = 0; i < k; ++i) best[i] = values[indices[i]];
}

}  // namespace tokenmill
