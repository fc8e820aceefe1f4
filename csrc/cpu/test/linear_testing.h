// Random quantized matrices and a threaded runner, shared by the tests of linears and linear_bench.cpp.
//
// Blocks are random bytes with sane scales written over their half fields; nothing here knows how kernels work.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../linear.h"
#include "../quant_blocks.h"

namespace tokenmill {

inline const std::vector<std::string>& all_types() {
  static const std::vector<std::string> types = {
      "F32",    "F16",    "BF16",  "Q4_0",    "Q4_1",    "Q5_0",   "Q5_1",  "Q8_0",  "Q2_K",
      "Q3_K",   "Q4_K",   "Q5_K",  "Q6_K",    "IQ4_NL",  "IQ4_XS", "MXFP4", "NVFP4", "IQ2_XXS",
      "IQ2_XS", "IQ2_S",  "IQ3_S", "IQ3_XXS", "IQ1_S",   "IQ1_M",  "TQ1_0", "TQ2_0"};
  return types;
}

// Byte offsets of the half-precision fields of a block: scale, then minimum.
inline std::vector<int> half_fields(const std::string& type) {
  if (type == "Q4_1" || type == "Q5_1" || type == "Q4_K" || type == "Q5_K") return {0, 2};
  if (type == "Q2_K") return {80, 82};
  if (type == "Q3_K") return {108};
  if (type == "Q6_K") return {208};
  if (type == "TQ1_0") return {52};
  if (type == "TQ2_0") return {64};
  if (type == "MXFP4" || type == "NVFP4" || type == "IQ1_M") return {};
  return {0};
}

inline bool type_is(const QuantFormat& format, const char* name) { return std::string(format.name) == name; }

// magnitude: typical size of a weight.
inline std::vector<uint8_t> random_weights(const QuantFormat& format, int64_t rows, int64_t cols, float magnitude,
                                           std::mt19937& random) {
  std::vector<uint8_t> data(size_t(rows * cols / format.block * format.bytes));
  std::normal_distribution<float> normal;
  if (format.bits == 0) {
    for (size_t i = 0; i < data.size() / size_t(format.bytes); ++i) {
      const float value = magnitude * normal(random);
      const uint32_t bits = float_to_bits(value);
      const uint16_t word = format.name[0] == 'B' ? float_to_bfloat(value) : float_to_half(value);
      std::memcpy(&data[i * size_t(format.bytes)], format.bytes == 4 ? (const void*)&bits : (const void*)&word,
                  size_t(format.bytes));
    }
    return data;
  }
  for (size_t i = 0; i + 4 <= data.size(); i += 4) {
    const uint32_t word = uint32_t(random());
    std::memcpy(&data[i], &word, 4);
  }
  const std::vector<int> fields = half_fields(format.name);
  const float levels = float(1 << format.bits) / 4 * (format.superblock() ? 16 : 1) * (format.lut ? 6 : 1);
  for (size_t b = 0; b < data.size(); b += size_t(format.bytes)) {
    const float scale = magnitude / levels * (0.5f + float(random() % 1000) / 1000);
    if (type_is(format, "MXFP4")) data[b] = uint8_t(127 + std::lround(std::log2(magnitude)) - int(random() % 3));
    if (type_is(format, "NVFP4"))  // four scales: 4 bits of exponent, 3 of fraction
      for (size_t g = 0; g < 4; ++g)
        data[b + g] = uint8_t((std::clamp(5 + int(std::lround(std::log2(magnitude))), 0, 14) << 3) + int(random() % 8));
    if (type_is(format, "IQ1_M"))  // four bits of the scale at the top of each of four words
      for (size_t i = 0; i < 4; ++i)
        data[b + 49 + 2 * i] = uint8_t((data[b + 49 + 2 * i] & 15) | (float_to_half(scale) >> (4 * i) & 15) << 4);
    for (size_t f = 0; f < fields.size(); ++f) {
      const float value = f == 0 ? scale : format.superblock() ? scale * 2 : -scale * float(1 << format.bits) / 2;
      const uint16_t half = float_to_half(value);
      std::memcpy(&data[b + size_t(fields[f])], &half, 2);
    }
  }
  return data;
}

// y = linear(x) with `threads` threads taking tiles in turn.
inline void run_linear(const Linear& linear, const float* x, int m, const float* bias, float* y, int threads) {
  std::vector<uint8_t> activations(linear.activation_bytes(m) + 64);
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(activations.data()) + 63) / 64 * 64);
  linear.quantize(x, linear.cols, 0, m, m, aligned);
  auto work = [&](int id) {
    std::vector<uint8_t> scratch(linear.scratch_bytes(m) + 64);
    void* mine = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
    for (int tile = id; tile < linear.num_tiles(m); tile += threads)
      linear.run_tile(tile, m, aligned, bias, y, linear.rows, mine);
  };
  std::vector<std::thread> pool;
  for (int id = 1; id < threads; ++id) pool.emplace_back(work, id);
  work(0);
  for (std::thread& thread : pool) thread.join();
}

}  // namespace tokenmill
