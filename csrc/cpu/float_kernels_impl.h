// The float32 kernels themselves, written once over simd.h's vector and compiled once per instruction set.
//
// Included by float_kernels.cpp (baseline) and by arch/<isa>_float.cpp, each of which exports one table. All in an
// unnamed namespace, see simd.h. Sums run over a fixed number of lanes, so a result depends on the instruction set only.
#pragma once

#include <cmath>
#include <type_traits>

#include "float_kernels.h"
#include "kv_rows_impl.h"
#include "simd.h"

namespace tokenmill {
namespace {

// out[i] = fn(i-th vectors of the inputs), the last one partial.
template <typename Function>
inline void map_row(const float* a, const float* b, int64_t n, float* out, Function fn) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, fn(load(a + i), load(b + i)));
  if (i < n) store_first(out + i, fn(load_first(a + i, n - i), load_first(b + i, n - i)), n - i);
}

// The sum of (x[i] - centre)^power, power 1 or 2.
template <int Power>
inline float sum_row(const float* x, float centre, int64_t n) {
  vec sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int u = 0; u < 4; ++u) {
      const vec v = load(x + i + u * kLanes) - centre;
      sum[u] += Power == 1 ? v : v * v;
    }
  }
  float total = lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; i < n; ++i) {
    const float v = x[i] - centre;
    total += Power == 1 ? v : v * v;
  }
  return total;
}

void layer_norm_row(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out) {
  const float mean = sum_row<1>(x, 0.0f, n) / static_cast<float>(n);
  const float variance = sum_row<2>(x, mean, n) / static_cast<float>(n);
  const float factor = 1.0f / std::sqrt(variance + eps);
  map_row(x, weight, n, out, [mean, factor](vec v, vec w) { return (v - mean) * factor * w; });
  if (bias != nullptr) map_row(out, bias, n, out, [](vec v, vec b) { return v + b; });
}

void rms_norm_row(const float* x, const float* weight, float eps, int64_t n, float* out) {
  vec sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int u = 0; u < 4; ++u) {
      const vec v = load(x + i + u * kLanes);
      sum[u] += v * v;
    }
  }
  for (; i < n; i += kLanes) {
    const vec v = i + kLanes <= n ? load(x + i) : load_first(x + i, n - i);
    sum[0] += v * v;
  }
  const float mean = lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) / static_cast<float>(n);
  const float factor = 1.0f / std::sqrt(mean + eps);
  map_row(x, weight, n, out, [factor](vec v, vec w) { return v * factor * w; });
}

void add_row(const float* x, const float* y, int64_t n, float* out) {
  map_row(x, y, n, out, [](vec a, vec b) { return a + b; });
}

void scale_row(const float* x, float factor, int64_t n, float* out) {
  map_row(x, x, n, out, [factor](vec v, vec) { return v * factor; });
}

template <Activation kActivation>
inline vec activate_vec(vec x) {
  if constexpr (kActivation == Activation::silu) return x / (1.0f + exp_vec(-x));
  if constexpr (kActivation == Activation::sigmoid) return 1.0f / (1.0f + exp_vec(-x));
  if constexpr (kActivation == Activation::gelu_tanh) {
    // 0.5 (1 + tanh t) is the logistic function of 2 t.
    const vec t = x * (1.0f + 0.044715f * x * x) * 1.5957691216057308f;
    return x / (1.0f + exp_vec(-t));
  }
  const vec zero = {};
  const vec positive = max(x, zero);
  if constexpr (kActivation == Activation::relu) return positive;
  if constexpr (kActivation == Activation::relu2) return positive * positive;
  // gelu: x (1 + erf(x / sqrt 2)) / 2, by a polynomial for erfc (Abramowitz and Stegun 7.1.26, error 1.5e-7). Written so
  // that nothing cancels for negative x.
  const vec size = max(x, -x), z = size * 0.70710678118654752f;
  const vec t = 1.0f / (1.0f + 0.3275911f * z);
  vec p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = (p * t + 0.254829592f) * t;
  return positive - 0.5f * size * p * exp_vec(-z * z);
}

