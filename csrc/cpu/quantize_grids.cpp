// The writers of quantize_grids.h: which points of a grid, and which scales, of least weighted error.
//
// A block at a time, four weights in a vector. Every sum has one order, that of the torch twin; contraction to fused
// multiply-add is off for this file (CMakeLists.txt).
#include "quantize_grids.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "quant_grids.h"
#include "quantize_search.h"

namespace tokenmill {
namespace {

constexpr int kBlock = 256, kNeighbours = 12, kMostLevels = 8;
constexpr double kFirst = 0.76, kStep = 0.04;  // of the scale that puts the largest weight on the largest level
constexpr int kTries = 13, kScaleFirst = 25, kScaleTries = 11, kLargestCode = 15;
constexpr double kThreshold = 0.5, kThresholdStep = 0.02;  // of the largest weight
constexpr int kThresholds = 21;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct GridKind {
  const char* name;
  int group;     // weights that share a scale
  float unit;    // of a scale: the stored half times an odd number times this
  bool is_even;  // seven sign bits for eight weights: the number of minus signs is even
  int num_levels;
  int levels[kMostLevels];
};

// The points as floats, and for every vector of levels the points nearest to it.
struct GridTables {
  const GridKind& kind;
  int length;
  std::vector<float> points;         // [count][length]
  std::vector<uint16_t> neighbours;  // [num_levels ^ length][kNeighbours]

