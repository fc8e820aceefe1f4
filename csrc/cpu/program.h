// The forward pass as a flat list of stages over fixed buffers: recorded once per model, replayed for every step.
//
// A stage is a run of row-wise ops (each row independent of the others) followed by at most one product, product by
// heads, attention or recurrent op, or a layer of experts or an exchange with other ranks by itself.
// Replaying is one pool run: all threads walk the stages together and meet at a barrier after each. When few rows are
// computed, every thread does the row-wise part for itself in private memory, which saves the barrier before the product.
// After the last attention or recurrent op rows no longer meet: where only the head reads the result, only its rows go
// on from there.
// Adapters change products from outside: which rows have one is an input of each step, nothing is recorded again.
// Knows nothing of Python or of models; recorded by runtime/recorded.py through bind_program.cpp.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "exchange.h"
#include "experts.h"
#include "float_kernels.h"
#include "memory.h"
#include "pool.h"
#include "product.h"
#include "recurrent.h"

namespace tokenmill {

// `count` numbers of each of `slices` slices of a row, copied into the slices of another.
struct Columns {
  int64_t slices = 1, count = 0;
  int64_t from = 0, from_width = 0;  // where they begin in a slice, and how wide that is
  int64_t to = 0, to_width = 0;
};

struct RowOp {
  enum class Kind {
    embed, positions, rms_norm, layer_norm, add, add_rms_norm, scale, rope, rope_tails, latent_row, gated, gate_rows,
    activate, softcap, select, columns, gated_norm
  };
  Kind kind;
  int in[2] = {-1, -1};   // values
  int out[2] = {-1, -1};
  const float* weight = nullptr;  // norms, latent_row; positions: the table
  const float* bias = nullptr;    // layer_norm
  int64_t weights = 0;            // layer_norm: how many there are, as many as a head has or as a row
  float number = 0;               // eps, scale or cap
  Columns columns;
  GatedNorm gated_norm;
  int64_t head_dim = 0;
  const float* cosines = nullptr;  // [positions, half]
  const float* sines = nullptr;
  int64_t half = 0;
  bool interleaved = false;
  Activation activation = Activation::silu;
  std::string type;  // embed
  const void* table = nullptr;
  const Linear* packed = nullptr;  // embed: instead of type and table
};

// Each head of a row times a matrix of its own: the projections of latent attention.
struct HeadProduct {
  const float* weights = nullptr;  // [heads, inputs, outputs] if by_inputs, else [heads, outputs, inputs]
  bool by_inputs = false;
  int heads = 0;
  int64_t inputs = 0, outputs = 0;     // of a matrix
  int64_t in_width = 0, out_width = 0;  // of a head in a row; its leading numbers are multiplied
  int64_t copied = 0;                   // numbers behind the inputs that are copied behind the outputs

  void run(const float* x, int64_t ldx, float* out, int64_t ldo, int head, int rows) const;
};

// One step's inputs; pointers stay the caller's. One entry of slots and block tables per KV group.
struct StepInputs {
  int num_tokens = 0;
  const int64_t* token_ids = nullptr;  // [T]
  const int64_t* positions = nullptr;  // [T]
  std::vector<const int64_t*> slots;   // [T] each
  std::vector<AttentionBatch> batches;
  int num_logit_rows = 0;
  const int64_t* logit_rows = nullptr;  // [R]
  float* logits = nullptr;              // [R, vocab]
  bool body = true;                     // compute the hidden state
  bool head = true;                     // compute logits from the hidden state of this or the previous call
  bool all_hidden = true;               // false: only this call's head reads the hidden state
  // Recurrent ops: rows [starts[s], starts[s + 1]) continue the state in slot state_slots[s]. States of drafted
  // sequences are left as they are until `settle` says how many of their rows hold.
  int num_sequences = 0;
  const int32_t* starts = nullptr;       // [S + 1]
  const int64_t* state_slots = nullptr;  // [S]
  std::vector<int> drafted;              // numbers of sequences, ascending
  const int32_t* adapter_slots = nullptr;  // [T], 0: none; null where no row has an adapter
};

class Program {
 public:
  Program(int max_tokens, int max_sequences, std::shared_ptr<ThreadPool> pool);

