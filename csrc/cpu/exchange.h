// Memory that the ranks of one host share, in which they put together what each has computed.
//
// Each rank has two buffers of its own, used in turn, and a counter of what it has brought. A rank that begins exchange
// n + 2 has seen all others begin n + 1, hence end n: nobody reads any more what it overwrites. All ranks make the same
// exchanges in the same order. Waiting spins first, then gives the core away; it ends when all have come, when the time
// is over or when somebody calls `abort`. Called by Program and, from Python, between ops.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tokenmill {

class Exchange {
 public:
  // `memory` has at least room_for(ranks) bytes, all zero before the first rank comes; it stays the caller's.
  Exchange(void* memory, int ranks, int rank, double timeout_seconds);
  static size_t room_for(int ranks);

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

  // x [rows, widths[rank]] of each rank -> out [rows, sum of widths], side by side. False: somebody did not come.
  bool gather(const float* x, int rows, const std::vector<int64_t>& widths, float* out);
  // The sum of `count` numbers of each rank, added in the order of ranks: the same bits for all.
  bool sum(const float* x, int64_t count, float* out);
  // From now on nobody waits, in any process.
  void abort();

 private:
  struct alignas(64) Line {
    std::atomic<uint64_t> value;
  };

  float* buffer(int rank) const;
  void publish();
  bool wait();

  Line* lines_;  // [0]: not 0 after abort; [1 + rank]: exchanges that it has begun
  float* buffers_;
  const int ranks_, rank_;
  const double timeout_;
  uint64_t number_ = 0;
};

}  // namespace tokenmill
