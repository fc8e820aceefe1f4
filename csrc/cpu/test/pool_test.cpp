// The thread pool: every index once, barriers order memory, callers take turns, idle workers sleep and wake, forks.
//
// Meant for the thread sanitizer: everything shared here is plain memory, ordered only by the pool.
#include "pool.h"

#include <chrono>
#include <thread>

#if defined(__linux__)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "check.h"

using namespace tokenmill;

namespace {

void every_index_once(int threads) {
  ThreadPool pool(threads);
  for (int count : {0, 1, 2, 7, 100, 1000}) {
    for (int grain : {1, 3, 64}) {
      std::vector<int> seen(count, 0);
      pool.for_each(count, grain, [&](int i) { ++seen[i]; });
      for (int i = 0; i < count; ++i) CHECK(seen[i] == 1);
    }
  }
}

// Each interval reads what other threads wrote in the one before.
void barriers_order_memory(int threads) {
  ThreadPool pool(threads);
  const int count = 16;
  std::vector<long> a(count, 1), b(count, 0);
  for (int run = 0; run < 20; ++run) {
    pool.run([&](Team& team) {
      for (int step = 0; step < 30; ++step) {
        team.for_each(count, 1, [&](int i) { b[i] = a[(i + 1) % count] + a[(i + 5) % count]; });
        team.barrier();
        if (step % 3 == 0) team.barrier();  // an interval without a loop
        team.for_each(count, 2, [&](int i) { a[i] = b[(i + 3) % count] % 1000003; });
        team.barrier();
      }
    });
  }
  std::vector<long> x(count, 1), y(count, 0);
  for (int step = 0; step < 20 * 30; ++step) {
    for (int i = 0; i < count; ++i) y[i] = x[(i + 1) % count] + x[(i + 5) % count];
    for (int i = 0; i < count; ++i) x[i] = y[(i + 3) % count] % 1000003;
  }
  CHECK(a == x);
}

void callers_take_turns() {
  const std::shared_ptr<ThreadPool> pool = ThreadPool::shared(3);
  CHECK(pool == ThreadPool::shared(3));
  CHECK(pool != ThreadPool::shared(2));
  long plain = 0;  // not atomic: only one caller may be inside at a time
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int run = 0; run < 50; ++run) {
        pool->run([&](Team& team) {
          if (team.thread == 0) ++plain;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(plain == 150);
}

void sleepers_wake() {
  ThreadPool pool(4);
  for (int run = 0; run < 5; ++run) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));  // past the spin: workers are asleep
    int total[4] = {};
    pool.run([&](Team& team) {
      if (team.thread == 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the others sleep at the barrier
      total[team.thread] = 1;
      team.barrier();
      if (team.thread == 0) CHECK(total[0] + total[1] + total[2] + total[3] == 4);
    });
  }
}

void forked_child_runs_alone() {
#if defined(__linux__) && !defined(__SANITIZE_THREAD__)
  ThreadPool pool(3);
  const pid_t child = fork();
  if (child == 0) {
    int sum = 0;
    pool.run([&](Team& team) { team.for_each(10, 1, [&](int i) { sum += i; }); });
    _exit(sum == 45 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

}  // namespace

int main() {
  CHECK(physical_cores() >= 1);
  for (int threads : {1, 2, 3, 8}) {
    every_index_once(threads);
    barriers_order_memory(threads);
  }
  callers_take_turns();
  sleepers_wake();
  forked_child_runs_alone();
  return report("pool");
}
