// Adapters for Python: packed ones, their place in a recorded program, and an eager call for tests.
#include "bind_adapters.h"

#include <array>

namespace tokenmill {
namespace {

using OptionalMatrix = std::optional<ConstMatrix>;
using OptionalVector = std::optional<ConstVector>;

// (a, b, gain, shift, whole, bias) of each matrix; outputs[i] rows.
PackedAdapter pack(int64_t inputs, const std::vector<int64_t>& outputs, const nb::list& parts, bool exact) {
  require(parts.size() == outputs.size(), "pack_adapter: one part for each matrix");
  std::vector<PartValues> values(outputs.size());
  std::vector<std::tuple<OptionalMatrix, OptionalMatrix, OptionalMatrix>> matrices(outputs.size());
  std::vector<std::array<OptionalVector, 3>> vectors(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (parts[i].is_none()) continue;
    const nb::tuple part = nb::cast<nb::tuple>(parts[i]);
    auto& [a, b, whole] = matrices[i];
    a = nb::cast<OptionalMatrix>(part[0]), b = nb::cast<OptionalMatrix>(part[1]);
    whole = nb::cast<OptionalMatrix>(part[4]);
    vectors[i] = {nb::cast<OptionalVector>(part[2]), nb::cast<OptionalVector>(part[3]),
                  nb::cast<OptionalVector>(part[5])};
    require(a.has_value() == b.has_value(), "pack_adapter: both factors or none");
    if (a) {
      require(int64_t(a->shape(1)) == inputs && int64_t(b->shape(0)) == outputs[i] && a->shape(0) == b->shape(1),
              "pack_adapter: shapes do not match");
      values[i].a = a->data(), values[i].b = b->data(), values[i].rank = static_cast<int>(a->shape(0));
    }
    if (whole) {
      require(int64_t(whole->shape(1)) == inputs && int64_t(whole->shape(0)) == outputs[i],
              "pack_adapter: shapes do not match");
      values[i].whole = whole->data();
    }
    const float** const to[3] = {&values[i].gain, &values[i].shift, &values[i].bias};
    for (int v = 0; v < 3; ++v) {
      require(!vectors[i][v] || int64_t(vectors[i][v]->size()) == outputs[i], "pack_adapter: wrong length");
      if (vectors[i][v]) *to[v] = vectors[i][v]->data();
    }
  }
  nb::gil_scoped_release release;  // packing takes its time, and steps go on meanwhile
  return {std::make_shared<ProductAdapter>(inputs, outputs, values, exact), outputs};
}

PackedEmbedding pack_embedding(OptionalMatrix a, OptionalMatrix b, OptionalMatrix whole) {
  auto made = std::make_shared<EmbeddingAdapter>();
  const auto copied = [](const ConstMatrix& m) { return std::vector<float>(m.data(), m.data() + m.size()); };
  PackedEmbedding packed;
  if (whole) {
    made->whole = copied(*whole);
    made->width = whole->shape(1);
    packed.vocabulary = whole->shape(0);
  } else {
    require(a && b && a->shape(0) == b->shape(1), "pack_embedding: shapes do not match");
    made->a = copied(*a), made->b = copied(*b);
    made->rank = static_cast<int>(a->shape(0)), made->width = a->shape(1);
    packed.vocabulary = b->shape(0);
  }
  packed.adapter = std::move(made);
  return packed;
}

// The rows of `outputs` as the adapters change them: what a step does to one product.
void adapt(ThreadPool& pool, ConstMatrix x, Int32Vector slots, const std::vector<const PackedAdapter*>& by_slot,
           const std::vector<Matrix>& outputs) {
  const int rows = static_cast<int>(x.shape(0)), inputs = static_cast<int>(x.shape(1));
  require(int(slots.size()) == rows && outputs.size() <= kMaxProductWeights, "adapt: one slot for each row");
  AdapterSlots adapters(by_slot.size() + 1);
  AdapterWorkspace workspace;
  workspace.reserve(rows, inputs);
  for (size_t i = 0; i < by_slot.size(); ++i) {
    if (by_slot[i] == nullptr) continue;
    adapters[i + 1] = by_slot[i]->adapter;
    require(adapters[i + 1]->inputs == inputs && by_slot[i]->outputs.size() == outputs.size(), "adapt: shapes");
    workspace.take(*adapters[i + 1]);
  }
  ProductOutput to[kMaxProductWeights];
  for (size_t i = 0; i < outputs.size(); ++i) {
    require(int(outputs[i].shape(0)) == rows, "adapt: shapes do not match");
    to[i] = {nullptr, outputs[i].data(), int64_t(outputs[i].shape(1))};
  }
  for (int i = 0; i < rows; ++i)
    require(slots.data()[i] >= 0 && slots.data()[i] < int(adapters.size()), "adapt: no such slot");
  AdapterRows by_adapter;
  by_adapter.build(slots.data(), nullptr, rows);
  nb::gil_scoped_release release;
  pool.run([&](Team& team) {
    team.for_each(rows, 1, [&](int row) { workspace.round_row(adapters, by_adapter, row, x.data() + row * inputs); });
    team.barrier();
    workspace.shrink(adapters, by_adapter, x.data(), inputs, team.thread, team.size);
    team.barrier();
    workspace.expand(adapters, by_adapter, x.data(), inputs, to, team.thread, team.size);
  });
}

}  // namespace

void set_adapter(RecordedProgram& self, int product, int slot, const PackedAdapter* packed) {
  Program& program = self.program;
  require(slot >= 1 && slot <= program.num_adapter_slots(), "no such adapter slot");
  require(packed == nullptr || program.has_product(product, packed->adapter->inputs, packed->outputs),
          "the adapter does not fit this product");
  program.set_adapter(product, slot, packed == nullptr ? nullptr : packed->adapter);
}

void set_embedding(RecordedProgram& self, int slot, const PackedEmbedding* packed) {
  require(slot >= 1 && slot <= self.program.num_adapter_slots(), "no such adapter slot");
  require(packed == nullptr || packed->vocabulary == self.vocabulary, "the adapter does not fit this embedding");
  self.program.set_embedding(slot, packed == nullptr ? nullptr : packed->adapter);
}

void bind_adapters(nb::module_& module) {
  nb::class_<PackedAdapter>(module, "PackedAdapter", "What an adapter does to one product")
      .def_prop_ro("nbytes", [](const PackedAdapter& self) { return self.adapter->bytes(); })
      .def_prop_ro("exact", [](const PackedAdapter& self) { return self.adapter->exact; });
  nb::class_<PackedEmbedding>(module, "PackedEmbedding", "Rows of an embedding as an adapter changes them");
  module.def("pack_adapter", &pack, nb::arg("inputs"), nb::arg("outputs"), nb::arg("parts"), nb::arg("exact"));
  module.def("pack_embedding", &pack_embedding, nb::arg("a").none(), nb::arg("b").none(), nb::arg("whole").none());
  module.def("adapt", &adapt, nb::arg("pool"), nb::arg("x"), nb::arg("slots"), nb::arg("by_slot"), nb::arg("outputs"));
}

}  // namespace tokenmill
