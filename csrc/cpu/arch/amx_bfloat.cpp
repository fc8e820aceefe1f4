// Products of BF16 tiles by AMX. Called through linear_plain.cpp only, on CPUs that have it.
#include "bfloat_tiles_impl.h"

namespace tokenmill {

const BfloatTiles& amx_bfloat_tiles() {
  static const BfloatTiles tiles = {"amx", split_row, multiply_bfloat_tiles};
  return tiles;
}

}  // namespace tokenmill
