// Steps of a recorded program for Python: inputs are checked, then the program runs without the GIL.
#include <algorithm>

#include "bind_attention.h"
#include "bind_program.h"
#include "sampling.h"

namespace tokenmill {
namespace {

void check_range(const int64_t* values, int64_t count, int64_t limit, const char* message) {
  for (int64_t i = 0; i < count; ++i) require(values[i] >= 0 && values[i] < limit, message);
}

// The states that each sequence continues; checked like the rest, since a wrong slot is someone else's memory.
void set_states(const RecordedProgram& self, StepInputs& inputs, int count, const int32_t* starts,
                const int64_t* state_slots, const std::vector<int>& drafted) {
  if (!self.has_states) return;
  require(state_slots != nullptr && starts[0] == 0 && starts[count] == inputs.num_tokens,
          "recurrent layers need a state slot for each sequence");
  for (int i = 0; i < count; ++i) require(starts[i] <= starts[i + 1], "query starts must not fall");
  check_range(state_slots, count, self.num_state_slots, "no such state slot");
  for (size_t i = 0; i < drafted.size(); ++i)
    require(drafted[i] > (i == 0 ? -1 : drafted[i - 1]) && drafted[i] < count, "no such drafted sequence");
  inputs.num_sequences = count;
  inputs.starts = starts;
  inputs.state_slots = state_slots;
  inputs.drafted = drafted;
}

void set_adapters(const RecordedProgram& self, StepInputs& inputs, const int32_t* slots) {
  if (slots == nullptr) return;
  for (int i = 0; i < inputs.num_tokens; ++i)
    require(slots[i] >= 0 && slots[i] <= self.program.num_adapter_slots(), "no such adapter slot");
  inputs.adapter_slots = slots;
}

}  // namespace

// A step in which every sequence brings one token and wants its logits: most steps, and short enough that the caller's
// bookkeeping shows. Plain lists come in, the index of each row's largest logit goes out.
//
// With more than one step, each goes on from the largest logits of the one before, until a sequence has drawn one of
// its `stops`; one list for each step that was computed. The tables have the pages of them all.
std::vector<std::vector<int64_t>> decode_steps(RecordedProgram& self, std::vector<int64_t> token_ids,
                                               std::vector<int64_t> positions, const std::vector<Tables>& tables,
                                               uintptr_t logits, int steps,
                                               const std::vector<std::vector<int64_t>>& stops,
                                               const std::vector<int64_t>& state_slots,
                                               const std::vector<int32_t>& adapter_slots) {
  const size_t count = token_ids.size();
  require(count > 0 && count <= size_t(self.program.max_sequences()), "more sequences than recorded for");
  const size_t num_groups = self.num_groups;
  require(positions.size() == count && (num_groups == 0 || tables.size() == num_groups),
          "one position and table per sequence");
  require(!self.has_states || state_slots.size() == count, "one state slot per sequence");
  require(steps == 1 || (steps > 1 && stops.size() == count), "one list of stops per sequence");
  std::vector<int64_t> rows(count);
  std::vector<int32_t> starts(count + 1), lengths(count);
  for (size_t i = 0; i < count; ++i) {
    rows[i] = int64_t(i);
    starts[i + 1] = int32_t(i + 1);
    lengths[i] = int32_t(positions[i] + steps);
  }
  check_range(token_ids.data(), int64_t(count), self.vocabulary, "a token id is outside the vocabulary");
  check_range(positions.data(), int64_t(count), self.positions - (steps - 1), "a position is outside the rotary table");
  StepInputs inputs;
  inputs.num_tokens = inputs.num_logit_rows = int(count);
  inputs.token_ids = token_ids.data();
  inputs.positions = positions.data();
  inputs.logit_rows = rows.data();
  inputs.logits = reinterpret_cast<float*>(logits);
  set_states(self, inputs, int(count), starts.data(), state_slots.data(), {});
  require(adapter_slots.empty() || adapter_slots.size() == count, "one adapter slot per sequence");
  set_adapters(self, inputs, adapter_slots.empty() ? nullptr : adapter_slots.data());
  std::vector<std::vector<int64_t>> slots(num_groups, std::vector<int64_t>(count));
  std::vector<std::vector<int32_t>> padded(num_groups);
  for (size_t group = 0; group < num_groups; ++group) {
    require(tables[group].size() == count, "one table per sequence");
    size_t width = 0;
    for (const auto& table : tables[group]) width = std::max(width, table.size());
    padded[group].assign(width * count, -1);
    for (size_t i = 0; i < count; ++i) {
      const auto& table = tables[group][i];
      require(size_t((lengths[i] - 1) / self.page_size) < table.size(), "a position has no page");
      std::copy(table.begin(), table.end(), padded[group].begin() + i * width);
    }
    inputs.slots.push_back(slots[group].data());
    inputs.batches.push_back({int(count), starts.data(), lengths.data(), padded[group].data(), int64_t(width)});
    check_batch(inputs.batches.back(), int(count), self.page_size, self.num_pages);
  }
  std::vector<std::vector<int64_t>> best;
  nb::gil_scoped_release release;
  bool stopped = false;
  while (!stopped && int(best.size()) < steps) {
    for (size_t i = 0; i < count; ++i) lengths[i] = int32_t(positions[i] + 1);
    for (size_t group = 0; group < num_groups; ++group) {
      for (size_t i = 0; i < count; ++i) {
        const int64_t page = tables[group][i][positions[i] / self.page_size];
        slots[group][i] = page * self.page_size + positions[i] % self.page_size;
      }
      check_range(slots[group].data(), int64_t(count), self.num_pages * self.page_size, "no such KV slot");
    }
    require(self.program.run(inputs), "a program that exchanges takes whole steps only");
    best.emplace_back(count);
    self.program.pool().for_each(int(count), 1, [&](int row) {
      best.back()[row] = argmax(inputs.logits + row * self.logits_width, self.logits_width);
    });
    for (size_t i = 0; i < count; ++i) {
      token_ids[i] = best.back()[i];
      ++positions[i];
      stopped = stopped || (steps > 1 && std::count(stops[i].begin(), stops[i].end(), token_ids[i]) > 0);
    }
  }
  return best;
}

// Inputs come as addresses: turning a dozen torch tensors into ndarrays costs more than many a step's Python. The caller
// (executors/recorded.py) vouches for types and lengths; the contents are checked here. False: see Program::run.
bool run_step(RecordedProgram& self, int num_tokens, int num_sequences, uintptr_t token_ids, uintptr_t positions,
              uintptr_t query_starts, uintptr_t seq_lens, const std::vector<uintptr_t>& slots,
              const std::vector<uintptr_t>& block_tables, const std::vector<int64_t>& table_widths, int num_logit_rows,
              uintptr_t logit_rows, uintptr_t logits, bool body, bool head, bool all_hidden, uintptr_t ancestors,
              uintptr_t state_slots, const std::vector<int>& drafted, uintptr_t adapter_slots) {
  StepInputs inputs;
  inputs.num_tokens = num_tokens;
  inputs.token_ids = reinterpret_cast<const int64_t*>(token_ids);
  inputs.positions = reinterpret_cast<const int64_t*>(positions);
  inputs.num_logit_rows = num_logit_rows;
  inputs.logit_rows = reinterpret_cast<const int64_t*>(logit_rows);
  inputs.logits = reinterpret_cast<float*>(logits);
  inputs.body = body;
  inputs.head = head;
  inputs.all_hidden = all_hidden;
  require(num_tokens > 0 && num_tokens <= self.program.max_tokens(), "more tokens than recorded for");
  require(num_sequences > 0 && num_sequences <= self.program.max_sequences(), "more sequences than recorded for");
  require(num_logit_rows <= self.program.max_tokens(), "more logit rows than recorded for");
  const size_t num_groups = self.num_groups;
  require((num_groups == 0 || slots.size() == num_groups) && block_tables.size() == slots.size() &&
              table_widths.size() == slots.size(),
          "one slot list and one block table per KV group");
  set_states(self, inputs, num_sequences, reinterpret_cast<const int32_t*>(query_starts),
             reinterpret_cast<const int64_t*>(state_slots), drafted);
  set_adapters(self, inputs, reinterpret_cast<const int32_t*>(adapter_slots));
  check_range(inputs.token_ids, num_tokens, self.vocabulary, "a token id is outside the vocabulary");
  check_range(inputs.positions, num_tokens, self.positions, "a position is outside the rotary table");
  check_range(inputs.logit_rows, num_logit_rows, num_tokens, "no such logit row");
  for (size_t group = 0; group < num_groups; ++group) {
    const int64_t* own_slots = reinterpret_cast<const int64_t*>(slots[group]);
    check_range(own_slots, num_tokens, self.num_pages * self.page_size, "no such KV slot");
    inputs.slots.push_back(own_slots);
    inputs.batches.push_back({num_sequences, reinterpret_cast<const int32_t*>(query_starts),
                              reinterpret_cast<const int32_t*>(seq_lens),
                              reinterpret_cast<const int32_t*>(block_tables[group]), table_widths[group],
                              reinterpret_cast<const uint64_t*>(ancestors)});
    check_batch(inputs.batches.back(), num_tokens, self.page_size, self.num_pages);
  }
  nb::gil_scoped_release release;
  return self.program.run(inputs);
}

// Nothing to do after a step that went through `decode_steps`: it has no drafts.
void settle_drafts(RecordedProgram& self, const std::vector<int>& kept) {
  Program& program = self.program;
  if (program.num_drafted() == 0) return;
  require(int(kept.size()) == program.num_drafted(), "one count for each drafted sequence");
  for (size_t i = 0; i < kept.size(); ++i)
    require(kept[i] >= 0 && kept[i] <= program.num_drafted_rows(int(i)), "more rows are kept than were computed");
  nb::gil_scoped_release release;
  program.settle(kept);
}

}  // namespace tokenmill
