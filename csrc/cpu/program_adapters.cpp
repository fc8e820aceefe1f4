// Adapters of a Program: which products have them, and which rows of a step. See program.h and adapters.h.
#include <algorithm>

#include "program.h"

namespace tokenmill {

void Program::hold_adapters(int num_slots) {
  int64_t inputs = 0;
  for (Stage& stage : stages_) {
    if (!stage.product) continue;
    stage.adapters.assign(num_slots + 1, nullptr);
    inputs = std::max(inputs, width(stage.input));
  }
  embeddings_.assign(num_slots + 1, nullptr);
  adapter_workspace_.reserve(max_tokens_, inputs);
  adapter_rows_.reserve(max_tokens_);
  head_adapter_rows_.reserve(max_tokens_);
}

void Program::set_adapter(int product, int slot, std::shared_ptr<const ProductAdapter> adapter) {
  if (adapter != nullptr) adapter_workspace_.take(*adapter);
  for (Stage& stage : stages_)
    if (stage.number == product) stage.adapters[slot] = std::move(adapter);
}

void Program::set_embedding(int slot, std::shared_ptr<const EmbeddingAdapter> adapter) {
  embeddings_[slot] = std::move(adapter);
}

bool Program::has_product(int product, int64_t inputs, const std::vector<int64_t>& outputs) const {
  for (const Stage& stage : stages_) {
    if (stage.number != product || !stage.product) continue;
    if (width(stage.input) != inputs || stage.outputs.size() != outputs.size()) return false;
    for (size_t i = 0; i < outputs.size(); ++i)
      if (width(stage.outputs[i]) != outputs[i]) return false;
    return true;
  }
  return false;
}

void Program::begin_adapters(const StepInputs& inputs) {
  if (inputs.adapter_slots == nullptr) return;
  adapter_rows_.build(inputs.adapter_slots, nullptr, inputs.num_tokens);
  head_adapter_rows_.build(inputs.adapter_slots, inputs.logit_rows, inputs.num_logit_rows);
}

bool Program::adapts(const Stage& stage, bool narrowed, const StepInputs& inputs) const {
  if (inputs.adapter_slots == nullptr || !stage.product) return false;
  return AdapterWorkspace::any(stage.adapters, stage.head || narrowed ? head_adapter_rows_ : adapter_rows_);
}

}  // namespace tokenmill
