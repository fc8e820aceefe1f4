// Conformance of every weight type on every instruction set this machine can run, against float64.
//
// Exits non-zero and names the case on the first failures. Bounds are the worst case of rounding activations to int8
// (and, where weights are requantized, those per 128), so a wrong lane, sign, scale or tail cannot hide. Sets that
// differ only in how they add integers must give the same bits.
//
// usage: linear_test [isa ...]   (none: all; 77 says that none of those named can run here, and why is printed)
#include <algorithm>

#include "../input_rounding.h"
#include "../panel_tiles.h"
#include "float_linear_testing.h"

using namespace tokenmill;

namespace {

// Sanitizers look for bad memory and bad arithmetic, which fewer sizes show as well, and take ten times as long.
#ifdef TOKENMILL_SANITIZED
constexpr bool kBrief = true;
#else
constexpr bool kBrief = false;
#endif

int failures = 0;

void fail(const std::string& what) {
  if (++failures <= 20) std::printf("FAIL %s\n", what.c_str());
}

// Worst rounding error of sum_k w x, in blocks of `block`.
double rounding_bound(const float* w, const float* x, int64_t cols, int block, bool expanded) {
  double bound = 0;
  for (int64_t k = 0; k < cols; k += block) {
    const int64_t end = std::min<int64_t>(k + block, cols);
    double w_sum = 0, x_sum = 0, w_peak = 0, x_peak = 0;
    for (int64_t i = k; i < end; ++i) {
      w_sum += std::fabs(w[i]);
      x_sum += std::fabs(x[i]);
      w_peak = std::max<double>(w_peak, std::fabs(w[i]));
      x_peak = std::max<double>(x_peak, std::fabs(x[i]));
    }
    bound += w_sum * x_peak / 127 * 0.501;
    // The scale of an expanded block comes from the range of its codes: at most twice the largest weight present here.
    if (expanded) bound += (x_sum + double(end - k) * x_peak / 254) * 2 * w_peak / 127 * 0.7;
  }
  return bound;
}

void check(const Linear& linear, const std::vector<float>& weights, int m, float x_scale, bool integer,
           std::mt19937& random, const std::string& name) {
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t(m * linear.cols)), bias(size_t(linear.rows)), y(size_t(m * linear.rows) + 16, 12345.0f);
  for (float& v : x) v = x_scale * normal(random) * (random() % 64 == 0 ? 8.0f : 1.0f);
  if (m > 2) std::fill_n(x.begin(), linear.cols, 0.0f);
  for (float& v : bias) v = normal(random);
  run_linear(linear, x.data(), m, bias.data(), y.data(), 1);
  std::vector<float> again(y.size(), 12345.0f);
  run_linear(linear, x.data(), m, bias.data(), again.data(), 3);
  if (y != again) fail(name + ": depends on threads");
  for (size_t i = y.size() - 16; i < y.size(); ++i)
    if (y[i] != 12345.0f) return fail(name + ": wrote past the output");
  const int kind = linear.activation_kind(m);
  for (int t = 0; t < m; ++t)
    for (int64_t row = 0; row < linear.rows; ++row) {
      const float *w = &weights[size_t(row * linear.cols)], *v = &x[size_t(t * linear.cols)];
      double want = bias[size_t(row)], magnitude = std::fabs(want);
      for (int64_t k = 0; k < linear.cols; ++k) {
        want += double(w[k]) * v[k];
        magnitude += std::fabs(double(w[k]) * v[k]);
      }
      double bound = magnitude * 2 * float_error(kind) + 1e-30;
      if (kind == kTiledKind) bound += magnitude * 1.01 / 256;  // both factors lose 2^-9 at most
      else if (integer) bound += rounding_bound(w, v, linear.cols, kind % 1000, kind > 1000 && kind % 1000 == 128);
      const double got = y[size_t(t * linear.rows + row)];
      if (!(std::fabs(got - want) <= bound))
        return fail(name + " row " + std::to_string(row) + " token " + std::to_string(t) + ": " + std::to_string(got) +
                    " for " + std::to_string(want) + " +- " + std::to_string(bound));
    }
}

void check_packing(const Linear& linear, const std::vector<float>& weights, const std::string& name) {
  std::vector<float> row(size_t(linear.cols));
  for (int64_t r = 0; r < linear.rows; ++r) {
    linear.dequantize_row(r, row.data());
    if (!std::equal(row.begin(), row.end(), &weights[size_t(r * linear.cols)])) return fail(name + ": row not kept");
  }
}

