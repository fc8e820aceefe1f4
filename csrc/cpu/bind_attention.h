// KV pages as they come from Python; shared by the eager binding and the recorder.
#pragma once

#include "attention.h"
#include "bind.h"

namespace tokenmill {

KVPages pages_of(const AnyTensor& k, const AnyTensor& v);
void check_batch(const AttentionBatch& batch, int64_t tokens, int page_size, int64_t num_pages);

}  // namespace tokenmill
