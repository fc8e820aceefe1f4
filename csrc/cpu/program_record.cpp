// Recording and memory of a Program: which stage an op falls into, and where each value lies. See program.h.
//
// Values share memory by liveness, counted in stages: a value made in a stage never takes the place of one that the same
// stage still reads, because threads may be at different ops of it.
#include <algorithm>
#include <numeric>

#include "program.h"

namespace tokenmill {
namespace {

constexpr int kAlignFloats = 16;

size_t aligned(size_t floats) { return (floats + kAlignFloats - 1) / kAlignFloats * kAlignFloats; }

}  // namespace

Program::Program(int max_tokens, int max_sequences, std::shared_ptr<ThreadPool> pool)
    : max_tokens_(max_tokens), max_sequences_(max_sequences), pool_(std::move(pool)) {}

Program::Stage& Program::open_stage() {
  if (!open_) {
    stages_.emplace_back();
    stages_.back().head = in_head_;
    open_ = true;
  }
  return stages_.back();
}

int Program::make_value(int64_t width) {
  Value value;
  value.width = width;
  value.first_stage = value.last_stage = static_cast<int>(stages_.size()) - 1;
  values_.push_back(value);
  return static_cast<int>(values_.size()) - 1;
}

void Program::use(int value) { values_[root(value)].last_stage = static_cast<int>(stages_.size()) - 1; }

RowOp& Program::row_op(RowOp::Kind kind) {
  Stage& stage = open_stage();
  stage.rows.emplace_back();
  stage.rows.back().kind = kind;
  return stage.rows.back();
}

int Program::embed(const std::string& type, const void* table, int64_t cols, float scale) {
  RowOp& op = row_op(RowOp::Kind::embed);
  op.type = type;
  op.table = table;
  op.number = scale;
  return op.out[0] = make_value(cols);
}

int Program::embed_packed(const Linear* table, float scale) {
  RowOp& op = row_op(RowOp::Kind::embed);
  op.packed = table;
  op.number = scale;
  return op.out[0] = make_value(table->cols);
}

int Program::rms_norm(int x, const float* weight, float eps, int64_t head_dim) {
  RowOp& op = row_op(RowOp::Kind::rms_norm);
  op.in[0] = x;
  op.weight = weight;
  op.number = eps;
  op.head_dim = head_dim > 0 ? head_dim : width(x);
  use(x);
  return op.out[0] = make_value(width(x));
}

int Program::add_positions(int x, const float* table) {
  RowOp& op = row_op(RowOp::Kind::positions);
  op.in[0] = x;
  op.weight = table;
  use(x);
  return op.out[0] = make_value(width(x));
}

int Program::layer_norm(int x, const float* weight, const float* bias, int64_t weights, float eps, int64_t head_dim) {
  RowOp& op = row_op(RowOp::Kind::layer_norm);
  op.in[0] = x;
  op.weight = weight;
  op.bias = bias;
  op.weights = weights;
  op.number = eps;
  op.head_dim = head_dim > 0 ? head_dim : width(x);
  use(x);
  return op.out[0] = make_value(width(x));
}

int Program::scale(int x, float factor) {
  RowOp& op = row_op(RowOp::Kind::scale);
  op.in[0] = x;
  op.number = factor;
  use(x);
  return op.out[0] = make_value(width(x));
}

int Program::activate(int x, Activation activation) {
  RowOp& op = row_op(RowOp::Kind::activate);
  op.in[0] = x;
  op.activation = activation;
  use(x);
  return op.out[0] = make_value(width(x));
}

int Program::add(int x, int y) {
  RowOp& op = row_op(RowOp::Kind::add);
  op.in[0] = x;
  op.in[1] = y;
  use(x), use(y);
  return op.out[0] = make_value(width(x));
}

std::pair<int, int> Program::add_rms_norm(int x, int y, const float* weight, float eps) {
  RowOp& op = row_op(RowOp::Kind::add_rms_norm);
  op.in[0] = x;
  op.in[1] = y;
  op.weight = weight;
  op.number = eps;
  use(x), use(y);
  op.out[0] = make_value(width(x));
  op.out[1] = make_value(width(x));
  return {op.out[0], op.out[1]};
}

int Program::rope(int x, const float* cosines, const float* sines, int64_t half, int64_t head_dim, bool interleaved) {
  RowOp& op = row_op(RowOp::Kind::rope);
  op.in[0] = x;
  op.cosines = cosines;
  op.sines = sines;
  op.half = half;
  op.head_dim = head_dim;
  op.interleaved = interleaved;
  use(x);
  return op.out[0] = make_value(width(x));
}

int Program::rope_tails(int x, const float* cosines, const float* sines, int64_t half, int64_t head_dim,
                        bool interleaved) {
  const int value = rope(x, cosines, sines, half, head_dim, interleaved);
  stages_.back().rows.back().kind = RowOp::Kind::rope_tails;
  return value;
}

int Program::latent_row(int x, const float* weight, float eps, const float* cosines, const float* sines, int64_t half,
                        bool interleaved) {
  const int value = rope(x, cosines, sines, half, width(x), interleaved);
  RowOp& op = stages_.back().rows.back();
  op.kind = RowOp::Kind::latent_row;
  op.weight = weight;
  op.number = eps;
  return value;
}

int Program::head_product(int x, const HeadProduct& heads) {
  Stage& stage = open_stage();
  use(x);
  stage.input = x;
  stage.heads = heads;
  stage.outputs.push_back(make_value(heads.heads * heads.out_width));
  open_ = false;
  return stage.outputs[0];
}

int Program::gated(int gate, int up, Activation activation) {
  RowOp& op = row_op(RowOp::Kind::gated);
  op.in[0] = gate;
  op.in[1] = up;
  op.activation = activation;
  use(gate), use(up);
  return op.out[0] = make_value(width(gate));
}

int Program::softcap(int x, float cap) {
  RowOp& op = row_op(RowOp::Kind::softcap);
  op.in[0] = x;
  op.number = cap;
  use(x);
  op.out[0] = make_value(width(x));
  values_[op.out[0]].alias = x;  // in place: logits are too large for a second copy
  return op.out[0];
}

int Program::gate_rows(int x, int gate) {
  RowOp& op = row_op(RowOp::Kind::gate_rows);
  op.in[0] = x;
  op.in[1] = gate;
  use(x), use(gate);
  return op.out[0] = make_value(width(x));
}

int Program::experts(int x, int logits, ExpertLayer layer) {
  open_ = false;  // a stage of its own
  Stage& stage = open_stage();
  use(x), use(logits);
  stage.input = x;
  stage.logits = logits;
  stage.experts = std::make_unique<ExpertLayer>(std::move(layer));
  stage.outputs.push_back(make_value(width(x)));
  open_ = false;
  return stage.outputs[0];
}

int Program::exchange(int x, std::shared_ptr<Exchange> ranks, const std::vector<int64_t>& widths) {
  open_ = false;  // what precedes it must be in shared memory
  Stage& stage = open_stage();
  use(x);
  stage.input = x;
  stage.exchange = std::move(ranks);
  stage.widths = widths;
  stage.outputs.push_back(make_value(widths.empty() ? width(x) : std::accumulate(widths.begin(), widths.end(), int64_t(0))));
  open_ = false;
  return stage.outputs[0];
}

int Program::select_rows(int x) {
  RowOp& op = row_op(RowOp::Kind::select);
  op.in[0] = x;
  use(x);
  return op.out[0] = make_value(width(x));
}

std::vector<int> Program::linear(int x, const std::vector<const Linear*>& weights,
                                 const std::vector<const float*>& biases) {
  Stage& stage = open_stage();
  use(x);
  stage.input = x;
  stage.product = std::make_unique<Product>(weights);
  stage.biases = biases;
  stage.number = num_products_++;
  for (const Linear* weight : weights) stage.outputs.push_back(make_value(weight->rows));
  open_ = false;
  return stage.outputs;
}

int Program::attention(int q, int k, int v, const KVPages& pages, int group, const AttentionShape& shape) {
  Stage& stage = open_stage();
  use(q), use(k), use(v);
  stage.q = q, stage.k = k, stage.v = v;
  stage.pages = pages;
  stage.group = group;
  stage.shape = shape;
  stage.plan = plan_for(stage);
  stage.outputs.push_back(make_value(width(q)));
  open_ = false;
  return stage.outputs[0];
}

void Program::end_body() {
  open_ = false;
  in_head_ = true;
}

// Layers of one group that look equally far share a plan.
int Program::plan_for(const Stage& stage) {
  const AttentionShape& shape = stage.shape;
  for (size_t i = 0; i < plans_.size(); ++i) {
    const PlanEntry& entry = plans_[i];
    if (entry.group == stage.group && entry.window == shape.window && entry.chunk == shape.chunk &&
        entry.num_heads == shape.num_heads)
      return static_cast<int>(i);
  }
  plans_.push_back({stage.group, shape.window, shape.chunk, stage.pages.page_size, shape.num_heads,
                    std::make_unique<AttentionPlan>(max_tokens_, max_sequences_, shape.num_heads, shape.num_kv_heads,
                                                    shape.head_dim)});
  return static_cast<int>(plans_.size()) - 1;
}

void Program::finish(int logits) {
  open_ = false;
  values_[root(logits)].external = true;
  // The head may run again for further rows: what it reads from the body must outlive it.
  for (const Stage& stage : stages_) {
    if (!stage.head) continue;
    for (const RowOp& op : stage.rows)
      if (op.kind == RowOp::Kind::select) values_[root(op.in[0])].last_stage = num_stages();
  }
  find_tail();
  lay_out_values();
  lay_out_scratch();
}

void Program::find_tail() {
  for (int number = 0; number < num_stages(); ++number)
    if (stages_[number].plan >= 0 || stages_[number].recurrence) tail_ = number + 1;
  for (int number = tail_; number < num_stages(); ++number)
    for (const RowOp& op : stages_[number].rows)
      if (op.kind == RowOp::Kind::rope || op.kind == RowOp::Kind::embed || op.kind == RowOp::Kind::positions)
        return;  // these depend on the row index
  for (size_t i = 0; i < values_.size(); ++i) {
    const Value& value = values_[i];
    if (value.alias < 0 && !value.external && value.first_stage < tail_ && value.last_stage >= tail_)
      tail_inputs_.push_back(static_cast<int>(i));
  }
}

void Program::lay_out_values() {
  struct Block {
    size_t offset, floats;
    int busy_until;  // last stage that uses it
  };
  std::vector<Block> blocks;
  size_t total = 0;
  for (size_t i = 0; i < values_.size(); ++i) {  // values are numbered in the order of their stages
    Value& value = values_[i];
    if (value.external || value.alias >= 0) continue;
    const size_t floats = aligned(static_cast<size_t>(max_tokens_) * value.width);
    Block* best = nullptr;
    for (Block& block : blocks) {
      const bool fits = block.busy_until < value.first_stage && block.floats >= floats;
      if (fits && (best == nullptr || block.floats < best->floats)) best = &block;
    }
    if (best == nullptr) {
      blocks.push_back({total, floats, 0});
      total += floats;
      best = &blocks.back();
    }
    best->busy_until = value.last_stage;
    value.offset = best->offset;
  }
  for (Value& value : values_)
    if (value.alias >= 0) value.offset = values_[root(value.alias)].offset;
  arena_ = allocate_aligned(total * sizeof(float));
  bytes_ += total * sizeof(float);
}

}  // namespace tokenmill