void check_type(const std::string& type, Isa isa, std::mt19937& random) {
  const QuantFormat& format = *find_quant_format(type);
  const int64_t shapes[][2] = {{1, 256}, {16, 512}, {37, 768}, {50, 1280}, {7, 2304}};
  for (auto& shape : shapes) {
    const int64_t rows = shape[0], cols = format.block == 1    ? shape[1] - 3
                                          : format.block == 32 ? shape[1] - 96
                                                               : shape[1];
    for (float magnitude : {0.02f, 30.0f, -0.02f}) {
      if (kBrief && (rows == 16 || magnitude > 1)) continue;
      if (magnitude < 0 && (type == "MXFP4" || type == "NVFP4" || rows != 37)) continue;  // scales without a sign
      const std::vector<uint8_t> data = random_weights(format, rows, cols, magnitude, random);
      std::vector<float> weights(size_t(rows * cols));
      for (int64_t r = 0; r < rows; ++r) dequantize_row(type, data.data(), r, cols, &weights[size_t(r * cols)]);
      std::string why;
      const auto linear = pack_linear(type, data.data(), rows, cols, isa, &why);
      if (!linear) return fail(type + ": " + why);
      const std::string name = std::string(linear->kernel()) + " " + std::to_string(rows) + "x" + std::to_string(cols);
      check_packing(*linear, weights, name);
      const bool integer = format.bits > 0 && isa != Isa::portable;
      for (int m : {1, 2, 3, 4, 5, 8, 17, 64, 200})
        if ((m < 20 || rows < 40) && !(kBrief && (m == 3 || m == 8 || m == 200)))
          check(*linear, weights, m, m % 2 ? 1.0f : 300.0f, integer, random, name + " m=" + std::to_string(m));
    }
  }
}

// Codes in groups. `variant`: 0 symmetric, 1 with zero points, 2 a table, 3 scales that halves cannot hold.
void check_grouped(Isa isa, int group, int bits, int variant, std::mt19937& random) {
  const int64_t rows = 37, cols = 384;
  const float table[16] = {-1.0f,   -0.6962f, -0.5251f, -0.3949f, -0.2844f, -0.1848f, -0.0911f, 0.0f,
                           0.0796f, 0.1609f,  0.2461f,  0.3379f,  0.4407f,  0.5626f,  0.7230f,  1.0f};
  const size_t groups = size_t(rows * cols / group);
  std::vector<uint8_t> codes(size_t(bits == 4 ? rows * cols / 2 : rows * cols));
  std::vector<float> scales(groups), zeros(groups, float(1 << (bits - 1))), weights(size_t(rows * cols));
  for (auto& c : codes) c = uint8_t(bits == 4 ? random() : random() % (1u << bits));
  for (auto& s : scales)
    s = half_to_float(float_to_half((variant == 3 ? 1e-7f : 0.01f) * float(1 + random() % 100)));
  if (variant == 1)
    for (auto& z : zeros) z = float(random() % (1u << bits));
  const size_t width = size_t(cols), size = size_t(group);
  const auto group_of = [&](size_t i) { return i / width * (width / size) + i % width / size; };
  for (size_t i = 0; i < weights.size(); ++i) {
    const int code = bits == 4 ? codes[i / 2] >> (i % 2 * 4) & 15 : codes[i];
    weights[i] = scales[group_of(i)] * (variant == 2 ? table[code] : float(code) - zeros[group_of(i)]);
  }
  std::string why;
  const float *given = variant == 1 ? zeros.data() : nullptr, *values = variant == 2 ? table : nullptr;
  const GroupedCodes weight{bits, codes.data(), scales.data(), given, values, group};
  const auto linear = pack_grouped(weight, rows, cols, isa, &why);
  if (!linear) return fail("grouped: " + why);
  // Scales are kept as halves or bfloats: compare with what was kept, which must be near what was given.
  std::vector<float> kept(weights.size());
  for (int64_t r = 0; r < rows; ++r) linear->dequantize_row(r, &kept[size_t(r * cols)]);
  for (size_t i = 0; i < kept.size(); ++i)
    if (std::fabs(kept[i] - weights[i]) > scales[group_of(i)] * 0.04f * (bits > 4 && variant == 3 ? 4 : 1))
      return fail(std::string(linear->kernel()) + ": weight not kept");
  for (int m : {1, 4, 6, 33})
    check(*linear, kept, m, 1.0f, isa != Isa::portable, random,
          std::string(linear->kernel()) + " variant " + std::to_string(variant));
}

