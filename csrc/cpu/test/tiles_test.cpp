// Products of float weights that need instructions this machine may lack: tiles of bfloat16 emulated, panels as wide as
// those of AVX-512 in plain vectors. Index arithmetic, shapes of tiles, odd sizes; the instructions themselves are
// linear_test's, where the machine has them.
#define TOKENMILL_EMULATED_TILES
#define TOKENMILL_PANEL_LANES 16
#include <limits>

#include "../arch/bfloat_tiles_impl.h"
#include "../float_panels_impl.h"
#include "check.h"
#include "float_linear_testing.h"

using namespace tokenmill;

namespace {

#ifdef TOKENMILL_SANITIZED
constexpr int kMostRows = 20;
#else
constexpr int kMostRows = 70;
#endif

const BfloatTiles kEmulated = {"emulated", split_row, multiply_bfloat_tiles};

void expect_right(const std::string& wrong) {
  if (!wrong.empty()) std::printf("%s\n", wrong.c_str());
  CHECK(wrong.empty());
}

void odd_shapes() {
  std::mt19937 random(11);
  for (const FloatShape& shape : float_shapes()) {
    const auto tiles = [&](const QuantFormat&) { return make_bfloat_tiles(shape.rows, shape.cols, kEmulated); };
    expect_right(check_float_linear("BF16", shape, tiles, kMostRows, random));
    const auto panels = [&](const QuantFormat& format) {
      return make_float_panels(format, shape.rows, shape.cols, kFloatPanels);
    };
    for (const char* type : {"F32", "F16", "BF16"})
      expect_right(check_float_linear(type, shape, panels, kMostRows, random));
  }
}

// More rows and outputs than one piece of work has, each size of piece.
void several_pieces() {
  std::mt19937 random(12);
  const int64_t rows = 161, cols = 40;
  std::vector<uint16_t> words(size_t(rows * cols));
  std::normal_distribution<float> normal;
  for (uint16_t& word : words) word = float_to_bfloat(normal(random));
  const auto linear = make_bfloat_tiles(rows, cols, kEmulated);
  linear->pack_rows(words.data(), 0, rows);
  std::vector<float> x(size_t(300 * cols)), singles(size_t(300 * rows)), y;
  for (float& v : x) v = normal(random);
  for (int t = 0; t < 300; ++t)
    run_linear(*linear, &x[size_t(t * cols)], 1, nullptr, &singles[size_t(t * rows)], 1);
  for (int m : {63, 64, 128, 129, 255, 256, 300}) {
    CHECK(run_guarded(*linear, x.data(), m, nullptr, 3, y));
    CHECK(std::equal(y.begin(), y.end(), singles.begin()));
  }
}

void terms() {
  const float infinity = std::numeric_limits<float>::infinity();
  const float values[] = {0.0f, -0.0f, 1.0f, 1.00390625f, -3.1415927f, 1e-30f, 1e30f, infinity, -infinity, NAN};
  for (float value : values) {
    uint16_t lines[2 * kTileDepth];
    std::fill_n(lines, 2 * kTileDepth, uint16_t(0xffff));
    split_row(&value, 1, lines);
    const float sum = bfloat_to_float(lines[0]) + bfloat_to_float(lines[kTileDepth]);
    CHECK(std::isnan(value) ? std::isnan(sum) : sum == value || std::fabs(sum - value) <= std::fabs(value) / 131072);
    for (int i = 1; i < kTileDepth; ++i) CHECK(lines[i] == 0 && lines[kTileDepth + i] == 0);
  }
}

}  // namespace

int main() {
  terms();
  odd_shapes();
  several_pieces();
  return report("float weights in tiles and panels");
}
