// The recurrent ops of a Program: recording, replaying, and what is kept of drafted rows. See program.h.
//
// A rejected token cannot be cut out of a state. In a step with drafts, the states of drafted sequences are continued in
// scratch memory and forgotten; the inputs of each op in these rows are kept. Once it is known how many rows hold, the
// ops run over just those, on the states themselves.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace tokenmill {

std::vector<int> Program::split(int x, const std::vector<int64_t>& widths, int64_t heads) {
  std::vector<int> parts;
  int64_t from = 0;
  for (int64_t width_of_part : widths) {
    RowOp& op = row_op(RowOp::Kind::columns);
    op.in[0] = x;
    op.columns = {heads, width_of_part, from, width(x) / heads, 0, width_of_part};
    use(x);
    parts.push_back(op.out[0] = make_value(heads * width_of_part));
    from += width_of_part;
  }
  return parts;
}

int Program::join(const std::vector<int>& values) {
  int64_t total = 0, to = 0;
  for (int value : values) total += width(value);
  open_stage();
  const int out = make_value(total);
  for (int value : values) {
    RowOp& op = row_op(RowOp::Kind::columns);
    op.in[0] = value;
    op.columns = {1, width(value), 0, width(value), to, total};
    op.out[0] = out;
    use(value);
    to += width(value);
  }
  return out;
}

int Program::gated_norm(int x, int gate, const GatedNorm& norm) {
  RowOp& op = row_op(RowOp::Kind::gated_norm);
  op.in[0] = x;
  op.in[1] = gate;
  op.gated_norm = norm;
  use(x), use(gate);
  return op.out[0] = make_value(width(x));
}

int Program::recurrence(const std::vector<int>& inputs, std::shared_ptr<const Recurrence> op, float* states) {
  Stage& stage = open_stage();
  for (int input : inputs) use(input);
  stage.inputs = inputs;
  stage.states = states;
  stage.outputs.push_back(make_value(op->out_width()));
  stage.recurrence = std::move(op);
  open_ = false;
  return stage.outputs[0];
}

// Memory for what `settle` will read, before the threads start.
void Program::begin_drafts(const StepInputs& inputs) {
  drafted_.clear();
  draft_of_.assign(inputs.num_sequences, -1);
  int32_t rows = 0;
  for (int sequence : inputs.drafted) {
    const int32_t count = inputs.starts[sequence + 1] - inputs.starts[sequence];
    draft_of_[sequence] = static_cast<int>(drafted_.size());
    drafted_.push_back({inputs.state_slots[sequence], rows, rows + count});
    rows += count;
  }
  for (Stage& stage : stages_) {
    int64_t floats = 0;
    for (int input : stage.inputs) floats += width(input);
    stage.drafts.resize(rows * floats);
  }
}

void Program::keep_inputs(Stage& stage, const float* const* inputs, int32_t first, const Drafted& drafted) const {
  float* to = stage.drafts.data();
  for (size_t i = 0; i < stage.inputs.size(); ++i) {
    const int64_t floats = width(stage.inputs[i]);
    std::memcpy(to + drafted.begin * floats, inputs[i] + first * floats,
                (drafted.end - drafted.begin) * floats * sizeof(float));
    to += drafted_.back().end * floats;
  }
}

void Program::run_recurrence(Team& team, Stage& stage, const Place& place, int rows, bool redundant) {
  float* scratch = reinterpret_cast<float*>(scratch_of(team));
  if (redundant) {
    run_rows(stage, place, 0, rows);
  } else if (!stage.rows.empty()) {
    team.for_each(rows, 1, [&](int row) { run_rows(stage, place, row, row + 1); });
    team.barrier();
  }
  const StepInputs& step = place.inputs;
  const Recurrence& op = *stage.recurrence;
  const float* inputs[kMaxRecurrentInputs];
  for (size_t i = 0; i < stage.inputs.size(); ++i) inputs[i] = place.at(stage.inputs[i], 0);
  float* out = place.at(stage.outputs[0], 0);
  const int parts = static_cast<int>(op.num_parts());
  team.for_each(step.num_sequences * parts, 1, [&](int piece) {
    const int sequence = piece / parts, draft = draft_of_[sequence], part = piece % parts;
    if (draft >= 0 && part == 0) keep_inputs(stage, inputs, step.starts[sequence], drafted_[draft]);
    op.run({inputs, step.starts[sequence], step.starts[sequence + 1], out}, part,
           stage.states + step.state_slots[sequence] * op.state_floats(), draft < 0, scratch);
  });
}

void Program::settle(const std::vector<int>& kept) {
  if (drafted_.empty()) return;
  const int32_t rows = drafted_.back().end;
  pool_->run([&](Team& team) {
    float* scratch = reinterpret_cast<float*>(scratch_of(team));
    for (Stage& stage : stages_) {
      if (!stage.recurrence) continue;
      const Recurrence& op = *stage.recurrence;
      const float* inputs[kMaxRecurrentInputs];
      const float* at = stage.drafts.data();
      for (size_t i = 0; i < stage.inputs.size(); ++i) {
        inputs[i] = at;
        at += rows * width(stage.inputs[i]);
      }
      const int parts = static_cast<int>(op.num_parts());
      team.for_each(static_cast<int>(drafted_.size()) * parts, 1, [&](int piece) {
        const Drafted& drafted = drafted_[piece / parts];
        op.run({inputs, drafted.begin, drafted.begin + kept[piece / parts], nullptr}, piece % parts,
               stage.states + drafted.slot * op.state_floats(), true, scratch);
      });
      team.barrier();  // one loop between two barriers
    }
  });
  drafted_.clear();
}

}  // namespace tokenmill