  explicit GridTables(const GridKind& kind) : kind(kind) {
    const Grid& grid = *find_grid(kind.name);
    length = grid.length;
    std::vector<int> values;
    for (int p = 0; p < grid.count; ++p)
      for (int i = 0; i < length; ++i)
        values.push_back(kind.levels[grid.points[p] >> (grid.bits * i) & ((1 << grid.bits) - 1)]);
    points.assign(values.begin(), values.end());
    int keys = 1;
    for (int i = 0; i < length; ++i) keys *= kind.num_levels;
    neighbours.resize(size_t(keys) * kNeighbours);
    std::vector<int64_t> order(size_t(grid.count));
    for (int key = 0; key < keys; ++key) {
      for (int p = 0; p < grid.count; ++p) {
        int64_t distance = 0;
        for (int i = 0, rest = key; i < length; ++i, rest /= kind.num_levels) {
          const int difference = kind.levels[rest % kind.num_levels] - values[size_t(p * length + i)];
          distance += difference * difference;
        }
        order[size_t(p)] = distance * grid.count + p;  // ties go to the first point
      }
      std::partial_sort(order.begin(), order.begin() + kNeighbours, order.end());
      // A vector that is itself a point has no better neighbour, whatever the weights: it fills its row.
      for (int n = 0; n < kNeighbours; ++n)
        neighbours[size_t(key * kNeighbours + n)] =
            uint16_t(order[order[0] < grid.count ? 0 : size_t(n)] % grid.count);
    }
  }
};

vec load(const float* p) {
  vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The two halves of eight, then pairs of neighbours.
float halved_sum(vec v) { return (v[0] + v[1]) + (v[2] + v[3]); }

template <int L>
float halved_product(const float* a, const float* b) {
  vec sum = load(a) * load(b);
  if constexpr (L == 8) sum = sum + load(a + 4) * load(b + 4);
  return halved_sum(sum);
}

struct Found {
  float d = 0;  // as stored
  int scales[16] = {};
  int points[64] = {};
  bool negative[kBlock] = {};
};

// importance * sqrt(2 * mean square of the block + x^2)
void weigh(const float* x, const float* importance, float* weights) {
  float total = 0;
  for (int g = 0; g < 8; ++g) {
    float sum = x[g * 32] * x[g * 32];
    for (int i = 1; i < 32; ++i) sum += x[g * 32 + i] * x[g * 32 + i];
    total = g ? total + sum : sum;
  }
  const float mean = total * (2.0f / kBlock);
  for (int i = 0; i < kBlock; ++i) {
    const float root = std::sqrt(mean + x[i] * x[i]);
    weights[i] = importance ? importance[i] * root : root;
  }
}

// One block in search of its points: L weights to a point.
template <int L>
class Search {
 public:
  Search(const GridTables& tables, const float* x, const float* weights) : tables_(tables), w_(weights) {
    for (int i = 0; i < kBlock; ++i) {
      found.negative[i] = x[i] < 0;
      t_[i] = std::fabs(x[i]);
    }
    if (tables.kind.is_even) even_signs(x);
  }

  void run() {
    const GridKind& kind = tables_.kind;
    const int groups = kBlock / kind.group;
    float scale[16], curvature[16], largest = 0;
    for (int g = 0; g < groups; ++g) {
      group_scale(g, scale[g], curvature[g]);
      largest = std::max(largest, scale[g]);
    }
    if (largest < kSmallest) {
      found = Found();
      return;
    }
    found.d = block_scale(scale, curvature, groups, largest);
    float along = 0, square = 0;
    for (int g = 0; g < groups; ++g) {
      const float odd = float(2 * found.scales[g] + 1), stored = found.d * kind.unit * odd;
      float group_along, group_square;
      choose(g, stored > 0 ? 1.0f / stored : 0.0f, found.points + g * (kind.group / L), group_along, group_square);
      along = g ? along + odd * group_along : odd * group_along;
      square = g ? square + odd * odd * group_square : odd * odd * group_square;
    }
    if (along > 0) found.d = along / square / kind.unit;  // the best one for these points
  }

  Found found;

 private:
  // With an even number of minus signs, the weight that matters least gets the wrong one: its size is then negative.
  void even_signs(const float* x) {
    for (int p = 0; p < kBlock; p += 8) {
      int count = 0, least = p;
      for (int i = p; i < p + 8; ++i) {
        count += found.negative[i];
        if (w_[i] * (x[i] * x[i]) < w_[least] * (x[least] * x[least])) least = i;
      }
      if (count % 2 == 0) continue;
      t_[least] = -t_[least];
      found.negative[least] = !found.negative[least];
    }
  }

  // The point of least weighted error for L sizes in units of the grid.
  int nearest_point(const float* sizes, const float* weights) const {
    const GridKind& kind = tables_.kind;
    constexpr int kVectors = L / 4;
    vec u[kVectors], w[kVectors];
    size_t key = 0, power = 1;
    for (int v = 0; v < kVectors; ++v) {
      u[v] = load(sizes + 4 * v);
      w[v] = load(weights + 4 * v);
      ivec code = {0, 0, 0, 0};
      for (int l = 0; l + 1 < kind.num_levels; ++l)
        code = code - (u[v] > splat(float(kind.levels[l] + kind.levels[l + 1]) / 2));
      for (int i = 0; i < 4; ++i, power *= size_t(kind.num_levels)) key += size_t(code[i]) * power;
    }
    const uint16_t* near = &tables_.neighbours[key * kNeighbours];
    if (near[0] == near[1]) return near[0];
    float best = kInfinity;
    int chosen = near[0];
    for (int n = 0; n < kNeighbours; ++n) {
      const float* point = &tables_.points[size_t(near[n]) * L];
      vec difference = u[0] - load(point), cost = w[0] * (difference * difference);
      if constexpr (L == 8) {
        difference = u[1] - load(point + 4);
        cost = cost + w[1] * (difference * difference);
      }
      const float total = halved_sum(cost);
      if (!(total < best)) continue;
      best = total;
      chosen = near[n];
    }
    return chosen;
  }

  // The points of a group at a scale; the sums of weight x size x point and of weight x point^2.
  void choose(int g, float inverse, int* points, float& along, float& square) const {
    const int size = tables_.kind.group;
    for (int i = 0; i < size; i += L) {
      const float *t = t_ + g * size + i, *w = w_ + g * size + i;
      float u[L], weighted[L];
      for (int k = 0; k < L; ++k) u[k] = t[k] * inverse;
      points[i / L] = nearest_point(u, w);
      const float* point = &tables_.points[size_t(points[i / L]) * L];
      for (int k = 0; k < L; ++k) weighted[k] = w[k] * point[k];
      const float a = halved_product<L>(weighted, t), b = halved_product<L>(weighted, point);
      along = i ? along + a : a;
      square = i ? square + b : b;
    }
  }

  void group_scale(int g, float& scale, float& curvature) const {
    const GridKind& kind = tables_.kind;
    float largest = -kInfinity, best = 0;
    for (int i = g * kind.group; i < (g + 1) * kind.group; ++i) largest = std::max(largest, t_[i]);
    scale = curvature = 0;
    if (!(largest >= kSmallest)) return;
    int points[32 / L];
    for (int n = 0; n < kTries; ++n) {
      const float wanted = float(kind.levels[kind.num_levels - 1] * (kFirst + kStep * n));
      float along, square;
      choose(g, (1.0f / largest) * wanted, points, along, square);
      const float gain = along > 0 ? along * along / square : 0.0f;
      if (!(gain > best)) continue;
      best = gain;
      scale = along / square;
      curvature = square;
    }
  }

  static int scale_code(float scale, float d) {
    const float ratio = d > 0 ? scale / d : 0.0f, wanted = (ratio - 1) * 0.5f;
    return int(std::nearbyint(std::min(std::max(wanted, 0.0f), float(kLargestCode))));
  }

  // d as stored, and the codes of all scales: these become d * unit * (2 * code + 1).
  float block_scale(const float* scale, const float* curvature, int groups, float largest) {
    float best = kInfinity, chosen = 0;
    for (int n = 0; n < kScaleTries; ++n) {
      const float d = largest / float(kScaleFirst + n);
      float error = 0;
      for (int g = 0; g < groups; ++g) {
        const float difference = scale[g] - d * float(2 * scale_code(scale[g], d) + 1);
        const float cost = curvature[g] * (difference * difference);
        error = g ? error + cost : cost;
      }
      if (!(error < best)) continue;
      best = error;
      chosen = d;
    }
    const float unit = tables_.kind.unit, stored = half_to_float(float_to_half(chosen / unit));
    for (int g = 0; g < groups; ++g) found.scales[g] = scale_code(scale[g], stored * unit);
    return stored;
  }

  const GridTables& tables_;
  const float* w_;
  float t_[kBlock];
};

template <int L>
Found search(const GridTables& tables, const float* x, const float* importance) {
  float weights[kBlock];
  weigh(x, importance, weights);
  Search<L> block(tables, x, weights);
  block.run();
  return block.found;
}

void store(uint32_t word, int size, uint8_t* out) {
  for (int i = 0; i < size; ++i) out[i] = uint8_t(word >> (8 * i));
}

unsigned signs_of(const Found& found, int eight) {
  unsigned bits = 0;
  for (int i = 0; i < 8; ++i) bits |= unsigned(found.negative[eight * 8 + i]) << i;
  return bits;
}

uint32_t signs_and_scale(const Found& found, int group) {
  uint32_t word = uint32_t(found.scales[group]) << 28;
  for (int i = 0; i < 4; ++i) word |= (signs_of(found, group * 4 + i) & 127) << (7 * i);
  return word;
}

void store_scales(const Found& found, int count, uint8_t* out) {
  for (int i = 0; i < count; ++i) out[i] = uint8_t(found.scales[2 * i] | found.scales[2 * i + 1] << 4);
}

// d and the codes 0, 1, 2 of a block: the threshold of least error. Weights of three levels already are kept.
float three_levels(const float* x, const float* importance, uint8_t* codes) {
  float weights[kBlock], sizes[kBlock], kept[kBlock], largest = 0;
  weigh(x, importance, weights);
  for (int i = 0; i < kBlock; ++i) {
    sizes[i] = std::fabs(x[i]);
    largest = std::max(largest, sizes[i]);
  }
  float best = 0, d = 0, threshold = 0;
  for (int n = 0; n < kThresholds; ++n) {
    const float limit = largest * float(kThreshold - kThresholdStep * n);
    for (int i = 0; i < kBlock; ++i) kept[i] = sizes[i] > limit ? weights[i] : 0.0f;
    float along = 0, square = 0;
    for (int i = 0; i < kBlock; i += 8) {
      const float a = halved_product<8>(kept + i, sizes + i), b = halved_sum(load(kept + i) + load(kept + i + 4));
      along = i ? along + a : a;
      square = i ? square + b : b;
    }
    const float gain = square > 0 ? along * along / square : 0.0f;
    if (!(gain > best)) continue;
    best = gain;
    threshold = limit;
    d = along / square;
  }
  if (largest < kSmallest) d = 0;
  for (int i = 0; i < kBlock; ++i) codes[i] = !(sizes[i] > threshold && d > 0) ? 1 : x[i] < 0 ? 0 : 2;
  return d;
}

const GridKind kIq2XxsKind = {"IQ2_XXS", 32, 0.125f, true, 3, {8, 25, 43}};
const GridKind kIq2XsKind = {"IQ2_XS", 16, 0.125f, true, 3, {8, 25, 43}};
const GridKind kIq2SKind = {"IQ2_S", 16, 0.125f, false, 3, {8, 25, 43}};
const GridKind kIq3XxsKind = {"IQ3_XXS", 32, 0.25f, true, 8, {4, 12, 20, 28, 36, 44, 52, 62}};
const GridKind kIq3SKind = {"IQ3_S", 32, 1.0f, false, 8, {1, 3, 5, 7, 9, 11, 13, 15}};

}  // namespace

void encode_iq2_xxs(const float* x, const float* importance, uint8_t* out) {
  static const GridTables tables(kIq2XxsKind);
  const Found found = search<8>(tables, x, importance);
  store(float_to_half(found.d), 2, out);
  for (int g = 0; g < 8; ++g) {
    for (int i = 0; i < 4; ++i) out[2 + g * 8 + i] = uint8_t(found.points[g * 4 + i]);
    store(signs_and_scale(found, g), 4, out + 6 + g * 8);
  }
}

void encode_iq2_xs(const float* x, const float* importance, uint8_t* out) {
  static const GridTables tables(kIq2XsKind);
  const Found found = search<8>(tables, x, importance);
  store(float_to_half(found.d), 2, out);
  for (int p = 0; p < 32; ++p) store(uint32_t(found.points[p]) | (signs_of(found, p) & 127) << 9, 2, out + 2 + 2 * p);
  store_scales(found, 8, out + 66);
}

void encode_iq2_s(const float* x, const float* importance, uint8_t* out) {
  static const GridTables tables(kIq2SKind);
  const Found found = search<8>(tables, x, importance);
  store(float_to_half(found.d), 2, out);
  std::memset(out + 66, 0, 8);
  for (int p = 0; p < 32; ++p) {
    out[2 + p] = uint8_t(found.points[p]);
    out[34 + p] = uint8_t(signs_of(found, p));
    out[66 + p / 4] = uint8_t(out[66 + p / 4] | (found.points[p] >> 8) << (2 * (p % 4)));
  }
  store_scales(found, 8, out + 74);
}

void encode_iq3_xxs(const float* x, const float* importance, uint8_t* out) {
  static const GridTables tables(kIq3XxsKind);
  const Found found = search<4>(tables, x, importance);
  store(float_to_half(found.d), 2, out);
  for (int p = 0; p < 64; ++p) out[2 + p] = uint8_t(found.points[p]);
  for (int g = 0; g < 8; ++g) store(signs_and_scale(found, g), 4, out + 66 + 4 * g);
}

void encode_iq3_s(const float* x, const float* importance, uint8_t* out) {
  static const GridTables tables(kIq3SKind);
  const Found found = search<4>(tables, x, importance);
  store(float_to_half(found.d), 2, out);
  std::memset(out + 66, 0, 8);
  for (int p = 0; p < 64; ++p) {
    out[2 + p] = uint8_t(found.points[p]);
    out[66 + p / 8] = uint8_t(out[66 + p / 8] | (found.points[p] >> 8) << (p % 8));
  }
  for (int p = 0; p < 32; ++p) out[74 + p] = uint8_t(signs_of(found, p));
  store_scales(found, 4, out + 106);
}

void encode_tq1_0(const float* x, const float* importance, uint8_t* out) {
  uint8_t codes[kBlock];
  const float d = three_levels(x, importance, codes);
  const uint8_t* code = codes;
  // Five digits of three (or four) to a byte, so that times 3 brings the next one to the top.
  const auto pack = [&](int run, int count) {
    for (int i = 0; i < run; ++i) {
      int number = 0, power = 81;
      for (int k = 0; k < count; ++k, power /= 3) number += code[k * run + i] * power;
      *out++ = uint8_t((number * 256 + 242) / 243);
    }
    code += run * count;
  };
  pack(32, 5);
  pack(16, 5);
  pack(4, 4);
  store(float_to_half(d), 2, out);
}

void encode_tq2_0(const float* x, const float* importance, uint8_t* out) {
  uint8_t codes[kBlock];
  const float d = three_levels(x, importance, codes);
  for (int i = 0; i < 64; ++i) {
    const uint8_t* code = codes + i / 32 * 128 + i % 32;
    out[i] = uint8_t(code[0] | code[32] << 2 | code[64] << 4 | code[96] << 6);
  }
  store(float_to_half(d), 2, out + 64);
}

}  // namespace tokenmill
