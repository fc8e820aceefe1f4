// One item of attention: online softmax in float32 over blocks of keys, and the merge of partial results.
//
// See attention.h. The inner products are FloatKernels; this file walks pages, masks, and keeps the running maximum.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "float_kernels.h"

namespace tokenmill {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

int max_rows(int num_heads, int num_kv_heads) {
  const int heads = num_heads / num_kv_heads;
  return std::max(1, kTileRows / heads) * heads;
}

// What a head's sink adds to the sum of weights relative to `maximum`. A far larger sink makes the sum infinite: then
// the output is zero, as it should be.
float sink_weight(const AttentionShape& shape, int head, float maximum) {
  return shape.sinks == nullptr ? 0 : std::exp(shape.sinks[head] - maximum);
}

// Sums over a chunk of keys, relative to their maximum, -> into those over the chunks before it. One function for all who
// do it, and never inlined: both must round alike.
__attribute__((noinline)) void fold(float* out, float* maximum, float* sum, const float* values, float other_maximum,
                                    float other_sum, int64_t dim) {
  if (other_maximum == kMinusInfinity) return;  // nothing of it is visible
  const float highest = std::max(*maximum, other_maximum);
  // One of the two is 1. keep: 0 at first.
  const float keep = *maximum == highest ? 1.0f : std::exp(*maximum - highest);
  const float weight = other_maximum == highest ? 1.0f : std::exp(other_maximum - highest);
  *maximum = highest;
  *sum = *sum * keep + other_sum * weight;
  if (keep != 1.0f) float_kernels().scale(out, keep, dim, out);
  float_kernels().accumulate(&weight, 1, 1, values, dim, 1, dim, out, dim);
}

constexpr int kRunFloats = 2048;  // keys or values that stay in the first cache while all queries of a tile pass over them

// fn(first, length) of each run of rows that are there, none longer than the cache bears; `whole`: all are there.
template <typename Function>
void for_runs(const float* const* rows, int count, bool whole, int64_t dim, Function&& fn) {
  const int longest = std::max(4, static_cast<int>(kRunFloats / dim) / 4 * 4);
  for (int begin = 0, end = 0; begin < count; begin = end) {
    if (!whole && rows[begin] == nullptr) {
      end = begin + 1;
      continue;
    }
    const int last = std::min(count, begin + longest);
    for (end = whole ? last : begin; end < last && rows[end] != nullptr;) ++end;
    fn(begin, end - begin);
  }
}

}  // namespace

size_t AttentionRunner::scratch_floats(int num_heads, int num_kv_heads, int head_dim) {
  const size_t rows = max_rows(num_heads, num_kv_heads), heads = num_heads / num_kv_heads;
  const size_t halves = rows * (head_dim + kKeyBlock + 1) / 2 + 1;  // in the place of converted keys, or beyond it
  const size_t per_row = 3 * head_dim + kKeyBlock + 4;
  return (rows + heads) * per_row + std::max(halves, kKeyBlock * static_cast<size_t>(head_dim)) +
         kKeyBlock * static_cast<size_t>(head_dim);
}

AttentionRunner::Tile AttentionRunner::make_tile(int rows, int heads, int64_t dim, float* scratch) {
  Tile tile;
  tile.rows = rows, tile.heads = heads, tile.dim = dim;
  tile.q = scratch;
  tile.out = tile.q + rows * dim;
  tile.scores = tile.out + rows * dim;
  tile.maximum = tile.scores + rows * kKeyBlock;
  tile.sum = tile.maximum + rows;
  tile.whole_out = tile.sum + rows;
  tile.whole_maximum = tile.whole_out + rows * dim;
  tile.whole_sum = tile.whole_maximum + rows;
  tile.converted = tile.whole_sum + rows;
  tile.behind = tile.converted + std::max(rows * (dim + kKeyBlock + 1) / 2 + 1, kKeyBlock * dim);
  return tile;
}

int AttentionRunner::piece_grain(int threads) const {
  const int heads = shape_.num_kv_heads;
  return num_pieces() >= 32 * threads * heads ? heads : 1;
}

