// The recorded program as Python holds it, and the calls that run steps of it.
#pragma once

#include <memory>
#include <vector>

#include "bind.h"
#include "program.h"

namespace tokenmill {

// What the C++ side needs to check a step against: collected while recording.
struct RecordedProgram {
  RecordedProgram(int max_tokens, int max_sequences, std::shared_ptr<ThreadPool> pool)
      : program(max_tokens, max_sequences, std::move(pool)) {}

  Program program;
  int64_t vocabulary = 0;  // rows of the embedding table
  int64_t positions = INT64_MAX;  // rows of the shortest table of positions, rotary or learned
  int64_t num_pages = INT64_MAX;
  int page_size = 1;
  int num_groups = 0;  // 0: no attention
  bool has_states = false;
  int64_t num_state_slots = INT64_MAX;
  int64_t logits_width = 0;
};

// Page ids of each sequence.
using Tables = std::vector<std::vector<int32_t>>;

std::vector<std::vector<int64_t>> decode_steps(RecordedProgram& self, std::vector<int64_t> token_ids,
                                               std::vector<int64_t> positions, const std::vector<Tables>& tables,
                                               uintptr_t logits, int steps,
                                               const std::vector<std::vector<int64_t>>& stops,
                                               const std::vector<int64_t>& state_slots,
                                               const std::vector<int32_t>& adapter_slots);

bool run_step(RecordedProgram& self, int num_tokens, int num_sequences, uintptr_t token_ids, uintptr_t positions,
              uintptr_t query_starts, uintptr_t seq_lens, const std::vector<uintptr_t>& slots,
              const std::vector<uintptr_t>& block_tables, const std::vector<int64_t>& table_widths, int num_logit_rows,
              uintptr_t logit_rows, uintptr_t logits, bool body, bool head, bool all_hidden, uintptr_t ancestors,
              uintptr_t state_slots, const std::vector<int>& drafted, uintptr_t adapter_slots);

void settle_drafts(RecordedProgram& self, const std::vector<int>& kept);

}  // namespace tokenmill
