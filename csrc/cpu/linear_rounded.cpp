// A weight whose scheme also rounds the input: wraps another Linear and changes only what becomes of the activations.
//
// Kernels that take floats get rounded floats. Integer panels get the int8 codes themselves, with the token's step as
// the scale of every block, so that nothing is rounded twice and the product is exact. Other roundings of panels are
// refused. Relies on the forms of linear_panel.h.
#include <cstring>
#include <algorithm>
#include <atomic>
#include <vector>

#include "input_rounding.h"
#include "linear_panel.h"

namespace tokenmill {
namespace {

constexpr int kRowKind = 32;         // activation kind of linear_panel.cpp: rows in blocks of 32
constexpr int kRoundedKind = 10000;  // added once per rounding, so that weights share only equal ones

bool is_int8(InputRounding kind) { return kind == InputRounding::int8_token || kind == InputRounding::int8_static; }

class RoundedLinear final : public Linear {
 public:
  RoundedLinear(std::unique_ptr<Linear> inner, InputRounding rounding, float scale, const std::string& name)
      : Linear(inner->rows, inner->cols),
        inner_(std::move(inner)),
        rounding_(rounding),
        scale_(scale),
        name_(inner_->kernel() + (", input " + name)) {
    // A calibrated scale belongs to one weight: its activations are shared with no other.
    static std::atomic<int> next{int(InputRounding::nvfp4) + 1};
    const bool own = rounding == InputRounding::int8_static || rounding == InputRounding::fp8_static ||
                     rounding == InputRounding::nvfp4;
    kind_ = kRoundedKind * (own ? next++ : int(rounding));
  }

  size_t bytes() const override { return inner_->bytes(); }
  const char* kernel() const override { return name_.c_str(); }
  int pack_row_block() const override { return inner_->pack_row_block(); }
  void pack_rows(const void* data, int64_t begin, int64_t end) override { inner_->pack_rows(data, begin, end); }
  void dequantize_row(int64_t row, float* out) const override { inner_->dequantize_row(row, out); }
  int activation_kind(int m) const override { return kind_ + inner_->activation_kind(m); }
  int activation_row_block(int m) const override { return inner_->activation_row_block(m); }
  size_t activation_bytes(int m) const override { return inner_->activation_bytes(m); }
  int num_tiles(int m) const override { return inner_->num_tiles(m); }
  size_t scratch_bytes(int m) const override { return inner_->scratch_bytes(m); }
  void prefetch_tile(int tile, int m) const override { inner_->prefetch_tile(tile, m); }
  void run_tile(int tile, int m, const void* activations, const float* bias, float* y, int64_t ldy,
                void* scratch) const override {
    inner_->run_tile(tile, m, activations, bias, y, ldy, scratch);
  }

  void quantize(const float* x, int64_t ldx, int begin, int end, int m, void* activations) const override {
    const int kind = inner_->activation_kind(m);
    uint8_t* out = static_cast<uint8_t*>(activations);
    if (kind == 0) return round_floats(x, ldx, begin, end, m, activations);
    if (kind == kRowKind) {
      const RowForm form{cols, 32};
      for (int row = begin; row < end; ++row) write_row(x + row * ldx, form, out + row * form.bytes());
      return;
    }
    const QuadForm form = quad_form_of(cols, kind);
    for (int row = begin; row < end; row += 4)
      write_quad(x + row * ldx, ldx, std::min(4, m - row), form, out + row / 4 * form.bytes());
  }

 private:
  void round_floats(const float* x, int64_t ldx, int begin, int end, int m, void* activations) const {
    thread_local std::vector<float> rounded;
    rounded.resize(size_t(cols));
    for (int row = begin; row < end; ++row) {
      round_row(x + row * ldx, cols, rounding_, scale_, rounded.data());
      inner_->quantize(rounded.data(), 0, row, row + 1, m, activations);  // stride 0: every row is this one
    }
  }

  void write_row(const float* x, const RowForm& form, uint8_t* out) const {
    int8_t* codes = reinterpret_cast<int8_t*>(out);
    float* scale = reinterpret_cast<float*>(out + form.scale());
    int32_t* sum = reinterpret_cast<int32_t*>(out + form.sum32());
    float* scaled = reinterpret_cast<float*>(out + form.extra());
    const float step = int8_row(x, cols, rounding_, scale_, codes);
    for (int64_t b = 0; b < cols / 32; ++b) {
      sum[b] = 0;
      for (int i = 0; i < 32; ++i) sum[b] += codes[b * 32 + i];
      scale[b] = step;
      scaled[b] = step * float(sum[b]);
    }
  }

  void write_quad(const float* x, int64_t ldx, int count, const QuadForm& form, uint8_t* out) const {
    thread_local std::vector<int8_t> codes;
    codes.resize(size_t(cols));
    for (int t = 0; t < 4; ++t) {
      float step = 0;
      if (t < count) step = int8_row(x + t * ldx, cols, rounding_, scale_, codes.data());
      if (t >= count) std::fill(codes.begin(), codes.end(), int8_t(0));
      for (int64_t k = 0; k < cols; k += 4) std::memcpy(out + form.code(k, t), codes.data() + k, 4);
      for (int64_t b = 0; b < form.blocks(); ++b) {
        int32_t sum = 0;
        for (int64_t i = b * form.block; i < std::min(cols, (b + 1) * form.block); ++i) sum += codes[size_t(i)];
        *reinterpret_cast<float*>(out + form.scale(b, t)) = step;
        *reinterpret_cast<int32_t*>(out + form.sum(b, t)) = sum;
        *reinterpret_cast<float*>(out + form.scaled_sum(b, t)) = step * float(sum);
      }
    }
  }

  std::unique_ptr<Linear> inner_;
  const InputRounding rounding_;
  const float scale_;
  std::string name_;
  int kind_;
};

}  // namespace

std::unique_ptr<Linear> round_inputs(std::unique_ptr<Linear> linear, const std::string& rounding, float scale,
                                     std::string* why) {
  InputRounding kind;
  if (!find_input_rounding(rounding, &kind)) {
    if (why) *why = "no CPU kernel rounds its input as " + rounding;
    return nullptr;
  }
  if (!linear || kind == InputRounding::none) return linear;
  // AVX2 multiplies by moving the weight's sign to the input, and int8 has no 128; only a fixed scale brings -128.
  if (kind == InputRounding::int8_static && std::strstr(linear->kernel(), "avx2")) {
    if (why) *why = std::string(linear->kernel()) + " cannot take the code -128 of a fixed input scale";
    return nullptr;
  }
  linear->multiply_floats();
  for (int m : {1, 4, 1024}) {
    const int form = linear->activation_kind(m);
    // One set of activations, in a form that is known here: a precise weight would read a second one.
    const int64_t row_bytes = RowForm{linear->cols, 32}.bytes();
    const int64_t quad_bytes = is_quad_kind(form) ? quad_form_of(linear->cols, form).bytes() : 0;
    const int64_t one_set = form == kRowKind ? m * row_bytes : (m + 3) / 4 * quad_bytes;
    const bool known = one_set > 0 && linear->activation_bytes(m) == size_t(one_set);
    if (form == 0 || (is_int8(kind) && known)) continue;
    if (why) *why = std::string(linear->kernel()) + " cannot take inputs rounded as " + rounding;
    return nullptr;
  }
  return std::make_unique<RoundedLinear>(std::move(linear), kind, scale, rounding);
}

}  // namespace tokenmill
