// Recurrent ops for Python: states are continued in place, outputs are written into `out`. See recurrent.h for shapes.
#include <vector>

#include "bind.h"
#include "float_kernels.h"
#include "pool.h"
#include "recurrent.h"

namespace tokenmill {
namespace {

using States3 = Tensor<float, nb::ndim<3>, nb::c_contig>;
using States4 = Tensor<float, nb::ndim<4>, nb::c_contig>;

// The sequences of a step, after checking that rows and slots are where they say.
Sequences sequences_of(const Int64Vector& slots, const Int64Vector& starts, int64_t rows, int64_t num_slots) {
  const int64_t *at = starts.data(), *slot = slots.data();
  require(starts.size() == slots.size() + 1 && at[0] == 0 && at[slots.size()] == rows,
          "recurrent: starts do not cover the rows");
  for (size_t i = 0; i < slots.size(); ++i)
    require(at[i] <= at[i + 1] && slot[i] >= 0 && slot[i] < num_slots, "recurrent: a slot or start is out of range");
  return {static_cast<int>(slots.size()), at, slot};
}

void bound_convolve(ThreadPool& pool, ConstMatrix x, States3 states, Int64Vector slots, Int64Vector starts,
                    ConstMatrix weight, std::optional<ConstVector> bias, Matrix out) {
  const int64_t channels = x.shape(1), width = weight.shape(0);
  require(static_cast<int64_t>(states.shape(1)) == width - 1 && static_cast<int64_t>(states.shape(2)) == channels &&
              static_cast<int64_t>(weight.shape(1)) == channels && out.size() == x.size() && width <= 64 &&
              (!bias || static_cast<int64_t>(bias->size()) == channels),
          "convolve: shapes do not match");
  const Sequences sequences = sequences_of(slots, starts, x.shape(0), states.shape(0));
  const float* offsets = bias ? bias->data() : nullptr;
  nb::gil_scoped_release release;
  convolve(pool, sequences, x.data(), states.data(), weight.data(), offsets, static_cast<int>(width), channels,
           out.data());
}

void bound_mamba_scan(ThreadPool& pool, ConstMatrix x, ConstMatrix dt, ConstMatrix b, ConstMatrix c, States3 states,
                      Int64Vector slots, Int64Vector starts, ConstMatrix a, ConstVector d, Matrix out) {
  const int64_t inner = x.shape(1), size = b.shape(1);
  require(dt.size() == x.size() && out.size() == x.size() && b.size() == c.size() && b.shape(0) == x.shape(0) &&
              static_cast<int64_t>(states.shape(1)) == inner && static_cast<int64_t>(states.shape(2)) == size &&
              static_cast<int64_t>(a.size()) == inner * size && static_cast<int64_t>(d.size()) == inner,
          "mamba_scan: shapes do not match");
  const Sequences sequences = sequences_of(slots, starts, x.shape(0), states.shape(0));
  nb::gil_scoped_release release;
  mamba_scan(pool, sequences, x.data(), dt.data(), b.data(), c.data(), states.data(), a.data(), d.data(), inner, size,
             out.data());
}

void bound_mamba2_scan(ThreadPool& pool, ConstMatrix xbc, ConstMatrix dt, States4 states, Int64Vector slots,
                       Int64Vector starts, ConstVector a, ConstVector d, ConstVector bias, int64_t groups,
                       float dt_scale, float dt_low, float dt_high, Matrix out) {
  const Mamba2Shape shape = {static_cast<int64_t>(states.shape(1)), static_cast<int64_t>(states.shape(2)),
                             static_cast<int64_t>(states.shape(3)), groups, dt_scale, dt_low, dt_high};
  const int64_t inner = shape.heads * shape.head_dim;
  require(groups > 0 && shape.heads % groups == 0 &&
              static_cast<int64_t>(xbc.shape(1)) == inner + 2 * groups * shape.size &&
              static_cast<int64_t>(dt.shape(1)) == shape.heads && dt.shape(0) == xbc.shape(0) &&
              static_cast<int64_t>(out.shape(1)) == inner && out.shape(0) == xbc.shape(0) &&
              static_cast<int64_t>(a.size()) == shape.heads && a.size() == d.size() && a.size() == bias.size(),
          "mamba2_scan: shapes do not match");
  const Sequences sequences = sequences_of(slots, starts, xbc.shape(0), states.shape(0));
  nb::gil_scoped_release release;
  mamba2_scan(pool, sequences, xbc.data(), dt.data(), states.data(), a.data(), d.data(), bias.data(), shape, out.data());
}

void bound_delta_scan(ThreadPool& pool, ConstMatrix qkv, ConstMatrix beta, ConstMatrix dt, States4 states,
                      Int64Vector slots, Int64Vector starts, ConstVector a, ConstVector bias, int64_t key_heads,
                      Matrix out) {
  const DeltaShape shape = {static_cast<int64_t>(states.shape(1)), key_heads, static_cast<int64_t>(states.shape(2)),
                            static_cast<int64_t>(states.shape(3))};
  const int64_t values = shape.heads * shape.value_dim;
  require(key_heads > 0 && shape.heads % key_heads == 0 &&
              static_cast<int64_t>(qkv.shape(1)) == 2 * key_heads * shape.key_dim + values &&
              static_cast<int64_t>(beta.shape(1)) == shape.heads && beta.shape(0) == qkv.shape(0) &&
              beta.size() == dt.size() && static_cast<int64_t>(out.shape(1)) == values &&
              out.shape(0) == qkv.shape(0) && static_cast<int64_t>(a.size()) == shape.heads && a.size() == bias.size(),
          "delta_scan: shapes do not match");
  const Sequences sequences = sequences_of(slots, starts, qkv.shape(0), states.shape(0));
  nb::gil_scoped_release release;
  delta_scan(pool, sequences, qkv.data(), beta.data(), dt.data(), states.data(), a.data(), bias.data(), shape,
             out.data());
}

// weight: one row for each group of a row of x, or a single one for all groups.
void gated_norm(ThreadPool& pool, ConstMatrix x, ConstMatrix gate, ConstMatrix weight, float eps, bool norm_first,
                float gate_scale, Matrix out) {
  const int64_t width = x.shape(1), group = weight.shape(1), weights = weight.shape(0);
  require(gate.size() == x.size() && out.size() == x.size() && width % group == 0 &&
              (weights == 1 || weights * group == width),
          "gated_norm: shapes do not match");
  const float *in = x.data(), *g = gate.data(), *w = weight.data();
  float* to = out.data();
  nb::gil_scoped_release release;
  pool.for_each(static_cast<int>(x.shape(0)), 8, [&](int row) {
    std::vector<float> factors(width);
    const FloatKernels& kernels = float_kernels();
    kernels.scale(g + row * width, gate_scale, width, factors.data());
    const float* from = in + row * width;
    float* y = to + row * width;
    if (!norm_first) {
      kernels.gated(factors.data(), from, Activation::silu, width, y);
      from = y;
    }
    for (int64_t at = 0; at < width; at += group)
      kernels.rms_norm(from + at, w + (weights == 1 ? 0 : at), eps, group, y + at);
    if (norm_first) kernels.gated(factors.data(), y, Activation::silu, width, y);
  });
}

}  // namespace

void bind_recurrent(nb::module_& module) {
  module.def("convolve", &bound_convolve, nb::arg("pool"), nb::arg("x"), nb::arg("states"), nb::arg("slots"),
             nb::arg("starts"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("out"));
  module.def("mamba_scan", &bound_mamba_scan);
  module.def("mamba2_scan", &bound_mamba2_scan);
  module.def("delta_scan", &bound_delta_scan);
  module.def("gated_norm", &gated_norm);
}

}  // namespace tokenmill
