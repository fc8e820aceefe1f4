// Float kernels and attention against plain double arithmetic, over odd sizes: meant for the address and
// undefined-behaviour sanitizers, so every buffer is exactly as long as it must be.
#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "check.h"
#include "plain_pages.h"
#include "float_kernels.h"
#include "pool.h"
#include "sampling.h"

using namespace tokenmill;

namespace {

void rows() {
  const FloatKernels& kernels = float_kernels();
  for (int n : {1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 65, 100}) {
    const std::vector<float> x = random_floats(n, n, 3), y = random_floats(n, n + 1), w = random_floats(n, n + 2);
    std::vector<float> out(n);
    double squares = 0;
    for (float v : x) squares += double(v) * v;
    kernels.rms_norm(x.data(), w.data(), 1e-5f, n, out.data());
    for (int i = 0; i < n; ++i) CHECK(near(out[i], x[i] / std::sqrt(squares / n + 1e-5) * w[i], 1e-6));
    kernels.add(x.data(), y.data(), n, out.data());
    for (int i = 0; i < n; ++i) CHECK(out[i] == x[i] + y[i]);
    kernels.gated(x.data(), y.data(), Activation::silu, n, out.data());
    for (int i = 0; i < n; ++i) CHECK(near(out[i], x[i] / (1 + std::exp(-double(x[i]))) * y[i], 1e-6));
    kernels.activate(x.data(), Activation::gelu, n, out.data());
    for (int i = 0; i < n; ++i) CHECK(near(out[i], x[i] * 0.5 * std::erfc(-x[i] / std::sqrt(2.0)), 1e-6));
    kernels.activate(x.data(), Activation::relu2, n, out.data());
    for (int i = 0; i < n; ++i) CHECK(out[i] == (x[i] > 0 ? x[i] * x[i] : 0));
    double sum = 0, deviations = 0;
    for (float v : x) sum += v;
    for (float v : x) deviations += (v - sum / n) * (v - sum / n);
    kernels.layer_norm(x.data(), w.data(), y.data(), 1e-5f, n, out.data());
    for (int i = 0; i < n; ++i)
      CHECK(near(out[i], (x[i] - sum / n) / std::sqrt(deviations / n + 1e-5) * w[i] + y[i], 1e-5));
    kernels.softcap(x.data(), 2.0f, n, out.data());
    for (int i = 0; i < n; ++i) CHECK(near(out[i], 2 * std::tanh(x[i] / 2.0), 1e-6));
    CHECK(kernels.maximum(x.data(), n) == *std::max_element(x.begin(), x.end()));
    CHECK(argmax(x.data(), n) == std::max_element(x.begin(), x.end()) - x.begin());
    std::vector<float> best(n);
    std::vector<int64_t> indices(n);
    top_k(x.data(), n, n, best.data(), indices.data());
    CHECK(std::is_sorted(best.rbegin(), best.rend()));
    std::vector<uint16_t> half(n);
    kernels.float_to_half(x.data(), half.data(), n);
    kernels.half_to_float(half.data(), out.data(), n);
    for (int i = 0; i < n; ++i) CHECK(near(out[i], x[i], 5e-4));
  }
}

// Every half value there and back; and exponentials over their whole range.
void conversions() {
  const FloatKernels& kernels = float_kernels();
  std::vector<uint16_t> all(1 << 16), back(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(all.size());
  kernels.half_to_float(all.data(), wide.data(), wide.size());
  kernels.float_to_half(wide.data(), back.data(), wide.size());
  for (size_t i = 0; i < all.size(); ++i) CHECK((all[i] & 0x7fff) > 0x7c00 ? std::isnan(wide[i]) : back[i] == all[i]);
  for (float x = -87.0f; x <= 0.0f; x += 0.037f) {
    float value = x;
    const float sum = kernels.exponentials(&value, 1, 0.0f);
    CHECK(sum == value && std::fabs(value / std::exp(double(x)) - 1) < 3e-7);
  }
  float values[3] = {-INFINITY, -200.0f, 1.0f};
  kernels.exponentials(values, 3, 1.0f);
  CHECK(values[0] == 0 && values[1] == 0 && values[2] == 1);
}

// Rows of a matrix and the same rows by address, in one call or in two: equal bits, and those of plain arithmetic.
void scattered_rows() {
  const FloatKernels& kernels = float_kernels();
  for (int rows : {1, 2, 3, 4, 5, 9})
    for (int keys : {1, 3, 4, 6, 11})
      for (int dim : {1, 3, 4, 7, 16, 21, 64}) {
        const std::vector<float> q = random_floats(rows * dim, 1), k = random_floats(keys * dim, 2);
        std::vector<std::vector<float>> apart;
        std::vector<const float*> at;
        for (int j = 0; j < keys; ++j) apart.emplace_back(k.begin() + j * dim, k.begin() + (j + 1) * dim);
        for (const std::vector<float>& row : apart) at.push_back(row.data());
        std::vector<float> scores(rows * keys), same(rows * keys), out(rows * dim, 0.5f), also = out;
        kernels.scores(q.data(), dim, rows, k.data(), dim, keys, dim, scores.data(), keys);
        kernels.scores_of(q.data(), dim, rows, at.data(), keys, dim, same.data(), keys);
        CHECK(scores == same);
        kernels.accumulate(scores.data(), keys, rows, k.data(), dim, keys, dim, out.data(), dim);
        const int half = keys / 2;
        kernels.accumulate_of(scores.data(), keys, rows, at.data(), half, dim, also.data(), dim);
        kernels.accumulate_of(scores.data() + half, keys, rows, at.data() + half, keys - half, dim, also.data(), dim);
        CHECK(out == also);
        for (int r = 0; r < rows; ++r) {
          for (int j = 0; j < keys; ++j) {
            double sum = 0;
            for (int d = 0; d < dim; ++d) sum += double(q[r * dim + d]) * k[j * dim + d];
            CHECK(near(scores[r * keys + j], sum, 1e-5));
          }
          for (int d = 0; d < dim; ++d) {
            double sum = 0.5;
            for (int j = 0; j < keys; ++j) sum += double(scores[r * keys + j]) * k[j * dim + d];
            CHECK(near(out[r * dim + d], sum, 2e-5));
          }
        }
      }
}

void attention(int heads, int kv_heads, int dim, int page_size, int window, bool shared, int threads) {
  const std::vector<int> lengths = {1, 37, 150, 151, 70}, counts = {1, 37, 1, 2, 3};
  const int sequences = 5, max_pages = 151 / page_size + 1, num_pages = sequences * max_pages;
  std::vector<int32_t> starts = {0}, seq_lens(lengths.begin(), lengths.end()), table(sequences * max_pages, -1);
  for (int count : counts) starts.push_back(starts.back() + count);
  for (int s = 0; s < sequences; ++s)
    for (int page = 0; page * page_size < lengths[s]; ++page)
      table[s * max_pages + page] =
          shared && s == 3 && (page + 1) * page_size <= 149 ? table[2 * max_pages + page] : (page * sequences + s);
  const int64_t page_values = int64_t(kv_heads) * page_size * dim;
  std::vector<float> k = random_floats(num_pages * page_values, 1), v = random_floats(num_pages * page_values, 2);
  const int tokens = starts.back();
  const int64_t width = int64_t(heads) * dim;
  const std::vector<float> q = random_floats(tokens * width, 3);
  std::vector<float> out(tokens * width, NAN);
  const KVPages pages = plain_pages(k.data(), v.data(), kv_heads, page_size, dim);
  const AttentionShape shape{heads, kv_heads, dim, 0.3f, window, 0.0f};
  const AttentionBatch batch{sequences, starts.data(), seq_lens.data(), table.data(), max_pages};
  AttentionPlan plan(tokens, sequences, heads, kv_heads, dim);
  plan.build(batch, page_size, window);
  CHECK((plan.num_shared_tokens() > 0) == (shared && (window == 0 || window > 151)));
  const AttentionRunner runner(plan, batch, pages, shape, q.data(), width, out.data(), width);
  ThreadPool pool(threads);
  for (int layer = 0; layer < 2; ++layer) {  // a plan serves several layers
    pool.run([&](Team& team) {
      std::vector<float> scratch(AttentionRunner::scratch_floats(heads, kv_heads, dim));
      team.for_each(runner.num_pieces(), 1, [&](int piece) { runner.run(piece, scratch.data()); });
    });
  }
  for (int s = 0; s < sequences; ++s) {
    for (int token = starts[s]; token < starts[s + 1]; ++token) {
      const int position = lengths[s] - (starts[s + 1] - token);
      for (int head = 0; head < heads; head += 2) {
        const auto row = [&](const std::vector<float>& base, int key) {
          const int64_t page = table[s * max_pages + key / page_size];
          return &base[page * page_values + (int64_t(head / (heads / kv_heads)) * page_size + key % page_size) * dim];
        };
        std::vector<double> expected(dim, 0.0);
        double total = 0;
        for (int key = window > 0 ? std::max(0, position - window + 1) : 0; key <= position; ++key) {
          double score = 0;
          for (int d = 0; d < dim; ++d) score += double(q[token * width + head * dim + d]) * row(k, key)[d];
          const double weight = std::exp(score * 0.3);
          total += weight;
          for (int d = 0; d < dim; ++d) expected[d] += weight * row(v, key)[d];
        }
        for (int d = 0; d < dim; ++d) CHECK(near(out[token * width + head * dim + d], expected[d] / total, 2e-5));
      }
    }
  }
}

}  // namespace

int main() {
  rows();
  conversions();
  scattered_rows();
  for (bool shared : {false, true}) {
    attention(4, 2, 16, 16, 0, shared, 2);
    attention(3, 1, 7, 4, 0, shared, 3);
    attention(2, 2, 33, 64, 0, shared, 1);
    attention(6, 2, 20, 5, 12, shared, 2);
    attention(6, 2, 20, 5, 200, shared, 2);
  }
  return report("float kernels and attention");
}
