// The tile instructions in plain C++, for machines without them. Included by arch/amx_tiles.h where a test defines
// TOKENMILL_EMULATED_TILES.
//
// Shapes are checked as the processor checks them; a tile that is read past its shape is an error here as there.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace tokenmill {
namespace {

struct EmulatedTile {
  alignas(64) uint8_t bytes[16][64];
  int rows, row_bytes;
};
thread_local EmulatedTile emulated[8];
thread_local bool configured_tiles = false;

inline void expect(bool right, const char* what) {
  if (right) return;
  std::printf("emulated tiles: %s\n", what);
  std::abort();
}

inline void configure_tiles(const TileShapes& shapes) {
  expect(shapes.palette == 1 && shapes.start_row == 0, "palette");
  for (int i = 0; i < 8; ++i) {
    expect(shapes.rows[i] <= 16 && shapes.row_bytes[i] <= 64, "shape");
    expect((shapes.rows[i] == 0) == (shapes.row_bytes[i] == 0), "one of rows and bytes is 0");
    std::memset(&emulated[i], 0, sizeof(emulated[i]));
    emulated[i].rows = shapes.rows[i];
    emulated[i].row_bytes = shapes.row_bytes[i];
  }
  configured_tiles = true;
}
inline void release_tiles() { configured_tiles = false; }

template <int Tile>
void zero_tile() {
  expect(configured_tiles && emulated[Tile].rows > 0, "not configured");
  std::memset(emulated[Tile].bytes, 0, sizeof(emulated[Tile].bytes));
}
template <int Tile>
void load_tile(const void* first_row, int64_t pitch) {
  zero_tile<Tile>();
  for (int row = 0; row < emulated[Tile].rows; ++row)
    std::memcpy(emulated[Tile].bytes[row], static_cast<const char*>(first_row) + row * pitch,
                size_t(emulated[Tile].row_bytes));
}
template <int Tile>
void store_tile(void* first_row, int64_t pitch) {
  expect(configured_tiles && emulated[Tile].rows > 0, "not configured");
  for (int row = 0; row < emulated[Tile].rows; ++row)
    std::memcpy(static_cast<char*>(first_row) + row * pitch, emulated[Tile].bytes[row],
                size_t(emulated[Tile].row_bytes));
}

inline float emulated_value(const EmulatedTile& tile, int row, int index) {
  uint16_t word;
  std::memcpy(&word, tile.bytes[row] + 2 * index, 2);
  const uint32_t bits = uint32_t(word & 0x7f80 ? word : word & 0x8000) << 16;  // subnormals count as 0
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// sums[m][n] += rows[m][2 k + i] * weights[k][2 n + i]. The processor may round the sum of a pair in another order.
template <int Sums, int Rows, int Weights>
void dot_bfloat_tiles() {
  EmulatedTile &c = emulated[Sums], &a = emulated[Rows], &b = emulated[Weights];
  expect(configured_tiles && a.rows == c.rows && b.row_bytes == c.row_bytes && a.row_bytes == 4 * b.rows,
         "shapes of a product");
  for (int m = 0; m < c.rows; ++m)
    for (int k = 0; k < a.row_bytes / 4; ++k)
      for (int n = 0; n < c.row_bytes / 4; ++n) {
        float sum;
        std::memcpy(&sum, c.bytes[m] + 4 * n, 4);
        for (int i = 0; i < 2; ++i) sum += emulated_value(a, m, 2 * k + i) * emulated_value(b, k, 2 * n + i);
        std::memcpy(c.bytes[m] + 4 * n, &sum, 4);
      }
}

}  // namespace
}  // namespace tokenmill
