// Times each kernel against its floor: bytes per second for one row, integer operations per second for many.
//
// usage: linear_bench [rows cols [type,type,... [m,m,...]]]   (2 threads, weights cold: several copies are cycled
// through) Prints type, m, microseconds, GB/s and GOP/s. Not a test.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <sstream>

#include "linear_testing.h"

using namespace tokenmill;

namespace {

using Clock = std::chrono::steady_clock;

// One thread is timed by its CPU time, which a busy machine disturbs less.
double seconds(int threads) {
  timespec now;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Two threads that spin between products, so that starting threads does not count.
class Pair {
 public:
  explicit Pair(int threads) : threads_(threads) {
    for (int id = 1; id < threads; ++id) pool_.emplace_back([this, id] { loop(id); });
  }
  ~Pair() {
    stop_ = true;
    for (std::thread& thread : pool_) thread.join();
  }
  template <class F>
  void run(F&& f) {
    job_ = f;
    done_ = 0;
    ++round_;
    job_(0);
    while (done_ != threads_ - 1) std::this_thread::yield();
  }

 private:
  void loop(int id) {
    int seen = 0;
    while (!stop_) {
      if (round_ == seen) {
        std::this_thread::yield();
        continue;
      }
      seen = round_;
      job_(id);
      ++done_;
    }
  }
  const int threads_;
  std::function<void(int)> job_;
  std::atomic<int> round_{0}, done_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> pool_;
};

std::vector<std::string> words(const char* text) {
  std::vector<std::string> out;
  std::stringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) out.push_back(word);
  return out;
}

void bench(const std::string& type, int64_t rows, int64_t cols, const std::vector<std::string>& ms, Pair& pair,
           int threads) {
  std::mt19937 random(1);
  const QuantFormat& format = *find_quant_format(type);
  if (cols % format.block) return;
  const std::vector<uint8_t> data = random_weights(format, rows, cols, 0.02f, random);
  std::vector<std::unique_ptr<Linear>> copies;
  // Past the last-level cache, unless the caller wants them warm.
  const size_t wanted = std::getenv("WARM") ? 0 : 100u << 20;
  const auto pack_start = Clock::now();
  for (size_t total = 0; copies.empty() || total < wanted; total += copies.back()->bytes())
    copies.push_back(pack_linear(type, data.data(), rows, cols, best_isa(), nullptr));
  const double pack = std::chrono::duration<double>(Clock::now() - pack_start).count() / double(copies.size());
  std::printf("%-7s %5ldx%-5ld %5.2f bits  pack %.0f M/s:", type.c_str(), long(rows), long(cols),
              8.0 * double(copies[0]->bytes()) / double(rows * cols), double(rows * cols) / pack / 1e6);
  for (const std::string& word : ms) {
    const int m = std::atoi(word.c_str());
    std::vector<float> x(size_t(m * cols), 0.5f), y(size_t(m * rows));
    for (float& v : x) v = float(int(random() % 2001) - 1000) / 1000;
    std::vector<uint8_t> activations(copies[0]->activation_bytes(m) + 64);
    std::vector<std::vector<uint8_t>> scratch(size_t(threads), std::vector<uint8_t>(copies[0]->scratch_bytes(m) + 64));
    auto align = [](std::vector<uint8_t>& v) {
      return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(v.data()) + 63) / 64 * 64);
    };
    copies[0]->quantize(x.data(), cols, 0, m, m, align(activations));
    std::vector<double> times;
    size_t copy = 0;
    double spent = 0;
    while (times.size() < 7 || (spent < 0.35 && times.size() < 400)) {
      const Linear& linear = *copies[copy++ % copies.size()];
      const int tiles = linear.num_tiles(m);
      const double start = seconds(threads);
      std::atomic<int> next{0};
      pair.run([&](int id) {
        for (int tile; (tile = next++) < tiles;)
          linear.run_tile(tile, m, align(activations), nullptr, y.data(), rows, align(scratch[size_t(id)]));
      });
      times.push_back(seconds(threads) - start);
      spent += times.back();
    }
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 3];
    if (m == 1) {
      std::printf("  m=1 %.0f us %.1f GB/s", median * 1e6, double(copies[0]->bytes()) / median / 1e9);
    } else {
      std::printf("  m=%d %.0f", m, 2.0 * double(m) * double(rows * cols) / median / 1e9);
    }
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = std::getenv("THREADS") ? std::atoi(std::getenv("THREADS")) : 2;
  const int64_t rows = argc > 2 ? std::atoll(argv[1]) : 5632, cols = argc > 2 ? std::atoll(argv[2]) : 2048;
  const std::vector<std::string> types = argc > 3 ? words(argv[3]) : all_types();
  const std::vector<std::string> ms = words(argc > 4 ? argv[4] : "1,2,4,8,16,64,512");
  std::printf("GOP/s unless said, %s, %d threads\n", isa_name(best_isa()), threads);
  Pair pair(threads);
  for (const std::string& type : types) bench(type, rows, cols, ms, pair, threads);
}
