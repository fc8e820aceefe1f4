// The row kernels of recurrent layers, written once over simd.h's vector and compiled once per instruction set.
//
// Included by recurrent.cpp (baseline) and by arch/<isa>_recurrent.cpp, each of which exports one table.
#pragma once

#include "recurrent.h"
#include "simd.h"

namespace tokenmill {
namespace {

// The i-th vector of a row of n values, the last one partial.
inline vec part_of(const float* row, int64_t i, int64_t n) {
  return i + kLanes <= n ? load(row + i) : load_first(row + i, static_cast<int>(n - i));
}

inline void put_part(float* row, int64_t i, int64_t n, vec value) {
  if (i + kLanes <= n)
    store(row + i, value);
  else
    store_first(row + i, value, static_cast<int>(n - i));
}

void convolve_row(const float* const* windows, const float* weight, int64_t stride, int width, const float* bias,
                  int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    vec total = part_of(windows[0], i, n) * part_of(weight, i, n);
    for (int w = 1; w < width; ++w) total += part_of(windows[w], i, n) * part_of(weight + w * stride, i, n);
    if (bias != nullptr) total += part_of(bias, i, n);
    put_part(out, i, n, total / (1.0f + exp_vec(-total)));
  }
}

float decay_row(float* state, float decay, float factor, const float* b, const float* c, int64_t n) {
  vec sum = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const vec next = part_of(state, i, n) * decay + part_of(b, i, n) * factor;
    put_part(state, i, n, next);
    sum += next * part_of(c, i, n);
  }
  return lane_sum(sum);
}

float selective_row(float* state, const float* a, float time, float factor, const float* b, const float* c,
                    int64_t n) {
  vec sum = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const vec next = part_of(state, i, n) * exp_vec(part_of(a, i, n) * time) + part_of(b, i, n) * factor;
    put_part(state, i, n, next);
    sum += next * part_of(c, i, n);
  }
  return lane_sum(sum);
}

void delta_row(float* state, float decay, float k, const float* update, float q, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const vec next = part_of(state, i, n) * decay + part_of(update, i, n) * k;
    put_part(state, i, n, next);
    put_part(out, i, n, part_of(out, i, n) + next * q);
  }
}

inline RecurrentKernels make_recurrent_kernels() { return {convolve_row, decay_row, selective_row, delta_row}; }

}  // namespace
}  // namespace tokenmill
