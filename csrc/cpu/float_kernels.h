// Single-row float32 kernels, one table of them per instruction set.
//
// Rows are contiguous; the callers (ops, attention, program) split rows over threads. The kernels know nothing of
// threads, pages or batches. `float_kernels()` picks the table for this CPU once.
#pragma once

#include <cstdint>

namespace tokenmill {

enum class Activation { silu, gelu_tanh, gelu, relu, relu2, sigmoid };

struct FloatKernels {
  const char* name;

  // out = x / rms(x) * weight over n values. `out` may be `x`.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // out = (x - mean) / deviation * weight + bias over n values; `bias` may be null, `out` may be `x`.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out);
  void (*add)(const float* x, const float* y, int64_t n, float* out);
  void (*scale)(const float* x, float factor, int64_t n, float* out);
  void (*gated)(const float* gate, const float* up, Activation activation, int64_t n, float* out);
  void (*activate)(const float* x, Activation activation, int64_t n, float* out);
  void (*softcap)(const float* x, float cap, int64_t n, float* out);

  // Rotate the first 2 * half values of one head; the rest is copied. `out` may be `x`.
  void (*rope)(const float* x, const float* cosines, const float* sines, int64_t half, int64_t head_dim,
               bool interleaved, float* out);

  void (*half_to_float)(const uint16_t* in, float* out, int64_t n);
  void (*float_to_half)(const float* in, uint16_t* out, int64_t n);
  void (*bfloat_to_float)(const uint16_t* in, float* out, int64_t n);
  void (*float_to_bfloat)(const float* in, uint16_t* out, int64_t n);

  // Codes of KV rows (kv_rows.h): out = value of the code * factor (+ offset); look_up has a table of 16.
  void (*int8_to_float)(const int8_t* in, float factor, float* out, int64_t n);
  void (*e4m3_to_float)(const uint8_t* in, float factor, float* out, int64_t n);
  void (*e5m2_to_float)(const uint8_t* in, float factor, float* out, int64_t n);
  void (*codes_to_float)(const uint8_t* codes, float factor, float offset, float* out, int64_t n);
  // With separate factors and offsets for even and odd indices.
  void (*pairs_to_float)(const uint8_t* codes, const float* factors, const float* offsets, float* out, int64_t n);
  void (*look_up)(const uint8_t* codes, const float* table, float factor, float* out, int64_t n);

  // scores[r][j] = sum_d q[r][d] * k[j][d]
  void (*scores)(const float* q, int64_t ldq, int rows, const float* k, int64_t ldk, int keys, int64_t dim,
                 float* scores, int64_t lds);
  // The same where each key lies somewhere: k[j] is its row.
  void (*scores_of)(const float* q, int64_t ldq, int rows, const float* const* k, int keys, int64_t dim, float* scores,
                    int64_t lds);
  // values[j] = e^(values[j] - max), none above max; returns their sum
  float (*exponentials)(float* values, int n, float max);
  float (*maximum)(const float* values, int64_t n);
  // out[r][d] += sum_j weights[r][j] * v[j][d]
  void (*accumulate)(const float* weights, int64_t ldw, int rows, const float* v, int64_t ldv, int keys, int64_t dim,
                     float* out, int64_t ldo);
  // The same where v[j] is the row of value j.
  void (*accumulate_of)(const float* weights, int64_t ldw, int rows, const float* const* v, int keys, int64_t dim,
                        float* out, int64_t ldo);
};

const FloatKernels& float_kernels();

}  // namespace tokenmill
