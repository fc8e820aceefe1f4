// Eager ops for Python: each takes tensors without copying, runs on the pool without the GIL, and writes into `out`.
//
// The recorded program does not come through here. Shapes are [tokens, width] float32 unless said otherwise.
#include <algorithm>

#include "bind.h"
#include "float_kernels.h"
#include "pool.h"
#include "sampling.h"

namespace tokenmill {
namespace {

constexpr int64_t kGrainValues = 8192;  // a thread takes rows of about this many values at a time

template <typename Function>
void for_rows(ThreadPool& pool, int64_t rows, int64_t width, Function&& fn) {
  nb::gil_scoped_release release;
  const int64_t grain = std::max<int64_t>(1, kGrainValues / std::max<int64_t>(1, width));
  const int blocks = static_cast<int>((rows + grain - 1) / grain);
  pool.for_each(blocks, 1, [&](int block) {
    const int64_t end = std::min(rows, (block + 1) * grain);
    for (int64_t row = block * grain; row < end; ++row) fn(row);
  });
}

void rms_norm(ThreadPool& pool, ConstMatrix x, ConstVector weight, float eps, int64_t head_dim, Matrix out) {
  const int64_t width = head_dim > 0 ? head_dim : x.shape(1);
  require(x.shape(1) % width == 0 && static_cast<int64_t>(weight.size()) == width && out.size() == x.size(),
          "rms_norm: shapes do not match");
  const float *in = x.data(), *w = weight.data();
  float* to = out.data();
  for_rows(pool, x.size() / width, width,
           [=](int64_t row) { float_kernels().rms_norm(in + row * width, w, eps, width, to + row * width); });
}

void add(ThreadPool& pool, ConstMatrix x, ConstMatrix y, Matrix out) {
  require(x.size() == y.size() && x.size() == out.size(), "add: shapes do not match");
  const int64_t width = x.shape(1);
  const float *a = x.data(), *b = y.data();
  float* to = out.data();
  for_rows(pool, x.shape(0), width, [=](int64_t row) {
    float_kernels().add(a + row * width, b + row * width, width, to + row * width);
  });
}

void add_rms_norm(ThreadPool& pool, ConstMatrix x, ConstMatrix y, ConstVector weight, float eps, Matrix total,
                  Matrix out) {
  const int64_t width = x.shape(1);
  require(x.size() == y.size() && x.size() == out.size() && x.size() == total.size() &&
              static_cast<int64_t>(weight.size()) == width,
          "add_rms_norm: shapes do not match");
  const float *a = x.data(), *b = y.data(), *w = weight.data();
  float *sum = total.data(), *to = out.data();
  for_rows(pool, x.shape(0), width, [=](int64_t row) {
    const int64_t at = row * width;
    float_kernels().add(a + at, b + at, width, sum + at);
    float_kernels().rms_norm(sum + at, w, eps, width, to + at);
  });
}

void layer_norm(ThreadPool& pool, ConstMatrix x, ConstVector weight, std::optional<ConstVector> bias, float eps,
                int64_t head_dim, Matrix out) {
  const int64_t width = x.shape(1), slice = head_dim > 0 ? head_dim : width, count = weight.size();
  require(width % slice == 0 && (count == slice || count == width) && out.size() == x.size() &&
              (!bias || bias->size() == weight.size()),
          "layer_norm: shapes do not match");
  const float *in = x.data(), *w = weight.data(), *b = bias ? bias->data() : nullptr;
  float* to = out.data();
  for_rows(pool, x.shape(0), width, [=](int64_t row) {
    for (int64_t i = 0; i < width; i += slice) {
      const int64_t at = row * width + i, own = i % count;
      float_kernels().layer_norm(in + at, w + own, b == nullptr ? nullptr : b + own, eps, slice, to + at);
    }
  });
}

void scale(ThreadPool& pool, ConstMatrix x, float factor, Matrix out) {
  require(x.size() == out.size(), "scale: shapes do not match");
  const int64_t width = x.shape(1);
  const float* in = x.data();
  float* to = out.data();
  for_rows(pool, x.shape(0), width,
           [=](int64_t row) { float_kernels().scale(in + row * width, factor, width, to + row * width); });
}

void add_positions(ThreadPool& pool, ConstMatrix x, ConstMatrix table, Int64Vector positions, Matrix out) {
  const int64_t width = x.shape(1);
  require(static_cast<int64_t>(table.shape(1)) == width && positions.size() == x.shape(0) && x.size() == out.size(),
          "add_positions: shapes do not match");
  const int64_t* at = positions.data();
  for (size_t i = 0; i < positions.size(); ++i)
    require(at[i] >= 0 && at[i] < static_cast<int64_t>(table.shape(0)),
            "add_positions: a position is outside the table");
  const float *in = x.data(), *rows = table.data();
  float* to = out.data();
  for_rows(pool, x.shape(0), width, [=](int64_t row) {
    float_kernels().add(in + row * width, rows + at[row] * width, width, to + row * width);
  });
}

void activate(ThreadPool& pool, ConstMatrix x, const std::string& activation, Matrix out) {
  require(x.size() == out.size(), "activate: shapes do not match");
  const Activation kind = activation_of(activation);
  const int64_t width = x.shape(1);
  const float* in = x.data();
  float* to = out.data();
  for_rows(pool, x.shape(0), width,
           [=](int64_t row) { float_kernels().activate(in + row * width, kind, width, to + row * width); });
}

void gated(ThreadPool& pool, ConstMatrix gate, ConstMatrix up, const std::string& activation, Matrix out) {
  require(gate.size() == up.size() && gate.size() == out.size(), "gated: shapes do not match");
  const Activation kind = activation_of(activation);
  const int64_t width = gate.shape(1);
  const float *g = gate.data(), *u = up.data();
  float* to = out.data();
  for_rows(pool, gate.shape(0), width, [=](int64_t row) {
    float_kernels().gated(g + row * width, u + row * width, kind, width, to + row * width);
  });
}

void softcap(ThreadPool& pool, ConstMatrix x, float cap, Matrix out) {
  require(x.size() == out.size(), "softcap: shapes do not match");
  const int64_t width = x.shape(1);
  const float* in = x.data();
  float* to = out.data();
  for_rows(pool, x.shape(0), width,
           [=](int64_t row) { float_kernels().softcap(in + row * width, cap, width, to + row * width); });
}

void rope(ThreadPool& pool, ConstMatrix x, Int64Vector positions, ConstMatrix cosines, ConstMatrix sines,
          int64_t head_dim, bool interleaved, Matrix out) {
  const int64_t width = x.shape(1), half = cosines.shape(1);
  require(width % head_dim == 0 && 2 * half <= head_dim && positions.size() == x.shape(0) && out.size() == x.size() &&
              cosines.size() == sines.size(),
          "rope: shapes do not match");
  const int64_t* at = positions.data();
  for (size_t i = 0; i < positions.size(); ++i)
    require(at[i] >= 0 && at[i] < static_cast<int64_t>(cosines.shape(0)), "rope: a position is outside the table");
  const float *in = x.data(), *c = cosines.data(), *s = sines.data();
  float* to = out.data();
  for_rows(pool, x.shape(0), width, [=](int64_t row) {
    for (int64_t head = 0; head < width; head += head_dim)
      float_kernels().rope(in + row * width + head, c + at[row] * half, s + at[row] * half, half, head_dim,
                           interleaved, to + row * width + head);
  });
}

// By address, as Program.run: it follows every decode step, and turning tensors into ndarrays costs more than the search.
void argmax_rows(ThreadPool& pool, uintptr_t logits, int64_t rows, int64_t width, uintptr_t out) {
  const float* in = reinterpret_cast<const float*>(logits);
  int64_t* to = reinterpret_cast<int64_t*>(out);
  if (rows < 4) {  // waking the pool takes longer
    for (int64_t row = 0; row < rows; ++row) to[row] = argmax(in + row * width, width);
    return;
  }
  for_rows(pool, rows, width, [=](int64_t row) { to[row] = argmax(in + row * width, width); });
}

void top_k_rows(ThreadPool& pool, ConstMatrix logits, Matrix values,
                Tensor<int64_t, nb::ndim<2>, nb::c_contig> indices) {
  const int64_t width = logits.shape(1), k = values.shape(1);
  require(values.shape(0) == logits.shape(0) && indices.shape(0) == logits.shape(0) &&
              static_cast<int64_t>(indices.shape(1)) == k && k <= width,
          "top_k: shapes do not match");
  const float* in = logits.data();
  float* best = values.data();
  int64_t* at = indices.data();
  for_rows(pool, logits.shape(0), width,
           [=](int64_t row) { top_k(in + row * width, width, k, best + row * k, at + row * k); });
}

}  // namespace

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "gelu") return Activation::gelu;
  if (name == "relu") return Activation::relu;
  if (name == "relu2") return Activation::relu2;
  require(name == "sigmoid", "unknown activation");
  return Activation::sigmoid;
}

void bind_ops(nb::module_& module) {
  module.def("rms_norm", &rms_norm);
  module.def("layer_norm", &layer_norm, nb::arg("pool"), nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(),
             nb::arg("eps"), nb::arg("head_dim"), nb::arg("out"));
  module.def("scale", &scale);
  module.def("add_positions", &add_positions);
  module.def("activate", &activate);
  module.def("add", &add);
  module.def("add_rms_norm", &add_rms_norm);
  module.def("gated", &gated);
  module.def("softcap", &softcap);
  module.def("rope", &rope);
  module.def("argmax", &argmax_rows);
  module.def("top_k", &top_k_rows);
  module.def("float_kernels_name", [] { return float_kernels().name; });
}

}  // namespace tokenmill
