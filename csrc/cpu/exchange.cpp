// Exchanges between ranks in shared memory. See exchange.h.
#include "exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace tokenmill {
namespace {

constexpr int64_t kFloats = 1 << 18;  // of a buffer: larger exchanges are made in pieces
constexpr int kSpins = 2000;          // some microseconds
constexpr int kYields = 2000;        // some milliseconds, where nobody else wants the core
constexpr auto kNap = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

size_t Exchange::room_for(int ranks) {
  return sizeof(Line) * (1 + size_t(ranks)) + sizeof(float) * 2 * size_t(ranks) * size_t(kFloats);
}

Exchange::Exchange(void* memory, int ranks, int rank, double timeout_seconds)
    : lines_(static_cast<Line*>(memory)), buffers_(reinterpret_cast<float*>(lines_ + 1 + ranks)), ranks_(ranks),
      rank_(rank), timeout_(timeout_seconds) {}

float* Exchange::buffer(int rank) const { return buffers_ + (2 * rank + int(number_ % 2)) * kFloats; }

void Exchange::publish() { lines_[1 + rank_].value.store(number_ + 1, std::memory_order_release); }

bool Exchange::wait() {
  const auto began = std::chrono::steady_clock::now();
  for (int rank = 0; rank < ranks_; ++rank) {
    const std::atomic<uint64_t>& begun = lines_[1 + rank].value;
    for (int turns = 0; begun.load(std::memory_order_acquire) <= number_; ++turns) {
      if (lines_[0].value.load(std::memory_order_relaxed) != 0) return false;
      if (turns < kSpins) {
        pause();
        continue;
      }
      if (turns < kSpins + kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kNap);
      }
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
      if (waited.count() > timeout_) {
        abort();
        return false;
      }
    }
  }
  return true;
}

bool Exchange::gather(const float* x, int rows, const std::vector<int64_t>& widths, float* out) {
  const int64_t widest = *std::max_element(widths.begin(), widths.end()), own = widths[rank_];
  int64_t total = 0;
  for (int64_t width : widths) total += width;
  // Pieces of rows, or of one row: the same for all ranks.
  const int64_t row_block = std::max<int64_t>(1, kFloats / std::max<int64_t>(1, widest));
  const int64_t column_block = std::min(widest, kFloats);
  for (int64_t row = 0; row < rows; row += row_block) {
    const int64_t count = std::min<int64_t>(row_block, rows - row);
    for (int64_t column = 0; column < widest; column += column_block) {
      const int64_t mine = std::max<int64_t>(0, std::min(column_block, own - column));
      float* to = buffer(rank_);
      for (int64_t i = 0; i < count && mine > 0; ++i)
        std::memcpy(to + i * mine, x + (row + i) * own + column, mine * sizeof(float));
      publish();
      if (!wait()) return false;
      int64_t first = 0;
      for (int rank = 0; rank < ranks_; ++rank) {
        const int64_t theirs = std::max<int64_t>(0, std::min(column_block, widths[rank] - column));
        const float* from = buffer(rank);
        for (int64_t i = 0; i < count && theirs > 0; ++i)
          std::memcpy(out + (row + i) * total + first + column, from + i * theirs, theirs * sizeof(float));
        first += widths[rank];
      }
      ++number_;
    }
  }
  return true;
}

bool Exchange::sum(const float* x, int64_t count, float* out) {
  for (int64_t begin = 0; begin < count; begin += kFloats) {
    const int64_t length = std::min(kFloats, count - begin);
    std::memcpy(buffer(rank_), x + begin, length * sizeof(float));
    publish();
    if (!wait()) return false;
    float* total = out + begin;
    std::memcpy(total, buffer(0), length * sizeof(float));
    for (int rank = 1; rank < ranks_; ++rank) {
      const float* theirs = buffer(rank);
      for (int64_t i = 0; i < length; ++i) total[i] += theirs[i];
    }
    ++number_;
  }
  return true;
}

void Exchange::abort() { lines_[0].value.store(1, std::memory_order_relaxed); }

}  // namespace tokenmill
