// Quantizing rows to GGUF blocks, for Python: takes tensors without copying, runs on the pool without the GIL.
#include <algorithm>

#include "bind.h"
#include "pool.h"
#include "quantize_blocks.h"

namespace tokenmill {
namespace {

constexpr int64_t kGrainValues = 1 << 15;  // a thread takes rows of about this many values at a time

void quantize(ThreadPool& pool, const std::string& type, ConstMatrix rows, std::optional<ConstVector> importance,
              Tensor<uint8_t, nb::ndim<2>, nb::c_contig> out) {
  const BlockQuantizer* quantizer = find_block_quantizer(type);
  require(quantizer != nullptr, "quantize_rows: unknown type");
  const int64_t count = rows.shape(0), cols = rows.shape(1);
  require(cols > 0 && cols % quantizer->block == 0, "quantize_rows: the row is not made of whole blocks");
  const int64_t row_bytes = cols / quantizer->block * quantizer->bytes;
  require(static_cast<int64_t>(out.shape(0)) == count && static_cast<int64_t>(out.shape(1)) == row_bytes &&
              (!importance || static_cast<int64_t>(importance->size()) == cols),
          "quantize_rows: shapes do not match");
  const float *in = rows.data(), *weights = importance ? importance->data() : nullptr;
  uint8_t* to = out.data();
  nb::gil_scoped_release release;
  const int64_t grain = std::max<int64_t>(1, kGrainValues / cols);
  pool.for_each(static_cast<int>((count + grain - 1) / grain), 1, [&](int chunk) {
    const int64_t begin = chunk * grain, end = std::min(count, begin + grain);
    quantize_rows(*quantizer, in + begin * cols, end - begin, cols, weights, to + begin * row_bytes);
  });
}

}  // namespace

void bind_quantize(nb::module_& module) {
  module.def("quantize_rows", &quantize, nb::arg("pool"), nb::arg("type"), nb::arg("rows"),
             nb::arg("importance").none(), nb::arg("out"));
}

}  // namespace tokenmill
