// Causal attention over paged keys and values: what to compute (AttentionPlan) and one piece of it (run_attention_item).
//
// A plan is built once per step and KV group and serves all its layers. It cuts the work into items (a tile of queries
// x a range of keys), so that: query heads of one KV head share each page read; a prefix whose pages several sequences
// share is read once for all of them; a long context is split. Sums over keys begin anew at every kKeyChunk keys of a
// sequence and are then folded together in order: by the item itself where it has several chunks, else by the thread that
// finishes the last item of a query. So a token has the same bits however the work is cut: alone, in any batch, among
// drafts, in a whole prompt, in chunks of one, and behind a cached prefix. Pages of halves are multiplied as halves where
// the processor can (attention_half.cpp), all others as floats.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kv_rows.h"

namespace tokenmill {

constexpr int kKeyBlock = 64;  // keys between two updates of the running maximum; where they begin orders the sums
constexpr int kKeyChunk = 128;  // keys whose sums are folded into those before them; a multiple of kKeyBlock
constexpr int kTileRows = 48;  // query rows (tokens x heads of one KV head) that share a page read

// Keys or values of one layer: rows of [num_pages, num_kv_heads, page_size], strides in bytes.
struct KVSide {
  uint8_t* data = nullptr;
  std::shared_ptr<const RowFormat> format;
  int64_t page_stride = 0, head_stride = 0, row_stride = 0;

  uint8_t* row(int64_t page, int kv_head, int offset) const {
    return data + page * page_stride + kv_head * head_stride + offset * row_stride;
  }
};

struct KVPages {
  KVSide k, v;
  int num_kv_heads = 0;
  int page_size = 0;
  int head_dim = 0;
};

struct AttentionShape {
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  float scale = 1;
  int window = 0;     // 0: full
  float softcap = 0;  // 0: off
  int chunk = 0;      // a token sees its own chunk of this many; 0: no chunks
  const float* sinks = nullptr;  // [num_heads] logits that join the softmax and carry no value
};

struct AttentionBatch {
  int num_sequences = 0;
  const int32_t* query_starts = nullptr;  // [S + 1]
  const int32_t* seq_lens = nullptr;      // [S], this step's tokens included
  const int32_t* block_table = nullptr;   // [S, max_pages], -1 for pages that left the window
  int64_t max_pages = 0;
  // Trees of drafts: [T] bit j is set where a token sees the j-th new token of its sequence; itself, the first and those
  // between, so that their number is its depth. nullptr: each sees all before it.
  const uint64_t* ancestors = nullptr;
};

class AttentionPlan {
 public:
  struct Query {
    int32_t token;     // row of q
    int32_t position;  // in its sequence, as stored
    int32_t known;     // tokens of its sequence before this step
  };
  struct Item {
    int32_t sequence;     // whose block table to read
    int32_t first_query;  // in queries
    int32_t num_queries;
    int32_t key_begin, key_end;
    int32_t partial;  // first partial slot, one per query; -1: the item is all there is, write the output itself
    bool few = false;  // of a sequence with few queries
    bool folds() const { return key_begin / kKeyChunk != (key_end - 1) / kKeyChunk; }
  };

  AttentionPlan(int max_tokens, int max_sequences, int num_heads, int num_kv_heads, int head_dim);

  void build(const AttentionBatch& batch, int page_size, int window, int chunk = 0);

  int num_items() const { return static_cast<int>(items_.size()); }
  int num_shared_tokens() const { return num_shared_tokens_; }  // longest prefix read once for several sequences

 private:
  friend class AttentionRunner;
  struct Member {
    int32_t sequence;
    int32_t shared_pages;
  };

  void share_prefixes(const AttentionBatch& batch, int page_size, int window, int chunk);
  void add_tile(int sequence, int first_query, int num_queries, int key_begin, int key_end, bool few);
  void split_keys();

  const int num_heads_, num_kv_heads_, head_dim_;
  const int tile_queries_;
  int max_slots_;
  int num_shared_tokens_ = 0;
  std::vector<Query> queries_;
  std::vector<Item> items_;
  std::vector<Item> tiles_;               // items before their keys are split
  std::vector<int32_t> shared_keys_;      // [S] leading keys that a shared item covers
  std::vector<Member> members_;
  std::vector<int32_t> slot_starts_;      // [T + 1] into slots_
  std::vector<int32_t> slots_;            // partial slots of each token, in merging order
  std::unique_ptr<std::atomic<int>[]> remaining_;  // [T, num_kv_heads] partials not yet written
  std::unique_ptr<float[]> partials_;     // [slot, num_heads, head_dim + 2]: values, maximum, sum
};

// One layer's attention in one step: q and out are [T, num_heads * head_dim].
class AttentionRunner {
 public:
  AttentionRunner(AttentionPlan& plan, const AttentionBatch& batch, const KVPages& pages, const AttentionShape& shape,
                  const float* q, int64_t ldq, float* out, int64_t ldo)
      : plan_(plan), batch_(batch), pages_(pages), shape_(shape), q_(q), ldq_(ldq), out_(out), ldo_(ldo) {}

