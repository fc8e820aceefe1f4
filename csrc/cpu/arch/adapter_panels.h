// A part of panel_kernels.h: products with the factors of adapters (adapter_kernels.h).
//
// Included by panel_kernels.h only. Two rows share every load of a factor: decode steps have few rows of one adapter.
#pragma once

#include <cmath>

namespace tokenmill {
namespace {

// y = panel x R rows, over blocks of kBlock k.
template <class V, int R, int kBlock>
TM_INLINE void adapter_sums(const int8_t* panel, int64_t blocks, const RoundedRow* rows,
                            typename V::Floats (&y)[R][kPanelCols / V::kLanes]) {
  constexpr int kRegs = kPanelCols / V::kLanes;
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kRegs; ++i) y[r][i] = V::splat(0);
  const uint8_t* at = reinterpret_cast<const uint8_t*>(panel);
  for (int64_t b = 0; b < blocks; ++b, at += kBlock * kPanelCols) {
    typename V::Ints acc[R][kRegs];
    typename V::X x[R][kBlock / 16];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < kRegs; ++i) acc[r][i] = V::splat_i(V::kFloatBase - V::kSignedBias * rows[r].sums[b]);
      for (int half = 0; half < kBlock / 16; ++half) x[r][half] = V::load_x(rows[r].codes + b * kBlock + 16 * half);
    }
    unroll<kBlock / 4>([&](auto step) {
      constexpr int kHalf = step.value / 4, kLane = step.value % 4;
      for (int i = 0; i < kRegs; ++i) {
        const auto w = V::load(at + step.value * 64 + i * V::kLanes * 4);
        for (int r = 0; r < R; ++r) acc[r][i] = V::template dot_signed<kLane>(acc[r][i], w, x[r][kHalf]);
      }
    });
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kRegs; ++i)
        y[r][i] = V::fma(V::based_to_float(acc[r][i]), V::splat(rows[r].scales[b]), y[r][i]);
  }
}

template <class V>
void round_adapter_input(const float* x, int64_t count, const RoundedRow& out) {
  for (int64_t b = 0; b < count / kInputBlock; ++b) {
    const float* block = x + b * kInputBlock;
    const float inverse = inverse_step<V>(block, kInputBlock);
    int8_t* codes = out.codes + b * kInputBlock;
    out.sums[b] = V::quantize16(block, inverse, codes) + V::quantize16(block + 16, inverse, codes + 16);
    out.scales[b] = inverse > 0 ? 1.0f / inverse : 0.0f;
  }
}

// One block of 16, in plain code: V::peak may read 32.
TM_INLINE void round_ranks(const float* x, const RoundedRow& out) {
  float peak = 0;
  for (int i = 0; i < kRankBlock; ++i) peak = std::fmax(peak, std::fabs(x[i]));
  const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
  int32_t sum = 0;
  for (int i = 0; i < kRankBlock; ++i) {
    const int32_t code = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
    out.codes[i] = static_cast<int8_t>(code);
    sum += code;
  }
  out.scales[0] = inverse > 0 ? 1.0f / inverse : 0.0f;
  out.sums[0] = sum;
}

template <class V, int R>
TM_INLINE void shrink_some(const int8_t* panel, int64_t blocks, const float* scales, const RoundedRow* rows,
                           const RoundedRow* out) {
  constexpr int kRegs = kPanelCols / V::kLanes;
  typename V::Floats y[R][kRegs];
  adapter_sums<V, R, kInputBlock>(panel, blocks, rows, y);
  alignas(64) float values[kPanelCols];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < kRegs; ++i)
      V::store_f(values + i * V::kLanes, V::mul(y[r][i], V::load_f(scales + i * V::kLanes)));
    round_ranks(values, out[r]);
  }
}

template <class V>
void adapter_shrink(const int8_t* panel, int64_t blocks, const float* scales, const RoundedRow* rows, int num_rows,
                    const RoundedRow* out) {
  int r = 0;
  for (; r + 2 <= num_rows; r += 2) shrink_some<V, 2>(panel, blocks, scales, rows + r, out + r);
  if (r < num_rows) shrink_some<V, 1>(panel, blocks, scales, rows + r, out + r);
}

template <class V, int R>
TM_INLINE void expand_some(const int8_t* panel, float factor, int64_t blocks, const RoundedRow* rows,
                           float* const* y, int64_t column) {
  constexpr int kRegs = kPanelCols / V::kLanes;
  typename V::Floats sums[R][kRegs];
  adapter_sums<V, R, kRankBlock>(panel, blocks, rows, sums);
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kRegs; ++i) {
      float* at = y[r] + column + i * V::kLanes;
      V::store_f(at, V::fma(sums[r][i], V::splat(factor), V::load_f(at)));
    }
}

template <class V>
void adapter_expand(const int8_t* panels, const float* factors, int64_t num_panels, int64_t blocks,
                    const RoundedRow* rows, int num_rows, float* const* y) {
  for (int64_t p = 0; p < num_panels; ++p, panels += blocks * kRankBlock * kPanelCols) {
    int r = 0;
    for (; r + 2 <= num_rows; r += 2) expand_some<V, 2>(panels, factors[p], blocks, rows + r, y + r, p * kPanelCols);
    if (r < num_rows) expand_some<V, 1>(panels, factors[p], blocks, rows + r, y + r, p * kPanelCols);
  }
}

template <class V>
constexpr AdapterKernels make_adapter_kernels() {
  return {round_adapter_input<V>, adapter_shrink<V>, adapter_expand<V>};
}

}  // namespace
}  // namespace tokenmill
