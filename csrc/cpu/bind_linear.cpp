// PackedLinear for Python: a weight repacked for this CPU, callable eagerly; and row lookup in a quantized table.
//
// The program borrows the Linear inside (the Python object is kept alive by the recorder).
#include "bind.h"
#include "bind_linear.h"
#include "float_kernels.h"
#include "memory.h"
#include "pool.h"
#include "product.h"

namespace tokenmill {
namespace {

Isa isa_of(const std::string& name) {
  if (name.empty()) return best_isa();
  for (int i = 0; i <= static_cast<int>(Isa::amx); ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (name != isa_name(isa)) continue;
    if (isa_missing(isa)) throw nb::value_error((name + ": " + isa_missing(isa)).c_str());
    return isa;
  }
  throw nb::value_error(("unknown instruction set " + name).c_str());
}

void construct(PackedLinear* self, const std::string& type, AnyTensor data, int64_t rows, int64_t cols,
               const std::string& isa, bool precise) {
  const Isa chosen = isa_of(isa);
  std::string why;
  std::unique_ptr<Linear> packed;
  {
    nb::gil_scoped_release release;
    packed = pack_linear(type, data.data(), rows, cols, chosen, &why, precise);
  }
  if (!packed) throw nb::value_error(why.c_str());
  new (self) PackedLinear{std::move(packed)};
}

using Bytes = Tensor<const uint8_t, nb::ndim<2>, nb::c_contig>;

// `rounding`: how the scheme rounds the input of the product, a name of kernels/rounding.py.
PackedLinear finished(std::unique_ptr<Linear> packed, const std::string& rounding, float input_scale, std::string why) {
  if (packed) packed = round_inputs(std::move(packed), rounding, input_scale, &why);
  if (!packed) throw nb::value_error(why.c_str());
  return PackedLinear{std::move(packed)};
}

PackedLinear grouped(Bytes codes, ConstMatrix scales, const std::optional<ConstMatrix>& zeros,
                     const std::optional<ConstVector>& table, int bits, const std::string& rounding, float input_scale,
                     const std::string& isa, bool precise) {
  const int64_t rows = codes.shape(0), cols = codes.shape(1) * (bits == 4 ? 2 : 1), groups = scales.shape(1);
  require(static_cast<int64_t>(scales.shape(0)) == rows && groups > 0 && cols % groups == 0 &&
              (!zeros || (zeros->shape(0) == scales.shape(0) && zeros->shape(1) == scales.shape(1))) &&
              (!table || (table->size() == 16 && bits == 4)) && !(zeros && table),
          "grouped: shapes do not match");
  const Isa chosen = isa_of(isa);
  const GroupedCodes weight{bits,
                            codes.data(),
                            scales.data(),
                            zeros ? zeros->data() : nullptr,
                            table ? table->data() : nullptr,
                            static_cast<int>(cols / groups)};
  std::string why;
  std::unique_ptr<Linear> packed;
  {
    nb::gil_scoped_release release;
    packed = pack_grouped(weight, rows, cols, chosen, &why, precise);
  }
  return finished(std::move(packed), rounding, input_scale, why);
}

PackedLinear int8(Tensor<const int8_t, nb::ndim<2>, nb::c_contig> codes, ConstMatrix scales,
                  const std::string& rounding, float input_scale, const std::string& isa, bool precise) {
  const int64_t rows = codes.shape(0), cols = codes.shape(1), groups = scales.shape(1);
  require(static_cast<int64_t>(scales.shape(0)) == rows && groups > 0 && cols % groups == 0,
          "int8: shapes do not match");
  const Isa chosen = isa_of(isa);
  std::string why;
  std::unique_ptr<Linear> packed;
  {
    nb::gil_scoped_release release;
    packed = pack_int8(codes.data(), scales.data(), static_cast<int>(cols / groups), rows, cols, chosen, &why, precise);
  }
  return finished(std::move(packed), rounding, input_scale, why);
}

PackedLinear coded(const std::string& element, Bytes codes, ConstMatrix scales, int64_t group, float multiplier,
                   const std::string& rounding, float input_scale) {
  const int64_t rows = codes.shape(0), cols = codes.shape(1) * (element == "e2m1" ? 2 : 1);
  require(static_cast<int64_t>(scales.shape(0)) == rows && group > 0 &&
              static_cast<int64_t>(scales.shape(1)) == (cols + group - 1) / group,
          "coded: shapes do not match");
  std::string why;
  std::unique_ptr<Linear> packed;
  {
    nb::gil_scoped_release release;
    packed = pack_coded({element, codes.data(), scales.data(), group, multiplier}, rows, cols, &why);
  }
  return finished(std::move(packed), rounding, input_scale, why);
}

// y[i] = x W_i^T + bias_i for all weights, in one parallel region.
void linear(ThreadPool& pool, ConstMatrix x, const std::vector<PackedLinear*>& weights,
            const std::vector<std::optional<ConstVector>>& biases, const std::vector<Matrix>& outputs) {
  const int m = static_cast<int>(x.shape(0));
  require(biases.size() == weights.size() && outputs.size() == weights.size() && !weights.empty(),
          "linear: one bias and one output per weight");
  std::vector<const Linear*> plain;
  std::vector<ProductOutput> places;
  for (size_t i = 0; i < weights.size(); ++i) {
    const Linear* weight = weights[i]->linear.get();
    require(weight->cols == static_cast<int64_t>(x.shape(1)) && outputs[i].shape(0) == x.shape(0) &&
                static_cast<int64_t>(outputs[i].shape(1)) == weight->rows &&
                (!biases[i] || static_cast<int64_t>(biases[i]->size()) == weight->rows),
            "linear: shapes do not match");
    plain.push_back(weight);
    places.push_back({biases[i] ? biases[i]->data() : nullptr, outputs[i].data(), weight->rows});
  }
  if (m == 0) return;
  nb::gil_scoped_release release;
  const Product product(plain);
  const AlignedBuffer activations = allocate_aligned(product.activation_bytes(m));
  const size_t scratch_bytes = (product.scratch_bytes(m) + 127) / 64 * 64;
  const AlignedBuffer scratch = allocate_aligned(scratch_bytes * pool.size());
  const float* in = x.data();
  const int block = product.row_block(m);
  pool.run([&](Team& team) {
    team.for_each((m + block - 1) / block, 1, [&](int i) {
      product.quantize(in, plain[0]->cols, i * block, std::min(m, (i + 1) * block), m, activations.get());
    });
    team.barrier();
    team.for_runs(product.num_tiles(m), [&](int tile) {
      product.run_tile(tile, m, activations.get(), places.data(), scratch.get() + team.thread * scratch_bytes);
    });
  });
}

void dequantized(const PackedLinear& self, int64_t index, Tensor<float, nb::ndim<1>, nb::c_contig> out) {
  require(index >= 0 && index < self.linear->rows && static_cast<int64_t>(out.size()) == self.linear->cols,
          "row: shapes do not match");
  self.linear->dequantize_row(index, out.data());
}

void embed(ThreadPool& pool, const std::string& type, AnyTensor table, int64_t num_rows, Int64Vector rows, float scale,
           Matrix out) {
  require(out.shape(0) == rows.shape(0), "embed: shapes do not match");
  const int64_t cols = out.shape(1);
  const int64_t* at = rows.data();
  for (size_t i = 0; i < rows.size(); ++i) require(at[i] >= 0 && at[i] < num_rows, "embed: no such row");
  const void* data = table.data();
  float* to = out.data();
  std::atomic<bool> known{true};
  {
    nb::gil_scoped_release release;
    pool.for_each(static_cast<int>(rows.size()), 4, [&](int i) {
      if (!dequantize_row(type, data, at[i], cols, to + i * cols)) known.store(false, std::memory_order_relaxed);
      if (scale != 1.0f) float_kernels().scale(to + i * cols, scale, cols, to + i * cols);
    });
  }
  require(known.load(), "embed: type or row length not supported");
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<PackedLinear>(module, "PackedLinear", "A weight [rows, cols] packed for one instruction set")
      .def("__init__", &construct, nb::arg("type"), nb::arg("data"), nb::arg("rows"), nb::arg("cols"),
           nb::arg("isa") = "", nb::arg("precise") = false)
      .def_static("grouped", &grouped, nb::arg("codes"), nb::arg("scales"), nb::arg("zeros").none(),
                  nb::arg("table").none(), nb::arg("bits") = 4, nb::arg("rounding") = "none",
                  nb::arg("input_scale") = 0.0f, nb::arg("isa") = "", nb::arg("precise") = false)
      .def_static("int8", &int8, nb::arg("codes"), nb::arg("scales"), nb::arg("rounding") = "none",
                  nb::arg("input_scale") = 0.0f, nb::arg("isa") = "", nb::arg("precise") = false)
      .def_static("coded", &coded, nb::arg("element"), nb::arg("codes"), nb::arg("scales"), nb::arg("group"),
                  nb::arg("multiplier") = 1.0f, nb::arg("rounding") = "none", nb::arg("input_scale") = 0.0f)
      .def("row", &dequantized, nb::arg("index"), nb::arg("out"), "One row as float32, from the packed form")
      .def_prop_ro("rows", [](const PackedLinear& self) { return self.linear->rows; })
      .def_prop_ro("cols", [](const PackedLinear& self) { return self.linear->cols; })
      .def_prop_ro("nbytes", [](const PackedLinear& self) { return self.linear->bytes(); })
      .def_prop_ro("kernel", [](const PackedLinear& self) { return self.linear->kernel(); });
  module.def("linear", &linear, nb::arg("pool"), nb::arg("x"), nb::arg("weights"), nb::arg("biases").none(),
             nb::arg("outputs"));
  module.def("embed", &embed);
  module.def("best_isa", [] { return isa_name(best_isa()); });
  // Every instruction set there are kernels for, with the reason where it cannot run here.
  module.def("isas", [] {
    nb::dict missing;
    for (int i = 0; i <= static_cast<int>(Isa::amx); ++i) {
      const char* reason = isa_missing(static_cast<Isa>(i));
      missing[isa_name(static_cast<Isa>(i))] = reason ? nb::object(nb::str(reason)) : nb::object(nb::none());
    }
    return missing;
  });
}

}  // namespace tokenmill
