// Replaying a Program on the pool. See program.h.
//
// No allocation, no locks, no Python: stages, barriers, kernels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "program.h"

namespace tokenmill {
namespace {

// Few rows: all threads compute them, each for itself, where that costs less than a barrier.
constexpr int kMaxRedundantRows = 4;
constexpr int64_t kBarrierCost = 2048;  // in the units of op_cost: about a value read and written
constexpr int64_t kSplitValues = 4096;  // elementwise ops are cut into pieces of this many values

int64_t op_cost(const RowOp& op, int64_t width) {
  switch (op.kind) {
    case RowOp::Kind::gated:
    case RowOp::Kind::activate:
    case RowOp::Kind::softcap:
      return 5 * width;
    case RowOp::Kind::layer_norm:
    case RowOp::Kind::add_rms_norm:
      return 3 * width;
    case RowOp::Kind::add:
    case RowOp::Kind::positions:
    case RowOp::Kind::scale:
    case RowOp::Kind::select:
      return width;
    case RowOp::Kind::columns:
      return op.columns.slices * op.columns.count;
    case RowOp::Kind::gated_norm:
      return 8 * width;
    default:
      return 2 * width;
  }
}

bool one_token_each(const AttentionBatch& batch, int tokens) {
  if (batch.num_sequences != tokens) return false;
  for (int s = 0; s < tokens; ++s)
    if (batch.query_starts[s + 1] != s + 1) return false;
  return true;
}

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

void Program::lay_out_scratch() {
  size_t activation_bytes = 0;
  for (size_t number = 0; number < stages_.size(); ++number) {
    Stage& stage = stages_[number];
    size_t floats = 0;
    stage.elementwise = !stage.rows.empty() && !stage.product && stage.heads.weights == nullptr && stage.plan < 0 &&
                        !stage.recurrence;
    for (const RowOp& op : stage.rows) {
      stage.row_cost += op_cost(op, width(op.out[0]));
      stage.elementwise = stage.elementwise && op.kind == RowOp::Kind::softcap;
      stage.in_place = stage.in_place || op.kind == RowOp::Kind::softcap;
      for (int out : op.out) {
        if (out < 0) continue;
        values_[out].by_rows = true;
        values_[out].private_offset = floats;
        floats += aligned(kMaxRedundantRows * width(out));
      }
    }
    private_floats_ = std::max(private_floats_, floats);
    if (stage.product) {
      stage.row_cost += 2 * width(stage.input);
      for (int m = 1; m <= max_tokens_; ++m) {
        activation_bytes = std::max(activation_bytes, stage.product->activation_bytes(m));
        scratch_bytes_ = std::max(scratch_bytes_, stage.product->scratch_bytes(m));
        if (m <= kMaxRedundantRows)
          private_activation_bytes_ = std::max(private_activation_bytes_, stage.product->activation_bytes(m));
      }
    }
    if (stage.experts) {
      expert_workspace_.reserve(*stage.experts, max_tokens_);
      scratch_bytes_ = std::max(scratch_bytes_, expert_workspace_.scratch_bytes());
    }
    if (stage.recurrence)
      scratch_bytes_ = std::max(scratch_bytes_, sizeof(float) * size_t(stage.recurrence->scratch_floats()));
    if (stage.plan >= 0) {
      const AttentionShape& shape = stage.shape;
      scratch_bytes_ = std::max(scratch_bytes_, sizeof(float) * AttentionRunner::scratch_floats(
                                                                    shape.num_heads, shape.num_kv_heads, shape.head_dim));
    }
  }
  // Per thread: values, activations, scratch; a line apart so that threads do not share one.
  thread_bytes_ = aligned(private_floats_ * sizeof(float)) + aligned(private_activation_bytes_) +
                  aligned(scratch_bytes_) + 64;
  expert_workspace_.allocate();
  bytes_ += expert_workspace_.bytes();
  activations_ = allocate_aligned(activation_bytes);
  private_ = allocate_aligned(thread_bytes_ * pool_->size());
  bytes_ += activation_bytes + thread_bytes_ * pool_->size();
}

char* Program::scratch_of(const Team& team) const {
  return private_.get() + team.thread * thread_bytes_ + aligned(private_floats_ * sizeof(float)) +
         aligned(private_activation_bytes_);
}

float* Program::Place::at(int value, int64_t row) const {
  const Value& v = program.values_[value];
  if (program.values_[program.root(value)].external) return inputs.logits + row * v.width;
  if (private_memory != nullptr && v.by_rows && v.first_stage == stage)
    return private_memory + v.private_offset + row * v.width;
  return program.arena() + v.offset + row * v.width;
}

bool Program::run(const StepInputs& inputs) {
  failed_ = false;
  if (inputs.body) {
    for (PlanEntry& entry : plans_) entry.plan->build(inputs.batches[entry.group], entry.page_size, entry.window, entry.chunk);
    begin_drafts(inputs);
  }
  begin_adapters(inputs);
  const bool narrowing = may_narrow(inputs);
  pool_->run([&](Team& team) {
    for (int number = 0; number < num_stages(); ++number) {
      const bool head = stages_[number].head, narrowed = narrowing && number >= tail_;
      if (narrowed && inputs.num_logit_rows == 0) break;
      if (narrowed && number == tail_) narrow(team, inputs);
      if (head ? inputs.head && inputs.num_logit_rows > 0 : inputs.body) run_stage(team, inputs, number, narrowed);
    }
  });
  return !failed_;
}

bool Program::may_narrow(const StepInputs& inputs) const {
  const int rows = inputs.num_logit_rows;
  if (!inputs.body || inputs.all_hidden || tail_inputs_.empty() || rows >= inputs.num_tokens) return false;
  if (rows > 0 && !inputs.head) return false;
  // Rows move to the front in place, in this order.
  const int64_t* end = inputs.logit_rows + rows;
  return std::adjacent_find(inputs.logit_rows, end, std::greater_equal<int64_t>()) == end;
}

void Program::narrow(Team& team, const StepInputs& inputs) {
  team.for_each(static_cast<int>(tail_inputs_.size()), 1, [&](int i) {
    const Value& value = values_[tail_inputs_[i]];
    float* first = arena() + value.offset;
    for (int row = 0; row < inputs.num_logit_rows; ++row) {
      const float* from = first + inputs.logit_rows[row] * value.width;
      float* to = first + row * value.width;
      if (from != to) std::memcpy(to, from, value.width * sizeof(float));
    }
  });
  team.barrier();
}

void Program::run_stage(Team& team, const StepInputs& inputs, int number, bool narrowed) {
  Stage& stage = stages_[number];
  const int rows = stage.head || narrowed ? inputs.num_logit_rows : inputs.num_tokens;
  char* own = private_.get() + team.thread * thread_bytes_;
  const int rows_each = (rows + team.size - 1) / team.size;
  bool redundant =
      !stage.in_place && rows <= kMaxRedundantRows && (rows - rows_each) * stage.row_cost <= kBarrierCost;
  const bool adapted = adapts(stage, narrowed, inputs);
  redundant = redundant && !adapted;  // its threads share what A makes of a row
  // With one new token per sequence, whoever attends to the end of a sequence stores that token: no barrier either.
  if (redundant && stage.plan >= 0) redundant = one_token_each(inputs.batches[stage.group], rows);
  // Thread 0 works in shared memory, so that later stages find the values; the others must not touch it meanwhile.
  float* const private_memory = redundant && team.thread > 0 ? reinterpret_cast<float*>(own) : nullptr;
  const Place place{*this, inputs, number, private_memory, narrowed};
  if (stage.product) {
    run_product(team, stage, place, rows, redundant, adapted);
  } else if (stage.heads.weights != nullptr) {
    run_head_product(team, stage, place, rows, redundant);
  } else if (stage.plan >= 0) {
    run_attention(team, stage, place, rows, redundant);
  } else if (stage.recurrence) {
    run_recurrence(team, stage, place, rows, redundant);
  } else if (stage.exchange) {
    if (team.thread == 0 && !failed_) run_exchange(stage, place, rows);
  } else if (stage.experts) {
    run_experts(team, stage, place, rows);
  } else if (stage.elementwise) {
    const int64_t count = rows * width(stage.rows[0].out[0]);
    float* values = place.at(stage.rows[0].out[0], 0);
    team.for_each(static_cast<int>((count + kSplitValues - 1) / kSplitValues), 1, [&](int piece) {
      const int64_t begin = piece * kSplitValues;
      for (const RowOp& op : stage.rows)
        float_kernels().softcap(values + begin, op.number, std::min(kSplitValues, count - begin), values + begin);
    });
  } else if (redundant) {
    if (team.thread == 0) run_rows(stage, place, 0, rows);
  } else {
    team.for_each(rows, 1, [&](int row) { run_rows(stage, place, row, row + 1); });
  }
  team.barrier();
}

void Program::run_rows(const Stage& stage, const Place& place, int begin, int end) const {
  for (const RowOp& op : stage.rows)
    for (int row = begin; row < end; ++row) run_row(op, place, row);
}

void Program::run_row(const RowOp& op, const Place& place, int row) const {
  const FloatKernels& kernels = float_kernels();
  float* out = place.at(op.out[0], row);
  const int64_t n = width(op.out[0]);
  const float* x = op.in[0] < 0 ? nullptr : place.at(op.in[0], op.kind == RowOp::Kind::select ? 0 : row);
  switch (op.kind) {
    case RowOp::Kind::embed:
      if (op.packed != nullptr) {
        op.packed->dequantize_row(place.inputs.token_ids[row], out);
      } else {
        dequantize_row(op.type, op.table, place.inputs.token_ids[row], n, out);
      }
      if (place.inputs.adapter_slots != nullptr) {
        const auto& adapter = embeddings_[place.inputs.adapter_slots[row]];
        if (adapter != nullptr) adapter->apply(place.inputs.token_ids[row], out);
      }
      if (op.number != 1.0f) kernels.scale(out, op.number, n, out);
      break;
    case RowOp::Kind::rms_norm:
      for (int64_t i = 0; i < n; i += op.head_dim) kernels.rms_norm(x + i, op.weight, op.number, op.head_dim, out + i);
      break;
    case RowOp::Kind::layer_norm:
      for (int64_t i = 0; i < n; i += op.head_dim) {
        const int64_t at = i % op.weights;
        const float* bias = op.bias == nullptr ? nullptr : op.bias + at;
        kernels.layer_norm(x + i, op.weight + at, bias, op.number, op.head_dim, out + i);
      }
      break;
    case RowOp::Kind::positions:
      kernels.add(x, op.weight + place.inputs.positions[row] * n, n, out);
      break;
    case RowOp::Kind::scale:
      kernels.scale(x, op.number, n, out);
      break;
    case RowOp::Kind::activate:
      kernels.activate(x, op.activation, n, out);
      break;
    case RowOp::Kind::add:
      kernels.add(x, place.at(op.in[1], row), n, out);
      break;
    case RowOp::Kind::add_rms_norm:
      kernels.add(x, place.at(op.in[1], row), n, out);
      kernels.rms_norm(out, op.weight, op.number, n, place.at(op.out[1], row));
      break;
    case RowOp::Kind::rope: {
      const int64_t at = place.inputs.positions[row] * op.half;
      for (int64_t i = 0; i < n; i += op.head_dim)
        kernels.rope(x + i, op.cosines + at, op.sines + at, op.half, op.head_dim, op.interleaved, out + i);
      break;
    }
    case RowOp::Kind::rope_tails: {
      const int64_t at = place.inputs.positions[row] * op.half, kept = op.head_dim - 2 * op.half;
      for (int64_t i = 0; i < n; i += op.head_dim) {
        std::memcpy(out + i, x + i, kept * sizeof(float));
        kernels.rope(x + i + kept, op.cosines + at, op.sines + at, op.half, 2 * op.half, op.interleaved, out + i + kept);
      }
      break;
    }
    case RowOp::Kind::latent_row: {
      const int64_t at = place.inputs.positions[row] * op.half, rank = n - 2 * op.half;
      kernels.rms_norm(x, op.weight, op.number, rank, out);
      kernels.rope(x + rank, op.cosines + at, op.sines + at, op.half, 2 * op.half, op.interleaved, out + rank);
      break;
    }
    case RowOp::Kind::gated:
      kernels.gated(x, place.at(op.in[1], row), op.activation, n, out);
      break;
    case RowOp::Kind::gate_rows:
      kernels.scale(x, 1 / (1 + std::exp(-*place.at(op.in[1], row))), n, out);
      break;
    case RowOp::Kind::softcap:
      kernels.softcap(x, op.number, n, out);
      break;
    case RowOp::Kind::columns: {
      const Columns& columns = op.columns;
      for (int64_t i = 0; i < columns.slices; ++i)
        std::memcpy(out + i * columns.to_width + columns.to, x + i * columns.from_width + columns.from,
                    columns.count * sizeof(float));
      break;
    }
    case RowOp::Kind::gated_norm:
      gated_norm_row(x, place.at(op.in[1], row), n, op.gated_norm, out);
      break;
    case RowOp::Kind::select:
      std::memcpy(out, x + (place.narrow ? row : place.inputs.logit_rows[row]) * n, n * sizeof(float));
      break;
  }
}

void Program::run_product(Team& team, const Stage& stage, const Place& place, int rows, bool redundant,
                          bool adapted) {
  const Product& product = *stage.product;
  char* own = private_.get() + team.thread * thread_bytes_;
  char* activations = redundant ? own + aligned(private_floats_ * sizeof(float)) : activations_.get();
  char* scratch = scratch_of(team);
  const int64_t cols = width(stage.input);
  const float* x = place.at(stage.input, 0);
  const int tiles = product.num_tiles(rows);
  product.prefetch_tile(team.own_run(tiles), rows);
  if (redundant) {
    run_rows(stage, place, 0, rows);
    product.quantize(x, cols, 0, rows, rows, activations);
  } else {
    const int unit = product.row_block(rows);
    const int per_thread = (rows + 4 * team.size - 1) / (4 * team.size);
    const int block = (std::min(per_thread, 16) + unit - 1) / unit * unit;
    team.for_each((rows + block - 1) / block, 1, [&](int i) {
      const int begin = i * block, end = std::min(rows, begin + block);
      run_rows(stage, place, begin, end);
      product.quantize(x, cols, begin, end, rows, activations);
      for (int row = begin; adapted && row < end; ++row)
        adapter_workspace_.round_row(stage.adapters, adapter_rows(place, stage), row, x + row * cols);
    });
    team.barrier();
  }
  ProductOutput outputs[kMaxProductWeights];
  for (int i = 0; i < product.size(); ++i)
    outputs[i] = {stage.biases[i], place.at(stage.outputs[i], 0), width(stage.outputs[i])};
  if (!adapted) {
    team.for_runs(tiles, [&](int tile) { product.run_tile(tile, rows, activations, outputs, scratch); });
    return;
  }
  const AdapterRows& by_adapter = adapter_rows(place, stage);
  adapter_workspace_.shrink(stage.adapters, by_adapter, x, cols, team.thread, team.size);
  AdapterPrefetch ahead;
  AdapterWorkspace::ask_for_expand(stage.adapters, by_adapter, team.thread, team.size, ahead);
  for (int next = place.stage + 1; next < num_stages(); ++next) {
    if (!stages_[next].product) continue;
    const AdapterRows& of_next = stages_[next].head ? head_adapter_rows_ : by_adapter;
    AdapterWorkspace::ask_for_shrink(stages_[next].adapters, of_next, team.thread, team.size, ahead);
    break;
  }
  ahead.spread(tiles / team.size);
  team.for_runs(tiles, [&](int tile) {
    ahead.some();
    product.run_tile(tile, rows, activations, outputs, scratch);
  });
  team.barrier();
  adapter_workspace_.expand(stage.adapters, by_adapter, x, cols, outputs, team.thread, team.size);
}

void Program::run_experts(Team& team, const Stage& stage, const Place& place, int rows) {
  char* scratch = scratch_of(team);
  expert_workspace_.run(team, *stage.experts, place.at(stage.input, 0), place.at(stage.logits, 0), rows,
                        place.at(stage.outputs[0], 0), scratch);
}

void Program::run_exchange(const Stage& stage, const Place& place, int rows) {
  const float* x = place.at(stage.input, 0);
  float* out = place.at(stage.outputs[0], 0);
  const bool came = stage.widths.empty() ? stage.exchange->sum(x, rows * width(stage.input), out)
                                         : stage.exchange->gather(x, rows, stage.widths, out);
  if (!came) failed_ = true;
}

void HeadProduct::run(const float* x, int64_t ldx, float* out, int64_t ldo, int head, int rows) const {
  const FloatKernels& kernels = float_kernels();
  const float* matrix = weights + head * inputs * outputs;
  x += head * in_width, out += head * out_width;
  if (by_inputs) {
    for (int row = 0; row < rows; ++row) std::memset(out + row * ldo, 0, outputs * sizeof(float));
    kernels.accumulate(x, ldx, rows, matrix, outputs, static_cast<int>(inputs), outputs, out, ldo);
  } else {
    kernels.scores(x, ldx, rows, matrix, inputs, static_cast<int>(outputs), inputs, out, ldo);
  }
  for (int row = 0; copied > 0 && row < rows; ++row)
    std::memcpy(out + row * ldo + outputs, x + row * ldx + inputs, copied * sizeof(float));
}

void Program::run_head_product(Team& team, const Stage& stage, const Place& place, int rows, bool redundant) {
  if (redundant) {
    run_rows(stage, place, 0, rows);
  } else if (!stage.rows.empty()) {
    team.for_each(rows, 1, [&](int row) { run_rows(stage, place, row, row + 1); });
    team.barrier();
  }
  const int64_t ldx = width(stage.input), ldo = width(stage.outputs[0]);
  const float* x = place.at(stage.input, 0);
  float* out = place.at(stage.outputs[0], 0);
  const int block = 32, blocks = (rows + block - 1) / block;
  team.for_each(stage.heads.heads * blocks, 1, [&](int piece) {
    const int head = piece / blocks, begin = piece % blocks * block;
    stage.heads.run(x + begin * ldx, ldx, out + begin * ldo, ldo, head, std::min(block, rows - begin));
  });
}

void Program::run_attention(Team& team, const Stage& stage, const Place& place, int rows, bool redundant) {
  float* scratch = reinterpret_cast<float*>(scratch_of(team));
  const StepInputs& inputs = place.inputs;
  const int64_t* slots = inputs.slots[stage.group];
  const int64_t kv_width = width(stage.k);
  if (redundant) {
    run_rows(stage, place, 0, rows);
  } else {
    const int block = std::max(1, std::min(16, rows / (4 * team.size)));
    team.for_each((rows + block - 1) / block, 1, [&](int i) {
      const int begin = i * block, end = std::min(rows, begin + block);
      run_rows(stage, place, begin, end);
      for (int row = begin; row < end; ++row) {
        const float *k = place.at(stage.k, row), *v = place.at(stage.v, row);
        for (int head = 0; head < stage.shape.num_kv_heads; ++head)
          store_kv_head(stage.pages, head, slots[row], k + head * stage.shape.head_dim, v + head * stage.shape.head_dim);
      }
    });
    team.barrier();
  }
  AttentionRunner runner(*plans_[stage.plan].plan, inputs.batches[stage.group], stage.pages, stage.shape,
                         place.at(stage.q, 0), width(stage.q), place.at(stage.outputs[0], 0), width(stage.outputs[0]));
  if (redundant) runner.store_first(place.at(stage.k, 0), place.at(stage.v, 0), kv_width, slots);
  team.for_each(runner.num_pieces(), runner.piece_grain(team.size), [&](int piece) { runner.run(piece, scratch); });
}

}  // namespace tokenmill
