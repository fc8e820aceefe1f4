// Pages of float32 over plain vectors, for tests.
#pragma once

#include "attention.h"

inline tokenmill::KVPages plain_pages(float* k, float* v, int kv_heads, int page_size, int dim) {
  auto format = std::make_shared<tokenmill::RowFormat>();
  format->head_dim = dim;
  const int64_t row = format->row_bytes();
  const auto side = [&](float* data) {
    return tokenmill::KVSide{reinterpret_cast<uint8_t*>(data), format, row * page_size * kv_heads, row * page_size, row};
  };
  return {side(k), side(v), kv_heads, page_size, dim};
}
