// The writers of quantize_blocks.h: four blocks at a time, one per lane, from values to codes to bits.
#include "quantize_blocks.h"

#include <cstring>
#include <vector>

#include "quant_blocks.h"
#include "quantize_grids.h"
#include "quantize_search.h"

namespace tokenmill {

// Four blocks transposed: element i of each is in x[i]. `importance` is one everywhere unless `weighted`.
struct FourBlocks {
  vec x[kMaxBlock];
  vec importance[kMaxBlock];
  vec row_mean_square;
  bool weighted;
};

namespace {

const AffineGrid kWeightedGrid = {-0.9, 0.05, 36};
constexpr float kLargestGain = 1.25f;

typedef uint8_t Codes[kSide][kMaxBlock];

template <int N>
void spread(const vec* values, Codes& out, int at = 0) {
  for (int i = 0; i < N; ++i)
    for (int k = 0; k < kSide; ++k) out[k][at + i] = uint8_t(int(values[i][k]));
}

vec round_to_half(vec v) {
  for (int k = 0; k < kSide; ++k) v[k] = half_to_float(float_to_half(v[k]));
  return v;
}

void store_half(float value, uint8_t* out) {
  const uint16_t bits = float_to_half(value);
  out[0] = uint8_t(bits);
  out[1] = uint8_t(bits >> 8);
}

// `runs` runs of `run` bytes; each run holds 8 / bits values per byte, the first ones in the lowest bits.
void pack(const uint8_t* codes, int runs, int run, int bits, int shift, uint8_t* out) {
  const int fields = 8 / bits, mask = (1 << bits) - 1;
  for (int r = 0; r < runs; ++r)
    for (int i = 0; i < run; ++i) {
      int byte = 0;
      for (int f = 0; f < fields; ++f) byte |= (codes[(r * fields + f) * run + i] >> shift & mask) << (f * bits);
      out[r * run + i] = uint8_t(byte);
    }
}

void pack_fifth_bits(const uint8_t* codes, uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    int byte = 0;
    for (int b = 0; b < 8; ++b) byte |= (codes[8 * i + b] >> 4 & 1) << b;
    out[i] = uint8_t(byte);
  }
}

// ---- blocks of 32

// importance * sqrt(mean square + x^2): large weights count more, zero ones still count.
template <int N>
void weigh(const vec* x, const vec* importance, vec mean, vec* weights) {
  for (int i = 0; i < N; ++i) weights[i] = importance[i] * square_root(mean + x[i] * x[i]);
}

vec symmetric_32(const FourBlocks& in, int levels, Codes& codes) {
  vec scale, code[32];
  if (in.weighted) {
    vec weights[32];
    weigh<32>(in.x, in.importance, in.row_mean_square, weights);
    scale = fit_symmetric<32>(in.x, weights, float(levels));
    const vec inverse = reciprocal_or_zero(round_to_half(scale));
    for (int i = 0; i < 32; ++i) code[i] = signed_codes(in.x[i] * inverse, float(levels)) + float(levels);
  } else {  // the extreme value becomes the lowest code
    scale = signed_extreme<32>(in.x) / splat(-float(levels));
    const vec inverse = reciprocal_or_zero(scale);
    for (int i = 0; i < 32; ++i) code[i] = clamp(in.x[i] * inverse + (levels + 0.5f), 0, float(2 * levels - 1));
  }
  spread<32>(code, codes);  // cuts what is behind the point
  return scale;
}

vec affine_32(const FourBlocks& in, int levels, Codes& codes, vec& low) {
  vec scale, code[32];
  if (in.weighted) {
    vec weights[32];
    weigh<32>(in.x, in.importance, in.row_mean_square, weights);
    const AffineFit fit = fit_affine<32>(in.x, weights, float(levels), kWeightedGrid);
    scale = fit.scale;
    low = -fit.minimum;
    const vec inverse = reciprocal_or_zero(round_to_half(scale)), stored_low = round_to_half(low);
    for (int i = 0; i < 32; ++i) code[i] = nearest(clamp((in.x[i] - stored_low) * inverse, 0, float(levels)));
  } else {
    vec high = low = in.x[0];
    for (int i = 1; i < 32; ++i) {
      low = in.x[i] < low ? in.x[i] : low;
      high = in.x[i] > high ? in.x[i] : high;
    }
    scale = (high - low) / splat(float(levels));
    const vec inverse = reciprocal_or_zero(scale);
    for (int i = 0; i < 32; ++i) code[i] = clamp((in.x[i] - low) * inverse + 0.5f, 0, float(levels));
  }
  spread<32>(code, codes);
  return scale;
}

void encode_q4_0(const FourBlocks& in, uint8_t* const* out) {
  Codes codes;
  const vec scale = symmetric_32(in, 8, codes);
  for (int k = 0; k < kSide; ++k) {
    store_half(scale[k], out[k]);
    pack(codes[k], 1, 16, 4, 0, out[k] + 2);
  }
}

void encode_q4_1(const FourBlocks& in, uint8_t* const* out) {
  Codes codes;
  vec low;
  const vec scale = affine_32(in, 15, codes, low);
  for (int k = 0; k < kSide; ++k) {
    store_half(scale[k], out[k]);
    store_half(low[k], out[k] + 2);
    pack(codes[k], 1, 16, 4, 0, out[k] + 4);
  }
}

void encode_q5_0(const FourBlocks& in, uint8_t* const* out) {
  Codes codes;
  const vec scale = symmetric_32(in, 16, codes);
  for (int k = 0; k < kSide; ++k) {
    store_half(scale[k], out[k]);
    pack_fifth_bits(codes[k], out[k] + 2);
    pack(codes[k], 1, 16, 4, 0, out[k] + 6);
  }
}

void encode_q5_1(const FourBlocks& in, uint8_t* const* out) {
  Codes codes;
  vec low;
  const vec scale = affine_32(in, 31, codes, low);
  for (int k = 0; k < kSide; ++k) {
    store_half(scale[k], out[k]);
    store_half(low[k], out[k] + 2);
    pack_fifth_bits(codes[k], out[k] + 4);
    pack(codes[k], 1, 16, 4, 0, out[k] + 8);
  }
}

void encode_q8_0(const FourBlocks& in, uint8_t* const* out) {
  const vec scale = magnitude(signed_extreme<32>(in.x)) / splat(127.0f), inverse = reciprocal_or_zero(scale);
  for (int k = 0; k < kSide; ++k) store_half(scale[k], out[k]);
  for (int i = 0; i < 32; ++i) {
    const vec scaled = in.x[i] * inverse;
    for (int k = 0; k < kSide; ++k) out[k][2 + i] = uint8_t(int8_t(std::round(scaled[k])));
  }
}

void encode_iq4_nl(const FourBlocks& in, uint8_t* const* out) {
  vec weights[32];
  if (in.weighted) {
    weigh<32>(in.x, in.importance, 2.0f * sum_of_squares<32>(in.x) / splat(32.0f), weights);
  } else {
    for (int i = 0; i < 32; ++i) weights[i] = in.x[i] * in.x[i];
  }
  const vec scale = fit_levels<32>(in.x, weights), inverse = reciprocal_or_zero(round_to_half(scale));
  Codes codes;
  for (int i = 0; i < 32; ++i) {
    const ivec index = nearest_level_index(inverse * in.x[i]);
    for (int k = 0; k < kSide; ++k) codes[k][i] = uint8_t(index[k]);
  }
  for (int k = 0; k < kSide; ++k) {
    store_half(scale[k], out[k]);
    pack(codes[k], 1, 16, 4, 0, out[k] + 2);
  }
}

// ---- blocks of 256 in groups of N

template <int N>
void weigh_block(const FourBlocks& in, float factor, vec* weights) {
  vec total = sum_of_squares<N>(in.x);
  for (int g = 1; g < kMaxBlock / N; ++g) total = total + sum_of_squares<N>(in.x + g * N);
  weigh<kMaxBlock>(in.x, in.importance, factor * total / splat(float(kMaxBlock)), weights);
}

// Scales >= 0 of a block as codes of its largest one.
template <int Groups>
vec against_largest(const vec* values, float levels, vec* codes) {
  vec largest = values[0];
  for (int g = 1; g < Groups; ++g) largest = values[g] > largest ? values[g] : largest;
  const vec inverse = pick(largest > splat(0), splat(levels) / largest, splat(0));
  for (int g = 0; g < Groups; ++g) codes[g] = nearest(clamp(inverse * values[g], 0, levels));
  return largest / splat(levels);
}

// Signed scales as codes; the one of the largest magnitude becomes -levels.
template <int Groups>
vec against_extreme(const vec* values, float levels, vec* codes) {
  const vec extreme = signed_extreme<Groups>(values);
  const ivec zero = magnitude(extreme) < splat(kSmallest);
  const vec inverse = pick(zero, splat(0), splat(-levels) / extreme);
  for (int g = 0; g < Groups; ++g) codes[g] = signed_codes(inverse * values[g], levels);
  return pick(zero, splat(0), 1.0f / inverse);
}

struct AffineBlock {
  vec d, dmin;
  Codes scales, minima, codes;
};

template <int N>
void affine_block(const FourBlocks& in, bool weighted, float levels, const AffineGrid& grid, float scale_levels,
                  AffineBlock& out) {
  constexpr int kGroups = kMaxBlock / N;
  vec weights[kMaxBlock], scale[kGroups], minimum[kGroups], scale_codes[kGroups], minimum_codes[kGroups];
  if (weighted) {
    vec total[kGroups];
    weigh_block<N>(in, levels == 3 ? 1.0f : 2.0f, weights);
    for (int g = 0; g < kGroups; ++g) {
      const AffineFit fit = fit_affine<N>(in.x + g * N, weights + g * N, levels, kWeightedGrid);
      scale[g] = fit.scale;
      minimum[g] = fit.minimum;
      total[g] = sum<N>(weights + g * N);
    }
    out.d = fit_positive<kGroups>(scale, total, scale_levels, scale_codes);
    out.dmin = fit_positive<kGroups>(minimum, total, scale_levels, minimum_codes);
  } else {
    for (int g = 0; g < kGroups; ++g) {
      const vec *x = in.x + g * N, rms = square_root(sum_of_squares<N>(x) / splat(float(N)));
      for (int i = 0; i < N; ++i) weights[i] = rms + magnitude(x[i]);
      const AffineFit fit = fit_affine<N>(x, weights, levels, grid);
      scale[g] = fit.scale;
      minimum[g] = fit.minimum;
    }
    out.d = against_largest<kGroups>(scale, scale_levels, scale_codes);
    out.dmin = against_largest<kGroups>(minimum, scale_levels, minimum_codes);
  }
  const vec d = round_to_half(out.d), dmin = round_to_half(out.dmin);
  for (int g = 0; g < kGroups; ++g) {
    const vec stored = d * scale_codes[g], stored_minimum = dmin * minimum_codes[g];
    vec code[N];
    for (int i = 0; i < N; ++i) {
      const vec scaled = (in.x[g * N + i] + stored_minimum) / stored;
      code[i] = pick(stored != splat(0), nearest(clamp(scaled, 0, levels)), splat(0));
    }
    spread<N>(code, out.codes, g * N);
  }
  spread<kGroups>(scale_codes, out.scales);
  spread<kGroups>(minimum_codes, out.minima);
}

// What to multiply a block's scales by so that the result, projected on the weights, has their length.
float gain_to_one(const FourBlocks& in, const AffineBlock& block, int k, float d, float dmin) {
  float wanted = 0, had = 0;
  for (int g = 0; g < 16; ++g) {
    const float scale = d * block.scales[k][g], minimum = dmin * block.minima[k][g];
    float group_wanted = 0, group_had = 0;
    for (int i = g * 16; i < g * 16 + 16; ++i) {
      const float weighted = in.importance[i][k] * in.x[i][k], found = scale * block.codes[k][i] - minimum;
      group_wanted += weighted * in.x[i][k];
      group_had += weighted * found;
    }
    wanted += group_wanted;
    had += group_had;
  }
  const float gain = wanted / had;
  return !(had > 0) ? 1.0f : gain < 1 / kLargestGain ? 1 / kLargestGain : gain > kLargestGain ? kLargestGain : gain;
}

void encode_q2_k(const FourBlocks& in, uint8_t* const* out) {
  AffineBlock block;
  affine_block<16>(in, true, 3, kWeightedGrid, 15, block);
  block.d = round_to_half(block.d);
  block.dmin = round_to_half(block.dmin);
  for (int k = 0; k < kSide; ++k) {
    const float gain = gain_to_one(in, block, k, block.d[k], block.dmin[k]);
    block.d[k] *= gain;
    block.dmin[k] *= gain;
    for (int g = 0; g < 16; ++g) out[k][g] = uint8_t(block.scales[k][g] | block.minima[k][g] << 4);
    pack(block.codes[k], 2, 32, 2, 0, out[k] + 16);
    store_half(block.d[k], out[k] + 80);
    store_half(block.dmin[k], out[k] + 82);
  }
}

// d, dmin and eight pairs of 6 bits: the last four keep their top two bits in the first eight bytes.
void store_k_head(const AffineBlock& block, int k, uint8_t* out) {
  store_half(block.d[k], out);
  store_half(block.dmin[k], out + 2);
  const uint8_t *scales = block.scales[k], *minima = block.minima[k];
  for (int g = 0; g < 4; ++g) {
    out[4 + g] = uint8_t(scales[g] | scales[g + 4] >> 4 << 6);
    out[8 + g] = uint8_t(minima[g] | minima[g + 4] >> 4 << 6);
    out[12 + g] = uint8_t((scales[g + 4] & 15) | (minima[g + 4] & 15) << 4);
  }
}

void encode_q4_k(const FourBlocks& in, uint8_t* const* out) {
  AffineBlock block;
  affine_block<32>(in, in.weighted, 15, {-1.0, 0.1, 20}, 63, block);
  for (int k = 0; k < kSide; ++k) {
    store_k_head(block, k, out[k]);
    pack(block.codes[k], 4, 32, 4, 0, out[k] + 16);
  }
}

void encode_q5_k(const FourBlocks& in, uint8_t* const* out) {
  AffineBlock block;
  affine_block<32>(in, in.weighted, 31, {-0.5, 0.1, 15}, 63, block);
  for (int k = 0; k < kSide; ++k) {
    store_k_head(block, k, out[k]);
    pack(block.codes[k], 1, 32, 1, 4, out[k] + 16);
    pack(block.codes[k], 4, 32, 4, 0, out[k] + 48);
  }
}

void symmetric_codes(const FourBlocks& in, vec d, const vec* scales, int levels, Codes& codes) {
  const vec stored_d = round_to_half(d);
  for (int g = 0; g < 16; ++g) {
    const vec stored = stored_d * scales[g];
    vec code[16];
    for (int i = 0; i < 16; ++i) {
      const vec rounded = signed_codes(in.x[g * 16 + i] / stored, float(levels));
      code[i] = pick(stored != splat(0), rounded, splat(0)) + float(levels);
    }
    spread<16>(code, codes, g * 16);
  }
}

void encode_q3_k(const FourBlocks& in, uint8_t* const* out) {
  vec group_scales[16], scales[16], d;
  if (in.weighted) {
    vec weights[kMaxBlock], total[16];
    weigh_block<16>(in, 2.0f, weights);
    for (int g = 0; g < 16; ++g) {
      group_scales[g] = fit_symmetric<16>(in.x + g * 16, weights + g * 16, 4);
      total[g] = sum<16>(weights + g * 16);
    }
    d = fit_symmetric<16>(group_scales, total, 32);
    const vec inverse = reciprocal_or_zero(d);
    for (int g = 0; g < 16; ++g) scales[g] = signed_codes(group_scales[g] * inverse, 32);
  } else {
    for (int g = 0; g < 16; ++g) group_scales[g] = fit_refined<16>(in.x + g * 16, 4);
    d = against_extreme<16>(group_scales, 32, scales);
  }
  Codes codes, scale_codes;
  symmetric_codes(in, d, scales, 4, codes);
  for (int g = 0; g < 16; ++g) scales[g] = scales[g] + 32.0f;
  spread<16>(scales, scale_codes);
  for (int k = 0; k < kSide; ++k) {
    pack(codes[k], 1, 32, 1, 2, out[k]);
    pack(codes[k], 2, 32, 2, 0, out[k] + 32);
    pack(scale_codes[k], 1, 8, 4, 0, out[k] + 96);
    pack(scale_codes[k], 1, 4, 2, 4, out[k] + 104);
    store_half(d[k], out[k] + 108);
  }
}

void encode_q6_k(const FourBlocks& in, uint8_t* const* out) {
  vec group_scales[16], scales[16];
  for (int g = 0; g < 16; ++g) {
    const vec* x = in.x + g * 16;
    vec squares[16];
    for (int i = 0; i < 16; ++i) squares[i] = x[i] * x[i];
    group_scales[g] = fit_symmetric<16>(x, in.weighted ? in.importance + g * 16 : squares, 32);
  }
  const vec d = against_extreme<16>(group_scales, 128, scales);
  Codes codes;
  symmetric_codes(in, d, scales, 32, codes);
  for (int k = 0; k < kSide; ++k) {
    pack(codes[k], 2, 64, 4, 0, out[k]);
    pack(codes[k], 2, 32, 2, 4, out[k] + 128);
    for (int g = 0; g < 16; ++g) out[k][192 + g] = uint8_t(int8_t(scales[g][k]));
    store_half(d[k], out[k] + 208);
  }
}

void encode_iq4_xs(const FourBlocks& in, uint8_t* const* out) {
  vec weights[kMaxBlock], group_scales[8], scales[8];
  if (in.weighted) {
    weigh_block<32>(in, 2.0f, weights);
  } else {
    for (int i = 0; i < kMaxBlock; ++i) weights[i] = in.x[i] * in.x[i];
  }
  for (int g = 0; g < 8; ++g) group_scales[g] = fit_levels<32>(in.x + g * 32, weights + g * 32);
  const vec d = against_extreme<8>(group_scales, 32, scales), stored_d = round_to_half(d);
  Codes codes, scale_codes;
  for (int i = 0; i < kMaxBlock; ++i) {
    const vec inverse = reciprocal_or_zero(stored_d * scales[i / 32]);
    const ivec index = nearest_level_index(inverse * in.x[i]);
    for (int k = 0; k < kSide; ++k) codes[k][i] = uint8_t(index[k]);
  }
  for (int g = 0; g < 8; ++g) scales[g] = scales[g] + 32.0f;
  spread<8>(scales, scale_codes);
  for (int k = 0; k < kSide; ++k) {
    store_half(d[k], out[k]);
    pack(scale_codes[k], 2, 1, 2, 4, out[k] + 2);
    pack(scale_codes[k], 4, 1, 4, 0, out[k] + 4);
    pack(codes[k], 8, 16, 4, 0, out[k] + 8);
  }
}

const BlockQuantizer kQuantizers[] = {{"Q4_0", 32, 18, encode_q4_0},   {"Q4_1", 32, 20, encode_q4_1},
                                      {"Q5_0", 32, 22, encode_q5_0},   {"Q5_1", 32, 24, encode_q5_1},
                                      {"Q8_0", 32, 34, encode_q8_0},   {"IQ4_NL", 32, 18, encode_iq4_nl},
                                      {"Q2_K", 256, 84, encode_q2_k},  {"Q3_K", 256, 110, encode_q3_k},
                                      {"Q4_K", 256, 144, encode_q4_k}, {"Q5_K", 256, 176, encode_q5_k},
                                      {"Q6_K", 256, 210, encode_q6_k}, {"IQ4_XS", 256, 136, encode_iq4_xs},
                                      {"IQ2_XXS", 256, 66, nullptr, encode_iq2_xxs},
                                      {"IQ2_XS", 256, 74, nullptr, encode_iq2_xs},
                                      {"IQ2_S", 256, 82, nullptr, encode_iq2_s},
                                      {"IQ3_XXS", 256, 98, nullptr, encode_iq3_xxs},
                                      {"IQ3_S", 256, 110, nullptr, encode_iq3_s},
                                      {"TQ1_0", 256, 54, nullptr, encode_tq1_0},
                                      {"TQ2_0", 256, 66, nullptr, encode_tq2_0}};

// Mean of the squares of a row: float32 inside each block of 32, double across them.
float mean_square(const float* row, int64_t cols) {
  double total = 0;
  for (int64_t begin = 0; begin < cols; begin += 32) {
    float block = row[begin] * row[begin];
    for (int i = 1; i < 32; ++i) block += row[begin + i] * row[begin + i];
    total += block;
  }
  return float(total / double(cols));
}

}  // namespace

