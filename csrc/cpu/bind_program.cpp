// Program for Python: recording methods take values (numbers) and tensors. Steps are in bind_steps.cpp.
//
// Tensors handed over while recording must outlive the program; the recorder keeps them.
#include "bind_program.h"

#include <algorithm>
#include <numeric>

#include "bind_adapters.h"
#include "bind_attention.h"
#include "bind_exchange.h"
#include "bind_linear.h"
#include "bind_recurrent.h"

namespace tokenmill {
namespace {

int64_t vector_of(const ConstVector& weight, int64_t width) {
  require(static_cast<int64_t>(weight.size()) == width, "a norm weight has the wrong length");
  return width;
}

int embed(RecordedProgram& self, const std::string& type, AnyTensor table, int64_t rows, int64_t cols, float scale) {
  std::vector<float> row(cols);
  require(dequantize_row(type, table.data(), 0, cols, row.data()), "embed: type or row length not supported");
  self.vocabulary = rows;
  return self.program.embed(type, table.data(), cols, scale);
}

int embed_packed(RecordedProgram& self, const PackedLinear& table, float scale) {
  self.vocabulary = table.linear->rows;
  return self.program.embed_packed(table.linear.get(), scale);
}

int rms_norm(RecordedProgram& self, int x, ConstVector weight, float eps, int64_t head_dim) {
  vector_of(weight, head_dim > 0 ? head_dim : self.program.width(x));
  return self.program.rms_norm(x, weight.data(), eps, head_dim);
}

nb::tuple add_rms_norm(RecordedProgram& self, int x, int y, ConstVector weight, float eps) {
  vector_of(weight, self.program.width(x));
  const auto [total, normed] = self.program.add_rms_norm(x, y, weight.data(), eps);
  return nb::make_tuple(total, normed);
}

std::vector<int> linear(RecordedProgram& self, int x, const std::vector<PackedLinear*>& weights,
                        const std::vector<std::optional<ConstVector>>& biases) {
  require(weights.size() == biases.size() && weights.size() <= kMaxProductWeights, "linear: one bias per weight");
  std::vector<const Linear*> plain;
  std::vector<const float*> values;
  for (size_t i = 0; i < weights.size(); ++i) {
    const Linear* weight = weights[i]->linear.get();
    require(weight->cols == self.program.width(x), "linear: shapes do not match");
    require(!biases[i] || static_cast<int64_t>(biases[i]->size()) == weight->rows, "linear: wrong bias length");
    plain.push_back(weight);
    values.push_back(biases[i] ? biases[i]->data() : nullptr);
  }
  return self.program.linear(x, plain, values);
}

int rope(RecordedProgram& self, int x, ConstMatrix cosines, ConstMatrix sines, int64_t head_dim, bool interleaved) {
  const int64_t half = cosines.shape(1);
  require(cosines.size() == sines.size() && 2 * half <= head_dim && self.program.width(x) % head_dim == 0,
          "rope: shapes do not match");
  self.positions = std::min<int64_t>(self.positions, cosines.shape(0));
  return self.program.rope(x, cosines.data(), sines.data(), half, head_dim, interleaved);
}

int attention(RecordedProgram& self, int q, int k, int v, const BoundPages& bound, int group, int num_heads, float scale,
              int window, float softcap, int chunk, std::optional<ConstVector> sinks) {
  const KVPages& pages = bound.pages;
  AttentionShape shape{num_heads, pages.num_kv_heads, pages.head_dim, scale, window, softcap, chunk,
                       sinks ? sinks->data() : nullptr};
  require(!sinks || static_cast<int>(sinks->size()) == num_heads, "attention: one sink per head");
  const int64_t kv_width = static_cast<int64_t>(pages.num_kv_heads) * pages.head_dim;
  require(num_heads % pages.num_kv_heads == 0 && self.program.width(k) == kv_width &&
              self.program.width(v) == kv_width &&
              self.program.width(q) == static_cast<int64_t>(num_heads) * pages.head_dim,
          "attention: shapes do not match");
  self.num_pages = std::min(self.num_pages, bound.num_pages);
  self.page_size = pages.page_size;
  self.num_groups = std::max(self.num_groups, group + 1);
  return self.program.attention(q, k, v, pages, group, shape);
}

// kv -> rows; q -> queries over rows; attention over the rows; then the values of each head. All in the absorbed form.
int latent_attention(RecordedProgram& self, int q, int kv, ConstVector norm, float eps, ConstMatrix cosines,
                     ConstMatrix sines, bool interleaved, AnyTensor keys, AnyTensor values, const BoundPages& bound,
                     int group, float scale) {
  Program& program = self.program;
  const int64_t rank = static_cast<int64_t>(norm.size()), half = cosines.shape(1), rope_dim = 2 * half;
  const auto is_stack = [&](const AnyTensor& t) {
    return t.ndim() == 3 && t.dtype() == nb::dtype<float>() && static_cast<int64_t>(t.shape(2)) == rank;
  };
  require(is_stack(keys) && is_stack(values) && keys.shape(0) == values.shape(0), "latent_attention: projections");
  const int heads = static_cast<int>(keys.shape(0));
  const int64_t nope_dim = keys.shape(1), value_dim = values.shape(1), row = rank + rope_dim;
  require(cosines.size() == sines.size() && program.width(kv) == row && bound.pages.num_kv_heads == 1 &&
              bound.pages.head_dim == row && program.width(q) == heads * (nope_dim + rope_dim),
          "latent_attention: shapes do not match");
  self.positions = std::min<int64_t>(self.positions, cosines.shape(0));
  const int rows = program.latent_row(kv, norm.data(), eps, cosines.data(), sines.data(), half, interleaved);
  const int turned = program.rope_tails(q, cosines.data(), sines.data(), half, nope_dim + rope_dim, interleaved);
  HeadProduct absorb{static_cast<const float*>(keys.data()), true, heads, nope_dim, rank, nope_dim + rope_dim, row,
                     rope_dim};
  HeadProduct project{static_cast<const float*>(values.data()), false, heads, rank, value_dim, row, value_dim, 0};
  const int queries = program.head_product(turned, absorb);
  const int attended =
      attention(self, queries, rows, rows, bound, group, heads, scale, 0, 0.0f, 0, std::nullopt);
  return program.head_product(attended, project);
}

int gated(RecordedProgram& self, int gate, int up, const std::string& activation) {
  return self.program.gated(gate, up, activation_of(activation));
}

int layer_norm(RecordedProgram& self, int x, ConstVector weight, std::optional<ConstVector> bias, float eps,
               int64_t head_dim) {
  const int64_t width = self.program.width(x), count = weight.size(), slice = head_dim > 0 ? head_dim : width;
  require(width % slice == 0 && (count == slice || count == width) && (!bias || bias->size() == weight.size()),
          "layer_norm: shapes do not match");
  return self.program.layer_norm(x, weight.data(), bias ? bias->data() : nullptr, count, eps, head_dim);
}

int add_positions(RecordedProgram& self, int x, ConstMatrix table) {
  require(static_cast<int64_t>(table.shape(1)) == self.program.width(x), "add_positions: shapes do not match");
  self.positions = std::min<int64_t>(self.positions, table.shape(0));
  return self.program.add_positions(x, table.data());
}

int gate_rows(RecordedProgram& self, int x, int gate) {
  require(self.program.width(gate) == 1, "gate_rows: one number per row");
  return self.program.gate_rows(x, gate);
}

// `weights` and `biases`: gate, up and down of each expert, expert by expert. A dictionary names the routing.
int experts(RecordedProgram& self, int x, int logits, const std::vector<PackedLinear*>& weights,
            const std::vector<std::optional<ConstVector>>& biases, const nb::dict& settings) {
  const auto get = [&](const char* name) { return settings[name]; };
  ExpertRouting routing;
  routing.experts_per_token = nb::cast<int>(get("experts_per_token"));
  const std::string score = nb::cast<std::string>(get("score")), activation = nb::cast<std::string>(get("activation"));
  require(score == "softmax" || score == "sigmoid" || score == "softmax_of_selected", "experts: unknown score");
  require(activation == "silu" || activation == "gelu_tanh", "experts: unknown activation");
  routing.score = score == "softmax"   ? ExpertRouting::Score::softmax
                  : score == "sigmoid" ? ExpertRouting::Score::sigmoid
                                       : ExpertRouting::Score::softmax_of_selected;
  routing.activation = activation == "silu" ? Activation::silu : Activation::gelu_tanh;
  routing.normalize = nb::cast<bool>(get("normalize"));
  routing.scale = nb::cast<float>(get("scale"));
  routing.num_groups = nb::cast<int>(get("num_groups"));
  routing.top_groups = nb::cast<int>(get("top_groups"));
  routing.group_maximum = nb::cast<std::string>(get("group_score")) == "max";
  routing.correction_bias = nb::cast<std::vector<float>>(get("correction_bias"));
  routing.clamp = nb::cast<float>(get("clamp"));
  routing.weights_on_input = nb::cast<bool>(get("weights_on_input"));
  const int64_t count = self.program.width(logits), hidden = self.program.width(x);
  require(int64_t(weights.size()) == 3 * count && biases.size() == weights.size(), "experts: three weights each");
  require(routing.experts_per_token > 0 && routing.num_groups > 0 && count % routing.num_groups == 0 &&
              routing.top_groups <= routing.num_groups &&
              routing.experts_per_token <= count / routing.num_groups * routing.top_groups,
          "experts: more experts or groups are chosen than there are");
  require(routing.correction_bias.empty() || int64_t(routing.correction_bias.size()) == count, "experts: wrong bias");
  const int64_t inner = weights[0]->linear->rows;
  std::vector<Expert> list;
  for (size_t i = 0; i < weights.size(); i += 3) {
    const Linear *gate = weights[i]->linear.get(), *up = weights[i + 1]->linear.get(),
                 *down = weights[i + 2]->linear.get();
    require(gate->rows == inner && up->rows == inner && down->cols == inner && gate->cols == hidden &&
                up->cols == hidden && down->rows == hidden,
            "experts: shapes do not match");
    Expert expert{Product(std::vector<const Linear*>{gate, up}), Product(std::vector<const Linear*>{down}), {}};
    for (size_t part = 0; part < 3; ++part) {
      const auto& bias = biases[i + part];
      require(!bias || int64_t(bias->size()) == weights[i + part]->linear->rows, "experts: wrong bias length");
      expert.biases[part] = bias ? bias->data() : nullptr;
    }
    list.push_back(std::move(expert));
  }
  return self.program.experts(x, logits, ExpertLayer(std::move(routing), std::move(list)));
}

int exchange(RecordedProgram& self, int x, const SharedExchange& ranks, const std::vector<int64_t>& widths) {
  const Exchange& exchange = *ranks.exchange;
  require(widths.empty() || (int(widths.size()) == exchange.ranks() && widths[exchange.rank()] == self.program.width(x)),
          "exchange: widths do not match");
  return self.program.exchange(x, ranks.exchange, widths);
}

void finish(RecordedProgram& self, int logits) {
  self.logits_width = self.program.width(logits);
  self.program.finish(logits);
}

int gated_norm(RecordedProgram& self, int x, int gate, ConstMatrix weight, float eps, bool norm_first,
               float gate_scale) {
  const int64_t width = self.program.width(x);
  require(self.program.width(gate) == width, "gated_norm: shapes do not match");
  return self.program.gated_norm(x, gate, gated_norm_of(weight, width, eps, norm_first, gate_scale));
}

std::vector<int> split(RecordedProgram& self, int x, const std::vector<int64_t>& widths, int64_t heads) {
  const int64_t total = std::accumulate(widths.begin(), widths.end(), int64_t(0));
  require(heads > 0 && total * heads == self.program.width(x), "split: the widths do not add up");
  return self.program.split(x, widths, heads);
}

int recurrence(RecordedProgram& self, const std::vector<int>& inputs, const BoundRecurrence& bound) {
  require(static_cast<int>(inputs.size()) == bound.op->num_inputs(), "recurrence: wrong number of inputs");
  for (size_t i = 0; i < inputs.size(); ++i)
    require(self.program.width(inputs[i]) == bound.op->input_width(static_cast<int>(i)),
            "recurrence: shapes do not match");
  self.num_state_slots = std::min(self.num_state_slots, bound.num_slots);
  self.has_states = true;
  return self.program.recurrence(inputs, bound.op, bound.states);
}

}  // namespace

void bind_program(nb::module_& module) {
  nb::class_<RecordedProgram>(module, "Program", "A forward pass recorded once and replayed for every step")
      .def(nb::init<int, int, std::shared_ptr<ThreadPool>>(), nb::arg("max_tokens"), nb::arg("max_sequences"),
           nb::arg("pool"))
      .def("embed", &embed)
      .def("embed_packed", &embed_packed)
      .def("rms_norm", &rms_norm)
      .def("add", [](RecordedProgram& self, int x, int y) { return self.program.add(x, y); })
      .def("add_rms_norm", &add_rms_norm)
      .def("linear", &linear)
      .def("layer_norm", &layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("eps"),
           nb::arg("head_dim"))
      .def("add_positions", &add_positions)
      .def("scale", [](RecordedProgram& self, int x, float factor) { return self.program.scale(x, factor); })
      .def("activate",
           [](RecordedProgram& self, int x, const std::string& name) {
             return self.program.activate(x, activation_of(name));
           })
      .def("rope", &rope)
      .def("attention", &attention, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("pages"), nb::arg("group"),
           nb::arg("num_heads"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"), nb::arg("chunk") = 0,
           nb::arg("sinks") = nb::none())
      .def("latent_attention", &latent_attention)
      .def("experts", &experts)
      .def("gate_rows", &gate_rows)
      .def("gated", &gated)
      .def("split", &split)
      .def("join", [](RecordedProgram& self, const std::vector<int>& values) { return self.program.join(values); })
      .def("gated_norm", &gated_norm)
      .def("recurrence", &recurrence)
      .def("exchange", &exchange)
      .def("select_rows", [](RecordedProgram& self, int x) { return self.program.select_rows(x); })
      .def("softcap", [](RecordedProgram& self, int x, float cap) { return self.program.softcap(x, cap); })
      .def("end_body", [](RecordedProgram& self) { self.program.end_body(); })
      .def("finish", &finish)
      .def("hold_adapters", [](RecordedProgram& self, int num_slots) { self.program.hold_adapters(num_slots); })
      .def("set_adapter", &set_adapter, nb::arg("product"), nb::arg("slot"), nb::arg("packed").none())
      .def("set_embedding", &set_embedding, nb::arg("slot"), nb::arg("packed").none())
      .def("run", &run_step)
      .def("decode", &decode_steps)
      .def("settle", &settle_drafts)
      .def(
          "value",
          [](RecordedProgram& self, int value) {
            const size_t shape[2] = {static_cast<size_t>(self.program.max_tokens()),
                                     static_cast<size_t>(self.program.width(value))};
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(const_cast<float*>(self.program.data(value)), 2, shape,
                                                               nb::find(self));
          },
          "The memory of a value, [max_tokens, width]; only those that outlive their stage mean anything")
      .def_prop_ro("nbytes", [](const RecordedProgram& self) { return self.program.bytes(); })
      .def_prop_ro("num_products", [](const RecordedProgram& self) { return self.program.num_products(); })
      .def_prop_ro("num_stages", [](const RecordedProgram& self) { return self.program.num_stages(); });
}

}  // namespace tokenmill
