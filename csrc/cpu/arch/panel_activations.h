// A part of panel_kernels.h: rows of activations to int8, as the direct (RowForm) and the expanded product (QuadForm)
// read them.
//
// Included by panel_kernels.h only. Knows nothing of weights.
#pragma once

namespace tokenmill {
namespace {

// The inverse step of a block's int8 grid: the peak falls on 127.
template <class V>
TM_INLINE float inverse_step(const float* x, int n) {
  const float peak = V::peak(x, n);
  return peak > 1e-30f ? 127.0f / peak : 0.0f;
}

// The same for a long block, where rounding errs more: the peak need not fall on 127 exactly. Of a few steps that
// differ by a percent, the one with the least squared rounding error is taken, which lowers the error by some 8 %.
template <class V>
TM_INLINE float choose_inverse(const float* x, int n) {
  const float peak = V::peak(x, n);
  if (!(peak > 1e-30f)) return 0.0f;
  constexpr float kTop[4] = {127.45f, 126.9f, 126.3f, 125.6f};
  float inverse[4], error[4];
  for (int i = 0; i < 4; ++i) inverse[i] = kTop[i] / peak;
  V::rounding_errors(x, n, inverse, error);
  int best = 0;
  for (int i = 0; i < 4; ++i) {
    error[i] *= 1.0f / (kTop[i] * kTop[i]);  // in units of x
    if (error[i] < error[best]) best = i;
  }
  return inverse[best];
}

TM_INLINE void take_away(const float* x, const int8_t* q, float unit, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = x[i] - unit * float(q[i]);
}

// One row of direct activations (RowForm). n is a multiple of 32, so are the blocks.
template <class V>
void quantize_row(const float* x, int64_t cols, int block, uint8_t* out, float* residuals) {
  const RowForm form{cols, block};
  int8_t* q = reinterpret_cast<int8_t*>(out);
  float* scale = reinterpret_cast<float*>(out + form.scale());
  int32_t* sum32 = reinterpret_cast<int32_t*>(out + form.sum32());
  uint8_t* extra = out + form.extra();
  for (int64_t k = 0; k < cols; k += block) {
    const float inverse = block == 32 ? inverse_step<V>(x + k, block) : choose_inverse<V>(x + k, block),
                unit = inverse > 0 ? 1.0f / inverse : 0.0f;
    scale[k / block] = unit;
    for (int64_t i = k; i < k + block; i += 32) {
      const int32_t low = V::quantize16(x + i, inverse, q + i), high = V::quantize16(x + i + 16, inverse, q + i + 16);
      if (residuals) take_away(x + i, q + i, unit, 32, residuals + i);
      sum32[i / 32] = low + high;
      if (block == 32) {
        reinterpret_cast<float*>(extra)[i / 32] = unit * float(low + high);
      } else {
        reinterpret_cast<int32_t*>(extra)[i / 16] = low;
        reinterpret_cast<int32_t*>(extra)[i / 16 + 1] = high;
        int8_t *parts16 = q + form.parts16() + k / 256 * 32, *parts32 = q + form.parts32() + k / 256 * 16;
        const int64_t g = (i - k) / 32;
        parts16[2 * g] = int8_t(low >> 6);
        parts16[2 * g + 1] = int8_t(high >> 6);
        parts16[2 * g + 16] = int8_t(low & 63);
        parts16[2 * g + 17] = int8_t(high & 63);
        parts32[g] = int8_t((low + high) >> 6);
        parts32[g + 8] = int8_t((low + high) & 63);
      }
    }
  }
}

// Four rows of expanded activations (QuadForm).
template <class V>
void quantize_quad(const float* const rows[4], int64_t cols, int block, uint8_t* out, float* residuals) {
  const QuadForm form{cols, block, V::kQuadRun};
  constexpr int kPiece = V::kQuadRun < 16 ? V::kQuadRun : 16;
  for (int64_t k = 0, b = 0; k < cols; k += block, ++b)
    for (int t = 0; t < 4; ++t) {
      const int length = int(k + block < cols ? block : cols - k);
      const float inverse = rows[t] ? inverse_step<V>(rows[t] + k, length) : 0.0f;
      const float scale = inverse > 0 ? 1.0f / inverse : 0.0f;
      int32_t sum = 0;
      for (int64_t i = k; i < k + length; i += 16) {
        int8_t q[16] = {};
        if (rows[t]) {
          sum += V::quantize16(rows[t] + i, inverse, q);
          if (residuals) take_away(rows[t] + i, q, scale, 16, residuals + t * cols + i);
        }
        uint8_t* to = out + form.code(i, t);  // the next run of a row follows those of all four
        for (int j = 0; j < 16; j += kPiece) __builtin_memcpy(to + j * 4, q + j, kPiece);
      }
      *reinterpret_cast<float*>(out + form.scale(b, t)) = scale;
      *reinterpret_cast<int32_t*>(out + form.sum(b, t)) = sum;
      *reinterpret_cast<float*>(out + form.scaled_sum(b, t)) = scale * float(sum);
    }
}

}  // namespace
}  // namespace tokenmill
