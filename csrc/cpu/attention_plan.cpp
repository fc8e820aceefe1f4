// Cuts one step's attention into items. See attention.h.
//
// Runs on one thread at the start of a step, once per KV group; allocates nothing once the vectors have grown.
#include <algorithm>

#include "attention.h"

namespace tokenmill {
namespace {

constexpr int kEnoughPieces = 32;   // below this many pieces the keys are split too
constexpr int kMinSharedKeys = 64;  // saved key reads under which sharing is not worth a merge
// A sequence with few queries (a decode, a draft that is checked) is cut at every kKeyChunk keys, whatever else is in the
// step: long contexts beside short ones then leave no thread alone at the end. What is computed does not depend on it.
constexpr int kFewQueries = 65;

int whole_chunks(int keys) { return keys / kKeyChunk * kKeyChunk; }

}  // namespace

AttentionPlan::AttentionPlan(int max_tokens, int max_sequences, int num_heads, int num_kv_heads, int head_dim)
    : num_heads_(num_heads),
      num_kv_heads_(num_kv_heads),
      head_dim_(head_dim),
      tile_queries_(std::max(1, kTileRows / (num_heads / num_kv_heads))) {
  // For short sequences: sharing gives a token two partials, splitting for the threads' sake about 2 * kEnoughPieces items
  // more. A sequence of few queries has an item per kKeyChunk keys besides; split_keys grows the memory when those are many.
  max_slots_ = 2 * max_tokens + 4 * kEnoughPieces * std::min(tile_queries_, max_tokens);
  queries_.reserve(2 * max_tokens);
  tiles_.reserve(2 * max_tokens);
  items_.reserve(2 * max_tokens + 4 * kEnoughPieces);
  shared_keys_.reserve(max_sequences);
  members_.reserve(max_sequences);
  slot_starts_.reserve(max_tokens + 1);
  slots_.reserve(max_slots_);
  remaining_.reset(new std::atomic<int>[static_cast<size_t>(max_tokens) * num_kv_heads]);
  // Not value-initialised: most of it is never touched, so never resident.
  partials_.reset(new float[static_cast<size_t>(max_slots_) * num_heads * (head_dim + 2)]);
}

void AttentionPlan::build(const AttentionBatch& batch, int page_size, int window, int chunk) {
  queries_.clear();
  tiles_.clear();
  num_shared_tokens_ = 0;
  shared_keys_.assign(batch.num_sequences, 0);
  share_prefixes(batch, page_size, window, chunk);
  for (int s = 0; s < batch.num_sequences; ++s) {
    const int begin = batch.query_starts[s], end = batch.query_starts[s + 1];
    const int first_position = batch.seq_lens[s] - (end - begin);
    for (int token = begin; token < end; token += tile_queries_) {
      const int count = std::min(tile_queries_, end - token);
      const int first = static_cast<int>(queries_.size());
      const int position = first_position + token - begin;
      for (int i = 0; i < count; ++i) queries_.push_back({token + i, position + i, first_position});
      const int oldest = batch.ancestors == nullptr ? position : first_position;  // a branch may be short
      const int first_key = window > 0 ? std::max(0, oldest - window + 1) : chunk > 0 ? oldest / chunk * chunk : 0;
      const int key_begin = first_key / kKeyBlock * kKeyBlock;
      add_tile(s, first, count, std::max(key_begin, shared_keys_[s]), position + count, end - begin <= kFewQueries);
    }
  }
  split_keys();
}

void AttentionPlan::add_tile(int sequence, int first_query, int num_queries, int key_begin, int key_end, bool few) {
  tiles_.push_back({sequence, first_query, num_queries, key_begin, key_end, -1, few});
}

// Sequences that begin with the same pages and bring few tokens: attend to those pages together.
void AttentionPlan::share_prefixes(const AttentionBatch& batch, int page_size, int window, int chunk) {
  const auto first_position = [&](int s) {
    return batch.seq_lens[s] - (batch.query_starts[s + 1] - batch.query_starts[s]);
  };
  const auto may_share = [&](int s) {
    const int count = batch.query_starts[s + 1] - batch.query_starts[s];
    return shared_keys_[s] == 0 && count > 0 && count < tile_queries_ && (window == 0 || batch.seq_lens[s] <= window) &&
           (chunk == 0 || batch.seq_lens[s] <= chunk) &&
           first_position(s) >= page_size;
  };
  const auto row = [&](int s) { return batch.block_table + s * batch.max_pages; };
  for (int leader = 0; leader + 1 < batch.num_sequences; ++leader) {
    if (!may_share(leader)) continue;
    members_.clear();
    for (int s = leader + 1; s < batch.num_sequences; ++s) {
      if (row(s)[0] != row(leader)[0] || row(s)[0] < 0 || !may_share(s)) continue;
      const int limit = std::min(first_position(leader), first_position(s)) / page_size;
      int pages = 1;
      while (pages < limit && row(s)[pages] == row(leader)[pages] && row(s)[pages] >= 0) ++pages;
      members_.push_back({s, pages});
    }
    // The k best members share the k-th longest prefix: take the k that saves most.
    std::sort(members_.begin(), members_.end(), [](const Member& a, const Member& b) {
      return a.shared_pages != b.shared_pages ? a.shared_pages > b.shared_pages : a.sequence < b.sequence;
    });
    int64_t saved = kMinSharedKeys - 1;
    size_t num_members = 0;
    for (size_t k = 0; k < members_.size(); ++k) {
      const int64_t keys = static_cast<int64_t>(k + 1) * whole_chunks(members_[k].shared_pages * page_size);
      if (keys > saved) saved = keys, num_members = k + 1;
    }
    if (num_members == 0) continue;
    const int shared = whole_chunks(members_[num_members - 1].shared_pages * page_size);
    num_shared_tokens_ = std::max(num_shared_tokens_, shared);
    members_.resize(num_members);
    members_.push_back({leader, 0});
    int first = static_cast<int>(queries_.size());
    for (const Member& member : members_) {
      const int s = member.sequence;
      shared_keys_[s] = shared;
      for (int token = batch.query_starts[s]; token < batch.query_starts[s + 1]; ++token)
        queries_.push_back({token, first_position(s) + token - batch.query_starts[s], first_position(s)});
    }
    const int end = static_cast<int>(queries_.size());
    for (; first < end; first += tile_queries_)
      add_tile(leader, first, std::min(tile_queries_, end - first), 0, shared, true);
  }
}

// Tiles -> items, with partial slots where a token has more than one item.
void AttentionPlan::split_keys() {
  // One chunk or all of them: parts of several chunks would be merged in another order than the chunks themselves.
  const bool all = static_cast<int>(tiles_.size()) * num_kv_heads_ < kEnoughPieces;
  items_.clear();
  int num_tokens = 0;
  for (const Query& query : queries_) num_tokens = std::max(num_tokens, query.token + 1);
  slot_starts_.assign(num_tokens + 1, 0);
  for (const Item& tile : tiles_) {
    const int longest = tile.few || all ? kKeyChunk : 1 << 30;
    for (int key = tile.key_begin; key < tile.key_end;) {
      const int64_t cut = (static_cast<int64_t>(key) / longest + 1) * longest;
      const int end = static_cast<int>(std::min<int64_t>(tile.key_end, cut));
      items_.push_back({tile.sequence, tile.first_query, tile.num_queries, key, end, -1});
      for (int i = 0; i < tile.num_queries; ++i) ++slot_starts_[queries_[tile.first_query + i].token + 1];
      key = end;
    }
  }
  for (int token = 0; token < num_tokens; ++token) {
    const int count = slot_starts_[token + 1];
    for (int head = 0; head < num_kv_heads_; ++head)
      remaining_[static_cast<size_t>(token) * num_kv_heads_ + head].store(count, std::memory_order_relaxed);
    slot_starts_[token + 1] += slot_starts_[token];
  }
  slots_.assign(slot_starts_[num_tokens], -1);
  int next_slot = 0;
  for (Item& item : items_) {
    const Query* queries = &queries_[item.first_query];
    const auto count = [&](int i) { return slot_starts_[queries[i].token + 1] - slot_starts_[queries[i].token]; };
    bool whole = true;
    for (int i = 0; i < item.num_queries; ++i) whole = whole && count(i) == 1;
    if (whole) continue;
    item.partial = next_slot;
    for (int i = 0; i < item.num_queries; ++i) {
      int slot = slot_starts_[queries[i].token];
      while (slots_[slot] >= 0) ++slot;
      slots_[slot] = next_slot++;
    }
  }
  if (next_slot > max_slots_) {  // long contexts of many sequences at once
    max_slots_ = next_slot + next_slot / 2;
    partials_.reset(new float[static_cast<size_t>(max_slots_) * num_heads_ * (head_dim_ + 2)]);
  }
}

}  // namespace tokenmill
