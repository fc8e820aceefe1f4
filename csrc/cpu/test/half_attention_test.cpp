// Attention over pages of halves against float64: its kernels, its bits however work is cut, and what does not fit.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "check.h"
#include "float_kernels.h"
#include "half_kernels.h"
#include "plain_pages.h"

using namespace tokenmill;

namespace {

std::vector<uint16_t> halves_of(const std::vector<float>& x) {
  std::vector<uint16_t> out(x.size());
  float_kernels().float_to_half(x.data(), out.data(), x.size());
  return out;
}

std::vector<float> floats_of(const std::vector<uint16_t>& x) {
  std::vector<float> out(x.size());
  float_kernels().half_to_float(x.data(), out.data(), x.size());
  return out;
}

// Sums of at most 32 halves and floats beyond, and the same bits for a row among others as alone.
void kernels(const HalfKernels& kernels) {
  constexpr int keys = 64;
  for (int dim : {8, 24, 64, 128, 256}) {
    const std::vector<uint16_t> k = halves_of(random_floats(keys * dim, dim));
    const std::vector<float> kf = floats_of(k);
    std::vector<const uint16_t*> at;
    for (int j = 0; j < keys; ++j) at.push_back(&k[j * dim]);
    for (int rows : {1, 2, 3, 4, 5, 9}) {
      const std::vector<uint16_t> q = halves_of(random_floats(rows * dim, rows));
      const std::vector<float> qf = floats_of(q);
      std::vector<uint16_t> scores(rows * keys), same(keys);
      std::vector<float> out(rows * dim, 0.5f), one(dim, 0.5f);
      std::vector<uint8_t> bad(rows);
      kernels.scores(q.data(), rows, at.data(), keys, dim, scores.data(), keys, bad.data(), at.data());
      std::vector<float> sums;
      std::vector<uint16_t> weights = scores;
      for (int r = 0; r < rows; ++r)
        sums.push_back(kernels.exponentials(&weights[r * keys], kernels.maximum(&scores[r * keys])));
      kernels.accumulate(weights.data(), keys, rows, at.data(), keys, dim, out.data(), dim, at.data());
      const std::vector<float> wf = floats_of(weights);
      for (int r = 0; r < rows; ++r) {
        kernels.scores(&q[r * dim], 1, at.data(), keys, dim, same.data(), keys, bad.data(), nullptr);
        CHECK(std::equal(same.begin(), same.end(), &scores[r * keys]) && !bad[r]);
        const std::vector<float> alone = floats_of(same);
        std::fill(one.begin(), one.end(), 0.5f);
        kernels.accumulate(&weights[r * keys], keys, 1, at.data(), keys, dim, one.data(), dim, nullptr);
        CHECK(std::equal(one.begin(), one.end(), &out[r * dim]));
        const float highest = *std::max_element(alone.begin(), alone.end());
        CHECK(highest == kernels.maximum(same.data()));
        double total = 0;
        for (int j = 0; j < keys; ++j) {
          double sum = 0, size = 0;
          for (int d = 0; d < dim; ++d) {
            sum += double(qf[r * dim + d]) * kf[j * dim + d];
            size += std::fabs(double(qf[r * dim + d]) * kf[j * dim + d]);
          }
          CHECK(std::fabs(alone[j] - sum) <= size * 1e-3);
          const double weight = std::exp(double(alone[j]) - highest);
          CHECK(std::fabs(wf[r * keys + j] - weight) <= weight * (1.5e-3 + 3e-4 * (highest - alone[j])) + 1.2e-7);
          total += weight;
        }
        CHECK(near(sums[r], total, 1e-3));
        for (int d = 0; d < dim; ++d) {
          double sum = 0.5, size = 0;
          for (int j = 0; j < keys; ++j) {
            sum += double(wf[r * keys + j]) * kf[j * dim + d];
            size += std::fabs(double(wf[r * keys + j]) * kf[j * dim + d]);
          }
          CHECK(std::fabs(out[r * dim + d] - sum) <= size * 2e-3 + 1e-6);
        }
      }
    }
  }
}

struct Case {
  int heads = 6, kv_heads = 2, dim = 64, page_size = 8, keys = 300;
  float q_scale = 1, k_scale = 1, v_scale = 1;
  bool nan_value = false;  // in the first value
};

// Attention of the last `fresh` of the tokens, over halves or over the same numbers as floats.
std::vector<float> attend(const Case& c, int fresh, bool halves, int window = 0) {
  const int64_t width = c.heads * c.dim;
  const int num_pages = (c.keys + c.page_size - 1) / c.page_size;
  const size_t side = size_t(num_pages) * c.kv_heads * c.page_size * c.dim;
  std::vector<uint16_t> k = halves_of(random_floats(side, 1, c.k_scale)), v = halves_of(random_floats(side, 2, c.v_scale));
  if (c.nan_value) v[0] = 0x7e00;
  std::vector<float> kf = floats_of(k), vf = floats_of(v);
  auto format = std::make_shared<RowFormat>();
  format->kind = RowKind::float16, format->bits = 16, format->head_dim = c.dim;
  const int64_t row = format->row_bytes();
  const auto of = [&](std::vector<uint16_t>& data) {
    return KVSide{reinterpret_cast<uint8_t*>(data.data()), format, row * c.page_size * c.kv_heads, row * c.page_size, row};
  };
  const KVPages pages = halves ? KVPages{of(k), of(v), c.kv_heads, c.page_size, c.dim}
                               : plain_pages(kf.data(), vf.data(), c.kv_heads, c.page_size, c.dim);
  const std::vector<float> q = random_floats(c.keys * width, 3, c.q_scale);
  const std::vector<int32_t> starts = {0, fresh}, lengths = {c.keys};
  std::vector<int32_t> table(num_pages);
  for (int i = 0; i < num_pages; ++i) table[i] = num_pages - 1 - i;
  const AttentionBatch batch{1, starts.data(), lengths.data(), table.data(), num_pages};
  const AttentionShape shape{c.heads, c.kv_heads, c.dim, 0.125f, window, 0.0f};
  std::vector<float> out(fresh * width);
  AttentionPlan plan(fresh, 1, c.heads, c.kv_heads, c.dim);
  plan.build(batch, c.page_size, window);
  const AttentionRunner runner(plan, batch, pages, shape, &q[(c.keys - fresh) * width], width, out.data(), width);
  std::vector<float> scratch(AttentionRunner::scratch_floats(c.heads, c.kv_heads, c.dim));
  for (int piece = 0; piece < runner.num_pieces(); ++piece) runner.run(piece, scratch.data());
  return out;
}

void same_as_floats(const Case& c, int fresh, int window, double tolerance) {
  const std::vector<float> out = attend(c, fresh, true, window), expected = attend(c, fresh, false, window);
  double largest = 0;
  for (float value : expected) largest = std::max(largest, std::fabs(double(value)));
  double worst = 0;
  for (size_t i = 0; i < out.size(); ++i)
    worst = std::max(worst, std::isfinite(out[i]) ? std::fabs(double(out[i]) - expected[i]) : INFINITY);
  CHECK(worst <= tolerance * largest);
}

void same_bits(const Case& c) {
  const std::vector<float> all = attend(c, c.keys, true);
  for (int fresh : {1, 2, 5, 70}) {
    const std::vector<float> some = attend(c, fresh, true);
    CHECK(std::equal(some.begin(), some.end(), all.end() - some.size()));
  }
}

}  // namespace

int main() {
  if (const HalfKernels* table = half_kernels()) kernels(*table);
  for (int fresh : {1, 3, 40, 300}) {
    for (int window : {0, 50}) {
      same_as_floats({}, fresh, window, 3e-3);
      same_as_floats({3, 1, 80, 16, 300}, fresh, window, 5e-3);
      same_as_floats({4, 4, 256, 8, 300}, fresh, window, 5e-3);
    }
    // Queries, products and sums beyond the range of halves: floats.
    same_as_floats({6, 2, 64, 8, 300, 1e6f}, fresh, 0, 1e-5);
    same_as_floats({6, 2, 64, 8, 300, 1e3f, 1e3f}, fresh, 0, 1e-5);
    same_as_floats({6, 2, 64, 8, 300, 1e-4f, 1, 1e4f}, fresh, 0, 3e-3);
  }
  same_bits({});
  same_bits({3, 1, 80, 16, 200});
  const std::vector<float> out = attend({6, 2, 64, 8, 60, 1, 1, 1, true}, 3, true);
  CHECK(std::count_if(out.begin(), out.end(), [](float x) { return std::isnan(x); }) > 0);
  return report("attention over halves");
}