void check_groups(Isa isa, std::mt19937& random) {
  const int64_t rows = 37, cols = 384;
  for (int group : {32, 128, int(cols)}) {
    for (int bits : {2, 3, 4, 5, 6})
      for (int variant = 0; variant < 4; ++variant)
        if (variant != 2 || bits == 4) check_grouped(isa, group, bits, variant, random);
    std::vector<int8_t> bytes(size_t(rows * cols));
    std::vector<float> scales(size_t(rows * cols / group)), kept(bytes.size());
    for (auto& b : bytes) b = int8_t(random());
    for (auto& s : scales) s = half_to_float(float_to_half(0.01f * float(1 + random() % 100)));
    std::string why;
    const auto eight = pack_int8(bytes.data(), scales.data(), group, rows, cols, isa, &why);
    for (int64_t r = 0; r < rows; ++r) eight->dequantize_row(r, &kept[size_t(r * cols)]);
    for (int m : {1, 4, 6, 33}) check(*eight, kept, m, 1.0f, isa != Isa::portable, random, eight->kernel());
  }
}

// Inputs rounded by the scheme reach the product exactly: nothing is rounded twice, whatever the kernel.
void check_rounded(Isa isa, std::mt19937& random) {
  const int64_t rows = 37, cols = 384;
  std::vector<int8_t> codes(size_t(rows * cols));
  std::vector<float> scales(rows), weights(codes.size()), rounded(cols);
  for (auto& c : codes) c = int8_t(random());
  for (auto& s : scales) s = half_to_float(float_to_half(0.0001f * float(1 + random() % 100)));
  for (size_t i = 0; i < codes.size(); ++i) weights[i] = scales[i / size_t(cols)] * float(codes[i]);
  std::string why;
  for (const char* rounding : {"int8_token", "int8_static", "fp8_token", "llm_int8"}) {
    const bool panel = rounding[0] == 'i';
    std::vector<uint8_t> bytes(codes.begin(), codes.end());
    auto plain = panel ? pack_int8(codes.data(), scales.data(), int(cols), rows, cols, isa, &why)
                       : pack_coded({"int8", bytes.data(), scales.data(), cols, 1.0f}, rows, cols, &why);
    const auto linear = round_inputs(std::move(plain), rounding, 0.05f, &why);
    if (!linear && isa == Isa::avx2 && std::string(rounding) == "int8_static") continue;  // declined, with the reason
    if (!linear) return fail(std::string(rounding) + ": " + why);
    InputRounding kind;
    find_input_rounding(rounding, &kind);
    for (int m : {1, 4, 6, 33}) {
      std::normal_distribution<float> normal(0, 3);
      std::vector<float> x(size_t(m * cols)), y(size_t(m * rows));
      for (auto& v : x) v = normal(random);
      run_linear(*linear, x.data(), m, nullptr, y.data(), 2);
      for (int t = 0; t < m; ++t) {
        round_row(&x[size_t(t * cols)], cols, kind, 0.05f, rounded.data());
        for (int64_t r = 0; r < rows; ++r) {
          double want = 0, size = 0;
          for (int64_t k = 0; k < cols; ++k) {
            want += double(rounded[size_t(k)]) * weights[size_t(r * cols + k)];
            size += std::fabs(double(rounded[size_t(k)]) * weights[size_t(r * cols + k)]);
          }
          if (std::fabs(y[size_t(t * rows + r)] - want) > size * 1e-6)
            return fail(std::string(linear->kernel()) + " m=" + std::to_string(m) + ": rounded twice, or not at all");
        }
      }
    }
  }
}

