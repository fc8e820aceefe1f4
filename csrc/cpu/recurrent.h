// Recurrent layers: a causal convolution and the three scans over the states of a batch of sequences.
//
// Rows are computed one after the other, so a result does not depend on how a sequence is cut into steps. Sequences and
// heads (or blocks of channels) are divided over the threads of a pool. The row kernels exist once per instruction set;
// `recurrent_kernels()` picks the table for this CPU. Knows nothing of Python or of models.
#pragma once

#include <cstdint>

#include "pool.h"

namespace tokenmill {

struct RecurrentKernels {
  // out[c] = silu(bias[c] + sum_i weight[i][c] * windows[i][c]) over n channels; bias may be null. `stride` of weight.
  void (*convolve)(const float* const* windows, const float* weight, int64_t stride, int width, const float* bias,
                   int64_t n, float* out);
  // state[i] = decay * state[i] + factor * b[i]; returns sum_i state[i] * c[i]
  float (*decay)(float* state, float decay, float factor, const float* b, const float* c, int64_t n);
  // The same with a decay of its own for each number: e^(time * a[i])
  float (*selective)(float* state, const float* a, float time, float factor, const float* b, const float* c, int64_t n);
  // state[i] = decay * state[i] + k * update[i]; out[i] += q * state[i]
  void (*delta)(float* state, float decay, float k, const float* update, float q, float* out, int64_t n);
};

const RecurrentKernels& recurrent_kernels();

// The sequences of a step: rows [starts[s], starts[s + 1]) continue the state in slot slots[s].
struct Sequences {
  int count = 0;
  const int64_t* starts = nullptr;  // [count + 1]
  const int64_t* slots = nullptr;   // [count]
};

// x, out [T, channels]; states [slots, width - 1, channels]; weight [width, channels].
void convolve(ThreadPool& pool, const Sequences& sequences, const float* x, float* states, const float* weight,
              const float* bias, int width, int64_t channels, float* out);

// x, dt, out [T, inner]; b, c [T, size]; states [slots, inner, size]; a [inner, size]; d [inner].
void mamba_scan(ThreadPool& pool, const Sequences& sequences, const float* x, const float* dt, const float* b,
                const float* c, float* states, const float* a, const float* d, int64_t inner, int64_t size, float* out);

struct Mamba2Shape {
  int64_t heads, head_dim, size, groups;
  float dt_scale, dt_low, dt_high;
};

// xbc [T, heads * head_dim + 2 * groups * size]; dt [T, heads]; states [slots, heads, head_dim, size]; a, d, bias [heads].
void mamba2_scan(ThreadPool& pool, const Sequences& sequences, const float* xbc, const float* dt, float* states,
                 const float* a, const float* d, const float* bias, const Mamba2Shape& shape, float* out);

struct DeltaShape {
  int64_t heads, key_heads, key_dim, value_dim;
};

// qkv [T, 2 * key_heads * key_dim + heads * value_dim]; beta, dt [T, heads]; states [slots, heads, key_dim, value_dim].
void delta_scan(ThreadPool& pool, const Sequences& sequences, const float* qkv, const float* beta, const float* dt,
                float* states, const float* a, const float* bias, const DeltaShape& shape, float* out);

}  // namespace tokenmill