void AttentionRunner::run(int piece, float* scratch) const {
  const int kv_head = head_of(piece);
  const AttentionPlan::Item& item = item_of(piece);
  const int heads = shape_.num_heads / shape_.num_kv_heads;
  Tile tile = make_tile(item.num_queries * heads, heads, shape_.head_dim, scratch);
  if (k_ != nullptr && item.key_end == batch_.seq_lens[item.sequence]) {
    const int token = plan_.queries_[item.first_query].token;
    const int64_t offset = token * ldkv_ + kv_head * tile.dim;
    store_kv_head(pages_, kv_head, slots_[token], k_ + offset, v_ + offset);
  }
  if (has_halves()) {
    attend_halves(piece, tile);
  } else {
    attend(item, kv_head, tile);
  }
  finish(item, kv_head, tile);
}

// Queries as they are multiplied; nothing gathered yet.
void AttentionRunner::begin(const AttentionPlan::Item& item, int kv_head, Tile& tile) const {
  for (int row = 0; row < tile.rows; ++row) {
    const int token = plan_.queries_[item.first_query + row / tile.heads].token;
    const float* q = q_ + token * ldq_ + (kv_head * tile.heads + row % tile.heads) * tile.dim;
    float_kernels().scale(q, shape_.scale, tile.dim, tile.q + row * tile.dim);
    pages_.k.format->turn_query(tile.q + row * tile.dim, kv_head);
    tile.maximum[row] = tile.whole_maximum[row] = kMinusInfinity;
    tile.sum[row] = tile.whole_sum[row] = 0;
  }
  std::memset(tile.out, 0, tile.rows * tile.dim * sizeof(float));
  if (item.folds()) std::memset(tile.whole_out, 0, tile.rows * tile.dim * sizeof(float));
}

void AttentionRunner::attend(const AttentionPlan::Item& item, int kv_head, Tile& tile) const {
  const FloatKernels& kernels = float_kernels();
  begin(item, kv_head, tile);
  for (int key = item.key_begin; key < item.key_end; key += kKeyBlock) {
    if (key % kKeyChunk == 0 && key != item.key_begin) fold_chunk(tile);
    const int count = std::min(kKeyBlock, item.key_end - key);
    const float* rows[kKeyBlock];
    // Keys whose page left the window are masked below: no query of this item sees them.
    bool whole = find_rows(pages_.k, item, kv_head, key, count, tile.converted, rows);
    for_runs(rows, count, whole, tile.dim, [&](int at, int length) {
      kernels.scores_of(tile.q, tile.dim, tile.rows, rows + at, length, tile.dim, tile.scores + at, kKeyBlock);
    });
    if (shape_.softcap > 0) {
      for (int row = 0; row < tile.rows; ++row) {
        float* scores = tile.scores + row * kKeyBlock;
        kernels.softcap(scores, shape_.softcap, count, scores);
      }
    }
    mask(item, key, count, tile.heads, tile.scores, kMinusInfinity);
    soften(count, tile);
    whole = find_rows(pages_.v, item, kv_head, key, count, tile.converted, rows);
    for_runs(rows, count, whole, tile.dim, [&](int at, int length) {
      kernels.accumulate_of(tile.scores + at, kKeyBlock, tile.rows, rows + at, length, tile.dim, tile.out, tile.dim);
    });
  }
  end(item.folds(), tile);
}

void AttentionRunner::end(bool folds, Tile& tile) {
  if (!folds) return;
  fold_chunk(tile);
  std::swap(tile.out, tile.whole_out);
  std::swap(tile.maximum, tile.whole_maximum);
  std::swap(tile.sum, tile.whole_sum);
}

// What was gathered since the last multiple of kKeyChunk goes to the sums of the whole item; then it begins anew.
void AttentionRunner::fold_chunk(Tile& tile) {
  for (int row = 0; row < tile.rows; ++row) {
    fold(tile.whole_out + row * tile.dim, tile.whole_maximum + row, tile.whole_sum + row, tile.out + row * tile.dim,
         tile.maximum[row], tile.sum[row], tile.dim);
    tile.maximum[row] = kMinusInfinity;
    tile.sum[row] = 0;
  }
  std::memset(tile.out, 0, tile.rows * tile.dim * sizeof(float));
}

