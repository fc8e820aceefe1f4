// KV rows: every format reads back what it wrote within its step, a rotation undoes itself, and attention over coded
// pages equals attention over the same rows expanded beforehand.
#include "kv_rows.h"

#include "check.h"
#include "plain_pages.h"
#include "pool.h"

using namespace tokenmill;

namespace {

std::shared_ptr<Rotation> rotation_of(int power, int rest) {
  auto rotation = std::make_shared<Rotation>();
  rotation->power = power;
  rotation->rest = rest;
  for (int i = 0; i < power * rest; ++i) rotation->signs.push_back(i * 7 % 3 == 0 ? -1.0f : 1.0f);
  const double angle = 0.7;  // any orthonormal matrix that is not symmetric
  if (rest == 2)
    rotation->matrix = {float(std::cos(angle)), float(-std::sin(angle)), float(std::sin(angle)), float(std::cos(angle))};
  return rotation;
}

std::shared_ptr<RowFormat> format_of(RowKind kind, int dim, int bits, int scale_bytes) {
  auto format = std::make_shared<RowFormat>();
  format->kind = kind;
  format->head_dim = dim;
  format->bits = bits;
  format->scale_bytes = scale_bytes;
  if (kind == RowKind::codebook) {
    const int levels = 1 << bits;
    for (int i = 0; i < 16; ++i) format->centroids.push_back(i < levels ? (i - (levels - 1) * 0.5f) * 6.0f / levels : 0);
    for (int i = 0; i + 1 < levels; ++i)
      format->bounds.push_back((format->centroids[i] + format->centroids[i + 1]) / 2);
  }
  return format;
}

void round_trip(const RowFormat& format, double tolerance) {
  const int n = format.head_dim;
  const std::vector<float> x = random_floats(3 * n, 5);
  // Rows may lie apart, and those of bytes anywhere.
  const bool plain = format.kind == RowKind::float32 || format.kind == RowKind::float16 || format.kind == RowKind::bfloat16;
  const int64_t stride = format.row_bytes() + (plain ? 4 : 3);
  std::vector<uint8_t> rows(3 * stride);
  std::vector<float> back(3 * n);
  for (int row = 0; row < 3; ++row) format.encode(&x[row * n], 0, &rows[row * stride]);
  format.decode(rows.data(), stride, 3, 0, back.data());
  for (int row = 0; row < 3; ++row) {
    if (format.rotation != nullptr) format.rotation->turn_back(&back[row * n]);
    double error = 0, norm = 0;
    for (int i = 0; i < n; ++i) {
      error += std::pow(x[row * n + i] - back[row * n + i], 2);
      norm += std::pow(x[row * n + i], 2);
    }
    CHECK(std::sqrt(error / norm) < tolerance);
  }
}

void not_a_number(RowFormat format) {
  std::vector<float> x(format.head_dim, 0.5f), back(format.head_dim);
  x[3] = NAN;
  std::vector<uint8_t> row(format.row_bytes());
  format.encode(x.data(), 0, row.data());
  format.decode(row.data(), format.row_bytes(), 1, 0, back.data());
  CHECK(std::isnan(back[3]));
}

void attention(std::shared_ptr<const RowFormat> format, int threads) {
  constexpr int heads = 6, kv_heads = 2, page_size = 8, num_pages = 40, tokens = 3;
  const int dim = format->head_dim;
  const int64_t row = format->row_bytes(), width = heads * dim;
  std::vector<uint8_t> coded[2];
  std::vector<float> plain[2];
  for (int side = 0; side < 2; ++side) {
    const int rows = num_pages * kv_heads * page_size;
    const std::vector<float> x = random_floats(size_t(rows) * dim, 11 + side);
    coded[side].resize(rows * row);
    plain[side].resize(size_t(rows) * dim);
    for (int i = 0; i < rows; ++i) {
      format->encode(&x[size_t(i) * dim], 0, &coded[side][i * row]);
      format->decode(&coded[side][i * row], row, 1, 0, &plain[side][size_t(i) * dim]);
      if (format->rotation != nullptr) format->rotation->turn_back(&plain[side][size_t(i) * dim]);
    }
  }
  const auto side = [&](std::vector<uint8_t>& data) {
    return KVSide{data.data(), format, row * page_size * kv_heads, row * page_size, row};
  };
  const KVPages packed{side(coded[0]), side(coded[1]), kv_heads, page_size, dim};
  const KVPages expanded = plain_pages(plain[0].data(), plain[1].data(), kv_heads, page_size, dim);
  const std::vector<int32_t> starts = {0, 1, 3}, lengths = {300, 11};
  std::vector<int32_t> table(2 * num_pages, -1);
  for (int i = 0; i < 38; ++i) table[i] = i;
  table[num_pages] = 38, table[num_pages + 1] = 39;
  const AttentionBatch batch{2, starts.data(), lengths.data(), table.data(), num_pages};
  const AttentionShape shape{heads, kv_heads, dim, 0.2f, 0, 0.0f};
  const std::vector<float> q = random_floats(tokens * width, 3);
  std::vector<float> out[2];
  for (int which = 0; which < 2; ++which) {
    out[which].resize(tokens * width);
    AttentionPlan plan(tokens, 2, heads, kv_heads, dim);
    plan.build(batch, page_size, 0);
    const AttentionRunner runner(plan, batch, which ? expanded : packed, shape, q.data(), width, out[which].data(), width);
    ThreadPool pool(threads);
    pool.run([&](Team& team) {
      std::vector<float> scratch(AttentionRunner::scratch_floats(heads, kv_heads, dim));
      team.for_each(runner.num_pieces(), 1, [&](int piece) { runner.run(piece, scratch.data()); });
    });
  }
  const double tolerance = format->kind == RowKind::float16 ? 1e-2 : 1e-4;  // halves may be multiplied as such
  for (size_t i = 0; i < out[0].size(); ++i) CHECK(near(out[0][i], out[1][i], tolerance));
}

}  // namespace

