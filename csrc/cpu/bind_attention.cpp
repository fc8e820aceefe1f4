// Eager paged attention and KV stores for Python, over plain pages (a tensor each) or Pages of any row format.
//
// Pages may be strided in all but their last dimension.
#include "attention.h"
#include "bind.h"
#include "bind_attention.h"
#include "float_kernels.h"
#include "half_kernels.h"
#include "memory.h"
#include "pool.h"

namespace tokenmill {

namespace {

using Floats = std::optional<ConstVector>;

std::vector<float> copy_of(const Floats& values) {
  return values ? std::vector<float>(values->data(), values->data() + values->size()) : std::vector<float>();
}

std::shared_ptr<Rotation> make_rotation(ConstVector signs, int power, ConstMatrix matrix) {
  auto rotation = std::make_shared<Rotation>();
  rotation->power = power;
  rotation->rest = static_cast<int>(matrix.shape(0));
  rotation->signs.assign(signs.data(), signs.data() + signs.size());
  rotation->matrix.assign(matrix.data(), matrix.data() + matrix.size());
  require(matrix.shape(0) == matrix.shape(1) && static_cast<int>(signs.size()) == power * rotation->rest &&
              (power & (power - 1)) == 0 && signs.size() <= kMaxHeadDim,
          "a rotation is signs [power * rest] and a matrix [rest, rest], power a power of two");
  return rotation;
}

std::shared_ptr<RowFormat> make_format(const std::string& kind, int head_dim, int bits, int scale_bytes,
                                       bool renormalize, Floats centroids, Floats bounds, Floats head_scales,
                                       Floats centers, Floats scales, Floats feedback,
                                       Floats weights, Floats gains, std::shared_ptr<Rotation> rotation) {
  auto format = std::make_shared<RowFormat>();
  require(row_kind(kind, &format->kind), "no such kind of KV row");
  format->head_dim = head_dim;
  format->bits = bits;
  format->scale_bytes = scale_bytes;
  format->renormalize = renormalize;
  format->centroids = copy_of(centroids);
  format->bounds = copy_of(bounds);
  format->head_scales = copy_of(head_scales);
  format->centers = copy_of(centers);
  format->scales = copy_of(scales);
  format->feedback = copy_of(feedback);
  format->weights = copy_of(weights);
  format->gains = copy_of(gains);
  require(format->centers.size() == format->scales.size() &&
              format->feedback.size() == format->weights.size() * head_dim &&
              (format->feedback.empty() || format->feedback.size() == format->centers.size() * head_dim),
          "centers, scales and feedback go together");
  const bool coded = format->kind > RowKind::int8;
  require(format->is_plain() ||
              (head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % 8 == 0 &&
               (coded ? bits >= 2 && bits <= 4 : bits == 8)),
          "no KV rows of this width in C++");
  const bool hides_zeros = format->kind == RowKind::hidden_zero || format->kind == RowKind::paired_zero;
  require(!hides_zeros || bits == 4, "a hidden zero point is for 4 bits");
  require(format->kind != RowKind::int8 || scale_bytes == 2 || scale_bytes == 4, "int8 rows have a scale");
  require(format->kind != RowKind::codebook ||
              (format->centroids.size() == 16 && format->bounds.size() == (size_t(1) << bits) - 1),
          "a codebook has 16 entries, padded, and a bound between neighbours");
  require(!rotation || static_cast<int>(rotation->signs.size()) == head_dim, "the rotation has another width");
  require(!rotation || !format->is_plain(), "plain floats are not rotated");
  format->rotation = std::move(rotation);
  return format;
}

KVSide side_of(const AnyTensor& tensor, std::shared_ptr<const RowFormat> format) {
  const int64_t item = tensor.dtype().bits / 8;
  require(tensor.ndim() == 4 && tensor.stride(3) == 1, "pages must be [pages, heads, page_size, row]");
  require(static_cast<int64_t>(tensor.shape(3)) * item == format->row_bytes(), "rows of another length");
  return {static_cast<uint8_t*>(tensor.data()), std::move(format), tensor.stride(0) * item, tensor.stride(1) * item,
          tensor.stride(2) * item};
}

std::shared_ptr<const RowFormat> plain_format(const AnyTensor& tensor) {
  auto format = std::make_shared<RowFormat>();
  if (tensor.dtype() == nb::dtype<float>()) {
    format->kind = RowKind::float32;
  } else {
    require(tensor.dtype().bits == 16, "pages must be float32, float16 or bfloat16");
    format->kind = tensor.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) ? RowKind::bfloat16
                                                                                              : RowKind::float16;
  }
  format->bits = tensor.dtype().bits;
  format->head_dim = static_cast<int>(tensor.shape(3));
  return format;
}

}  // namespace

