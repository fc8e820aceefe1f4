// How a group of weights gets its scale, for four groups side by side: the searches of quantize/ggml/search.py.
//
// One lane is one group, so every sum runs over its elements in order, exactly as in the torch twin; with contraction to
// fused multiply-add off (see CMakeLists.txt) the results have the same bits. Included by quantize_blocks.cpp; quantize_grids.cpp takes the vector.
#pragma once

#include <cmath>
#include <cstdint>

namespace tokenmill {
namespace {

constexpr int kSide = 4;  // groups (and so blocks) side by side
constexpr float kSmallest = 1e-15f;
constexpr int kRefinements = 5;

typedef float vec __attribute__((vector_size(kSide * 4)));
typedef int32_t ivec __attribute__((vector_size(kSide * 4)));

inline vec splat(float value) { return vec{value, value, value, value}; }
inline vec pick(ivec mask, vec yes, vec no) { return mask ? yes : no; }
inline vec magnitude(vec v) { return (vec)((ivec)v & 0x7fffffff); }
inline vec clamp(vec v, float low, float high) {
  v = v > splat(low) ? v : splat(low);
  return v < splat(high) ? v : splat(high);
}
inline vec square_root(vec v) {
  for (int k = 0; k < kSide; ++k) v[k] = std::sqrt(v[k]);
  return v;
}
// Nearest whole number, halves to even. |v| < 2^22: clamp first.
inline vec nearest(vec v) { return (v + 12582912.0f) - 12582912.0f; }
inline vec codes_from_zero(vec v, float levels) {
  return nearest(pick(v > splat(0), v < splat(levels) ? v : splat(levels), splat(0)));
}
inline vec signed_codes(vec v, float levels) { return nearest(clamp(v, -levels, levels - 1)); }
inline vec reciprocal_or_zero(vec v) { return pick(v != splat(0), 1.0f / v, splat(0)); }

template <int N>
inline vec signed_extreme(const vec* x) {
  vec extreme = splat(0);
  for (int i = 0; i < N; ++i) extreme = pick(magnitude(x[i]) > magnitude(extreme), x[i], extreme);
  return extreme;
}

template <int N>
inline vec sum_of_squares(const vec* x) {
  vec total = x[0] * x[0];
  for (int i = 1; i < N; ++i) total = total + x[i] * x[i];
  return total;
}

template <int N>
inline vec sum(const vec* x) {
  vec total = x[0];
  for (int i = 1; i < N; ++i) total = total + x[i];
  return total;
}

struct AffineGrid {
  double first, step;
  int steps;
};

// x ~ scale * code - minimum, codes 0 .. levels.
struct AffineFit {
  vec scale, minimum;
};

template <int N>
inline vec affine_error(const vec* x, const vec* weights, const vec* codes, vec scale, vec offset) {
  vec error = splat(0);
  for (int i = 0; i < N; ++i) {
    const vec difference = scale * codes[i] + offset - x[i];
    error = error + weights[i] * (difference * difference);
  }
  return error;
}

template <int N>
AffineFit fit_affine(const vec* x, const vec* weights, float levels, const AffineGrid& grid) {
  vec low = x[0], high = x[0], sum_w = weights[0], sum_x = weights[0] * x[0];
  for (int i = 1; i < N; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    sum_w = sum_w + weights[i];
    sum_x = sum_x + weights[i] * x[i];
  }
  low = low < splat(0) ? low : splat(0);
  const ivec flat = high <= low;
  vec inverse = splat(levels) / (high - low);
  vec best_scale = 1.0f / inverse, best_low = low;
  vec codes[N];
  for (int i = 0; i < N; ++i) codes[i] = codes_from_zero(inverse * (x[i] - low), levels);
  vec best_error = affine_error<N>(x, weights, codes, best_scale, low);
  for (int k = 0; k <= grid.steps; ++k) {
    inverse = splat(float(grid.first + grid.step * k + levels)) / (high - best_low);
    vec sum_l = splat(0), sum_l2 = splat(0), sum_xl = splat(0);
    for (int i = 0; i < N; ++i) {
      const vec code = codes_from_zero(inverse * (x[i] - best_low), levels), weighted = weights[i] * code;
      codes[i] = code;
      sum_l = sum_l + weighted;
      sum_l2 = sum_l2 + weighted * code;
      sum_xl = sum_xl + weighted * x[i];
    }
    const vec determinant = sum_w * sum_l2 - sum_l * sum_l;
    vec scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
    vec offset = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
    const ivec above = offset > splat(0);
    scale = pick(above, sum_xl / sum_l2, scale);
    offset = pick(above, splat(0), offset);
    const vec error = affine_error<N>(x, weights, codes, scale, offset);
    const ivec better = (determinant > splat(0)) & (error < best_error);
    best_error = pick(better, error, best_error);
    best_scale = pick(better, scale, best_scale);
    best_low = pick(better, offset, best_low);
  }
  return {pick(flat, splat(0), best_scale), pick(flat, 0.0f - low, 0.0f - best_low)};
}

// x ~ scale * code, codes -levels .. levels - 1; the scale may have either sign.
template <int N>
vec fit_symmetric(const vec* x, const vec* weights, float levels) {
  const vec extreme = signed_extreme<N>(x);
  vec scale = splat(0), best = splat(0);
  for (int turn = 0; turn <= 18; ++turn) {  // first the whole range, then -9 .. 9 tenths around it
    const int k = turn == 0 ? 0 : turn <= 9 ? turn - 10 : turn - 9;
    const vec inverse = splat(float(-(levels + 0.1 * k))) / extreme;
    vec sum_lx = splat(0), sum_l2 = splat(0);
    for (int i = 0; i < N; ++i) {
      const vec code = signed_codes(inverse * x[i], levels);
      sum_lx = sum_lx + weights[i] * x[i] * code;
      sum_l2 = sum_l2 + weights[i] * code * code;
    }
    ivec better = sum_l2 > splat(0);
    if (turn > 0) better = better & (sum_lx * sum_lx > best * sum_l2);
    scale = pick(better, sum_lx / sum_l2, scale);
    best = pick(better, scale * sum_lx, best);
  }
  return pick(magnitude(extreme) < splat(kSmallest), splat(0), scale);
}

// Move single codes while that raises (sum of x l)^2 / (sum of l^2).
template <int N>
inline void refine(const vec* x, const vec* weights, vec* codes, vec& sum_lx, vec& sum_l2, float low, float high) {
  for (int pass = 0; pass < kRefinements; ++pass)
    for (int i = 0; i < N; ++i) {
      const vec w = weights[i], weighted = w * x[i];
      const vec rest_lx = sum_lx - weighted * codes[i], rest_l2 = sum_l2 - w * codes[i] * codes[i];
      const vec moved = nearest(clamp(x[i] * rest_l2 / rest_lx, low, high));
      const vec new_lx = rest_lx + weighted * moved, new_l2 = rest_l2 + w * moved * moved;
      const ivec better = (rest_lx > splat(0)) & (rest_l2 > splat(0)) & (moved != codes[i]) & (new_l2 > splat(0)) &
                          (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2);
      codes[i] = pick(better, moved, codes[i]);
      sum_lx = pick(better, new_lx, sum_lx);
      sum_l2 = pick(better, new_l2, sum_l2);
    }
}

template <int N>
inline void code_sums(const vec* x, const vec* weights, const vec* codes, vec& sum_lx, vec& sum_l2) {
  sum_lx = sum_l2 = splat(0);
  for (int i = 0; i < N; ++i) {
    sum_lx = sum_lx + weights[i] * x[i] * codes[i];
    sum_l2 = sum_l2 + weights[i] * codes[i] * codes[i];
  }
}

// As fit_symmetric with weights x * x, improving one code at a time instead of trying scales.
template <int N>
vec fit_refined(const vec* x, float levels) {
  const vec extreme = signed_extreme<N>(x), inverse = splat(-levels) / extreme;
  vec weights[N], codes[N], sum_lx, sum_l2;
  for (int i = 0; i < N; ++i) {
    weights[i] = x[i] * x[i];
    codes[i] = signed_codes(inverse * x[i], levels);
  }
  code_sums<N>(x, weights, codes, sum_lx, sum_l2);
  refine<N>(x, weights, codes, sum_lx, sum_l2, -levels, levels - 1);
  const vec scale = pick(sum_l2 > splat(0), sum_lx / sum_l2, splat(0));
  return pick(magnitude(extreme) < splat(kSmallest), splat(0), scale);
}

// x ~ scale * code, x >= 0, codes 0 .. levels: how scales themselves are stored.
template <int N>
vec fit_positive(const vec* x, const vec* weights, float levels, vec* codes) {
  vec highest = splat(0);
  for (int i = 0; i < N; ++i) highest = x[i] > highest ? x[i] : highest;
  vec best_inverse = splat(levels) / highest, best_error = splat(0);
  for (int turn = 0; turn <= 8; ++turn) {
    const int k = turn == 0 ? 0 : turn <= 4 ? turn - 5 : turn - 4;
    const vec inverse = splat(float(levels + 0.1 * k)) / highest, scale = 1.0f / inverse;
    vec error = splat(0);
    for (int i = 0; i < N; ++i) {
      const vec difference = x[i] - scale * codes_from_zero(inverse * x[i], levels);
      error = error + weights[i] * difference * difference;
    }
    if (turn == 0) {
      best_error = error;
      continue;
    }
    const ivec better = error < best_error;
    best_error = pick(better, error, best_error);
    best_inverse = pick(better, inverse, best_inverse);
  }
  for (int i = 0; i < N; ++i) codes[i] = codes_from_zero(best_inverse * x[i], levels);
  vec sum_lx, sum_l2;
  code_sums<N>(x, weights, codes, sum_lx, sum_l2);
  refine<N>(x, weights, codes, sum_lx, sum_l2, 0, levels);
  const ivec zero = highest < splat(kSmallest);
  for (int i = 0; i < N; ++i) codes[i] = pick(zero, splat(0), codes[i]);
  return pick(zero | (sum_l2 <= splat(0)), splat(0), sum_lx / sum_l2);
}

constexpr int kNumLevels = 16, kLevelTries = 7;
constexpr float kLevels[kNumLevels] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// The level nearest to v; halfway goes up.
inline vec nearest_level(vec v) {
  const vec doubled = v + v;
  vec level = splat(kLevels[0]);
  for (int j = 1; j < kNumLevels; ++j)
    level = level + (vec)((doubled >= splat(kLevels[j - 1] + kLevels[j])) & (ivec)splat(kLevels[j] - kLevels[j - 1]));
  return level;
}

inline ivec nearest_level_index(vec v) {
  const vec doubled = v + v;
  ivec index = {0, 0, 0, 0};
  for (int j = 1; j < kNumLevels; ++j) index = index - (doubled >= splat(kLevels[j - 1] + kLevels[j]));
  return index;
}

// x ~ scale * level[code]; the scale may have either sign.
template <int N>
vec fit_levels(const vec* x, const vec* weights) {
  const vec extreme = signed_extreme<N>(x);
  vec scale = splat(0), best = splat(0);
  for (int turn = -1; turn <= 2 * kLevelTries; ++turn) {
    const vec inverse = turn < 0 ? 1.0f / (extreme / splat(-kLevels[0]))
                                 : splat(float(turn - kLevelTries) + kLevels[0]) / extreme;
    vec sum_qx = splat(0), sum_q2 = splat(0);
    for (int i = 0; i < N; ++i) {
      const vec level = nearest_level(inverse * x[i]), weighted = weights[i] * level;
      sum_qx = sum_qx + weighted * x[i];
      sum_q2 = sum_q2 + weighted * level;
    }
    ivec better = sum_q2 > splat(0);
    if (turn >= 0) better = better & (sum_qx * sum_qx > best * sum_q2);
    scale = pick(better, sum_qx / sum_q2, scale);
    best = pick(better, scale * sum_qx, best);
  }
  return pick(magnitude(extreme) < splat(kSmallest), splat(0), scale);
}

}  // namespace
}  // namespace tokenmill