// Integer sums are exact and floats are added in the same order: not a bit may differ.
void check_equal(Isa isa, Isa other, std::mt19937& random) {
  const int64_t rows = 37;
  std::normal_distribution<float> normal;
  for (int64_t cols : {1280, 2304}) {  // more than one chunk, with a last block of 128 or none
    std::vector<float> x(size_t(70 * cols));
    for (float& v : x) v = normal(random);
    auto compare = [&](const Linear& one, const Linear& two) {
      for (int m : {1, 4, 13, 16, 24, 30, 70}) {
        if (one.activation_kind(m) == kTiledKind) continue;  // rounded otherwise: see check_tiled
        std::vector<float> y(size_t(m * rows)), z(y.size());
        run_linear(one, x.data(), m, nullptr, y.data(), 2);
        run_linear(two, x.data(), m, nullptr, z.data(), 2);
        if (y != z) fail(std::string(one.kernel()) + " m=" + std::to_string(m) + ": other bits than " + two.kernel());
      }
    };
    for (const std::string& type : all_types()) {
      if (type == "BF16" && isa == Isa::amx) continue;  // two terms of activations instead of floats
      const QuantFormat& format = *find_quant_format(type);
      const std::vector<uint8_t> data = random_weights(format, rows, cols, 0.02f, random);
      for (bool precise : {false, true})
        compare(*pack_linear(type, data.data(), rows, cols, isa, nullptr, precise),
                *pack_linear(type, data.data(), rows, cols, other, nullptr, precise));
    }
    std::vector<int8_t> codes(size_t(rows * cols));
    for (auto& c : codes) c = int8_t(random());
    for (int64_t short_cols : {cols, cols - 32, cols - 96}) {  // a last block of less than 128
      const std::vector<float> scales(size_t(rows), 0.01f);
      compare(*pack_int8(codes.data(), scales.data(), int(short_cols), rows, short_cols, isa, nullptr),
              *pack_int8(codes.data(), scales.data(), int(short_cols), rows, short_cols, other, nullptr));
    }
  }
}

// Rows in tiles of bfloat16 have the same bits whatever their number, and lose nothing that bfloat16 holds.
void check_tiled(Isa isa, std::mt19937& random) {
  const int64_t rows = 75, cols = 1120;  // an odd panel, and a chunk that is not full
  const int most = kBrief ? 97 : 300;
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t(most * cols)), all(size_t(most * rows)), y;
  for (float& v : x) v = normal(random);
  for (const std::string& type : all_types()) {
    const QuantFormat& format = *find_quant_format(type);
    if (cols % format.block) continue;
    const std::vector<uint8_t> data = random_weights(format, rows, cols, 0.02f, random);
    const auto linear = pack_linear(type, data.data(), rows, cols, isa, nullptr);
    if (linear->activation_kind(most) != kTiledKind) continue;
    run_linear(*linear, x.data(), most, nullptr, all.data(), 2);
    for (int m : {64, 65, 80, 81, 96, 97}) {
      y.assign(size_t(m * rows), 0);
      run_linear(*linear, x.data(), m, nullptr, y.data(), 1);
      if (!std::equal(y.begin(), y.end(), all.begin())) fail(type + " m=" + std::to_string(m) + ": bits of a row change");
    }
    std::vector<float> rounded(x);
    for (float& v : rounded) v = bfloat_to_float(float_to_bfloat(v));
    y.assign(all.size(), 0);
    run_linear(*linear, rounded.data(), most, nullptr, y.data(), 1);
    if (y != all) fail(type + ": tiles of rounded activations differ");
    if (pack_linear(type, data.data(), rows, cols, isa, nullptr, true)->activation_kind(most) == kTiledKind)
      fail(type + ": a precise weight in tiles");
  }
}

// Float weights in odd shapes.
void check_floats(Isa isa, std::mt19937& random) {
  for (const char* type : {"F32", "F16", "BF16"})
    for (const FloatShape& shape : float_shapes()) {
      const auto make = [&](const QuantFormat&) {
        return make_linear(type, shape.rows, shape.cols, isa, nullptr);
      };
      for (float magnitude : {0.02f, 30.0f}) {  // the second leaves the range of halves
        const std::string wrong = check_float_linear(type, shape, make, kBrief ? 9 : 70, random, magnitude);
        if (!wrong.empty()) fail(std::string(isa_name(isa)) + " " + wrong);
      }
    }
}

}  // namespace

int main(int argc, char** argv) {
  std::string tested;
  for (int i = 0; i <= int(Isa::amx); ++i) {
    const Isa isa = Isa(i);
    const std::string name = isa_name(isa);
    if (argc > 1 && std::find(argv + 1, argv + argc, name) == argv + argc) continue;
    if (const char* reason = isa_missing(isa)) {
      std::printf("skipped %s: %s\n", name.c_str(), reason);
      continue;
    }
    std::mt19937 random(7);
    for (const std::string& type : all_types()) check_type(type, isa, random);
    check_floats(isa, random);
    check_groups(isa, random);
    check_rounded(isa, random);
    if (isa == Isa::neon_i8mm) check_equal(isa, Isa::neon_dotprod, random);
    if (isa == Isa::amx) check_equal(isa, Isa::avx512_vnni, random);
    if (isa == Isa::amx) check_tiled(isa, random);
    tested += " " + name;
  }
  if (tested.empty()) return 77;
  std::printf("%s:%s, %d failures\n", failures ? "FAILED" : "ok", tested.c_str(), failures);
  return failures != 0;
}