const BlockQuantizer* find_block_quantizer(const std::string& type) {
  for (const BlockQuantizer& quantizer : kQuantizers)
    if (type == quantizer.name) return &quantizer;
  return nullptr;
}

void quantize_rows(const BlockQuantizer& quantizer, const float* in, int64_t rows, int64_t cols,
                   const float* importance, uint8_t* out) {
  const int size = quantizer.block;
  const int64_t per_row = cols / size, blocks = rows * per_row;
  if (quantizer.encode_one) {
    for (int64_t block = 0; block < blocks; ++block)
      quantizer.encode_one(in + block * size, importance ? importance + block % per_row * size : nullptr,
                           out + block * quantizer.bytes);
    return;
  }
  std::vector<float> means(importance && size == 32 ? rows : 0);
  for (size_t row = 0; row < means.size(); ++row) means[row] = mean_square(in + row * cols, cols);
  FourBlocks four;
  four.weighted = importance != nullptr;
  four.row_mean_square = splat(0);
  for (vec& each : four.importance) each = splat(1);
  uint8_t spare[kSide * kMaxBlock];  // where the lanes past the last block go
  for (int64_t first = 0; first < blocks; first += kSide) {
    uint8_t* to[kSide];
    for (int k = 0; k < kSide; ++k) {
      const bool past = first + k >= blocks;
      const int64_t block = past ? blocks - 1 : first + k;  // a repeated block is as good as any
      to[k] = past ? spare + k * kMaxBlock : out + block * quantizer.bytes;
      const float* from = in + block * size;
      for (int i = 0; i < size; ++i) four.x[i][k] = from[i];
      if (!importance) continue;
      const float* weight = importance + block % per_row * size;
      for (int i = 0; i < size; ++i) four.importance[i][k] = weight[i];
      if (!means.empty()) four.row_mean_square[k] = means[block / per_row];
    }
    quantizer.encode(four, to);
  }
}

}  // namespace tokenmill
