// F32, F16 and BF16 weights: kept as they lie in the file, multiplied in float32.
//
// Bound by memory for one row of activations and by float arithmetic for many; activations stay float32. Every output
// is a sum of 4 partial sums over k, however rows are blocked, so results depend neither on threads nor on the number
// of rows.
#include <algorithm>

#include "linear_panel.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace tokenmill {
namespace {

// A vector of the baseline instruction set, by the compiler's extension.
typedef float Float4 __attribute__((vector_size(16)));

Float4 load4(const float* p) {
  Float4 v;
  std::memcpy(&v, p, 16);
  return v;
}

struct AsFloat {
  using Storage = float;
  static float load(float value) { return value; }
  static Float4 four(const float* p) { return load4(p); }
};
struct AsBfloat {
  using Storage = uint16_t;
  static float load(uint16_t value) { return bfloat_to_float(value); }
#if defined(__aarch64__)
  static Float4 four(const uint16_t* p) { return (Float4)vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
#else
  static Float4 four(const uint16_t* p) { return Float4{load(p[0]), load(p[1]), load(p[2]), load(p[3])}; }
#endif
};
struct AsHalf {
  using Storage = uint16_t;
  static float load(uint16_t value) { return half_to_float(value); }
#if defined(__aarch64__)
  static Float4 four(const uint16_t* p) { return (Float4)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
#else
  static Float4 four(const uint16_t* p) { return Float4{load(p[0]), load(p[1]), load(p[2]), load(p[3])}; }
#endif
};

constexpr int kTileRows = 16;

// y[t][r] = w[r] . x[t] for R rows of the weight and T rows of activations.
template <class Type, int R, int T>
void block(const typename Type::Storage* w, const float* x, int64_t cols, const float* bias, float* y, int64_t ldy) {
  Float4 sums[R][T] = {};
  int64_t k = 0;
  for (; k + 4 <= cols; k += 4) {
    Float4 v[T];
    for (int t = 0; t < T; ++t) v[t] = load4(x + t * cols + k);
    for (int r = 0; r < R; ++r) {
      const Float4 weight = Type::four(w + r * cols + k);
      for (int t = 0; t < T; ++t) sums[r][t] += weight * v[t];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      float sum = (sums[r][t][0] + sums[r][t][1]) + (sums[r][t][2] + sums[r][t][3]);
      for (int64_t i = k; i < cols; ++i) sum += Type::load(w[r * cols + i]) * x[t * cols + i];
      y[t * ldy + r] = bias ? sum + bias[r] : sum;
    }
}

template <class Type>
class PlainLinear final : public Linear {
 public:
  PlainLinear(const QuantFormat& format, int64_t rows, int64_t cols)
      : Linear(rows, cols),
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

  int activation_kind(int) const override { return 0; }
  int activation_row_block(int) const override { return 1; }
  size_t activation_bytes(int m) const override { return size_t(m) * size_t(cols) * 4; }
  void quantize(const float* x, int64_t ldx, int begin, int end, int, void* activations) const override {
    float* out = static_cast<float*>(activations);
    for (int row = begin; row < end; ++row) std::copy_n(x + row * ldx, cols, out + row * cols);
  }
  int num_tiles(int) const override { return int((rows + kTileRows - 1) / kTileRows); }
  // Many rows: 4 rows of the weight are widened once for all of them.
  size_t scratch_bytes(int m) const override { return widens(m) ? size_t(cols) * 16 : 0; }

  void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                void* scratch) const override {
    const float* x = static_cast<const float*>(activations);
    const int64_t last = std::min(int64_t(tile + 1) * kTileRows, rows);
    for (int64_t row = int64_t(tile) * kTileRows; row < last;) {
      const int64_t left = last - row;
      const int64_t count = left >= 8 && m == 1 ? 8 : left >= 4 ? 4 : 1;
      const float* add = bias ? bias + row : nullptr;
      const auto* w = weights(row);
      if (count == 8) block<Type, 8, 1>(w, x, cols, add, y + row, ldy);
      if (count == 4 && widens(m)) {
        float* wide = static_cast<float*>(scratch);
        for (int64_t k = 0; k + 4 <= 4 * cols; k += 4) {
          const Float4 v = Type::four(w + k);
          std::memcpy(wide + k, &v, 16);
        }
        rows_of<AsFloat, 4>(wide, x, m, add, y + row, ldy);
      } else if (count == 4) {
        rows_of<Type, 4>(w, x, m, add, y + row, ldy);
      } else if (count == 1) {
        rows_of<Type, 1>(w, x, m, add, y + row, ldy);
      }
      row += count;
    }
  }

 private:
  using Storage = typename Type::Storage;

  static bool widens(int m) { return sizeof(Storage) == 2 && m >= 4; }

  template <class Source, int R>
  void rows_of(const typename Source::Storage* w, const float* x, int m, const float* bias, float* y,
               int64_t ldy) const {
    int t = 0;
    for (; t + 4 <= m; t += 4) block<Source, R, 4>(w, x + t * cols, cols, bias, y + t * ldy, ldy);
    for (; t < m; ++t) block<Source, R, 1>(w, x + t * cols, cols, bias, y + t * ldy, ldy);
  }

  const Storage* weights(int64_t row) const { return reinterpret_cast<const Storage*>(storage_.data()) + row * cols; }

  const QuantFormat& format_;
  std::string name_;
  AlignedBytes storage_;
};

}  // namespace

std::unique_ptr<Linear> make_plain_linear(const QuantFormat& format, int64_t rows, int64_t cols, Isa) {
  if (format.bytes == 4) return std::make_unique<PlainLinear<AsFloat>>(format, rows, cols);
  if (format.name[0] == 'B') return std::make_unique<PlainLinear<AsBfloat>>(format, rows, cols);
  return std::make_unique<PlainLinear<AsHalf>>(format, rows, cols);
}

}  // namespace tokenmill