// Where the rows of keys [key, key + count) lie: in their pages if those hold floats, else converted. null where the page
// left the window; false if there is such a key.
bool AttentionRunner::find_rows(const KVSide& side, const AttentionPlan::Item& item, int kv_head, int key, int count,
                                float* converted, const float** rows) const {
  const int32_t* table = batch_.block_table + item.sequence * batch_.max_pages;
  const RowFormat& format = *side.format;
  const int64_t dim = shape_.head_dim;
  const bool in_place = format.kind == RowKind::float32 && side.row_stride == format.row_bytes();
  bool whole = true;
  for (int at = 0; at < count;) {
    const int offset = (key + at) % pages_.page_size;
    const int length = std::min(pages_.page_size - offset, count - at);
    const int page = table[(key + at) / pages_.page_size];
    const uint8_t* stored = page < 0 ? nullptr : side.row(page, kv_head, offset);
    const float* first = in_place ? reinterpret_cast<const float*>(stored) : converted + at * dim;
    if (page >= 0 && !in_place) format.decode(stored, side.row_stride, length, kv_head, converted + at * dim);
    for (int i = 0; i < length; ++i) rows[at + i] = page < 0 ? nullptr : first + i * dim;
    whole = whole && page >= 0;
    at += length;
  }
  return whole;
}

int AttentionRunner::oldest(int position) const {
  if (shape_.window > 0) return position - shape_.window + 1;
  return shape_.chunk > 0 ? position / shape_.chunk * shape_.chunk : 0;
}

// Hide keys after the query's own position, and those before its window or chunk.
template <typename Score>
void AttentionRunner::mask(const AttentionPlan::Item& item, int key, int count, int heads, Score* scores,
                           Score hidden) const {
  for (int i = 0; i < item.num_queries; ++i) {
    const AttentionPlan::Query& query = plan_.queries_[item.first_query + i];
    if (batch_.ancestors != nullptr) {
      for (int head = 0; head < heads; ++head)
        mask_tree(query, key, count, scores + (i * heads + head) * kKeyBlock, hidden);
      continue;
    }
    const int position = query.position;
    const int end = std::min(count, position + 1 - key);
    const int begin = std::max(0, oldest(position) - key);
    if (begin == 0 && end == count) continue;
    for (int head = 0; head < heads; ++head) {
      Score* row = scores + (i * heads + head) * kKeyBlock;
      std::fill(row, row + std::min(begin, count), hidden);
      std::fill(row + std::max(end, 0), row + count, hidden);
    }
  }
}

// As `mask`, of one row of a tree: known keys within the window of the position that its depth gives it, and ancestors.
template <typename Score>
void AttentionRunner::mask_tree(const AttentionPlan::Query& query, int key, int count, Score* scores,
                                Score hidden) const {
  const uint64_t* first = batch_.ancestors + (query.token - (query.position - query.known));  // of its sequence
  const uint64_t seen = batch_.ancestors[query.token];
  const auto place = [&](uint64_t ancestors) { return query.known + __builtin_popcountll(ancestors) - 1; };
  const int first_key = oldest(place(seen));
  for (int at = 0; at < count; ++at) {
    const int node = key + at - query.known;
    const bool visible =
        node < 0 ? key + at >= first_key : node < 64 && (seen >> node & 1) && place(first[node]) >= first_key;
    if (!visible) scores[at] = hidden;
  }
}

template void AttentionRunner::mask(const AttentionPlan::Item&, int, int, int, uint16_t*, uint16_t) const;

