// Threads, the spin-then-sleep wait, the barrier. See pool.h.
//
// Waiting has three steps: spin (a barrier between two kernels takes well under a microsecond), yield (two threads
// may share one core with somebody else's work), sleep in the kernel. No step allocates. Waking sleepers is expensive,
// above all under a hypervisor: with eight of them it cost a third of a small model's decode step.
#include "pool.h"

#include <chrono>
#include <map>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#endif

namespace tokenmill {
namespace {

std::atomic<uint32_t> fork_generation{0};

void watch_forks() {
#if defined(__linux__)
  static const int registered = pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });
  (void)registered;
#endif
}

inline void pause_cpu() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` is a no-op on most cores; isb waits some tens of cycles
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}
#else
std::mutex sleep_mutex;
std::condition_variable sleep_condition;
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  std::unique_lock<std::mutex> lock(sleep_mutex);
  sleep_condition.wait(lock, [&] { return word.load(std::memory_order_acquire) != value; });
}
void wake_all(std::atomic<uint32_t>&) {
  { std::lock_guard<std::mutex> lock(sleep_mutex); }  // a sleeper is now either waiting or has seen the new value
  sleep_condition.notify_all();
}
#endif

constexpr int kYieldFor = 1000;  // microseconds: longer than what lies between two steps

// Returns when `word` is no longer `value`. Spins for about `spin_us`, yields for a while, then sleeps.
void wait_for_change(std::atomic<uint32_t>& word, uint32_t value, int spin_us, std::atomic<int>& sleepers) {
  for (int i = 0; i < 256; ++i) {
    if (word.load(std::memory_order_acquire) != value) return;
    pause_cpu();
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
  do {
    for (int i = 0; i < 64; ++i) {
      if (word.load(std::memory_order_acquire) != value) return;
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() < until);
  const auto last = until + std::chrono::microseconds(kYieldFor);
  do {
    for (int i = 0; i < 32; ++i) {
      if (word.load(std::memory_order_acquire) != value) return;
      std::this_thread::yield();
    }
  } while (std::chrono::steady_clock::now() < last);
  // Order matters: announce the sleeper, then let the kernel compare the word; the waker writes, then looks for sleepers.
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == value) sleep_while(word, value);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

constexpr int kSpinInRun = 20;        // microseconds, at a barrier
constexpr int kSpinBetweenRuns = 100;  // microseconds: the next decode step usually follows sooner

}  // namespace

void Team::barrier() {
  if (size == 1) return;
  // Interval e draws from counter e % 3. Clear that of e + 1: it was last used in e - 2, where nobody is left.
  if (thread == 0) pool_->counters_[(epoch_ + 1) % 3].value.store(0, std::memory_order_relaxed);
  pool_->arrive(*this);
  ++epoch_;
}

void ThreadPool::arrive(Team& team) {
  const uint32_t round = released_.load(std::memory_order_relaxed);  // cannot move before we arrive
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == team.size - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    released_.store(round + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(released_);
  } else {
    wait_for_change(released_, round, kSpinInRun, sleepers_);
  }
}

ThreadPool::ThreadPool(int num_threads)
    : size_(num_threads < 1 ? physical_cores() : num_threads),
      generation_((watch_forks(), fork_generation.load(std::memory_order_relaxed))) {
  threads_.reserve(size_ - 1);
  for (int thread = 1; thread < size_; ++thread) threads_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  if (generation_ != fork_generation.load(std::memory_order_relaxed)) {
    for (std::thread& thread : threads_) thread.detach();  // they live in the parent process only
    return;
  }
  stop_ = true;
  start_.fetch_add(1, std::memory_order_seq_cst);
  wake_all(start_);
  for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<ThreadPool> ThreadPool::shared(int num_threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<ThreadPool>> pools;
  const int size = num_threads < 1 ? physical_cores() : num_threads;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<ThreadPool> pool = pools[size].lock();
  if (!pool || pool->generation_ != fork_generation.load(std::memory_order_relaxed)) {
    pool = std::make_shared<ThreadPool>(size);
    pools[size] = pool;
  }
  return pool;
}

void ThreadPool::run_erased(Erased function, void* context) {
  if (size_ == 1 || generation_ != fork_generation.load(std::memory_order_relaxed)) {
    Team alone(this, 0, 1);
    function(context, alone);
    return;
  }
  std::lock_guard<std::mutex> lock(turn_);
  function_ = function;
  context_ = context;
  for (PaddedCounter& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
  start_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(start_);
  Team team(this, 0, size_);
  function(context, team);
  arrive(team);
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_for_change(start_, seen, kSpinBetweenRuns, sleepers_);
    ++seen;
    if (stop_) return;
    Team team(this, thread, size_);
    function_(context_, team);
    arrive(team);
  }
}

}  // namespace tokenmill
