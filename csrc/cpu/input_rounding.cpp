// Plain C++: a row is rounded once per product, little beside the product itself. See input_rounding.h.
#include "input_rounding.h"

#include <algorithm>
#include <cmath>

#include "quant_blocks.h"

namespace tokenmill {
namespace {

const char* const kNames[] = {"none",       "int8_token",   "int8_static", "llm_int8", "fp8_token",
                              "fp8_static", "fp8_group128", "mxfp8",       "mxfp4",    "nvfp4"};
constexpr float kOutlier = 6.0f;  // of llm_int8

// The small floats: fraction bits, exponent of the smallest normal number, largest number.
struct SmallFloat {
  int fraction, least_exponent;
  float largest;
};
constexpr SmallFloat kE4M3{3, -6, 448.0f}, kE2M1{1, 0, 6.0f};

float two_to(int exponent) {
  if (exponent >= -126) return bits_to_float(uint32_t(exponent + 127) << 23);
  return bits_to_float(1u << (exponent + 149));  // subnormal
}

// Nearest number of the type, ties to even, saturating.
float nearest(float value, const SmallFloat& type) {
  const float magnitude = std::fmin(std::fabs(value), type.largest);
  const int exponent = std::max(int(float_to_bits(magnitude) >> 23) - 127, type.least_exponent);
  const float quantum = two_to(exponent - type.fraction);
  return std::copysign(std::nearbyint(magnitude / quantum) * quantum, value);
}

float peak(const float* x, int64_t n) {
  float found = 0;
  for (int64_t i = 0; i < n; ++i) found = std::fmax(found, std::fabs(x[i]));
  return found;
}

// 2^(e - largest), where 2^e is the peak rounded to a power of two as compressed-tensors does.
float power_of_two(float value, int largest) {
  const int exponent = int((float_to_bits(value) + (1u << 21)) >> 23) - 127 - largest;
  return two_to(std::min(std::max(exponent, -127), 127));
}

void round_small(const float* x, int64_t n, float scale, const SmallFloat& type, float* out) {
  const float step = scale > 0 ? scale : 1.0f;
  for (int64_t i = 0; i < n; ++i) out[i] = nearest(x[i] / step, type) * step;
}

float int8_code(float value, float step) { return std::fmin(std::fmax(std::nearbyint(value / step), -128.0f), 127.0f); }

void round_int8(const float* x, int64_t n, float scale, float* out) {
  const float step = scale > 0 ? scale : 1.0f;
  for (int64_t i = 0; i < n; ++i) out[i] = int8_code(x[i], step) * step;
}

void round_with_outliers(const float* x, int64_t n, float* out) {
  float inner = 0;
  for (int64_t i = 0; i < n; ++i)
    if (std::fabs(x[i]) < kOutlier) inner = std::fmax(inner, std::fabs(x[i]));
  const float step = inner > 0 ? inner / 127 : 1.0f;
  for (int64_t i = 0; i < n; ++i) out[i] = std::fabs(x[i]) < kOutlier ? int8_code(x[i], step) * step : x[i];
}

template <class Scale>
void round_groups(const float* x, int64_t n, int64_t size, const SmallFloat& type, float* out, Scale scale) {
  for (int64_t k = 0; k < n; k += size) {
    const int64_t length = std::min(size, n - k);
    round_small(x + k, length, scale(peak(x + k, length)), type, out + k);
  }
}

}  // namespace

bool find_input_rounding(const std::string& name, InputRounding* out) {
  for (int i = 0; i <= int(InputRounding::nvfp4); ++i)
    if (name == kNames[i]) {
      *out = InputRounding(i);
      return true;
    }
  return false;
}

void round_row(const float* x, int64_t n, InputRounding kind, float scale, float* out) {
  switch (kind) {
    case InputRounding::none:
      std::copy_n(x, n, out);
      return;
    case InputRounding::int8_token:
      return round_int8(x, n, peak(x, n) / 127, out);
    case InputRounding::int8_static:
      return round_int8(x, n, scale, out);
    case InputRounding::llm_int8:
      return round_with_outliers(x, n, out);
    case InputRounding::fp8_token:
      return round_small(x, n, peak(x, n) / kE4M3.largest, kE4M3, out);
    case InputRounding::fp8_static:
      return round_small(x, n, scale, kE4M3, out);
    case InputRounding::fp8_group128:
      return round_groups(x, n, 128, kE4M3, out, [](float top) { return top / kE4M3.largest; });
    case InputRounding::mxfp8:
      return round_groups(x, n, 32, kE4M3, out, [](float top) { return power_of_two(top, 8); });
    case InputRounding::mxfp4:
      return round_groups(x, n, 32, kE2M1, out, [](float top) { return power_of_two(top, 2); });
    case InputRounding::nvfp4:
      return round_groups(x, n, 16, kE2M1, out,
                          [&](float top) { return nearest(top / kE2M1.largest / scale, kE4M3) * scale; });
  }
}

float int8_row(const float* x, int64_t n, InputRounding kind, float scale, int8_t* codes) {
  if (kind == InputRounding::int8_token) scale = peak(x, n) / 127;
  const float step = scale > 0 ? scale : 1.0f;
  for (int64_t i = 0; i < n; ++i) codes[i] = int8_t(int8_code(x[i], step));
  return step;
}

}  // namespace tokenmill
