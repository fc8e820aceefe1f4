// Times attention of one layer on one thread, in CPU time: prompts behind a cached prefix, decodes that share one or not.
//
//   attention_bench [HEADS KV_HEADS HEAD_DIM [float32|float16]]        default: 9 3 64 float32, as smollm2
//
// Pages of 8 tokens in a pool of 30 layers as the engine has it, every run over another layer. Operations count products
// with keys and with values only.
#include <time.h>

#include <algorithm>
#include <cstdlib>

#include "attention.h"
#include "check.h"
#include "memory.h"

using namespace tokenmill;

namespace {

constexpr int kPage = 8, kLayers = 30;

struct Load {
  const char* name;
  int sequences, fresh, length;  // tokens of this step in each, and all its tokens
  int shared;                    // with the first sequence
};

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

void measure(const Load& load, int heads, int kv_heads, int dim, RowKind kind) {
  auto format = std::make_shared<RowFormat>();
  format->kind = kind, format->head_dim = dim, format->bits = kind == RowKind::float32 ? 32 : 16;
  const int max_pages = load.length / kPage + 1, num_pages = load.sequences * max_pages;
  const int64_t row = format->row_bytes(), page = kv_heads * kPage * row, side = num_pages * page;
  uint8_t* pool;
  const auto memory = allocate_huge(2 * kLayers * side, &pool);
  const std::vector<float> values = random_floats(1 << 16, 1);
  for (int64_t at = 0, i = 0; at < 2 * kLayers * side; at += row, i += dim)
    format->encode(&values[i % (values.size() - dim)], 0, pool + at);
  const auto of = [&](int64_t offset) { return KVSide{pool + offset, format, page, row * kPage, row}; };
  std::vector<int32_t> starts = {0}, lengths(load.sequences, load.length), table(num_pages);
  for (int s = 0; s < load.sequences; ++s) {
    starts.push_back(starts.back() + load.fresh);
    for (int p = 0; p < max_pages; ++p) table[s * max_pages + p] = (p < load.shared / kPage ? 0 : s) * max_pages + p;
  }
  const int tokens = starts.back(), width = heads * dim;
  const std::vector<float> q = random_floats(int64_t(tokens) * width, 1);
  std::vector<float> out(q.size());
  AttentionShape shape;
  shape.num_heads = heads, shape.num_kv_heads = kv_heads, shape.head_dim = dim;
  shape.scale = 1 / std::sqrt(float(dim));
  AttentionBatch batch{load.sequences, starts.data(), lengths.data(), table.data(), max_pages, nullptr};
  AttentionPlan plan(tokens, load.sequences, heads, kv_heads, dim);
  plan.build(batch, kPage, 0);
  std::vector<float> scratch(AttentionRunner::scratch_floats(heads, kv_heads, dim));
  std::vector<double> times;
  for (int i = 0; i < 31; ++i) {
    const int64_t layer = i % kLayers * 2 * side;
    const KVPages pages{of(layer), of(layer + side), kv_heads, kPage, dim};
    const AttentionRunner runner(plan, batch, pages, shape, q.data(), width, out.data(), width);
    const double began = cpu_seconds();
    for (int piece = 0; piece < runner.num_pieces(); ++piece) runner.run(piece, scratch.data());
    times.push_back(cpu_seconds() - began);
  }
  std::sort(times.begin(), times.end());
  const double median = times[times.size() / 2];
  const double keys = load.fresh * (load.length - (load.fresh - 1) / 2.0) * load.sequences;
  std::printf("%-44s %8.3f ms %6.1f G operations/s\n", load.name, median * 1e3, keys * width * 4 / median / 1e9);
}

}  // namespace

int main(int count, char** arguments) {
  const auto number = [&](int i, int otherwise) { return i < count ? std::atoi(arguments[i]) : otherwise; };
  const int heads = number(1, 9), kv_heads = number(2, 3), dim = number(3, 64);
  const RowKind kind = count > 4 && std::string(arguments[4]) == "float16" ? RowKind::float16 : RowKind::float32;
  const Load loads[] = {
      {"prompt of 200 behind 512", 1, 200, 712, 0},
      {"prompt of 512 behind 3584", 1, 512, 4096, 0},
      {"16 decodes, 512 in common, 232 of their own", 16, 1, 744, 512},
      {"16 decodes after 512", 16, 1, 528, 0},
  };
  for (const Load& load : loads) measure(load, heads, kv_heads, dim, kind);
}
