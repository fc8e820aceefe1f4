// y = W x for a few rows of float weights and of activations: the inner loop of everything that multiplies in float32.
//
// Every output is a sum of 4 partial sums over k (x86: of as many as a vector has lanes), however rows are blocked, so
// results depend neither on threads nor on the number of rows. Plain compiler vectors of the baseline: enough on NEON; on
// x86, where they are a quarter of what the CPU has, rows of floats go to its float kernels.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float_kernels.h"

namespace tokenmill {
namespace {

// A vector of the baseline instruction set, by the compiler's extension.
typedef float Float4 __attribute__((vector_size(16)));

inline Float4 load4(const float* p) {
  Float4 v;
  std::memcpy(&v, p, 16);
  return v;
}

// How a stored weight becomes a float: one, four or eight in a row.
struct AsFloat {
  using Storage = float;
  static float load(float value) { return value; }
  static Float4 four(const float* p) { return load4(p); }
  static void eight(const float* p, Float4* out) { out[0] = load4(p), out[1] = load4(p + 4); }
};

// y[t][r] = w[r] . x[t] for R rows of the weight and T rows of activations. Ahead: the rows of the weight after these lie
// behind them and come next.
template <class Type, int R, int T, bool Ahead>
void block(const typename Type::Storage* w, const float* x, int64_t cols, const float* bias, float* y, int64_t ldy) {
  Float4 sums[R][T] = {};
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    Float4 v[T];
    for (int t = 0; t < T; ++t) v[t] = load4(x + t * cols + k);
    for (int r = 0; r < R; ++r) {
      const Float4 weight = Type::four(w + r * cols + k);
      for (int t = 0; t < T; ++t) sums[r][t] += weight * v[t];
    }
  };
  int64_t k = 0;
  // One row is bound by memory. The rows after these are asked for meanwhile, line after line as they lie: as many
  // streams as rows are more than the hardware follows by itself.
  if constexpr (T == 1) {
    constexpr int64_t kLine = 64 / sizeof(typename Type::Storage);
    const auto* next = w + R * cols;
    for (; k + kLine <= cols; k += kLine, next += R * kLine) {
      if constexpr (Ahead)
        for (int r = 0; r < R; ++r) __builtin_prefetch(next + r * kLine);
      for (int64_t i = k; i < k + kLine; i += 8) {
        const Float4 v[2] = {load4(x + i), load4(x + i + 4)};
        for (int r = 0; r < R; ++r) {
          Float4 weights[2];
          Type::eight(w + r * cols + i, weights);
          sums[r][0] += weights[0] * v[0];
          sums[r][0] += weights[1] * v[1];
        }
      }
    }
  }
  for (; k + 4 <= cols; k += 4) step(k);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      float sum = (sums[r][t][0] + sums[r][t][1]) + (sums[r][t][2] + sums[r][t][3]);
      for (int64_t i = k; i < cols; ++i) sum += Type::load(w[r * cols + i]) * x[t * cols + i];
      y[t * ldy + r] = bias ? sum + bias[r] : sum;
    }
}

// R rows of the weight with all m rows of activations.
template <class Type, int R, bool Ahead = false>
void rows_of(const typename Type::Storage* w, const float* x, int m, int64_t cols, const float* bias, float* y,
             int64_t ldy) {
#if !defined(__aarch64__)
  if constexpr (std::is_same_v<Type, AsFloat>) {
    float_kernels().scores(x, cols, m, w, cols, R, cols, y, ldy);
    if (bias == nullptr) return;
    for (int t = 0; t < m; ++t)
      for (int r = 0; r < R; ++r) y[t * ldy + r] += bias[r];
    return;
  }
#endif
  int t = 0;
  for (; t + 4 <= m; t += 4) block<Type, R, 4, Ahead>(w, x + t * cols, cols, bias, y + t * ldy, ldy);
  for (; t < m; ++t) block<Type, R, 1, Ahead>(w, x + t * cols, cols, bias, y + t * ldy, ldy);
}

}  // namespace
}  // namespace tokenmill