// Scores -> weights relative to the running maximum; rescale what was gathered under the old one.
void AttentionRunner::soften(int count, Tile& tile) const {
  const FloatKernels& kernels = float_kernels();
  for (int row = 0; row < tile.rows; ++row) {
    float* scores = tile.scores + row * kKeyBlock;
    // Always a whole block: the order of the sum must not depend on how many keys later queries of the tile see.
    std::fill(scores + count, scores + kKeyBlock, kMinusInfinity);
    const float highest = kernels.maximum(scores, kKeyBlock);
    if (highest > tile.maximum[row]) {
      const float factor = std::exp(tile.maximum[row] - highest);  // 0 at first
      tile.maximum[row] = highest;
      tile.sum[row] *= factor;
      float* out = tile.out + row * tile.dim;
      kernels.scale(out, factor, tile.dim, out);
    }
    if (tile.maximum[row] == kMinusInfinity) {
      std::memset(scores, 0, count * sizeof(float));  // nothing visible yet
    } else {
      tile.sum[row] += kernels.exponentials(scores, kKeyBlock, tile.maximum[row]);
    }
  }
}

void AttentionRunner::finish(const AttentionPlan::Item& item, int kv_head, const Tile& tile) const {
  const FloatKernels& kernels = float_kernels();
  const Rotation* rotation = pages_.v.format->rotation.get();
  for (int row = 0; row < tile.rows; ++row) {
    const int i = row / tile.heads;
    const int head = kv_head * tile.heads + row % tile.heads;
    const float* values = tile.out + row * tile.dim;
    if (item.partial < 0) {
      const int token = plan_.queries_[item.first_query + i].token;
      float* out = out_ + token * ldo_ + head * tile.dim;
      const float sink = sink_weight(shape_, head, tile.maximum[row]);
      kernels.scale(values, 1.0f / (tile.sum[row] + sink), tile.dim, out);
      if (rotation != nullptr) rotation->turn_back(out);
    } else {
      float* partial = &plan_.partials_[(static_cast<int64_t>(item.partial + i) * shape_.num_heads + head) *
                                        (tile.dim + 2)];
      std::memcpy(partial, values, tile.dim * sizeof(float));
      partial[tile.dim] = tile.maximum[row];
      partial[tile.dim + 1] = tile.sum[row];
    }
  }
  if (item.partial < 0) return;
  for (int i = 0; i < item.num_queries; ++i) {
    const int token = plan_.queries_[item.first_query + i].token;
    const int64_t index = static_cast<int64_t>(token) * shape_.num_kv_heads + kv_head;
    if (plan_.remaining_[index].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(token, kv_head);
  }
}

// Called by the thread that wrote the token's last partial for this KV head.
void AttentionRunner::merge(int token, int kv_head) const {
  const int begin = plan_.slot_starts_[token], end = plan_.slot_starts_[token + 1];
  plan_.remaining_[static_cast<int64_t>(token) * shape_.num_kv_heads + kv_head].store(end - begin,
                                                                                     std::memory_order_relaxed);
  const int64_t dim = shape_.head_dim;
  const int heads = shape_.num_heads / shape_.num_kv_heads;
  for (int head = kv_head * heads; head < (kv_head + 1) * heads; ++head) {
    const auto partial = [&](int slot) {
      return &plan_.partials_[(static_cast<int64_t>(plan_.slots_[slot]) * shape_.num_heads + head) * (dim + 2)];
    };
    float maximum = kMinusInfinity, sum = 0;
    float* out = out_ + token * ldo_ + head * dim;
    std::memset(out, 0, dim * sizeof(float));
    for (int slot = begin; slot < end; ++slot)
      fold(out, &maximum, &sum, partial(slot), partial(slot)[dim], partial(slot)[dim + 1], dim);
    float_kernels().scale(out, 1.0f / (sum + sink_weight(shape_, head, maximum)), dim, out);
    if (pages_.v.format->rotation != nullptr) pages_.v.format->rotation->turn_back(out);
  }
}

void store_kv_head(const KVPages& pages, int kv_head, int64_t slot, const float* k, const float* v) {
  store_head(pages, pages.k, kv_head, slot, k);
  if (pages.v.data != pages.k.data) store_head(pages, pages.v, kv_head, slot, v);  // latent rows are both
}

void store_head(const KVPages& pages, const KVSide& side, int kv_head, int64_t slot, const float* x) {
  const int offset = static_cast<int>(slot % pages.page_size);
  side.format->encode(x, kv_head, side.row(slot / pages.page_size, kv_head, offset));
}

}  // namespace tokenmill
