// Recurrent layers: a causal convolution and three scans, each over the state of one sequence.
//
// Rows are computed one after the other, so a result does not depend on how a sequence is cut into steps. A state has
// parts (heads, blocks of channels) that do not meet: callers divide sequences and parts over threads. The inner loops
// exist once per instruction set; `recurrent_kernels()` picks the table for this CPU. Knows nothing of Python, of
// models or of slots; called by bind_recurrent.cpp (op by op) and by the recorded program.
#pragma once

#include <cstdint>

namespace tokenmill {

// One token of a head of Mamba 2. The inputs are `dim` and `size` long.
struct DecayToken {
  const float* x;  // [dim]
  const float* b;  // [size]
  const float* c;  // [size]
  float* out;      // [dim]; null: nobody wants it
  float decay, time;
};

// One token of a head of the gated delta rule: q and k normalised.
struct DeltaToken {
  const float* q;  // [keys]
  const float* k;  // [keys]
  const float* v;  // [values]
  float* out;      // [values]; null: nobody wants it
  float decay, weight;
};

struct RecurrentKernels {
  // out[c] = silu(bias[c] + sum_i weight[i][c] * windows[i][c]) over n channels; bias may be null. `stride` of weight.
  void (*convolve)(const float* const* windows, const float* weight, int64_t stride, int width, const float* bias,
                   int64_t n, float* out);
  // state[i] = e^(time * a[i]) * state[i] + factor * b[i]; returns sum_i state[i] * c[i]
  float (*selective)(float* state, const float* a, float time, float factor, const float* b, const float* c, int64_t n);
  // state [dim, size] over `count` <= kMaxTokens tokens: S = decay S + time x b', out = S c + skip x
  void (*decay)(float* state, int64_t dim, int64_t size, float skip, const DecayToken* tokens, int count);
  // state [keys, values] over `count` tokens: S = decay S, S += k (weight (v - S' k))', out = S' q
  void (*delta)(float* state, int64_t keys, int64_t values, const DeltaToken* tokens, int count);
  // out[i] = x[i] * silu(scale * gate[i]); `out` may be `x`
  void (*gate)(const float* x, const float* gate, float scale, int64_t n, float* out);
};

constexpr int kMaxTokens = 16;  // that a kernel takes at a time, the state in registers or in the nearest cache

const RecurrentKernels& recurrent_kernels();

// RMS norm of each `group` numbers of a row, times silu(gate_scale * gate), which comes after the norm or before it.
struct GatedNorm {
  const float* weight = nullptr;  // [weights]: as many as a group has, or as a row
  int64_t weights = 0, group = 0;
  float eps = 0, gate_scale = 1;
  bool norm_first = false;
};

// x, gate, out [n]; `out` must not be `gate`.
void gated_norm_row(const float* x, const float* gate, int64_t n, const GatedNorm& norm, float* out);

// Rows [begin, end) of a sequence.
struct RecurrentRows {
  const float* const* inputs;  // each [T, its width]
  int64_t begin, end;
  float* out;  // [T, out_width]; null: only the state is wanted
};

constexpr int kMaxRecurrentInputs = 4;

// An op that continues a state.
class Recurrence {
 public:
  virtual ~Recurrence() = default;
  virtual int num_inputs() const = 0;
  virtual int64_t input_width(int input) const = 0;
  virtual int64_t out_width() const = 0;
  virtual int64_t state_floats() const = 0;  // of a sequence
  virtual int64_t num_parts() const = 0;
  virtual int64_t scratch_floats() const = 0;
  // One part of a sequence whose state is `state`. `keeps` false: the state is left as it is.
  virtual void run(const RecurrentRows& rows, int64_t part, float* state, bool keeps, float* scratch) const = 0;
};

// Input x [T, channels]; state [width - 1, channels]; weight [width, channels]; bias may be null.
class Convolution final : public Recurrence {
 public:
  static constexpr int kMaxWidth = 64;
  Convolution(const float* weight, const float* bias, int width, int64_t channels)
      : weight_(weight), bias_(bias), width_(width), channels_(channels) {}
  int num_inputs() const override { return 1; }
  int64_t input_width(int) const override { return channels_; }
  int64_t out_width() const override { return channels_; }
  int64_t state_floats() const override { return (width_ - 1) * channels_; }
  int64_t num_parts() const override;
  int64_t scratch_floats() const override { return 0; }
  void run(const RecurrentRows& rows, int64_t part, float* state, bool keeps, float* scratch) const override;