BoundPages pages_of(const AnyTensor& k, const AnyTensor& v, std::shared_ptr<const RowFormat> k_rows,
                    std::shared_ptr<const RowFormat> v_rows) {
  require(k.ndim() == 4 && v.ndim() == 4, "pages must be [pages, heads, page_size, row]");
  for (size_t i = 0; i < 3; ++i) require(k.shape(i) == v.shape(i), "k and v pages must have the same shape");
  BoundPages bound;
  KVPages& pages = bound.pages;
  pages.k = side_of(k, k_rows ? std::move(k_rows) : plain_format(k));
  pages.v = side_of(v, v_rows ? std::move(v_rows) : plain_format(v));
  require(pages.k.format->head_dim == pages.v.format->head_dim, "keys and values of different widths");
  bound.num_pages = static_cast<int64_t>(k.shape(0));
  pages.num_kv_heads = static_cast<int>(k.shape(1));
  pages.page_size = static_cast<int>(k.shape(2));
  pages.head_dim = pages.k.format->head_dim;
  for (const KVSide* side : {&pages.k, &pages.v}) {
    const size_t scales = side->format->head_scales.size();
    require(scales == 0 || scales == k.shape(1), "one scale per KV head");
    const size_t centers = side->format->centers.size();
    require(centers == 0 || centers == k.shape(1) * pages.head_dim, "one center per KV head");
  }
  require(pages.v.format->centers.empty(), "values have no center: nobody would give it back");
  return bound;
}

namespace {

void store_side(ThreadPool& pool, const ConstMatrix& x, const BoundPages& bound, const KVSide& side,
                const Int64Vector& slots) {
  const KVPages& pages = bound.pages;
  const int64_t width = static_cast<int64_t>(pages.num_kv_heads) * pages.head_dim;
  require(static_cast<int64_t>(x.shape(1)) == width && slots.size() == x.shape(0), "store_kv: shapes do not match");
  const int64_t limit = bound.num_pages * pages.page_size;
  const int64_t* at = slots.data();
  for (size_t i = 0; i < slots.size(); ++i) require(at[i] >= 0 && at[i] < limit, "store_kv: no such slot");
  const float* in = x.data();
  nb::gil_scoped_release release;
  pool.for_each(static_cast<int>(slots.size()), 16, [&](int token) {
    for (int head = 0; head < pages.num_kv_heads; ++head)
      store_head(pages, side, head, at[token], in + token * width + head * pages.head_dim);
  });
}

void store_kv(ThreadPool& pool, ConstMatrix x, AnyTensor tensor, Int64Vector slots) {
  const BoundPages bound = pages_of(tensor, tensor, nullptr, nullptr);
  store_side(pool, x, bound, bound.pages.k, slots);
}

void store_pages(ThreadPool& pool, ConstMatrix k, ConstMatrix v, const BoundPages& bound, Int64Vector slots) {
  store_side(pool, k, bound, bound.pages.k, slots);
  store_side(pool, v, bound, bound.pages.v, slots);
}

int attend_pages(ThreadPool& pool, ConstMatrix q, const BoundPages& bound, Int32Matrix block_table,
                 Int32Vector query_starts, Int32Vector seq_lens, float scale, int window, float softcap, int chunk,
                 std::optional<ConstVector> sinks, Matrix out) {
  const KVPages& pages = bound.pages;
  const int tokens = static_cast<int>(q.shape(0));
  AttentionShape shape;
  shape.num_heads = static_cast<int>(q.shape(1)) / pages.head_dim;
  shape.num_kv_heads = pages.num_kv_heads;
  shape.head_dim = pages.head_dim;
  shape.scale = scale;
  shape.window = window;
  shape.softcap = softcap;
  shape.chunk = chunk;
  shape.sinks = sinks ? sinks->data() : nullptr;
  require(!sinks || static_cast<int>(sinks->size()) == shape.num_heads, "attention: one sink per head");
  AttentionBatch batch{static_cast<int>(seq_lens.size()), query_starts.data(), seq_lens.data(), block_table.data(),
                       static_cast<int64_t>(block_table.shape(1))};
  require(shape.num_heads % shape.num_kv_heads == 0 && out.size() == q.size() &&
              query_starts.size() == seq_lens.size() + 1 && block_table.shape(0) == seq_lens.size() &&
              static_cast<int64_t>(q.shape(1)) == static_cast<int64_t>(shape.num_heads) * shape.head_dim,
          "attention: shapes do not match");
  check_batch(batch, tokens, pages.page_size, bound.num_pages);
  nb::gil_scoped_release release;
  AttentionPlan plan(tokens, batch.num_sequences, shape.num_heads, shape.num_kv_heads, shape.head_dim);
  plan.build(batch, pages.page_size, window, chunk);
  const int64_t width = static_cast<int64_t>(shape.num_heads) * shape.head_dim;
  const AttentionRunner runner(plan, batch, pages, shape, q.data(), width, out.data(), width);
  const size_t scratch_floats =
      (AttentionRunner::scratch_floats(shape.num_heads, shape.num_kv_heads, shape.head_dim) + 31) / 16 * 16;
  const AlignedBuffer scratch = allocate_aligned(scratch_floats * sizeof(float) * pool.size());
  pool.run([&](Team& team) {
    float* own = reinterpret_cast<float*>(scratch.get()) + team.thread * scratch_floats;
    team.for_each(runner.num_pieces(), 1, [&](int piece) { runner.run(piece, own); });
  });
  return plan.num_shared_tokens();
}

int attention(ThreadPool& pool, ConstMatrix q, AnyTensor k_pages, AnyTensor v_pages, Int32Matrix block_table,
              Int32Vector query_starts, Int32Vector seq_lens, float scale, int window, float softcap, int chunk,
              std::optional<ConstVector> sinks, Matrix out) {
  const BoundPages bound = pages_of(k_pages, v_pages, nullptr, nullptr);
  return attend_pages(pool, q, bound, block_table, query_starts, seq_lens, scale, window, softcap, chunk, sinks, out);
}

}  // namespace

