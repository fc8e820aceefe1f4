// The kernels of recurrent layers, written once over simd.h's vector and compiled once per instruction set.
//
// Included by recurrent.cpp (baseline) and by arch/<isa>_recurrent.cpp, each of which exports one table. A number is
// computed in the same order however many tokens a call has.
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

// The same inside a block of vectors: those of a block of more than one are whole.
template <int kVectors>
inline vec block_part(const float* row, int64_t i, int64_t n) {
  if constexpr (kVectors > 1) return load(row + i);
  return part_of(row, i, n);
}

template <int kVectors>
inline void put_block_part(float* row, int64_t i, int64_t n, vec value) {
  if constexpr (kVectors > 1) {
    store(row + i, value);
  } else {
    put_part(row, i, n, value);
  }
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

// kRows rows of the state, kVectors vectors of each at a time in registers while all tokens pass.
template <int kRows, int kVectors>
inline void decay_block(float* state, int64_t size, int64_t at, int64_t row, const DecayToken* tokens, int count,
                        vec (*sums)[kMaxTokens]) {
  vec s[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) s[r][v] = block_part<kVectors>(state + r * size, at + v * kLanes, size);
  for (int t = 0; t < count; ++t) {
    const DecayToken& token = tokens[t];
    vec b[kVectors], c[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      b[v] = block_part<kVectors>(token.b, at + v * kLanes, size);
      c[v] = block_part<kVectors>(token.c, at + v * kLanes, size);
    }
    for (int r = 0; r < kRows; ++r) {
      const float factor = token.time * token.x[row + r];
      vec sum = sums[r][t];
      for (int v = 0; v < kVectors; ++v) {
        s[r][v] = s[r][v] * token.decay + b[v] * factor;
        sum += s[r][v] * c[v];
      }
      sums[r][t] = sum;
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) put_block_part<kVectors>(state + r * size, at + v * kLanes, size, s[r][v]);
}

template <int kRows>
inline void decay_rows(float* state, int64_t size, float skip, int64_t row, const DecayToken* tokens, int count) {
  constexpr int kVectors = 4;
  vec sums[kRows][kMaxTokens];
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < count; ++t) sums[r][t] = vec{};
  int64_t at = 0;
  for (; at + kVectors * kLanes <= size; at += kVectors * kLanes)
    decay_block<kRows, kVectors>(state, size, at, row, tokens, count, sums);
  for (; at < size; at += kLanes) decay_block<kRows, 1>(state, size, at, row, tokens, count, sums);
  for (int t = 0; t < count; ++t)
    for (int r = 0; tokens[t].out != nullptr && r < kRows; ++r)
      tokens[t].out[row + r] = lane_sum(sums[r][t]) + skip * tokens[t].x[row + r];
}

void decay_head(float* state, int64_t dim, int64_t size, float skip, const DecayToken* tokens, int count) {
  int64_t row = 0;
  for (; row + 2 <= dim; row += 2) decay_rows<2>(state + row * size, size, skip, row, tokens, count);
  if (row < dim) decay_rows<1>(state + row * size, size, skip, row, tokens, count);
}

// The columns of a state of the delta rule do not meet: kVectors vectors of them, while all tokens pass.
template <int kVectors>
inline void delta_columns(float* state, int64_t keys, int64_t values, int64_t at, const DeltaToken* tokens, int count) {
  for (int t = 0; t < count; ++t) {
    const DeltaToken& token = tokens[t];
    vec known[kVectors] = {}, update[kVectors], y[kVectors] = {};  // known: what the state answers to this key
    for (int64_t i = 0; i < keys; ++i)
      for (int v = 0; v < kVectors; ++v)
        known[v] += block_part<kVectors>(state + i * values, at + v * kLanes, values) * token.k[i];
    for (int v = 0; v < kVectors; ++v)
      update[v] = (block_part<kVectors>(token.v, at + v * kLanes, values) - known[v] * token.decay) * token.weight;
    for (int64_t i = 0; i < keys; ++i) {
      float* row = state + i * values;
      for (int v = 0; v < kVectors; ++v) {
        const vec next = block_part<kVectors>(row, at + v * kLanes, values) * token.decay + update[v] * token.k[i];
        put_block_part<kVectors>(row, at + v * kLanes, values, next);
        y[v] += next * token.q[i];
      }
    }
    for (int v = 0; token.out != nullptr && v < kVectors; ++v)
      put_block_part<kVectors>(token.out, at + v * kLanes, values, y[v]);
  }
}

void delta_head(float* state, int64_t keys, int64_t values, const DeltaToken* tokens, int count) {
  constexpr int kVectors = 4;
  int64_t at = 0;
  for (; at + kVectors * kLanes <= values; at += kVectors * kLanes)
    delta_columns<kVectors>(state, keys, values, at, tokens, count);
  for (; at < values; at += kLanes) delta_columns<1>(state, keys, values, at, tokens, count);
}

void gate_row(const float* x, const float* gate, float scale, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const vec g = part_of(gate, i, n) * scale;
    put_part(out, i, n, part_of(x, i, n) * (g / (1.0f + exp_vec(-g))));
  }
}

inline RecurrentKernels make_recurrent_kernels() {
  return {convolve_row, selective_row, decay_head, delta_head, gate_row};
}

}  // namespace
}  // namespace tokenmill
