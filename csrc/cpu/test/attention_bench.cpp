// Times attention of one layer on one thread, in CPU time: a prompt behind a cached prefix, and decodes that share one.
//
//   attention_bench [HEADS KV_HEADS HEAD_DIM]        default: 9 3 64, as smollm2
//
// Float32 pages of 8 tokens, spread as in a pool of 30 layers. Operations count products with keys and with values only.
#include <time.h>

#include <algorithm>
#include <cstdlib>

#include "attention.h"
#include "check.h"

using namespace tokenmill;

namespace {

constexpr int kPage = 8, kLayers = 30, kShared = 512;

struct Load {
  const char* name;
  int sequences, fresh, length;  // tokens of this step in each, and all its tokens
};

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

void measure(const Load& load, int heads, int kv_heads, int dim) {
  const int max_pages = load.length / kPage + 1, num_pages = load.sequences * max_pages;
  const int64_t side = int64_t(kv_heads) * kPage * dim, page = kLayers * 2 * side;
  std::vector<float> pool(num_pages * page);
  for (int p = 0; p < num_pages; ++p) {
    const std::vector<float> values = random_floats(2 * side, p);
    std::copy(values.begin(), values.end(), pool.begin() + p * page);
  }
  auto format = std::make_shared<RowFormat>();
  format->head_dim = dim;
  const int64_t row = format->row_bytes();
  const auto of = [&](int64_t offset) {
    return KVSide{reinterpret_cast<uint8_t*>(pool.data() + offset), format, page * 4, row * kPage, row};
  };
  const KVPages pages{of(0), of(side), kv_heads, kPage, dim};
  std::vector<int32_t> starts = {0}, lengths(load.sequences, load.length), table(num_pages);
  for (int s = 0; s < load.sequences; ++s) {
    starts.push_back(starts.back() + load.fresh);
    for (int p = 0; p < max_pages; ++p) table[s * max_pages + p] = (p < kShared / kPage ? 0 : s) * max_pages + p;
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
  const AttentionRunner runner(plan, batch, pages, shape, q.data(), width, out.data(), width);
  std::vector<float> scratch(AttentionRunner::scratch_floats(heads, kv_heads, dim));
  std::vector<double> times;
  for (int i = 0; i < 31; ++i) {
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
  measure({"prompt of 200 behind 512", 1, 200, 712}, heads, kv_heads, dim);
  measure({"16 decodes, 512 in common and 232 of their own", 16, 1, 744}, heads, kv_heads, dim);
}