void check_batch(const AttentionBatch& batch, int64_t tokens, int page_size, int64_t num_pages) {
  require(batch.query_starts[0] == 0 && batch.query_starts[batch.num_sequences] == tokens,
          "query_starts must run from 0 to the number of tokens");
  for (int s = 0; s < batch.num_sequences; ++s) {
    const int count = batch.query_starts[s + 1] - batch.query_starts[s];
    require(count >= 0 && batch.seq_lens[s] >= count, "a sequence is shorter than its new tokens");
    require(batch.ancestors == nullptr || count <= 64, "a tree of drafts has more than 64 tokens");
    for (int i = 0; batch.ancestors != nullptr && i < count; ++i)
      require(batch.ancestors[batch.query_starts[s] + i] >> i == 1, "a token of a tree sees itself and none after it");
    const int64_t pages = (batch.seq_lens[s] + page_size - 1) / page_size;
    require(pages <= batch.max_pages, "the block table is too narrow");
    for (int64_t page = 0; page < pages; ++page)
      require(batch.block_table[s * batch.max_pages + page] < num_pages, "the block table names a page that is not there");
  }
}

void bind_attention(nb::module_& module) {
  nb::class_<Rotation>(module, "Rotation", "Random signs, then a Hadamard matrix")
      .def(nb::new_(&make_rotation), nb::arg("signs"), nb::arg("power"), nb::arg("matrix"));
  nb::class_<RowFormat>(module, "RowFormat", "How one token's key or value of one KV head lies in a page")
      .def(nb::new_(&make_format), nb::arg("kind"), nb::arg("head_dim"), nb::arg("bits"), nb::arg("scale_bytes") = 0,
           nb::arg("renormalize") = false, nb::arg("centroids") = nb::none(), nb::arg("bounds") = nb::none(),
           nb::arg("head_scales") = nb::none(), nb::arg("centers") = nb::none(), nb::arg("scales") = nb::none(),
           nb::arg("feedback") = nb::none(), nb::arg("weights") = nb::none(), nb::arg("gains") = nb::none(),
           nb::arg("rotation") = nb::none())
      .def_prop_ro("row_bytes", &RowFormat::row_bytes);
  nb::class_<BoundPages>(module, "Pages", "The pages of one layer; the tensors must outlive it")
      .def(nb::new_([](AnyTensor k, AnyTensor v, std::shared_ptr<RowFormat> k_rows, std::shared_ptr<RowFormat> v_rows) {
             return std::make_shared<BoundPages>(pages_of(k, v, std::move(k_rows), std::move(v_rows)));
           }),
           nb::arg("k"), nb::arg("v"), nb::arg("k_rows") = nb::none(), nb::arg("v_rows") = nb::none());
  module.def("store_pages", &store_pages);
  module.def("attend_pages", &attend_pages, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg("sinks").none(), nb::arg(),
             "As `attention`, over Pages of any format");
  module.def("store_kv", &store_kv);
  module.def("multiplies_halves", [](int64_t head_dim) { return multiplies_halves(head_dim); });
  module.def("attention", &attention, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("sinks").none(), nb::arg(), "Returns how many leading keys were read once for several sequences");
}

}  // namespace tokenmill
