// The smallest test frame: CHECK prints what failed and where, and the process exits with 1 at the end.
#pragma once

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

inline int& failures() {
  static int count = 0;
  return count;
}

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      if (++failures() < 20) std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                             \
  } while (0)

inline bool near(double actual, double expected, double tolerance) {
  return std::fabs(actual - expected) <= tolerance * (1.0 + std::fabs(expected));
}

inline std::vector<float> random_floats(size_t count, unsigned seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

inline int report(const char* name) {
  std::printf("%s: %s\n", name, failures() == 0 ? "ok" : "FAILED");
  return failures() == 0 ? 0 : 1;
}