 private:
  const float *weight_, *bias_;
  int width_;
  int64_t channels_;
};

// Inputs x, dt [T, inner]; b, c [T, size]; state [inner, size]; a [inner, size]; d [inner].
class MambaScan final : public Recurrence {
 public:
  MambaScan(const float* a, const float* d, int64_t inner, int64_t size) : a_(a), d_(d), inner_(inner), size_(size) {}
  int num_inputs() const override { return 4; }
  int64_t input_width(int input) const override { return input < 2 ? inner_ : size_; }
  int64_t out_width() const override { return inner_; }
  int64_t state_floats() const override { return inner_ * size_; }
  int64_t num_parts() const override;
  int64_t scratch_floats() const override;
  void run(const RecurrentRows& rows, int64_t part, float* state, bool keeps, float* scratch) const override;

 private:
  const float *a_, *d_;
  int64_t inner_, size_;
};

struct Mamba2Shape {
  int64_t heads, head_dim, size, groups;
  float dt_scale, dt_low, dt_high;
};

// Inputs xbc [T, heads * head_dim + 2 * groups * size], dt [T, heads]; state [heads, head_dim, size]; a, d, bias [heads].
class Mamba2Scan final : public Recurrence {
 public:
  Mamba2Scan(const float* a, const float* d, const float* bias, const Mamba2Shape& shape)
      : a_(a), d_(d), bias_(bias), shape_(shape) {}
  int num_inputs() const override { return 2; }
  int64_t input_width(int input) const override {
    return input == 0 ? out_width() + 2 * shape_.groups * shape_.size : shape_.heads;
  }
  int64_t out_width() const override { return shape_.heads * shape_.head_dim; }
  int64_t state_floats() const override { return out_width() * shape_.size; }
  int64_t num_parts() const override { return shape_.heads; }
  int64_t scratch_floats() const override { return shape_.head_dim * shape_.size; }
  void run(const RecurrentRows& rows, int64_t part, float* state, bool keeps, float* scratch) const override;

 private:
  const float *a_, *d_, *bias_;
  Mamba2Shape shape_;
};

struct DeltaShape {
  int64_t heads, key_heads, key_dim, value_dim;
};

// Inputs qkv [T, 2 * key_heads * key_dim + heads * value_dim], beta, dt [T, heads]; state [heads, key_dim, value_dim];
// a, bias [heads].
class DeltaScan final : public Recurrence {
 public:
  DeltaScan(const float* a, const float* bias, const DeltaShape& shape) : a_(a), bias_(bias), shape_(shape) {}
  int num_inputs() const override { return 3; }
  int64_t input_width(int input) const override {
    return input == 0 ? 2 * shape_.key_heads * shape_.key_dim + out_width() : shape_.heads;
  }
  int64_t out_width() const override { return shape_.heads * shape_.value_dim; }
  int64_t state_floats() const override { return out_width() * shape_.key_dim; }
  int64_t num_parts() const override { return shape_.heads; }
  int64_t scratch_floats() const override { return shape_.key_dim * (shape_.value_dim + 2 * kMaxTokens); }
  void run(const RecurrentRows& rows, int64_t part, float* state, bool keeps, float* scratch) const override;

 private:
  const float *a_, *bias_;
  DeltaShape shape_;
};

}  // namespace tokenmill
