// Recurrent layers, a part of a sequence at a time: see recurrent.h. Also the baseline kernels and the choice of a table.
#include "recurrent.h"

#include <algorithm>
#include <cmath>

#include "float_kernels.h"
#include "linear.h"
#include "recurrent_impl.h"

namespace tokenmill {

#if defined(TOKENMILL_HAS_AVX2)
const RecurrentKernels& avx2_recurrent_kernels();
#endif
#if defined(TOKENMILL_HAS_AVX512_VNNI)
const RecurrentKernels& avx512_recurrent_kernels();
#endif

const RecurrentKernels& recurrent_kernels() {
  static const RecurrentKernels& chosen = []() -> const RecurrentKernels& {
    const Isa isa = best_isa();
    (void)isa;
#if defined(TOKENMILL_HAS_AVX512_VNNI)
    if (isa == Isa::avx512_vnni || isa == Isa::amx) return avx512_recurrent_kernels();
#endif
#if defined(TOKENMILL_HAS_AVX2)
    if (isa == Isa::avx2) return avx2_recurrent_kernels();
#endif
    static const RecurrentKernels baseline = make_recurrent_kernels();
    return baseline;
  }();
  return chosen;
}

namespace {

constexpr int64_t kChannels = 256;  // of a convolution or of Mamba, in a part

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The floats that a scan works on: those of the state itself, or a copy.
float* own_state(float* state, int64_t floats, bool keeps, float* scratch) {
  if (keeps) return state;
  std::copy(state, state + floats, scratch);
  return scratch;
}

// `from` with length one, times `scale`.
void normalize(const float* from, int64_t n, float scale, float* to) {
  float square = 0;
  for (int64_t i = 0; i < n; ++i) square += from[i] * from[i];
  const float factor = scale / std::sqrt(square + 1e-6f);
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] * factor;
}

}  // namespace

void gated_norm_row(const float* x, const float* gate, int64_t n, const GatedNorm& norm, float* out) {
  const float* from = x;
  if (!norm.norm_first) {
    recurrent_kernels().gate(x, gate, norm.gate_scale, n, out);
    from = out;
  }
  for (int64_t i = 0; i < n; i += norm.group)
    float_kernels().rms_norm(from + i, norm.weight + i % norm.weights, norm.eps, norm.group, out + i);
  if (norm.norm_first) recurrent_kernels().gate(out, gate, norm.gate_scale, n, out);
}

int64_t Convolution::num_parts() const { return (channels_ + kChannels - 1) / kChannels; }

void Convolution::run(const RecurrentRows& rows, int64_t part, float* state, bool keeps, float*) const {
  const int64_t first = part * kChannels, count = std::min(kChannels, channels_ - first);
  const int64_t kept = width_ - 1, num_rows = rows.end - rows.begin;
  const float* input = rows.inputs[0] + rows.begin * channels_ + first;
  state += first;
  // Row `at` of this step's inputs; those before the first one are in the state.
  const auto window = [&](int64_t at) { return at < 0 ? state + (at + kept) * channels_ : input + at * channels_; };
  if (rows.out != nullptr) {
    const float* windows[kMaxWidth];
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int i = 0; i < width_; ++i) windows[i] = window(row - kept + i);
      recurrent_kernels().convolve(windows, weight_ + first, channels_, width_, bias_ == nullptr ? nullptr : bias_ + first,
                                   count, rows.out + (rows.begin + row) * channels_ + first);
    }
  }
  if (!keeps || num_rows == 0) return;
  for (int64_t i = 0; i < kept; ++i) {  // from the oldest on: what is read lies behind what is written
    const float* from = window(num_rows - kept + i);
    std::copy(from, from + count, state + i * channels_);
  }
}

int64_t MambaScan::num_parts() const { return (inner_ + kChannels - 1) / kChannels; }

int64_t MambaScan::scratch_floats() const { return std::min(kChannels, inner_) * size_; }

void MambaScan::run(const RecurrentRows& rows, int64_t part, float* state, bool keeps, float* scratch) const {
  const int64_t first = part * kChannels, count = std::min(kChannels, inner_ - first);
  float* own = own_state(state + first * size_, count * size_, keeps, scratch);
  const float *x = rows.inputs[0], *dt = rows.inputs[1], *b = rows.inputs[2], *c = rows.inputs[3];
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t channel = first + i, at = row * inner_ + channel;
      const float time = softplus(dt[at]);
      const float y = recurrent_kernels().selective(own + i * size_, a_ + channel * size_, time, time * x[at],
                                                    b + row * size_, c + row * size_, size_);
      if (rows.out != nullptr) rows.out[at] = y + d_[channel] * x[at];
    }
  }
}

void Mamba2Scan::run(const RecurrentRows& rows, int64_t part, float* state, bool keeps, float* scratch) const {
  const int64_t heads = shape_.heads, dim = shape_.head_dim, size = shape_.size, head = part;
  const int64_t inner = heads * dim, width = input_width(0), group = head / (heads / shape_.groups);
  float* own = own_state(state + head * dim * size, dim * size, keeps, scratch);
  DecayToken tokens[kMaxTokens];
  for (int64_t begin = rows.begin; begin < rows.end; begin += kMaxTokens) {
    const int count = static_cast<int>(std::min<int64_t>(kMaxTokens, rows.end - begin));
    for (int i = 0; i < count; ++i) {
      const int64_t row = begin + i;
      const float* in = rows.inputs[0] + row * width;
      const float wanted = softplus(rows.inputs[1][row * heads + head] * shape_.dt_scale + bias_[head]);
      const float time = std::min(std::max(wanted, shape_.dt_low), shape_.dt_high);
      const float* b = in + inner + group * size;
      tokens[i] = {in + head * dim, b, b + shape_.groups * size,
                   rows.out == nullptr ? nullptr : rows.out + row * inner + head * dim, std::exp(time * a_[head]), time};
    }
    recurrent_kernels().decay(own, dim, size, d_[head], tokens, count);
  }
}

void DeltaScan::run(const RecurrentRows& rows, int64_t part, float* state, bool keeps, float* scratch) const {
  const int64_t heads = shape_.heads, keys = shape_.key_dim, values = shape_.value_dim, head = part;
  const int64_t key_width = shape_.key_heads * keys, width = input_width(0);
  const int64_t key_head = head / (heads / shape_.key_heads);
  float* normalized = scratch + keys * values;
  float* own = own_state(state + head * keys * values, keys * values, keeps, scratch);
  DeltaToken tokens[kMaxTokens];
  for (int64_t begin = rows.begin; begin < rows.end; begin += kMaxTokens) {
    const int count = static_cast<int>(std::min<int64_t>(kMaxTokens, rows.end - begin));
    for (int i = 0; i < count; ++i) {
      const int64_t row = begin + i;
      const float* in = rows.inputs[0] + row * width;
      float *q = normalized + 2 * i * keys, *k = q + keys;
      normalize(in + key_head * keys, keys, 1.0f / std::sqrt(static_cast<float>(keys)), q);
      normalize(in + key_width + key_head * keys, keys, 1.0f, k);
      tokens[i] = {q, k, in + 2 * key_width + head * values,
                   rows.out == nullptr ? nullptr : rows.out + (row * heads + head) * values,
                   std::exp(a_[head] * softplus(rows.inputs[2][row * heads + head] + bias_[head])),
                   sigmoid(rows.inputs[1][row * heads + head])};
    }
    recurrent_kernels().delta(own, keys, values, tokens, count);
  }
}

}  // namespace tokenmill
