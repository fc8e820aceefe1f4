// Float weights against float64 in odd shapes, for any number of rows. Shared by linear_test.cpp (the instruction sets
// of the machine) and tiles_test.cpp (those that it lacks, emulated).
#pragma once

#include <functional>

#include "linear_testing.h"

namespace tokenmill {

constexpr int kTwoTermKind = 7;  // activation kind of linear_tiles.cpp: 2^-17 of a value is lost at most
constexpr int kHalfKind = 8;     // of linear_plain.cpp: 2^-11 of a value, and as much of some sums

// Of a sum of products, times the sum of their sizes.
inline double float_error(int activation_kind) {
  return activation_kind == kHalfKind ? 4e-3 : activation_kind == kTwoTermKind ? 9e-6 : 1e-6;
}

struct FloatShape {
  int64_t rows, cols;
};

inline const std::vector<FloatShape>& float_shapes() {
  static const std::vector<FloatShape> shapes = {{1, 1}, {5, 31}, {16, 32}, {33, 33}, {48, 64}, {71, 95}, {145, 96},
                                                 {39, 200}};
  return shapes;
}

// y of m rows, the place behind it untouched.
inline bool run_guarded(const Linear& linear, const float* x, int m, const float* bias, int threads,
                        std::vector<float>& y) {
  y.assign(size_t(m * linear.rows) + 64, 12345.0f);
  run_linear(linear, x, m, bias, y.data(), threads);
  for (size_t i = y.size() - 64; i < y.size(); ++i)
    if (y[i] != 12345.0f) return false;
  y.resize(y.size() - 64);
  return true;
}

// What is wrong, or nothing. Every row alone gives the bits that it has among others.
inline std::string check_float_linear(const std::string& type, FloatShape shape,
                                      const std::function<std::unique_ptr<Linear>(const QuantFormat&)>& make,
                                      int most_rows, std::mt19937& random, float magnitude = 0.02f) {
  const QuantFormat& format = *find_quant_format(type);
  const int64_t rows = shape.rows, cols = shape.cols;
  const std::vector<uint8_t> data = random_weights(format, rows, cols, magnitude, random);
  const auto linear = make(format);
  for (int64_t row = 0; row < rows; row += linear->pack_row_block())
    linear->pack_rows(data.data(), row, std::min<int64_t>(rows, row + linear->pack_row_block()));
  const std::string name = std::string(linear->kernel()) + " " + std::to_string(rows) + "x" + std::to_string(cols);
  std::vector<float> weights(size_t(rows * cols)), row(cols), alone, y, again;
  for (int64_t r = 0; r < rows; ++r) {
    dequantize_row(type, data.data(), r, cols, &weights[size_t(r * cols)]);
    linear->dequantize_row(r, row.data());
    if (!std::equal(row.begin(), row.end(), &weights[size_t(r * cols)])) return name + ": row not kept";
  }
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t(most_rows * cols)), bias(size_t(rows), 0.0f);
  for (float& v : x) v = normal(random) * (random() % 16 == 0 ? 100.0f : 1.0f);
  for (float& b : bias) b = normal(random);
  std::vector<float> singles(size_t(most_rows * rows));
  for (int t = 0; t < most_rows; ++t) {
    run_linear(*linear, &x[size_t(t * cols)], 1, bias.data(), &singles[size_t(t * rows)], 1);
    for (int64_t r = 0; r < rows; ++r) {
      double want = bias[size_t(r)], size = std::fabs(want);
      for (int64_t k = 0; k < cols; ++k) {
        want += double(weights[size_t(r * cols + k)]) * x[size_t(t * cols + k)];
        size += std::fabs(double(weights[size_t(r * cols + k)]) * x[size_t(t * cols + k)]);
      }
      const double bound = size * float_error(linear->activation_kind(1));
      const double error = std::fabs(singles[size_t(t * rows + r)] - want);
      if (!(error <= bound)) return name + ": " + std::to_string(error / size * 1e6) + "e-6 from float64";
    }
  }
  for (int m = 1; m <= most_rows; ++m) {
    const std::string with = name + " m=" + std::to_string(m);
    if (!run_guarded(*linear, x.data(), m, bias.data(), 1, y)) return with + ": wrote past the output";
    if (!std::equal(y.begin(), y.end(), singles.begin())) return with + ": other bits than one row at a time";
    run_guarded(*linear, x.data(), m, bias.data(), 3, again);
    if (y != again) return with + ": depends on threads";
    run_guarded(*linear, x.data(), m, nullptr, 1, again);
    for (size_t i = 0; i < y.size(); ++i)
      if (again[i] + bias[i % size_t(rows)] != y[i]) return with + ": bias";
  }
  return "";
}

}  // namespace tokenmill
