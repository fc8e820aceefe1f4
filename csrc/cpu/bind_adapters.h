// Packed adapters as Python holds them, and their place in a recorded program.
#pragma once

#include <memory>
#include <vector>

#include "adapters.h"
#include "bind_program.h"

namespace tokenmill {

struct PackedAdapter {
  std::shared_ptr<const ProductAdapter> adapter;
  std::vector<int64_t> outputs;
};

struct PackedEmbedding {
  std::shared_ptr<const EmbeddingAdapter> adapter;
  int64_t vocabulary = 0;
};

void set_adapter(RecordedProgram& self, int product, int slot, const PackedAdapter* packed);
void set_embedding(RecordedProgram& self, int slot, const PackedEmbedding* packed);

}  // namespace tokenmill
