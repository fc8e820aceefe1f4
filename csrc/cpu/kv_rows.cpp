// Writing rows of KV pages, and reading them through FloatKernels. See kv_rows.h.
//
// Encoding is plain code: it runs once per token and head. Decoding runs for every key that is attended to: codes are
// unpacked to bytes here and become floats in kernels of the widest instruction set.
#include "kv_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "float_kernels.h"

namespace tokenmill {
namespace {

constexpr float kSmallestScale = 1e-6f;
constexpr uint32_t kZeroBits = 15;  // of a hidden_zero scale: the low mantissa bits are the zero point

uint16_t to_half(float value) {
  uint16_t half;
  float_kernels().float_to_half(&value, &half, 1);
  return half;
}

float from_half(const uint8_t* bytes) {
  uint16_t half;
  float value;
  std::memcpy(&half, bytes, 2);
  float_kernels().half_to_float(&half, &value, 1);
  return value;
}

void put_half(uint8_t* bytes, float value) {
  const uint16_t half = to_half(value);
  std::memcpy(bytes, &half, 2);
}

float rounded_to_half(float value) {
  const uint16_t half = to_half(value);
  return from_half(reinterpret_cast<const uint8_t*>(&half));
}

// Round to the nearest value of `mantissa` bits with exponents from `lowest` on, ties to even. `bias` is the format's.
uint8_t to_float8(float value, int mantissa, int bias, float limit) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80);
  float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7f;
  magnitude = std::min(magnitude, limit);
  const float smallest_normal = std::ldexp(1.0f, 1 - bias);
  if (magnitude < smallest_normal)  // steps of the least subnormal; the result may be the first normal number
    return sign | static_cast<uint8_t>(std::nearbyint(std::ldexp(magnitude, bias - 1 + mantissa)));
  std::memcpy(&bits, &magnitude, 4);
  const int drop = 23 - mantissa;
  bits += (1u << (drop - 1)) - 1 + ((bits >> drop) & 1);
  return sign | static_cast<uint8_t>((bits >> drop) - (static_cast<uint32_t>(127 - bias) << mantissa));
}

// Codes are packed low bits first: 2 to a byte, 4 to a byte, or 8 to three bytes.
void pack(const uint8_t* codes, int bits, int n, uint8_t* out) {
  const int group = bits == 3 ? 8 : 8 / bits;
  for (int i = 0; i < n; i += group) {
    uint32_t word = 0;
    for (int j = 0; j < group; ++j) word |= static_cast<uint32_t>(codes[i + j]) << (j * bits);
    for (int byte = 0; byte < group * bits / 8; ++byte) *out++ = static_cast<uint8_t>(word >> (8 * byte));
  }
}

void unpack(const uint8_t* in, int bits, int n, uint8_t* codes) {
  if (bits == 4) {
    for (int i = 0; i < n / 2; ++i) {
      codes[2 * i] = in[i] & 15;
      codes[2 * i + 1] = in[i] >> 4;
    }
  } else if (bits == 3) {
    for (int i = 0; i < n; i += 8, in += 3) {
      const uint32_t word = in[0] | in[1] << 8 | static_cast<uint32_t>(in[2]) << 16;
      for (int j = 0; j < 8; ++j) codes[i + j] = (word >> (3 * j)) & 7;
    }
  } else {
    for (int i = 0; i < n; i += 4, ++in)
      for (int j = 0; j < 4; ++j) codes[i + j] = (*in >> (2 * j)) & 3;
  }
}

// 0, or NaN where a value is not finite: added to a row's scale, so that reading the row shows it.
float poison(const float* x, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += x[i] * 0.0f;
  return sum;
}

