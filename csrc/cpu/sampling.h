// The best of a row of logits without sorting it. Called by the sampler's helpers; one row at a time, no threads.
#pragma once

#include <cstdint>

namespace tokenmill {

// Index of the largest value; the first one of equals.
int64_t argmax(const float* values, int64_t n);

// The k largest in descending order; of equal values the lower index first. k <= n.
void top_k(const float* values, int64_t n, int64_t k, float* best, int64_t* indices);

}  // namespace tokenmill