  // Recording: values are numbers; every method returns those it makes.
  int embed(const std::string& type, const void* table, int64_t cols, float scale);
  int embed_packed(const Linear* table, float scale);
  int rms_norm(int x, const float* weight, float eps, int64_t head_dim);
  int add_positions(int x, const float* table);  // [positions, width]
  // `weights`: head_dim, or one for each number of a row.
  int layer_norm(int x, const float* weight, const float* bias, int64_t weights, float eps, int64_t head_dim);
  int add(int x, int y);
  int scale(int x, float factor);
  std::pair<int, int> add_rms_norm(int x, int y, const float* weight, float eps);
  std::vector<int> linear(int x, const std::vector<const Linear*>& weights, const std::vector<const float*>& biases);
  int rope(int x, const float* cosines, const float* sines, int64_t half, int64_t head_dim, bool interleaved);
  // As rope, of the last 2 * half numbers of each head; of the row [latent | key], the latent normed and the key rotated.
  int rope_tails(int x, const float* cosines, const float* sines, int64_t half, int64_t head_dim, bool interleaved);
  int latent_row(int x, const float* weight, float eps, const float* cosines, const float* sines, int64_t half,
                 bool interleaved);
  int head_product(int x, const HeadProduct& heads);
  int attention(int q, int k, int v, const KVPages& pages, int group, const AttentionShape& shape);
  int gated(int gate, int up, Activation activation);
  int gate_rows(int x, int gate);
  int activate(int x, Activation activation);
  // `logits`: the router's product with x.
  int experts(int x, int logits, ExpertLayer layer);
  // Columns of x, one value for each width; with `heads`, x is that many slices, and each is split so.
  std::vector<int> split(int x, const std::vector<int64_t>& widths, int64_t heads);
  int join(const std::vector<int>& values);
  int gated_norm(int x, int gate, const GatedNorm& norm);
  // `states`: [slots, op->state_floats()], of this layer.
  int recurrence(const std::vector<int>& inputs, std::shared_ptr<const Recurrence> op, float* states);
  // What other ranks have of x: side by side if `widths` says how wide theirs are, else the sum.
  int exchange(int x, std::shared_ptr<Exchange> ranks, const std::vector<int64_t>& widths);
  int select_rows(int x);
  int softcap(int x, float cap);
  int num_products() const { return num_products_; }  // `linear` calls so far: they are numbered from 0
  void end_body();          // what follows is the head: it runs over the selected rows only
  void finish(int logits);  // no more recording; lays out the memory

  // Adapters in slots 1 to num_slots, for the products by their number; null: none. Not while a step runs.
  void hold_adapters(int num_slots);
  void set_adapter(int product, int slot, std::shared_ptr<const ProductAdapter> adapter);
  void set_embedding(int slot, std::shared_ptr<const EmbeddingAdapter> adapter);
  int num_adapter_slots() const { return static_cast<int>(embeddings_.size()) - 1; }
  bool has_product(int product, int64_t inputs, const std::vector<int64_t>& outputs) const;

  // False: another rank did not come to an exchange; what was computed is of no use.
  bool run(const StepInputs& inputs);
  // After a step with drafted sequences: their states go on over this many rows of each, in the order of `drafted`.
  void settle(const std::vector<int>& kept);
  int num_drafted() const { return static_cast<int>(drafted_.size()); }
  int num_drafted_rows(int draft) const { return drafted_[draft].end - drafted_[draft].begin; }

  int64_t width(int value) const { return values_[value].width; }
  const float* data(int value) const { return arena() + values_[value].offset; }
  size_t bytes() const { return bytes_ + adapter_workspace_.bytes(); }
  int num_stages() const { return static_cast<int>(stages_.size()); }
  ThreadPool& pool() const { return *pool_; }
  int max_tokens() const { return max_tokens_; }
  int max_sequences() const { return max_sequences_; }

