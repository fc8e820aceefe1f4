// Recurrent ops for Python: states are continued in place, outputs are written into `out`. See recurrent.h for shapes.
//
// The recorded program takes the same ops as objects: states and parameters that it points into must outlive it.
#include "bind_recurrent.h"

#include <vector>

#include "pool.h"

namespace tokenmill {

GatedNorm gated_norm_of(ConstMatrix weight, int64_t width, float eps, bool norm_first, float gate_scale) {
  const int64_t group = weight.shape(1), weights = weight.size();
  require(width % group == 0 && (weights == group || weights == width), "gated_norm: shapes do not match");
  return {weight.data(), weights, group, eps, gate_scale, norm_first};
}

namespace {

using ConstInputs = std::vector<ConstMatrix>;

// Continues the states of a step's sequences: rows [starts[s], starts[s + 1]) have the state in slots[s].
void run(const BoundRecurrence& self, ThreadPool& pool, const ConstInputs& inputs, Int64Vector slots,
         Int32Vector starts, Matrix out) {
  const Recurrence& op = *self.op;
  const int64_t rows = out.shape(0);
  require(static_cast<int>(inputs.size()) == op.num_inputs() && static_cast<int64_t>(out.shape(1)) == op.out_width(),
          "recurrent: inputs or outputs do not match");
  const float* values[kMaxRecurrentInputs];
  for (size_t i = 0; i < inputs.size(); ++i) {
    require(static_cast<int64_t>(inputs[i].shape(0)) == rows &&
                static_cast<int64_t>(inputs[i].shape(1)) == op.input_width(static_cast<int>(i)),
            "recurrent: shapes do not match");
    values[i] = inputs[i].data();
  }
  const int32_t* at = starts.data();
  const int64_t* slot = slots.data();
  const int count = static_cast<int>(slots.size());
  require(starts.size() == slots.size() + 1 && at[0] == 0 && at[count] == rows,
          "recurrent: starts do not cover the rows");
  for (int i = 0; i < count; ++i)
    require(at[i] <= at[i + 1] && slot[i] >= 0 && slot[i] < self.num_slots,
            "recurrent: a slot or start is out of range");
  float* to = out.data();
  nb::gil_scoped_release release;
  const int parts = static_cast<int>(op.num_parts());
  pool.run([&](Team& team) {
    std::vector<float> scratch(op.scratch_floats());
    team.for_each(count * parts, 1, [&](int piece) {
      const int sequence = piece / parts;
      op.run({values, at[sequence], at[sequence + 1], to}, piece % parts,
             self.states + slot[sequence] * op.state_floats(), true, scratch.data());
    });
  });
}

BoundRecurrence bound(std::unique_ptr<Recurrence> op, float* states, size_t num_slots, size_t floats) {
  require(static_cast<int64_t>(floats) == op->state_floats() * static_cast<int64_t>(num_slots),
          "recurrent: the states have another shape");
  return {std::move(op), states, static_cast<int64_t>(num_slots)};
}

BoundRecurrence convolution(States3 states, ConstMatrix weight, std::optional<ConstVector> bias) {
  const int64_t width = weight.shape(0), channels = weight.shape(1);
  require(width >= 1 && width <= Convolution::kMaxWidth && (!bias || static_cast<int64_t>(bias->size()) == channels),
          "convolution: shapes do not match");
  const float* offsets = bias ? bias->data() : nullptr;
  return bound(std::make_unique<Convolution>(weight.data(), offsets, static_cast<int>(width), channels), states.data(),
               states.shape(0), states.size());
}

BoundRecurrence mamba_scan(States3 states, ConstMatrix a, ConstVector d) {
  require(a.shape(0) == d.size(), "mamba_scan: shapes do not match");
  return bound(std::make_unique<MambaScan>(a.data(), d.data(), a.shape(0), a.shape(1)), states.data(), states.shape(0),
               states.size());
}

BoundRecurrence mamba2_scan(States4 states, ConstVector a, ConstVector d, ConstVector bias, int64_t groups,
                            float dt_scale, float dt_low, float dt_high) {
  const Mamba2Shape shape = {static_cast<int64_t>(states.shape(1)), static_cast<int64_t>(states.shape(2)),
                             static_cast<int64_t>(states.shape(3)), groups, dt_scale, dt_low, dt_high};
  require(groups > 0 && shape.heads % groups == 0 && static_cast<int64_t>(a.size()) == shape.heads &&
              a.size() == d.size() && a.size() == bias.size(),
          "mamba2_scan: shapes do not match");
  return bound(std::make_unique<Mamba2Scan>(a.data(), d.data(), bias.data(), shape), states.data(), states.shape(0),
               states.size());
}

BoundRecurrence delta_scan(States4 states, ConstVector a, ConstVector bias, int64_t key_heads) {
  const DeltaShape shape = {static_cast<int64_t>(states.shape(1)), key_heads, static_cast<int64_t>(states.shape(2)),
                            static_cast<int64_t>(states.shape(3))};
  require(key_heads > 0 && shape.heads % key_heads == 0 && static_cast<int64_t>(a.size()) == shape.heads &&
              a.size() == bias.size(),
          "delta_scan: shapes do not match");
  return bound(std::make_unique<DeltaScan>(a.data(), bias.data(), shape), states.data(), states.shape(0),
               states.size());
}

// weight: one row for each group of a row of x, or a single one for all groups.
void gated_norm(ThreadPool& pool, ConstMatrix x, ConstMatrix gate, ConstMatrix weight, float eps, bool norm_first,
                float gate_scale, Matrix out) {
  const int64_t width = x.shape(1);
  require(gate.size() == x.size() && out.size() == x.size(), "gated_norm: shapes do not match");
  const GatedNorm norm = gated_norm_of(weight, width, eps, norm_first, gate_scale);
  const float *in = x.data(), *g = gate.data();
  float* to = out.data();
  nb::gil_scoped_release release;
  pool.for_each(static_cast<int>(x.shape(0)), 8, [&](int row) {
    gated_norm_row(in + row * width, g + row * width, width, norm, to + row * width);
  });
}

}  // namespace

void bind_recurrent(nb::module_& module) {
  nb::class_<BoundRecurrence>(module, "Recurrence", "An op that continues states, with the slots that these are in")
      .def("run", &run);
  module.def("convolution", &convolution, nb::arg("states"), nb::arg("weight"), nb::arg("bias").none());
  module.def("mamba_scan", &mamba_scan);
  module.def("mamba2_scan", &mamba2_scan);
  module.def("delta_scan", &delta_scan);
  module.def("gated_norm", &gated_norm);
}

}  // namespace tokenmill