float largest_magnitude(const float* x, int n) {
  float largest = 0;
  for (int i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest + poison(x, n);
}

float sum_of_squares(const float* x, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return static_cast<float>(sum);
}

uint8_t clamped_code(float value, int highest) {  // NaN: 0
  return value > 0 ? static_cast<uint8_t>(std::min(value, static_cast<float>(highest))) : 0;
}

// At least the smallest scale; NaN stays.
float scale_of(float range, float steps) {
  const float scale = range / steps;
  return scale < kSmallestScale ? kSmallestScale : scale;
}

// rows [power] of `rest` floats each: x <- matrix x, with the matrix transposed on request.
void multiply_rest(const Rotation& rotation, float* x, bool transposed) {
  const int rest = rotation.rest;
  float row[kMaxHeadDim];
  for (int i = 0; i < rotation.power; ++i, x += rest) {
    for (int r = 0; r < rest; ++r) {
      float sum = 0;
      for (int c = 0; c < rest; ++c) sum += rotation.matrix[transposed ? c * rest + r : r * rest + c] * x[c];
      row[r] = sum;
    }
    std::memcpy(x, row, rest * sizeof(float));
  }
}

// Sylvester's matrix over rows of `rest` floats, which is its own inverse.
void butterflies(const Rotation& rotation, float* x) {
  const int n = rotation.power * rotation.rest;
  for (int half = rotation.rest; half < n; half *= 2) {
    for (int i = 0; i < n; i += 2 * half) {
      for (int j = i; j < i + half; ++j) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
    }
  }
  const float factor = 1.0f / std::sqrt(static_cast<float>(rotation.power));
  for (int i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace

void Rotation::turn(float* x) const {
  for (size_t i = 0; i < signs.size(); ++i) x[i] *= signs[i];
  if (rest > 1) multiply_rest(*this, x, false);
  butterflies(*this, x);
}

void Rotation::turn_back(float* x) const {
  butterflies(*this, x);
  if (rest > 1) multiply_rest(*this, x, true);
  for (size_t i = 0; i < signs.size(); ++i) x[i] *= signs[i];
}

bool row_kind(const std::string& name, RowKind* kind) {
  static const std::pair<const char*, RowKind> kinds[] = {
      {"float32", RowKind::float32},         {"float16", RowKind::float16},         {"bfloat16", RowKind::bfloat16},
      {"float8_e4m3", RowKind::float8_e4m3}, {"float8_e5m2", RowKind::float8_e5m2}, {"int8", RowKind::int8},
      {"hidden_zero", RowKind::hidden_zero}, {"paired_zero", RowKind::paired_zero}, {"uniform", RowKind::uniform},
      {"codebook", RowKind::codebook},
  };
  for (const auto& each : kinds)
    if (name == each.first) return *kind = each.second, true;
  return false;
}

int64_t RowFormat::row_bytes() const {
  const int64_t codes = static_cast<int64_t>(head_dim) * bits / 8;
  switch (kind) {
    case RowKind::hidden_zero:
    case RowKind::paired_zero:
    case RowKind::uniform:
      return codes + 4;
    case RowKind::codebook:
      return codes + 2;
    default:
      return codes + scale_bytes;
  }
}

void RowFormat::encode(const float* x, int kv_head, uint8_t* row) const {
  switch (kind) {
    case RowKind::float32:
      std::memcpy(row, x, head_dim * sizeof(float));
      return;
    case RowKind::float16:
      return float_kernels().float_to_half(x, reinterpret_cast<uint16_t*>(row), head_dim);
    case RowKind::bfloat16:
      return float_kernels().float_to_bfloat(x, reinterpret_cast<uint16_t*>(row), head_dim);
    default:
      break;
  }
  if (rotation == nullptr && centers.empty()) return encode_codes(x, kv_head, row);
  float moved[kMaxHeadDim];
  std::memcpy(moved, x, head_dim * sizeof(float));
  if (!centers.empty()) {
    const size_t at = static_cast<size_t>(kv_head) * head_dim;
    for (int i = 0; i < head_dim; ++i) moved[i] = (moved[i] - centers[at + i]) * scales[at + i];
  }
  if (rotation != nullptr) rotation->turn(moved);
  encode_codes(moved, kv_head, row);
}

void RowFormat::turn_query(float* q, int kv_head) const {
  if (!scales.empty())
    for (int i = 0; i < head_dim; ++i) q[i] /= scales[static_cast<size_t>(kv_head) * head_dim + i];
  if (rotation != nullptr) rotation->turn(q);
}

// round(i, target) keeps the code of coordinate i and returns what it stands for. What one misses, the later ones make up
// for as far as queries cannot tell: see tokenmill/model/kvstore/conditioning.py. Returns what is lost.
template <typename Round>
float RowFormat::round_all(const float* x, int kv_head, Round&& round) const {
  const int n = head_dim;
  float cost = 0;
  if (feedback.empty()) {
    for (int i = 0; i < n; ++i) {
      const float error = round(i, x[i]) - x[i];
      cost += error * error;
    }
    return cost;
  }
  const float* row = &feedback[static_cast<size_t>(kv_head) * n * n];
  const float* weight = &weights[static_cast<size_t>(kv_head) * n];
  float targets[kMaxHeadDim];
  std::memcpy(targets, x, n * sizeof(float));
  for (int i = 0; i < n; ++i, row += n) {
    const float value = round(i, targets[i]), missed = value - targets[i], error = value - x[i];
    cost += weight[i] * missed * missed;
    for (int j = i + 1; j < n; ++j) targets[j] -= row[j] * error;
  }
  return cost;
}

void RowFormat::encode_codes(const float* x, int kv_head, uint8_t* row) const {
  const int n = head_dim, highest = (1 << bits) - 1;
  uint8_t codes[kMaxHeadDim];
  uint8_t* tail = row + static_cast<int64_t>(n) * bits / 8;
  switch (kind) {
    case RowKind::float8_e4m3:
    case RowKind::float8_e5m2: {
      const bool wide = kind == RowKind::float8_e5m2;
      const float limit = wide ? 57344.0f : 448.0f;
      float scale = head_scale(kv_head);
      if (scale_bytes == 4) {
        scale = scale_of(largest_magnitude(x, n), limit);
        std::memcpy(tail, &scale, 4);
      }
      round_all(x, kv_head, [&](int i, float target) {
        row[i] = to_float8(target / scale, wide ? 2 : 3, wide ? 15 : 7, limit);
        float value;
        (wide ? float_kernels().e5m2_to_float : float_kernels().e4m3_to_float)(row + i, scale, &value, 1);
        return value;
      });
      break;
    }
    case RowKind::int8: {
      float scale = scale_of(largest_magnitude(x, n), 127.0f);
      if (scale_bytes == 2) {
        put_half(tail, scale);
        scale = from_half(tail);
      } else {
        std::memcpy(tail, &scale, 4);
      }
      round_all(x, kv_head, [&](int i, float target) {
        float code = std::round(target / scale);
        code = code > -127.0f ? std::min(code, 127.0f) : -127.0f;
        row[i] = static_cast<uint8_t>(static_cast<int8_t>(code));
        return code * scale;
      });
      break;
    }
    case RowKind::hidden_zero: {
      const float low = std::min(0.0f, *std::min_element(x, x + n)), high = std::max(0.0f, *std::max_element(x, x + n));
      float scale = scale_of(high - low + poison(x, n), highest);
      uint32_t word;
      std::memcpy(&word, &scale, 4);
      word &= ~kZeroBits;
      std::memcpy(&scale, &word, 4);
      const uint8_t zero = clamped_code(std::round(-low / scale), highest);
      word |= zero;
      std::memcpy(tail, &word, 4);
      round_all(x, kv_head, [&](int i, float target) {
        codes[i] = clamped_code(std::round(target / scale) + zero, highest);
        return static_cast<float>(codes[i] - zero) * scale;
      });
      pack(codes, bits, n, row);
      break;
    }
    case RowKind::paired_zero: {
      const float bad = poison(x, n);
      float scale[2], zero[2];
      for (int odd = 0; odd < 2; ++odd) {
        float low = 0, high = 0;
        for (int i = odd; i < n; i += 2) low = std::min(low, x[i]), high = std::max(high, x[i]);
        uint16_t half = to_half(scale_of(high - low + bad, highest)) & ~static_cast<uint16_t>(kZeroBits);
        scale[odd] = from_half(reinterpret_cast<const uint8_t*>(&half));
        const uint8_t code = clamped_code(std::round(-low / scale[odd]), highest);
        zero[odd] = code;
        half |= code;
        std::memcpy(tail + 2 * odd, &half, 2);
      }
      round_all(x, kv_head, [&](int i, float target) {
        codes[i] = clamped_code(std::round(target / scale[i & 1]) + zero[i & 1], highest);
        return (codes[i] - zero[i & 1]) * scale[i & 1];
      });
      pack(codes, bits, n, row);
      break;
    }
    case RowKind::uniform: {
      const float low = rounded_to_half(*std::min_element(x, x + n));
      const float high = *std::max_element(x, x + n);
      const float scale = rounded_to_half(scale_of(high - low + poison(x, n), highest));
      put_half(tail, scale);
      put_half(tail + 2, low);
      round_all(x, kv_head, [&](int i, float target) {
        codes[i] = clamped_code(std::round((target - low) / scale), highest);
        return codes[i] * scale + low;
      });
      pack(codes, bits, n, row);
      break;
    }
    case RowKind::codebook: {
      const float norm = std::sqrt(sum_of_squares(x, n)), width = std::sqrt(static_cast<float>(n));
      uint8_t tried[kMaxHeadDim];
      float least = 0;
      for (size_t attempt = 0; attempt < std::max<size_t>(1, gains.size()); ++attempt) {
        const float length = gains.empty() ? norm : norm * gains[attempt];
        const float factor = length > 0 ? width / length : 0.0f;
        const float cost = round_all(x, kv_head, [&](int i, float target) {
          const float value = target * factor;
          uint8_t code = 0;
          for (const float bound : bounds) code += value > bound;
          tried[i] = code;
          return centroids[code] * length / width;
        });
        if (attempt > 0 && !(cost < least)) continue;
        least = cost;
        put_half(tail, length);
        std::memcpy(codes, tried, n);
      }
      if (!gains.empty()) {  // as long as it must be for the product with x itself to be right
        double product = 0;
        for (int i = 0; i < n; ++i) product += static_cast<double>(x[i]) * centroids[codes[i]];
        if (product > 0) put_half(tail, static_cast<float>(static_cast<double>(norm) * norm * width / product));
      }
      pack(codes, bits, n, row);
      break;
    }
    default:
      break;
  }
}

void RowFormat::decode(const uint8_t* rows, int64_t stride, int count, int kv_head, float* out) const {
  const FloatKernels& kernels = float_kernels();
  if (is_plain()) {
    const bool together = stride == row_bytes();
    const int64_t n = together ? static_cast<int64_t>(count) * head_dim : head_dim;
    for (int i = 0; i < (together ? 1 : count); ++i, rows += stride, out += n) {
      if (kind == RowKind::float32) {
        std::memcpy(out, rows, n * sizeof(float));
      } else {
        (kind == RowKind::float16 ? kernels.half_to_float : kernels.bfloat_to_float)(
            reinterpret_cast<const uint16_t*>(rows), out, n);
      }
    }
    return;
  }
  for (int i = 0; i < count; ++i) decode_codes(rows + i * stride, kv_head, out + static_cast<int64_t>(i) * head_dim);
}

void RowFormat::decode_codes(const uint8_t* row, int kv_head, float* out) const {
  const FloatKernels& kernels = float_kernels();
  const int n = head_dim;
  const uint8_t* tail = row + static_cast<int64_t>(n) * bits / 8;
  float scale = scale_bytes == 0 ? head_scale(kv_head) : 1.0f;
  if (scale_bytes == 2) scale = from_half(tail);
  if (scale_bytes == 4) std::memcpy(&scale, tail, 4);
  if (kind == RowKind::float8_e4m3) return kernels.e4m3_to_float(row, scale, out, n);
  if (kind == RowKind::float8_e5m2) return kernels.e5m2_to_float(row, scale, out, n);
  if (kind == RowKind::int8) return kernels.int8_to_float(reinterpret_cast<const int8_t*>(row), scale, out, n);
  uint8_t codes[kMaxHeadDim];
  unpack(row, bits, n, codes);
  if (kind == RowKind::hidden_zero) {
    uint32_t word;
    std::memcpy(&word, tail, 4);
    const float zero = static_cast<float>(word & kZeroBits);
    word &= ~kZeroBits;
    std::memcpy(&scale, &word, 4);
    return kernels.codes_to_float(codes, scale, -zero * scale, out, n);
  }
  if (kind == RowKind::paired_zero) {
    float factors[2], offsets[2];
    for (int odd = 0; odd < 2; ++odd) {
      uint16_t half;
      std::memcpy(&half, tail + 2 * odd, 2);
      const float zero = static_cast<float>(half & kZeroBits);
      half &= ~static_cast<uint16_t>(kZeroBits);
      kernels.half_to_float(&half, &factors[odd], 1);
      offsets[odd] = -zero * factors[odd];
    }
    return kernels.pairs_to_float(codes, factors, offsets, out, n);
  }
  if (kind == RowKind::uniform) return kernels.codes_to_float(codes, from_half(tail), from_half(tail + 2), out, n);
  const float norm = from_half(tail);
  if (!renormalize) return kernels.look_up(codes, centroids.data(), norm / std::sqrt(static_cast<float>(n)), out, n);
  kernels.look_up(codes, centroids.data(), 1.0f, out, n);
  kernels.scale(out, norm / std::sqrt(sum_of_squares(out, n)), n, out);
}

}  // namespace tokenmill