// fn(activation as a constant)
template <typename Function>
inline void with_activation(Activation activation, Function fn) {
  switch (activation) {
    case Activation::silu: return fn(std::integral_constant<Activation, Activation::silu>{});
    case Activation::gelu_tanh: return fn(std::integral_constant<Activation, Activation::gelu_tanh>{});
    case Activation::gelu: return fn(std::integral_constant<Activation, Activation::gelu>{});
    case Activation::relu: return fn(std::integral_constant<Activation, Activation::relu>{});
    case Activation::relu2: return fn(std::integral_constant<Activation, Activation::relu2>{});
    case Activation::sigmoid: return fn(std::integral_constant<Activation, Activation::sigmoid>{});
  }
}

void gated_row(const float* gate, const float* up, Activation activation, int64_t n, float* out) {
  with_activation(activation, [&](auto kind) {
    map_row(gate, up, n, out, [](vec g, vec u) { return activate_vec<decltype(kind)::value>(g) * u; });
  });
}

void activate_row(const float* x, Activation activation, int64_t n, float* out) {
  with_activation(activation, [&](auto kind) {
    map_row(x, x, n, out, [](vec v, vec) { return activate_vec<decltype(kind)::value>(v); });
  });
}

void softcap_row(const float* x, float cap, int64_t n, float* out) {
  const float inverse = 1.0f / cap;
  map_row(x, x, n, out, [cap, inverse](vec v, vec) { return cap * tanh_vec(v * inverse); });
}

void rope_row(const float* x, const float* cosines, const float* sines, int64_t half, int64_t head_dim,
              bool interleaved, float* out) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float first = x[2 * i], second = x[2 * i + 1];
      out[2 * i] = first * cosines[i] - second * sines[i];
      out[2 * i + 1] = second * cosines[i] + first * sines[i];
    }
  } else {
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const vec first = load(x + i), second = load(x + half + i), c = load(cosines + i), s = load(sines + i);
      store(out + i, first * c - second * s);
      store(out + half + i, second * c + first * s);
    }
    for (; i < half; ++i) {
      const float first = x[i], second = x[half + i];
      out[i] = first * cosines[i] - second * sines[i];
      out[half + i] = second * cosines[i] + first * sines[i];
    }
  }
  for (int64_t i = 2 * half; i < head_dim; ++i) out[i] = x[i];
}

// Rows of a matrix, and rows that lie anywhere.
struct EvenRows {
  const float* first;
  int64_t stride;
  const float* at(int row) const { return first + row * stride; }
};
struct RowsOf {
  const float* const* rows;
  const float* at(int row) const { return rows[row]; }
};

// The last dim % lanes products. Kept out of line: inlined, it makes the compiler spill the accumulators of scores_block.
template <class Rows>
__attribute__((noinline)) void scores_tail(const float* q, int64_t ldq, int rows, Rows k, int key, int keys,
                                           int64_t begin, int64_t dim, float* out, int64_t ldo) {
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < keys; ++j)
      for (int64_t d = begin; d < dim; ++d)
        out[r * ldo + j] = fused(q[r * ldq + d], k.at(key + j)[d], out[r * ldo + j]);
}

// sum += a * b, or the first of the products. On NEON by hand: where much is unrolled, the compiler copies sums from register
// to register on the way.
template <bool First>
__attribute__((always_inline)) inline void multiply_add(vec& sum, vec a, vec b) {
#if defined(__aarch64__)
  if constexpr (First) {
    asm("fmul %0.4s, %1.4s, %2.4s" : "=w"(sum) : "w"(a), "w"(b));
  } else {
    asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b));
  }
#else
  sum = fused(a, b, First ? vec{} : sum);  // not a * b: it might be fused with the sum that follows, or not
#endif
}

template <bool First, int R, int K>
__attribute__((always_inline)) inline void add_products(vec (&sum)[R][K], const float* q, int64_t ldq,
                                                        const float* const (&from)[K], int64_t d) {
  vec keys[K];
  for (int j = 0; j < K; ++j) keys[j] = load(from[j] + d);
  for (int r = 0; r < R; ++r) {
    const vec query = load(q + r * ldq + d);
    for (int j = 0; j < K; ++j) multiply_add<First>(sum[r][j], query, keys[j]);
  }
}

