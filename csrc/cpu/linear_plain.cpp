// F32, F16 and BF16 weights. On aarch64: kept as they lie in the file, multiplied in float32, or F16 in half precision
// where the processor has it. Elsewhere: which of the packed forms a weight gets.
//
// Bound by memory for one row of activations and by float arithmetic for many; activations stay float32, or become halves
// (half_products.h) or two bfloat16 terms (bfloat_tiles.h). See float_block.h and float_panels.h for the order of the sums.
#include <algorithm>

#include "linear_panel.h"
#if defined(__aarch64__)
#include <arm_neon.h>

#include "float_block.h"
#include "float_rows.h"
#include "half_products.h"
#else
#include "bfloat_tiles.h"
#include "float_panels.h"
#endif

namespace tokenmill {

#if defined(__aarch64__)
namespace {

struct AsBfloat {
  using Storage = uint16_t;
  static float load(uint16_t value) { return bfloat_to_float(value); }
  static Float4 four(const uint16_t* p) { return (Float4)vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
  static void eight(const uint16_t* p, Float4* out) {
    const uint16x8_t bits = vld1q_u16(p);
    out[0] = (Float4)vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16));
    out[1] = (Float4)vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16));
  }
};
struct AsHalf {
  using Storage = uint16_t;
  static float load(uint16_t value) { return half_to_float(value); }
  static Float4 four(const uint16_t* p) { return (Float4)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static void eight(const uint16_t* p, Float4* out) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
    out[0] = (Float4)vcvt_f32_f16(vget_low_f16(halves));
    out[1] = (Float4)vcvt_high_f32_f16(halves);
  }
};

constexpr int kTokens = 64;  // activations multiplied at a time

template <class Type>
class PlainLinear final : public WithFloatRows<Linear> {
 public:
  PlainLinear(const QuantFormat& format, int64_t rows, int64_t cols)
      : WithFloatRows<Linear>(rows, cols),
        format_(format),
        name_(std::string(format.name) + " float32"),
        storage_(size_t(rows) * size_t(cols) * sizeof(typename Type::Storage)) {}

  size_t bytes() const override { return storage_.size(); }
  const char* kernel() const override { return name_.c_str(); }
  int pack_row_block() const override { return 1; }
  void pack_rows(const void* data, int64_t begin, int64_t end) override {
    const size_t row_bytes = size_t(cols) * size_t(format_.bytes);
    std::memcpy(storage_.data() + size_t(begin) * row_bytes,
                static_cast<const uint8_t*>(data) + size_t(begin) * row_bytes, size_t(end - begin) * row_bytes);
  }
  void dequantize_row(int64_t row, float* out) const override { dequantize(format_, weights(row), cols, out); }

  int num_tiles(int) const override { return int((rows + tile_rows() - 1) / tile_rows()); }
  // Many rows: 4 rows of the weight are widened once for all of them.
  size_t scratch_bytes(int m) const override { return widens(m) ? size_t(cols) * 16 : 0; }

  void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                void* scratch) const override {
    const float* x = static_cast<const float*>(activations);
    // A block of activations stays near while all rows of the tile pass over it.
    for (int t = 0; t < m; t += kTokens) {
      const int count = std::min(kTokens, m - t);
      if (widens(m)) {
        run_block(tile, count, x + t * cols, bias, y + t * ldy, ldy, static_cast<float*>(scratch));
      } else {
        run_rows(tile, count, x + t * cols, bias, y + t * ldy, ldy);
      }
    }
  }

 private:
  using Storage = typename Type::Storage;

  // The weight is read as it lies.
  void run_rows(int tile, int m, const float* x, const float* bias, float* y, int64_t ldy) const {
    const int64_t last = std::min((tile + 1) * tile_rows(), rows);
    int64_t row = tile * tile_rows();
    const auto add = [&] { return bias ? bias + row : nullptr; };
    for (; row + 4 <= last; row += 4) rows_of<Type, 4, true>(weights(row), x, m, cols, add(), y + row, ldy);
    for (; row < last; ++row) rows_of<Type, 1>(weights(row), x, m, cols, add(), y + row, ldy);
  }

  void run_block(int tile, int m, const float* x, const float* bias, float* y, int64_t ldy, float* wide) const {
    const int64_t last = std::min((tile + 1) * tile_rows(), rows);
    int64_t row = tile * tile_rows();
    for (; row + 4 <= last; row += 4) {
      for (int64_t k = 0; k + 4 <= 4 * cols; k += 4) {
        const Float4 v = Type::four(weights(row) + k);
        std::memcpy(wide + k, &v, 16);
      }
      rows_of<AsFloat, 4>(wide, x, m, cols, bias ? bias + row : nullptr, y + row, ldy);
    }
    for (; row < last; ++row) rows_of<Type, 1>(weights(row), x, m, cols, bias ? bias + row : nullptr, y + row, ldy);
  }

  static bool widens(int m) { return sizeof(Storage) == 2 && m >= 8; }
  // Large: the rows that are asked for ahead belong to the same thread except at the end of a tile. Small matrices have
  // more of them, for the balance.
  int64_t tile_rows() const { return rows >= 1024 ? 64 : 32; }

  const Storage* weights(int64_t row) const { return reinterpret_cast<const Storage*>(storage_.data()) + row * cols; }

  const QuantFormat& format_;
  std::string name_;
  AlignedBytes storage_;
};

}  // namespace

std::unique_ptr<Linear> make_plain_linear(const QuantFormat& format, int64_t rows, int64_t cols, Isa isa) {
  if (format.bytes == 4) return std::make_unique<PlainLinear<AsFloat>>(format, rows, cols);
  if (format.name[0] == 'B') return std::make_unique<PlainLinear<AsBfloat>>(format, rows, cols);
  const HalfProducts* products = isa == Isa::portable ? nullptr : half_products();
  if (products && cols % kHalfLanes == 0) return make_half_linear(rows, cols, *products);
  return std::make_unique<PlainLinear<AsHalf>>(format, rows, cols);
}

#else

#if defined(TOKENMILL_HAS_AMX)
const BfloatTiles& amx_bfloat_tiles();
#endif

std::unique_ptr<Linear> make_plain_linear(const QuantFormat& format, int64_t rows, int64_t cols, Isa isa) {
#if defined(TOKENMILL_HAS_AMX)
  if (isa == Isa::amx && format.name[0] == 'B') return make_bfloat_tiles(rows, cols, amx_bfloat_tiles());
#endif
  return make_float_panels(format, rows, cols, float_panels(isa));
}

#endif

}  // namespace tokenmill
