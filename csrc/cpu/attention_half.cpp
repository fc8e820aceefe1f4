// One item of attention over pages of halves, multiplied as halves (half_kernels.h).
//
// What is kept over blocks of keys is floats, as in attention.cpp. A row whose numbers do not
// fit into halves shows an infinity or a NaN at the end of its chunk of keys; then that chunk is computed again in floats.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"
#include "float_kernels.h"
#include "half_kernels.h"

namespace tokenmill {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr uint16_t kHidden = 0xfc00;  // minus infinity
alignas(64) const uint16_t kZeros[kMaxHalfDim] = {};

bool all_finite(const float* x, int64_t n) {
  uint32_t largest = 0;  // as integers: sums of floats would wait for each other
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    largest = std::max(largest, bits & 0x7fffffff);
  }
  return largest < 0x7f800000;
}

}  // namespace

bool AttentionRunner::has_halves() const {
  return pages_.k.format->kind == RowKind::float16 && pages_.v.format->kind == RowKind::float16 &&
         multiplies_halves(shape_.head_dim);
}

void AttentionRunner::attend_halves(int piece, Tile& tile) const {
  const HalfKernels& kernels = *half_kernels();
  const AttentionPlan::Item& item = item_of(piece);
  const int kv_head = head_of(piece);
  begin(item, kv_head, tile);
  uint16_t* q = reinterpret_cast<uint16_t*>(tile.converted);
  uint16_t* scores = q + tile.rows * tile.dim;
  uint8_t* bad = reinterpret_cast<uint8_t*>(scores + tile.rows * kKeyBlock);
  float_kernels().float_to_half(tile.q, q, tile.rows * tile.dim);
  std::memset(bad, 0, tile.rows);
  const auto in_block = [](const AttentionPlan::Item& of, int key) { return std::min(kKeyBlock, of.key_end - key); };
  const uint16_t *k[kKeyBlock], *v[kKeyBlock], **ahead;
  find_halves(pages_.k, item, kv_head, item.key_begin, in_block(item, item.key_begin), k);
  int chunk = item.key_begin;
  for (int key = item.key_begin; key < item.key_end; key += kKeyBlock) {
    if (key % kKeyChunk == 0 && key != chunk) {
      mend(item, kv_head, chunk, key, tile);
      fold_chunk(tile);
      chunk = key;
    }
    const int count = in_block(item, key);
    find_halves(pages_.v, item, kv_head, key, count, v);
    kernels.scores(q, tile.rows, k, (count + 3) / 4 * 4, tile.dim, scores, kKeyBlock, bad, v);
    // Pages are too short for the processor to see what comes next.
    ahead = k;
    if (key + count < item.key_end) {
      find_halves(pages_.k, item, kv_head, key + count, in_block(item, key + count), k);
    } else if (piece + 1 < num_pieces()) {
      const AttentionPlan::Item& next = item_of(piece + 1);
      find_halves(pages_.k, next, head_of(piece + 1), next.key_begin, in_block(next, next.key_begin), k);
    } else {
      ahead = nullptr;
    }
    if (shape_.softcap > 0) {
      const int64_t n = tile.rows * kKeyBlock;
      float_kernels().half_to_float(scores, tile.scores, n);
      float_kernels().softcap(tile.scores, shape_.softcap, n, tile.scores);
      float_kernels().float_to_half(tile.scores, scores, n);
    }
    mask(item, key, count, tile.heads, scores, kHidden);
    soften_halves(count, scores, tile);
    kernels.accumulate(scores, kKeyBlock, tile.rows, v, (count + 7) / 8 * 8, tile.dim, tile.out, tile.dim, ahead);
  }
  mend(item, kv_head, chunk, item.key_end, tile);
  end(item.folds(), tile);
}

// Where the rows of keys [key, key + count) lie; zeros where the page left the window, and behind them.
void AttentionRunner::find_halves(const KVSide& side, const AttentionPlan::Item& item, int kv_head, int key, int count,
                                  const uint16_t** rows) const {
  const int32_t* page = batch_.block_table + item.sequence * batch_.max_pages + key / pages_.page_size;
  int offset = key % pages_.page_size;
  for (int at = 0; at < count; offset = 0, ++page) {
    const int length = std::min(pages_.page_size - offset, count - at);
    const uint8_t* stored = *page < 0 ? nullptr : side.row(*page, kv_head, offset);
    for (int i = 0; i < length; ++i)
      rows[at + i] = *page < 0 ? kZeros : reinterpret_cast<const uint16_t*>(stored + i * side.row_stride);
    at += length;
  }
  std::fill(rows + count, rows + kKeyBlock, kZeros);
}

// As soften, of halves.
void AttentionRunner::soften_halves(int count, uint16_t* scores, Tile& tile) const {
  const HalfKernels& kernels = *half_kernels();
  for (int row = 0; row < tile.rows; ++row, scores += kKeyBlock) {
    std::fill(scores + count, scores + kKeyBlock, kHidden);
    const float highest = kernels.maximum(scores);
    if (highest > tile.maximum[row]) {
      if (tile.maximum[row] != -kInfinity) {
        const float factor = std::exp(tile.maximum[row] - highest);
        tile.sum[row] *= factor;
        float* out = tile.out + row * tile.dim;
        float_kernels().scale(out, factor, tile.dim, out);
      }
      tile.maximum[row] = highest;
    }
    if (tile.maximum[row] == -kInfinity) {
      std::memset(scores, 0, kKeyBlock * sizeof(*scores));  // nothing visible yet
    } else {
      tile.sum[row] += kernels.exponentials(scores, tile.maximum[row]);
    }
  }
}

// Rows that did not fit into halves, of keys [begin, end) of one chunk: again in floats.
void AttentionRunner::mend(const AttentionPlan::Item& item, int kv_head, int begin, int end, Tile& tile) const {
  uint8_t* bad = reinterpret_cast<uint8_t*>(reinterpret_cast<uint16_t*>(tile.converted) +
                                            tile.rows * (tile.dim + kKeyBlock));
  for (int row = 0; row < tile.rows; ++row) {
    float* out = tile.out + row * tile.dim;
    if (!bad[row] && tile.maximum[row] < kInfinity && all_finite(out, tile.dim)) continue;
    AttentionPlan::Item one = item;
    one.first_query += row / tile.heads, one.num_queries = 1;
    one.key_begin = begin, one.key_end = end;
    Tile floats = make_tile(tile.heads, tile.heads, tile.dim, tile.behind);
    attend(one, kv_head, floats);
    const int head = row % tile.heads;
    tile.maximum[row] = floats.maximum[head];
    tile.sum[row] = floats.sum[head];
    std::memcpy(out, floats.out + head * tile.dim, tile.dim * sizeof(float));
    bad[row] = 0;
  }
}

}  // namespace tokenmill