  // With every sequence bringing one token, an item that reaches the end of its sequence can store that token's key and
  // value first: then no barrier is needed between storing and attending. k and v are [T, num_kv_heads * head_dim].
  void store_first(const float* k, const float* v, int64_t ldkv, const int64_t* slots) {
    k_ = k, v_ = v, ldkv_ = ldkv, slots_ = slots;
  }

  int num_pieces() const { return plan_.num_items() * shape_.num_kv_heads; }
  int piece_grain(int threads) const;  // neighbours that one thread should have: heads of an item lie side by side
  static size_t scratch_floats(int num_heads, int num_kv_heads, int head_dim);
  void run(int piece, float* scratch) const;

 private:
  // Scratch of one thread. Rows are (query, head) pairs of one KV head, head fastest.
  struct Tile {
    int rows, heads;
    int64_t dim;
    float* q;          // [rows, dim], scaled
    float* out;        // [rows, dim]
    float* scores;     // [rows, kKeyBlock]
    float* maximum;    // [rows]
    float* sum;        // [rows]
    float* converted;  // [kKeyBlock, dim]; halves: q, the scores of a block, and which rows do not fit
    // As out, maximum and sum: of the chunks before, where the item has several.
    float *whole_out, *whole_maximum, *whole_sum;
    float* behind;  // halves: scratch for the rows of one query, in floats
  };
  int head_of(int piece) const { return piece % shape_.num_kv_heads; }
  // Later tiles of a causal prefill are longer: start with them, so that threads end together.
  const AttentionPlan::Item& item_of(int piece) const {
    return plan_.items_[(num_pieces() - 1 - piece) / shape_.num_kv_heads];
  }
  static Tile make_tile(int rows, int heads, int64_t dim, float* scratch);

  void begin(const AttentionPlan::Item& item, int kv_head, Tile& tile) const;
  void attend(const AttentionPlan::Item& item, int kv_head, Tile& tile) const;
  static void end(bool folds, Tile& tile);
  // In attention_half.cpp.
  bool has_halves() const;
  void attend_halves(int piece, Tile& tile) const;
  void find_halves(const KVSide& side, const AttentionPlan::Item& item, int kv_head, int key, int count,
                   const uint16_t** rows) const;
  void soften_halves(int count, uint16_t* scores, Tile& tile) const;
  void mend(const AttentionPlan::Item& item, int kv_head, int begin, int end, Tile& tile) const;
  // Of floats or of halves; `hidden`: minus infinity.
  template <typename Score>
  void mask(const AttentionPlan::Item& item, int key, int count, int heads, Score* scores, Score hidden) const;
  template <typename Score>
  void mask_tree(const AttentionPlan::Query& query, int key, int count, Score* scores, Score hidden) const;
  int oldest(int position) const;  // first key that a token at this position sees
  void soften(int count, Tile& tile) const;
  static void fold_chunk(Tile& tile);
  void finish(const AttentionPlan::Item& item, int kv_head, const Tile& tile) const;
  void merge(int token, int kv_head) const;
  bool find_rows(const KVSide& side, const AttentionPlan::Item& item, int kv_head, int key, int count, float* converted,
                 const float** rows) const;

  AttentionPlan& plan_;
  const AttentionBatch& batch_;
  const KVPages& pages_;
  const AttentionShape& shape_;
  const float* q_;
  int64_t ldq_;
  float* out_;
  int64_t ldo_;
  const float* k_ = nullptr;
  const float* v_ = nullptr;
  int64_t ldkv_ = 0;
  const int64_t* slots_ = nullptr;
};

// Write one token's row of one KV head to its slot (page * page_size + offset) in pages.k or pages.v; or both.
void store_head(const KVPages& pages, const KVSide& side, int kv_head, int64_t slot, const float* x);
void store_kv_head(const KVPages& pages, int kv_head, int64_t slot, const float* k, const float* v);

}  // namespace tokenmill