int main() {
  for (const int dim : {16, 48, 64, 256}) {
    const struct {
      RowKind kind;
      int bits, scale_bytes;
      double tolerance;
    } cases[] = {
        {RowKind::float32, 32, 0, 1e-9},     {RowKind::float16, 16, 0, 1e-3},    {RowKind::bfloat16, 16, 0, 5e-3},
        {RowKind::float8_e4m3, 8, 0, 0.04},  {RowKind::float8_e4m3, 8, 4, 0.04}, {RowKind::float8_e5m2, 8, 0, 0.08},
        {RowKind::int8, 8, 2, 0.015},        {RowKind::int8, 8, 4, 0.015},       {RowKind::hidden_zero, 4, 0, 0.2},
        {RowKind::paired_zero, 4, 0, 0.2},
        {RowKind::uniform, 4, 0, 0.2},       {RowKind::uniform, 3, 0, 0.4},      {RowKind::codebook, 4, 0, 0.2},
        {RowKind::codebook, 3, 0, 0.4},      {RowKind::codebook, 2, 0, 0.8},
    };
    for (const auto& each : cases) {
      auto format = format_of(each.kind, dim, each.bits, each.scale_bytes);
      round_trip(*format, each.tolerance);
      if (!format->is_plain()) not_a_number(*format);
      if (each.bits < 8) {
        if (dim != 48) format->rotation = rotation_of(dim, 1);
        round_trip(*format, each.tolerance);
      }
      for (int threads : {1, 3}) attention(format, threads);
    }
  }
  auto rotated = format_of(RowKind::codebook, 64, 4, 0);
  rotated->rotation = rotation_of(32, 2);
  round_trip(*rotated, 0.2);
  attention(rotated, 2);
  return report("kv_rows_test");
}
