// Eager paged attention and KV stores for Python. Pages may be strided in their first dimension only.
#include "attention.h"
#include "bind.h"
#include "bind_attention.h"
#include "float_kernels.h"
#include "memory.h"
#include "pool.h"

namespace tokenmill {

KVPages pages_of(const AnyTensor& k, const AnyTensor& v) {
  require(k.ndim() == 4 && v.ndim() == 4 && k.dtype() == v.dtype(), "pages must be [pages, heads, page_size, head_dim]");
  for (size_t i = 0; i < 4; ++i)
    require(k.shape(i) == v.shape(i) && k.stride(i) == v.stride(i), "k and v pages must lie alike");
  require(k.stride(3) == 1 && k.stride(2) == static_cast<int64_t>(k.shape(3)) &&
              k.stride(1) == static_cast<int64_t>(k.shape(2) * k.shape(3)),
          "a page must be contiguous");
  KVPages pages;
  if (k.dtype() == nb::dtype<float>()) {
    pages.type = PageType::float32;
  } else {
    require(k.dtype().bits == 16, "pages must be float32, float16 or bfloat16");
    pages.type = k.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) ? PageType::bfloat16
                                                                                        : PageType::float16;
  }
  pages.k = k.data();
  pages.v = v.data();
  pages.page_stride = k.stride(0);
  pages.num_kv_heads = static_cast<int>(k.shape(1));
  pages.page_size = static_cast<int>(k.shape(2));
  pages.head_dim = static_cast<int>(k.shape(3));
  return pages;
}

namespace {

void store_kv(ThreadPool& pool, ConstMatrix x, AnyTensor tensor, Int64Vector slots) {
  const KVPages pages = pages_of(tensor, tensor);
  const int64_t width = static_cast<int64_t>(pages.num_kv_heads) * pages.head_dim;
  require(static_cast<int64_t>(x.shape(1)) == width && slots.size() == x.shape(0), "store_kv: shapes do not match");
  const int64_t limit = static_cast<int64_t>(tensor.shape(0)) * pages.page_size;
  const int64_t* at = slots.data();
  for (size_t i = 0; i < slots.size(); ++i) require(at[i] >= 0 && at[i] < limit, "store_kv: no such slot");
  const float* in = x.data();
  nb::gil_scoped_release release;
  pool.for_each(static_cast<int>(slots.size()), 16, [&](int token) {
    for (int head = 0; head < pages.num_kv_heads; ++head)
      store_head(pages, pages.k, head, at[token], in + token * width + head * pages.head_dim);
  });
}

int attention(ThreadPool& pool, ConstMatrix q, AnyTensor k_pages, AnyTensor v_pages, Int32Matrix block_table,
              Int32Vector query_starts, Int32Vector seq_lens, float scale, int window, float softcap, Matrix out) {
  const KVPages pages = pages_of(k_pages, v_pages);
  const int tokens = static_cast<int>(q.shape(0));
  AttentionShape shape;
  shape.num_heads = static_cast<int>(q.shape(1)) / pages.head_dim;
  shape.num_kv_heads = pages.num_kv_heads;
  shape.head_dim = pages.head_dim;
  shape.scale = scale;
  shape.window = window;
  shape.softcap = softcap;
  AttentionBatch batch{static_cast<int>(seq_lens.size()), query_starts.data(), seq_lens.data(), block_table.data(),
                       static_cast<int64_t>(block_table.shape(1))};
  require(shape.num_heads % shape.num_kv_heads == 0 && out.size() == q.size() &&
              query_starts.size() == seq_lens.size() + 1 && block_table.shape(0) == seq_lens.size() &&
              static_cast<int64_t>(q.shape(1)) == static_cast<int64_t>(shape.num_heads) * shape.head_dim,
          "attention: shapes do not match");
  check_batch(batch, tokens, pages.page_size, k_pages.shape(0));
  nb::gil_scoped_release release;
  AttentionPlan plan(tokens, batch.num_sequences, shape.num_heads, shape.num_kv_heads, shape.head_dim);
  plan.build(batch, pages.page_size, window);
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

}  // namespace

void check_batch(const AttentionBatch& batch, int64_t tokens, int page_size, int64_t num_pages) {
  require(batch.query_starts[0] == 0 && batch.query_starts[batch.num_sequences] == tokens,
          "query_starts must run from 0 to the number of tokens");
  for (int s = 0; s < batch.num_sequences; ++s) {
    const int count = batch.query_starts[s + 1] - batch.query_starts[s];
    require(count >= 0 && batch.seq_lens[s] >= count, "a sequence is shorter than its new tokens");
    const int64_t pages = (batch.seq_lens[s] + page_size - 1) / page_size;
    require(pages <= batch.max_pages, "the block table is too narrow");
    for (int64_t page = 0; page < pages; ++page)
      require(batch.block_table[s * batch.max_pages + page] < num_pages, "the block table names a page that is not there");
  }
}

void bind_attention(nb::module_& module) {
  module.def("store_kv", &store_kv);
  module.def("attention", &attention, "Returns how many leading keys were read once for several sequences");
}

}  // namespace tokenmill