// Of R rows with keys [key, key + K).
template <int R, int K, class Rows>
inline void scores_block(const float* q, int64_t ldq, Rows k, int key, int64_t dim, float* out, int64_t ldo) {
  vec sum[R][K];
  const float* from[K];
  for (int j = 0; j < K; ++j) from[j] = k.at(key + j);
  int64_t d = 0;
  if (kLanes <= dim) {
    add_products<true>(sum, q, ldq, from, 0);  // zeros to begin with would cost as much as products
    d = kLanes;
  } else {
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < K; ++j) sum[r][j] = vec{};
  }
  for (; d + kLanes <= dim; d += kLanes) add_products<false>(sum, q, ldq, from, d);
  for (int r = 0; r < R; ++r) {
    if constexpr (K == 4) {
      lane_sum4(sum[r], out + r * ldo);
    } else {
      for (int j = 0; j < K; ++j) out[r * ldo + j] = lane_sum(sum[r][j]);
    }
  }
  if (d < dim) scores_tail(q, ldq, R, k, key, K, d, dim, out, ldo);
}

template <int R, class Rows>
inline void scores_rows(const float* q, int64_t ldq, Rows k, int keys, int64_t dim, float* out, int64_t ldo) {
  int j = 0;
  for (; j + 4 <= keys; j += 4) scores_block<R, 4>(q, ldq, k, j, dim, out + j, ldo);
  for (; j < keys; ++j) scores_block<R, 1>(q, ldq, k, j, dim, out + j, ldo);
}

template <class Rows>
inline void scores_all(const float* q, int64_t ldq, int rows, Rows k, int keys, int64_t dim, float* out, int64_t ldo) {
  int r = 0;
  for (; r + kRowBlock <= rows; r += kRowBlock)
    scores_rows<kRowBlock>(q + r * ldq, ldq, k, keys, dim, out + r * ldo, ldo);
  const float* rest = q + r * ldq;
  switch (rows - r) {
    case 3: return scores_rows<3>(rest, ldq, k, keys, dim, out + r * ldo, ldo);
    case 2: return scores_rows<2>(rest, ldq, k, keys, dim, out + r * ldo, ldo);
    case 1: return scores_rows<1>(rest, ldq, k, keys, dim, out + r * ldo, ldo);
  }
}

void scores_tile(const float* q, int64_t ldq, int rows, const float* k, int64_t ldk, int keys, int64_t dim,
                 float* out, int64_t ldo) {
  scores_all(q, ldq, rows, EvenRows{k, ldk}, keys, dim, out, ldo);
}

void scores_of_rows(const float* q, int64_t ldq, int rows, const float* const* k, int keys, int64_t dim, float* out,
                    int64_t ldo) {
  scores_all(q, ldq, rows, RowsOf{k}, keys, dim, out, ldo);
}

float exponentials_row(float* values, int n, float max) {
  vec sum{};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    vec e[4];
    for (int u = 0; u < 4; ++u) e[u] = load(values + i + u * kLanes) - max;
    exp_below(e);
    for (int u = 0; u < 4; ++u) store(values + i + u * kLanes, e[u]);
    sum += (e[0] + e[1]) + (e[2] + e[3]);
  }
  for (; i < n; i += kLanes) {
    const int left = n - i < kLanes ? n - i : kLanes;
    vec e[1] = {load_first(values + i, left) - max};
    exp_below(e);
    store_first(values + i, e[0], left);
    sum += load_first(values + i, left);  // lanes behind the last value do not count
  }
  return lane_sum(sum);
}

float maximum_row(const float* values, int64_t n) {
  float best = values[0];
  int64_t i = 0;
  if (n >= kLanes) {
    vec top = load(values);
    i = kLanes;
    if (n >= 4 * kLanes) {  // four at a time: one after the other they would wait for each other
      vec tops[4];
      for (int u = 0; u < 4; ++u) tops[u] = load(values + u * kLanes);
      for (i = 4 * kLanes; i + 4 * kLanes <= n; i += 4 * kLanes)
        for (int u = 0; u < 4; ++u) tops[u] = max(tops[u], load(values + i + u * kLanes));
      top = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
    }
    for (; i + kLanes <= n; i += kLanes) top = max(top, load(values + i));
    best = lane_max(top);
  }
  for (; i < n; ++i) best = values[i] > best ? values[i] : best;
  return best;
}

