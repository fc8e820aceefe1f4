// What this machine can do at most, measured: how fast all threads read memory, how fast they multiply bytes.
//
// The floors in benchmarks/cpu_kernels.py and decode_bandwidth.py. See machine_limits.h.
#include "machine_limits.h"

#include <chrono>
#include <vector>

#include "linear_panel.h"
#include "memory.h"

namespace tokenmill {
namespace {

double seconds_of(ThreadPool& pool, const std::function<void(Team&)>& work) {
  const auto start = std::chrono::steady_clock::now();
  pool.run([&](Team& team) { work(team); });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double read_bandwidth(ThreadPool& pool, size_t bytes) {
  const size_t share = bytes / pool.size() / 512 * 512;
  const AlignedBuffer buffer = allocate_aligned(share * pool.size());
  std::memset(buffer.get(), 1, share * pool.size());
  std::vector<uint64_t> sums(pool.size() * 8);
  double best = 0;
  for (int attempt = 0; attempt < 5; ++attempt) {
    const double seconds = seconds_of(pool, [&](Team& team) {
      const uint64_t* words = reinterpret_cast<const uint64_t*>(buffer.get() + team.thread * share);
      uint64_t sum[8] = {};
      for (size_t i = 0; i < share / 8; i += 8) {
        __builtin_prefetch(words + i + 64);
        for (int j = 0; j < 8; ++j) sum[j] ^= words[i + j];
      }
      for (int j = 0; j < 8; ++j) sums[team.thread * 8] ^= sum[j];
    });
    const double rate = double(share) * pool.size() / seconds;
    best = rate > best ? rate : best;
  }
  return best;
}

double int8_peak(ThreadPool& pool) {
  const PanelKernels* kernels = find_panel_kernels(best_isa());
  if (!kernels) return 0;
  std::vector<int64_t> done(pool.size());
  double best = 0;
  for (int attempt = 0; attempt < 5; ++attempt) {
    const double seconds = seconds_of(pool, [&](Team& team) { done[team.thread] = kernels->spin_dots(4000000); });
    const double rate = double(done[0]) * pool.size() / seconds;
    best = rate > best ? rate : best;
  }
  return best;
}

}  // namespace tokenmill
