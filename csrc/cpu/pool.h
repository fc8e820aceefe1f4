// A persistent pool of worker threads that run one function together (single program, many threads).
//
// Owns threads, the barrier they meet at, and the counters they draw work from. The caller is thread 0. Between runs the
// workers spin briefly, then sleep. Knows nothing of tensors. Called by the eager bindings and by Program::run.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tokenmill {

// Cores this process may use: affinity mask, one per physical core, cut to the cgroup's CPU quota.
int physical_cores();

class ThreadPool;

// What a thread sees inside ThreadPool::run. All threads must meet at the same barriers.
class Team {
 public:
  Team(ThreadPool* pool, int thread, int size) : thread(thread), size(size), pool_(pool) {}
  const int thread;
  const int size;

  void barrier();  // everything written before it is visible after it

  // Dynamic distribution: fn(index) for each of [0, count), every index once, by whichever thread is free, `grain`
  // neighbours at a time. At most one such loop between two barriers.
  template <typename Function>
  void for_each(int count, int grain, Function&& fn);

  // The same for indices that are cheaper in a row (they stream through memory): each thread begins with a run of its own,
  // [own_run() ...), and only the last eighth goes to any free thread. Neighbours given to different threads one by one
  // halve the memory bandwidth: each core's prefetcher fetches what the other will read.
  template <typename Function>
  void for_runs(int count, Function&& fn);
  int own_run(int count) const { return thread * run_length(count); }

 private:
  friend class ThreadPool;
  int run_length(int count) const { return count / size * 7 / 8; }
  ThreadPool* pool_;
  uint32_t epoch_ = 0;  // barriers passed in this run
};

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The pool that everyone who asks for the same number of threads (0: physical cores) shares.
  static std::shared_ptr<ThreadPool> shared(int num_threads);

  int size() const { return size_; }

  // fn(Team&) on every thread at once; returns when all are done. Callers from several threads take turns, so that two
  // engines in one process never run 2 x size() busy threads. fn must not throw and must not call run().
  template <typename Function>
  void run(Function&& fn) {
    run_erased([](void* context, Team& team) { (*static_cast<Function*>(context))(team); }, const_cast<void*>(
        static_cast<const void*>(&fn)));
  }

  // fn(index) for each of [0, count) on all threads.
  template <typename Function>
  void for_each(int count, int grain, Function&& fn) {
    if (count <= grain || size_ == 1) {
      for (int i = 0; i < count; ++i) fn(i);
      return;
    }
    run([&](Team& team) { team.for_each(count, grain, fn); });
  }

 private:
  friend class Team;
  using Erased = void (*)(void*, Team&);
  struct alignas(64) PaddedCounter {
    std::atomic<int> value{0};
  };

  void run_erased(Erased function, void* context);
  void work(int thread);
  void arrive(Team& team);

  const int size_;
  const uint32_t generation_;  // of forks: a forked child has no workers and runs alone
  std::mutex turn_;
  std::vector<std::thread> threads_;
  Erased function_ = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<uint32_t> start_{0};    // bumped to begin a run
  alignas(64) std::atomic<int> arrived_{0};       // threads at the barrier
  alignas(64) std::atomic<uint32_t> released_{0};  // barriers passed, all runs together
  std::atomic<int> sleepers_{0};
  PaddedCounter counters_[3];  // used in turn, one per interval between barriers
};

template <typename Function>
void Team::for_runs(int count, Function&& fn) {
  const int length = run_length(count), begin = thread * length, shared = size * length;
  for (int i = begin; i < begin + length; ++i) fn(i);
  const int rest = count - shared;
  for_each(rest, rest / (8 * size) + 1, [&](int i) { fn(shared + i); });
}

template <typename Function>
void Team::for_each(int count, int grain, Function&& fn) {
  if (size == 1) {
    for (int i = 0; i < count; ++i) fn(i);
    return;
  }
  std::atomic<int>& next = pool_->counters_[epoch_ % 3].value;
  for (;;) {
    const int begin = next.fetch_add(grain, std::memory_order_relaxed);
    if (begin >= count) return;
    const int end = begin + grain < count ? begin + grain : count;
    for (int i = begin; i < end; ++i) fn(i);
  }
}

}  // namespace tokenmill
