// Weights of one or half a byte whose values no integer panel holds: float8, 4-bit floats in groups of 16, int8 rows
// with float inputs. Kept as in the file, expanded to float32 four rows at a time in the thread's scratch.
//
// Exact in the weights; activations stay float32 (or are rounded as the scheme says: linear_rounded.cpp). Small floats
// become halves by shifting bits, which is exact, and the difference in exponent goes into the scale.
#include <algorithm>
#include <vector>

#include "float_block.h"
#include "float_rows.h"
#include "linear_panel.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace tokenmill {
namespace {

constexpr int kTileRows = 16;

struct E4M3 {
  static constexpr const char* kName = "float8";
  static constexpr int kBits = 8;
  static constexpr float kScale = 256.0f;  // 2^8: the difference of the exponent biases
  static uint16_t half(uint8_t code) { return uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7); }
  static float value(uint8_t code) { return half_to_float(half(code)); }
#if defined(__aarch64__)
  static uint16x8_t halves(uint8x8_t code) {
    const uint16x8_t wide = vmovl_u8(code);
    return vorrq_u16(vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(0x80)), 8),
                     vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(0x7f)), 7));
  }
#endif
};

struct E2M1 {
  static constexpr const char* kName = "float4";
  static constexpr int kBits = 4;
  static constexpr float kScale = 16384.0f;  // 2^14
  static uint16_t half(uint8_t code) { return uint16_t((code & 8) << 12 | (code & 7) << 9); }
  static float value(uint8_t code) { return half_to_float(half(code)); }
#if defined(__aarch64__)
  static uint16x8_t halves(uint8x8_t code) {
    const uint16x8_t wide = vmovl_u8(code);
    return vorrq_u16(vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(8)), 12),
                     vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(7)), 9));
  }
#endif
};

struct Signed8 {
  static constexpr const char* kName = "int8";
  static constexpr int kBits = 8;
  static constexpr float kScale = 1.0f;
  static float value(uint8_t code) { return float(int8_t(code)); }
};

#if defined(__aarch64__)
template <class Element>
void expand8(uint8x8_t codes, float32x4_t scale, float* out) {
  const float16x8_t halves = vreinterpretq_f16_u16(Element::halves(codes));
  vst1q_f32(out, vmulq_f32(vcvt_f32_f16(vget_low_f16(halves)), scale));
  vst1q_f32(out + 4, vmulq_f32(vcvt_high_f32_f16(halves), scale));
}
template <>
void expand8<Signed8>(uint8x8_t codes, float32x4_t scale, float* out) {
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(codes));
  vst1q_f32(out, vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), scale));
  vst1q_f32(out + 4, vmulq_f32(vcvtq_f32_s32(vmovl_high_s16(wide)), scale));
}
#endif

// Columns [begin, end) of a row, all under one scale; `begin` is even.
template <class Element>
void expand(const uint8_t* row, int64_t begin, int64_t end, float scale, float* out) {
  scale *= Element::kScale;
  int64_t k = begin;
#if defined(__aarch64__)
  const float32x4_t wide = vdupq_n_f32(scale);
  if constexpr (Element::kBits == 8) {
    for (; k + 8 <= end; k += 8) expand8<Element>(vld1_u8(row + k), wide, out + k);
  } else {
    for (; k + 16 <= end; k += 16) {
      const uint8x8_t pairs = vld1_u8(row + k / 2);
      const uint8x8x2_t codes = vzip_u8(vand_u8(pairs, vdup_n_u8(15)), vshr_n_u8(pairs, 4));
      expand8<Element>(codes.val[0], wide, out + k);
      expand8<Element>(codes.val[1], wide, out + k + 8);
    }
  }
#endif
  for (; k < end; ++k) {
    const uint8_t code = Element::kBits == 8 ? row[k] : row[k / 2] >> (k % 2 * 4) & 15;
    out[k] = Element::value(code) * scale;
  }
}

template <class Element>
class CodedLinear final : public WithFloatRows<Linear> {
 public:
  CodedLinear(const Coded& weight, int64_t rows, int64_t cols)
      : WithFloatRows<Linear>(rows, cols),
        group_(weight.group),
        groups_((cols + weight.group - 1) / weight.group),
        row_bytes_((cols * Element::kBits + 7) / 8),
        name_(std::string(Element::kName) + " float32"),
        codes_(size_t(rows * row_bytes_)),
        multiplier_(weight.multiplier),
        scales_(weight.scales, weight.scales + rows * groups_) {
    std::memcpy(codes_.data(), weight.codes, codes_.size());
    // Powers of two and float8 scales are bfloats as they are: half the memory where groups are small.
    const bool narrow = std::all_of(scales_.begin(), scales_.end(),
                                    [](float s) { return bfloat_to_float(float_to_bfloat(s)) == s; });
    if (!narrow) return;
    for (float scale : scales_) narrow_.push_back(float_to_bfloat(scale));
    scales_ = {};
  }

  size_t bytes() const override { return codes_.size() + scales_.size() * 4 + narrow_.size() * 2; }
  const char* kernel() const override { return name_.c_str(); }
  int pack_row_block() const override { return 1; }
  void pack_rows(const void*, int64_t, int64_t) override {}  // filled when constructed
  void dequantize_row(int64_t row, float* out) const override {
    for (int64_t g = 0; g < groups_; ++g)
      expand<Element>(codes_.data() + row * row_bytes_, g * group_, std::min(cols, (g + 1) * group_),
                      scale(row * groups_ + g), out);
  }

  int num_tiles(int) const override { return int((rows + kTileRows - 1) / kTileRows); }
  size_t scratch_bytes(int) const override { return size_t(cols) * 16; }

  void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                void* scratch) const override {
    const float* x = static_cast<const float*>(activations);
    float* wide = static_cast<float*>(scratch);
    const int64_t last = std::min(int64_t(tile + 1) * kTileRows, rows);
    for (int64_t row = int64_t(tile) * kTileRows; row < last;) {
      const int count = last - row >= 4 ? 4 : 1;
      for (int r = 0; r < count; ++r) dequantize_row(row + r, wide + r * cols);
      const float* add = bias ? bias + row : nullptr;
      if (count == 4) rows_of<AsFloat, 4>(wide, x, m, cols, add, y + row, ldy);
      if (count == 1) rows_of<AsFloat, 1>(wide, x, m, cols, add, y + row, ldy);
      row += count;
    }
  }

 private:
  float scale(int64_t index) const {
    return (narrow_.empty() ? scales_[size_t(index)] : bfloat_to_float(narrow_[size_t(index)])) * multiplier_;
  }

  const int64_t group_, groups_, row_bytes_;
  std::string name_;
  AlignedBytes codes_;
  float multiplier_;
  std::vector<float> scales_;  // [rows, groups], or narrow_ instead
  std::vector<uint16_t> narrow_;
};

}  // namespace

std::unique_ptr<Linear> pack_coded(const Coded& weight, int64_t rows, int64_t cols, std::string* why) {
  if (rows > 0 && cols > 0 && weight.group > 0 && (weight.group % 2 == 0 || weight.group >= cols)) {
    if (weight.element == "e4m3") return std::make_unique<CodedLinear<E4M3>>(weight, rows, cols);
    if (weight.element == "int8") return std::make_unique<CodedLinear<Signed8>>(weight, rows, cols);
    if (weight.element == "e2m1" && cols % 2 == 0) return std::make_unique<CodedLinear<E2M1>>(weight, rows, cols);
  }
  if (why) *why = "no CPU kernel for " + weight.element + " in groups of " + std::to_string(weight.group);
  return nullptr;
}

}  // namespace tokenmill
