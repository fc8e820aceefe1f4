// The tile instructions of AMX, with the number of a tile as a template argument.
//
// gcc's intrinsics want it as a literal and do not say which memory they read. Eight tiles of at most 16 rows of 64
// bytes; a thread sets their shapes before it uses them. Included by amx_kernels.cpp and bfloat_tiles_impl.h.
#pragma once

#include <cstdint>

#include "../linear_panel.h"

namespace tokenmill {
namespace {

// The operand of ldtilecfg.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "as the processor reads it");

}  // namespace
}  // namespace tokenmill

#if defined(TOKENMILL_EMULATED_TILES)
#include "../test/emulated_tiles.h"
#else

namespace tokenmill {
namespace {

TM_INLINE void configure_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg (%0)" : : "r"(&shapes) : "memory"); }
// A thread that holds tiles costs more to switch away from: release them after the last product.
TM_INLINE void release_tiles() { asm volatile("tilerelease" : : : "memory"); }

template <int Tile>
TM_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
template <int Tile>
TM_INLINE void load_tile(const void* first_row, int64_t pitch) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(first_row), "r"(pitch), "i"(Tile) : "memory");
}
template <int Tile>
TM_INLINE void store_tile(void* first_row, int64_t pitch) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(first_row), "r"(pitch), "i"(Tile) : "memory");
}
// sums[m][n] += rows[m][4 k + i] * weights[k][4 n + i], signed bytes to int32.
template <int Sums, int Rows, int Weights>
TM_INLINE void dot_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Weights));
}
// sums[m][n] += rows[m][2 k + i] * weights[k][2 n + i], bfloat16 to float32; subnormals count as 0.
template <int Sums, int Rows, int Weights>
TM_INLINE void dot_bfloat_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Weights));
}

}  // namespace
}  // namespace tokenmill

#endif