#if defined(__aarch64__)
// sum[r][c] += (lane `Lane` of weights[r]) * values[c]: one load of weights serves four keys. By hand as in multiply_add.
template <int Lane, int R, int V>
__attribute__((always_inline)) inline void add_value(vec (&sum)[R][V], const vec (&weights)[R], const float* value) {
  vec values[V];
  for (int c = 0; c < V; ++c) values[c] = load(value + c * kLanes);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < V; ++c)
      asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum[r][c]) : "w"(values[c]), "w"(weights[r]), "i"(Lane));
}
#endif

// Of R rows, their numbers [d, d + V * kLanes).
template <int R, int V, class Rows>
inline void accumulate_block(const float* weights, int64_t ldw, Rows v, int64_t d, int keys, float* out, int64_t ldo) {
  vec sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < V; ++c) sum[r][c] = load(out + r * ldo + d + c * kLanes);
  int j = 0;
#if defined(__aarch64__)
  for (; j + 4 <= keys; j += 4) {
    vec four[R];
    for (int r = 0; r < R; ++r) four[r] = load(weights + r * ldw + j);
    add_value<0>(sum, four, v.at(j) + d);
    add_value<1>(sum, four, v.at(j + 1) + d);
    add_value<2>(sum, four, v.at(j + 2) + d);
    add_value<3>(sum, four, v.at(j + 3) + d);
  }
#endif
  for (; j < keys; ++j) {
    vec value[V];
    for (int c = 0; c < V; ++c) value[c] = load(v.at(j) + d + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const vec weight = splat(weights[r * ldw + j]);
      for (int c = 0; c < V; ++c) multiply_add<false>(sum[r][c], weight, value[c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < V; ++c) store(out + r * ldo + d + c * kLanes, sum[r][c]);
}

template <int R, class Rows>
inline void accumulate_rows(const float* weights, int64_t ldw, Rows v, int keys, int64_t dim, float* out, int64_t ldo) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) accumulate_block<R, 4>(weights, ldw, v, d, keys, out, ldo);
  for (; d + kLanes <= dim; d += kLanes) accumulate_block<R, 1>(weights, ldw, v, d, keys, out, ldo);
  for (; d < dim; ++d) {
    for (int r = 0; r < R; ++r) {
      float total = out[r * ldo + d];
      for (int j = 0; j < keys; ++j) total = fused(weights[r * ldw + j], v.at(j)[d], total);
      out[r * ldo + d] = total;
    }
  }
}

template <class Rows>
inline void accumulate_all(const float* weights, int64_t ldw, int rows, Rows v, int keys, int64_t dim, float* out,
                           int64_t ldo) {
  int r = 0;
  for (; r + kRowBlock <= rows; r += kRowBlock)
    accumulate_rows<kRowBlock>(weights + r * ldw, ldw, v, keys, dim, out + r * ldo, ldo);
  const float* rest = weights + r * ldw;
  switch (rows - r) {
    case 3: return accumulate_rows<3>(rest, ldw, v, keys, dim, out + r * ldo, ldo);
    case 2: return accumulate_rows<2>(rest, ldw, v, keys, dim, out + r * ldo, ldo);
    case 1: return accumulate_rows<1>(rest, ldw, v, keys, dim, out + r * ldo, ldo);
  }
}

void accumulate_tile(const float* weights, int64_t ldw, int rows, const float* v, int64_t ldv, int keys, int64_t dim,
                     float* out, int64_t ldo) {
  accumulate_all(weights, ldw, rows, EvenRows{v, ldv}, keys, dim, out, ldo);
}

void accumulate_of_rows(const float* weights, int64_t ldw, int rows, const float* const* v, int keys, int64_t dim,
                        float* out, int64_t ldo) {
  accumulate_all(weights, ldw, rows, RowsOf{v}, keys, dim, out, ldo);
}

inline FloatKernels make_float_kernels(const char* name) {
  return {name,
          rms_norm_row,
          layer_norm_row,
          add_row,
          scale_row,
          gated_row,
          activate_row,
          softcap_row,
          rope_row,
          half_row_to_float,
          float_row_to_half,
          bfloat_row_to_float,
          float_row_to_bfloat,
          int8_row_to_float,
          e4m3_row_to_float,
          e5m2_row_to_float,
          codes_row_to_float,
          paired_row_to_float,
          look_up_row,
          scores_tile,
          scores_of_rows,
          exponentials_row,
          maximum_row,
          accumulate_tile,
          accumulate_of_rows};
}

}  // namespace
}  // namespace tokenmill
