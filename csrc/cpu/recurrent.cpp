// Recurrent layers over a batch of sequences: see recurrent.h. Also the baseline row kernels and the choice of a table.
#include "recurrent.h"

#include <algorithm>
#include <cmath>
#include <vector>

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

constexpr int64_t kChannels = 256;  // of a convolution or of Mamba, that a thread takes at a time
constexpr int kMaxWidth = 64;       // of a convolution

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// fn(sequence, part) for every part of every sequence.
template <typename Function>
void for_parts(ThreadPool& pool, const Sequences& sequences, int64_t parts, Function&& fn) {
  pool.for_each(static_cast<int>(sequences.count * parts), 1,
                [&](int index) { fn(static_cast<int>(index / parts), index % parts); });
}

}  // namespace

void convolve(ThreadPool& pool, const Sequences& sequences, const float* x, float* states, const float* weight,
              const float* bias, int width, int64_t channels, float* out) {
  const int64_t kept = width - 1;
  for_parts(pool, sequences, (channels + kChannels - 1) / kChannels, [&](int sequence, int64_t part) {
    const int64_t first = part * kChannels, count = std::min(kChannels, channels - first);
    const int64_t begin = sequences.starts[sequence], rows = sequences.starts[sequence + 1] - begin;
    float* state = states + sequences.slots[sequence] * kept * channels + first;
    const float* input = x + begin * channels + first;
    const float* windows[kMaxWidth];
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < width; ++i) {
        const int64_t at = row - kept + i;
        windows[i] = at < 0 ? state + (at + kept) * channels : input + at * channels;
      }
      recurrent_kernels().convolve(windows, weight + first, channels, width, bias == nullptr ? nullptr : bias + first,
                                   count, out + (begin + row) * channels + first);
    }
    for (int64_t i = 0; i < kept; ++i) {  // from the oldest on: what is read lies behind what is written
      const int64_t at = rows - kept + i;
      const float* from = at < 0 ? state + (at + kept) * channels : input + at * channels;
      std::copy(from, from + count, state + i * channels);
    }
  });
}

void mamba_scan(ThreadPool& pool, const Sequences& sequences, const float* x, const float* dt, const float* b,
                const float* c, float* states, const float* a, const float* d, int64_t inner, int64_t size,
                float* out) {
  for_parts(pool, sequences, (inner + kChannels - 1) / kChannels, [&](int sequence, int64_t part) {
    const int64_t first = part * kChannels, last = std::min(first + kChannels, inner);
    float* state = states + sequences.slots[sequence] * inner * size;
    for (int64_t row = sequences.starts[sequence]; row < sequences.starts[sequence + 1]; ++row) {
      for (int64_t channel = first; channel < last; ++channel) {
        const int64_t at = row * inner + channel;
        const float time = softplus(dt[at]);
        const float y = recurrent_kernels().selective(state + channel * size, a + channel * size, time, time * x[at],
                                                      b + row * size, c + row * size, size);
        out[at] = y + d[channel] * x[at];
      }
    }
  });
}

void mamba2_scan(ThreadPool& pool, const Sequences& sequences, const float* xbc, const float* dt, float* states,
                 const float* a, const float* d, const float* bias, const Mamba2Shape& shape, float* out) {
  const int64_t heads = shape.heads, dim = shape.head_dim, size = shape.size;
  const int64_t inner = heads * dim, width = inner + 2 * shape.groups * size;
  for_parts(pool, sequences, heads, [&](int sequence, int64_t head) {
    float* state = states + (sequences.slots[sequence] * heads + head) * dim * size;
    const int64_t group = head / (heads / shape.groups);
    for (int64_t row = sequences.starts[sequence]; row < sequences.starts[sequence + 1]; ++row) {
      const float* x = xbc + row * width + head * dim;
      const float* b = xbc + row * width + inner + group * size;
      const float* c = b + shape.groups * size;
      const float time = std::min(std::max(softplus(dt[row * heads + head] * shape.dt_scale + bias[head]), shape.dt_low),
                                  shape.dt_high);
      const float decay = std::exp(time * a[head]);
      float* y = out + row * inner + head * dim;
      for (int64_t i = 0; i < dim; ++i)
        y[i] = recurrent_kernels().decay(state + i * size, decay, time * x[i], b, c, size) + d[head] * x[i];
    }
  });
}

void delta_scan(ThreadPool& pool, const Sequences& sequences, const float* qkv, const float* beta, const float* dt,
                float* states, const float* a, const float* bias, const DeltaShape& shape, float* out) {
  const int64_t heads = shape.heads, keys = shape.key_dim, values = shape.value_dim;
  const int64_t key_width = shape.key_heads * keys, width = 2 * key_width + heads * values;
  for_parts(pool, sequences, heads, [&](int sequence, int64_t head) {
    float* state = states + (sequences.slots[sequence] * heads + head) * keys * values;
    const int64_t key_head = head / (heads / shape.key_heads);
    std::vector<float> q(keys), k(keys), update(values);
    // A vector of length one, times `scale`.
    const auto normalize = [&](const float* from, float scale, std::vector<float>& to) {
      float square = 0;
      for (int64_t i = 0; i < keys; ++i) square += from[i] * from[i];
      const float factor = scale / std::sqrt(square + 1e-6f);
      for (int64_t i = 0; i < keys; ++i) to[i] = from[i] * factor;
    };
    for (int64_t row = sequences.starts[sequence]; row < sequences.starts[sequence + 1]; ++row) {
      const float* in = qkv + row * width;
      normalize(in + key_head * keys, 1.0f / std::sqrt(static_cast<float>(keys)), q);
      normalize(in + key_width + key_head * keys, 1.0f, k);
      const float* v = in + 2 * key_width + head * values;
      const float decay = std::exp(a[head] * softplus(dt[row * heads + head] + bias[head]));
      const float weight = sigmoid(beta[row * heads + head]);
      std::fill(update.begin(), update.end(), 0.0f);  // what the state answers to this key, before its decay
      float_kernels().accumulate(k.data(), keys, 1, state, values, static_cast<int>(keys), values, update.data(), values);
      for (int64_t i = 0; i < values; ++i) update[i] = weight * (v[i] - decay * update[i]);
      float* y = out + (row * heads + head) * values;
      std::fill(y, y + values, 0.0f);
      for (int64_t i = 0; i < keys; ++i)
        recurrent_kernels().delta(state + i * values, decay, k[i], update.data(), q[i], y, values);
    }
  });
}

}  // namespace tokenmill
