// KV pages as they come from Python; shared by the eager binding and the recorder.
#pragma once

#include "attention.h"
#include "bind.h"

namespace tokenmill {

struct BoundPages {
  KVPages pages;
  int64_t num_pages = 0;
};

// Without formats the tensors hold plain floats.
BoundPages pages_of(const AnyTensor& k, const AnyTensor& v, std::shared_ptr<const RowFormat> k_rows,
                    std::shared_ptr<const RowFormat> v_rows);
void check_batch(const AttentionBatch& batch, int64_t tokens, int page_size, int64_t num_pages);

}  // namespace tokenmill