 private:
  struct Value {
    int64_t width = 0;
    int first_stage = 0, last_stage = 0;
    int alias = -1;              // shares the memory of that value
    bool external = false;       // in the caller's logits
    bool by_rows = false;        // made by a row op: every thread may have its own
    size_t offset = 0;           // floats in the arena
    size_t private_offset = 0;   // floats in a thread's private memory, while its own stage runs redundantly
  };
  struct Stage {
    std::vector<RowOp> rows;
    std::unique_ptr<Product> product;
    HeadProduct heads;                // weights null: none
    int input = -1;                   // product, product by heads, experts, exchange
    std::vector<int> outputs;         // product, product by heads, attention, experts, exchange
    std::vector<const float*> biases;  // product
    AdapterSlots adapters;             // product
    int number = -1;                   // product: which one
    int q = -1, k = -1, v = -1;       // attention
    int plan = -1;
    int group = 0;
    KVPages pages;
    AttentionShape shape;
    std::unique_ptr<ExpertLayer> experts;
    int logits = -1;  // experts; they read `input`
    std::shared_ptr<Exchange> exchange;  // reads `input`
    std::vector<int64_t> widths;         // exchange; none: a sum
    std::shared_ptr<const Recurrence> recurrence;
    float* states = nullptr;      // recurrence
    std::vector<int> inputs;      // recurrence
    std::vector<float> drafts;    // recurrence: its inputs in the drafted rows of a step, one input after the other
    bool head = false;  // runs over the selected rows
    int64_t row_cost = 0;
    bool in_place = false;     // a row op overwrites its input: must run once
    bool elementwise = false;  // may be split within rows
  };
  struct Drafted {  // a drafted sequence of the last step
    int64_t slot = 0;
    int32_t begin = 0, end = 0;  // its rows, among those of all drafted sequences
  };
  struct PlanEntry {
    int group, window, chunk, page_size, num_heads;
    std::unique_ptr<AttentionPlan> plan;
  };
  struct Place {  // where a thread reads and writes values in this stage
    const Program& program;
    const StepInputs& inputs;
    int stage;
    float* private_memory;  // null: shared
    bool narrow;            // the rows of the head have been moved to the front
    float* at(int value, int64_t row) const;
  };

  int make_value(int64_t width);
  void use(int value);
  RowOp& row_op(RowOp::Kind kind);
  Stage& open_stage();
  int plan_for(const Stage& stage);
  void find_tail();
  void lay_out_values();
  void lay_out_scratch();
  int root(int value) const { return values_[value].alias < 0 ? value : root(values_[value].alias); }

  const AdapterRows& adapter_rows(const Place& place, const Stage& stage) const {
    return stage.head || place.narrow ? head_adapter_rows_ : adapter_rows_;
  }
  void begin_adapters(const StepInputs& inputs);
  bool adapts(const Stage& stage, bool narrowed, const StepInputs& inputs) const;
  bool may_narrow(const StepInputs& inputs) const;
  void narrow(Team& team, const StepInputs& inputs);
  void run_stage(Team& team, const StepInputs& inputs, int number, bool narrowed);
  void run_rows(const Stage& stage, const Place& place, int begin, int end) const;
  void run_row(const RowOp& op, const Place& place, int row) const;
  void run_product(Team& team, const Stage& stage, const Place& place, int rows, bool redundant, bool adapted);
  void run_exchange(const Stage& stage, const Place& place, int rows);
  void run_experts(Team& team, const Stage& stage, const Place& place, int rows);
  void run_head_product(Team& team, const Stage& stage, const Place& place, int rows, bool redundant);
  void run_attention(Team& team, const Stage& stage, const Place& place, int rows, bool redundant);
  void run_recurrence(Team& team, Stage& stage, const Place& place, int rows, bool redundant);
  void begin_drafts(const StepInputs& inputs);
  void keep_inputs(Stage& stage, const float* const* inputs, int32_t first, const Drafted& drafted) const;
  char* scratch_of(const Team& team) const;
  float* arena() const { return reinterpret_cast<float*>(arena_.get()); }

  const int max_tokens_, max_sequences_;
  std::shared_ptr<ThreadPool> pool_;
  std::vector<Value> values_;
  std::vector<Stage> stages_;
  bool open_ = false;  // the last stage may still take row ops
  bool in_head_ = false;
  std::vector<PlanEntry> plans_;
  int tail_ = 0;                  // first stage behind the last attention or recurrent op
  std::vector<int> tail_inputs_;  // values that it and later stages read from before; empty: must not be narrowed
  AlignedBuffer arena_, activations_, private_;
  ExpertWorkspace expert_workspace_;
  std::vector<Drafted> drafted_;
  std::vector<int> draft_of_;  // by sequence of the step: its index in drafted_, or -1
  size_t private_floats_ = 0;             // per thread, values
  size_t private_activation_bytes_ = 0;  // per thread
  size_t scratch_bytes_ = 0;             // per thread
  size_t thread_bytes_ = 0;
  size_t bytes_ = 0;
  int num_products_ = 0;
  std::atomic<bool> failed_{false};  // an exchange of this run
  AdapterWorkspace adapter_workspace_;
  AdapterRows adapter_rows_, head_adapter_rows_;  // of all rows; of those whose logits are wanted
  std::vector<std::shared_ptr<const EmbeddingAdapter>> embeddings_{nullptr};  // by slot
};

}  // namespace tokenmill
