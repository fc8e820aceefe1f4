// Adapters against plain double arithmetic, over odd sizes and mixtures of rows, on several threads, and the bits of a row
// in one mixture against another: meant for the sanitizers, so every buffer of the caller is as long as it must be.
#include "adapters.h"

#include <cstring>

#include "check.h"
#include "pool.h"

using namespace tokenmill;

namespace {

struct Numbers {
  int rank;
  std::vector<float> a, b, gain, shift;
};

Numbers numbers(int rank, int64_t inputs, int64_t outputs, unsigned seed, bool gains) {
  Numbers made{rank, random_floats(rank * inputs, seed), random_floats(outputs * rank, seed + 1), {}, {}};
  if (gains) made.gain = random_floats(outputs, seed + 2), made.shift = random_floats(outputs, seed + 3);
  return made;
}

double wanted(const Numbers& n, const float* x, int64_t inputs, int64_t output, double y) {
  if (!n.gain.empty()) y = y * n.gain[output] + n.shift[output];
  for (int r = 0; r < n.rank; ++r) {
    double h = 0;
    for (int64_t k = 0; k < inputs; ++k) h += double(n.a[r * inputs + k]) * x[k];
    y += h * n.b[output * n.rank + r];
  }
  return y;
}

using Matrices = std::vector<std::vector<float>>;  // one for each part, row-major

// The parts of a product after the adapters, for the picked of all rows in this order.
Matrices adapted(ThreadPool& pool, const AdapterSlots& slots, AdapterWorkspace& workspace,
                 const std::vector<int32_t>& named, const std::vector<int>& picked, int64_t inputs,
                 const std::vector<float>& x, const std::vector<int64_t>& outputs, const Matrices& before) {
  const int rows = static_cast<int>(picked.size());
  std::vector<float> own;
  std::vector<int32_t> own_named;
  Matrices y(outputs.size());
  ProductOutput to[kMaxProductWeights];
  for (int row : picked) {
    own_named.push_back(named[row]);
    own.insert(own.end(), x.begin() + row * inputs, x.begin() + (row + 1) * inputs);
    for (size_t i = 0; i < outputs.size(); ++i)
      y[i].insert(y[i].end(), before[i].begin() + row * outputs[i], before[i].begin() + (row + 1) * outputs[i]);
  }
  AdapterRows by_adapter;
  by_adapter.build(own_named.data(), nullptr, rows);
  for (size_t part = 0; part < outputs.size(); ++part) to[part] = {nullptr, y[part].data(), outputs[part]};
  pool.run([&](Team& team) {
    team.for_each(rows, 1, [&](int row) { workspace.round_row(slots, by_adapter, row, own.data() + row * inputs); });
    team.barrier();
    workspace.shrink(slots, by_adapter, own.data(), inputs, team.thread, team.size);
    team.barrier();
    workspace.expand(slots, by_adapter, own.data(), inputs, to, team.thread, team.size);
  });
  return y;
}

void mixtures(ThreadPool& pool, int64_t inputs, const std::vector<int64_t>& outputs, bool exact) {
  const int ranks[3] = {3, 16, 37}, rows = 23;
  std::vector<std::vector<Numbers>> made(3);
  AdapterSlots slots(4);
  AdapterWorkspace workspace;
  workspace.reserve(rows, inputs);
  for (int i = 0; i < 3; ++i) {
    std::vector<PartValues> values;
    for (size_t part = 0; part < outputs.size(); ++part)
      made[i].push_back(numbers(ranks[i], inputs, outputs[part], 10 * i + part, i == 1));
    for (const Numbers& n : made[i])
      values.push_back({n.a.data(), n.b.data(), n.rank, n.gain.empty() ? nullptr : n.gain.data(),
                        n.shift.empty() ? nullptr : n.shift.data()});
    slots[i + 1] = std::make_shared<ProductAdapter>(inputs, outputs, values, exact);
    workspace.take(*slots[i + 1]);
  }
  std::vector<int32_t> named(rows);
  std::vector<int> all(rows);
  for (int row = 0; row < rows; ++row) named[row] = row * 7 % 4, all[row] = row;
  const std::vector<float> x = random_floats(rows * inputs, 5);
  Matrices before;
  for (int64_t width : outputs) before.push_back(random_floats(rows * width, unsigned(width)));
  const auto of = [&](const std::vector<int>& picked) {
    return adapted(pool, slots, workspace, named, picked, inputs, x, outputs, before);
  };
  const Matrices y = of(all);
  for (size_t part = 0; part < outputs.size(); ++part) {
    double error = 0, size = 1e-12;
    for (int row = 0; row < rows; ++row)
      for (int64_t n = 0; n < outputs[part]; ++n) {
        const int64_t at = row * outputs[part] + n;
        if (named[row] == 0) {
          CHECK(y[part][at] == before[part][at]);
          continue;
        }
        const double spec = wanted(made[named[row] - 1][part], x.data() + row * inputs, inputs, n, before[part][at]);
        error += (y[part][at] - spec) * (y[part][at] - spec);
        size += (spec - before[part][at]) * (spec - before[part][at]);
      }
    CHECK(std::sqrt(error / size) < (exact ? 1e-5 : 0.02));
  }
  // A row has the same bits alone and among others: here 1 to 6 neighbours with its adapter, and one of another.
  for (int length = 1; length <= 6; ++length)
    for (int slot = 1; slot <= 3; ++slot) {
      std::vector<int> picked;
      for (int row = 0; row < rows; ++row)
        if (named[row] == slot && static_cast<int>(picked.size()) < length) picked.push_back(row);
      picked.push_back(named[0] == slot ? 1 : 0);
      const Matrices few = of(picked);
      for (size_t part = 0; part < outputs.size(); ++part)
        for (size_t i = 0; i < picked.size(); ++i)
          CHECK(std::memcmp(few[part].data() + i * outputs[part], y[part].data() + picked[i] * outputs[part],
                            outputs[part] * sizeof(float)) == 0);
    }
}

}  // namespace

int main() {
  const auto pool = ThreadPool::shared(3);
  for (const bool exact : {false, true}) {
    mixtures(*pool, 64, {48}, exact);
    mixtures(*pool, 96, {64, 32, 32}, exact);
    mixtures(*pool, 33, {17, 5}, exact);
    mixtures(*pool, 7, {1}, exact);
  }
  return report("adapters");
}
