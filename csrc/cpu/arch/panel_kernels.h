// The integer kernels over panels, written once over a small vector type V that each arch/<isa>_*.cpp defines.
//
// V is one register: kLanes columns x 4 k of bytes, or kLanes int32/float32. V lives in the including file's unnamed
// namespace, so every instantiation is private to that file and its compiler flags. V gives:
//   load(p) field<shift, mask>(b) insert<shift, mask>(low, b) lookup(table, b): decoding of codes
//   X, load_x(p), dot_unsigned / dot_signed<lane>(acc, w, x): acc[col] += w[col][0..3] . x[4 lane .. 4 lane + 3]
//   kSignedBias: what dot_signed adds to every signed weight (its sum is taken out through the block sums)
//   kFloatBase: 0, or the bits of kFloatBaseValue, on which a sum is a float as it is: float_base(), as_float(sum),
//   based_to_float(sum), load_anew(p): a load for each use, fma_lane(a, four, lane, c)
//   splat_i, add_scaled_i(acc, a, b), load_i8, load_u8, load_byte_of(p, i), to_float: integers
//   splat, mul, div, fma, max_abs, load_f, store_f, load_half, load_bfloat: floats
//   Fixed, fixed(floats), requantize(codes, a, b): (code * a + b) >> 8 with int16 a, b per column
//   splat_bytes, sub_bytes, store_weights, dot_stored<lane>: expanded weights
//   peak(x, n), quantize16(x, inverse, out) -> sum: activations
//   kDirectRegs, kWideRegs, kQuads: register blocking; kDotOperations: multiplications and additions of a product
//   kAskForLines: whether a stream is faster where every line is asked for; else one line here and there
//   kByteFactors: whether by_bytes<V, T>() expands superblocks of 4 to 6 bits in a way of its own
//   kQuadRun: QuadForm::run. Where it is 8, the expanded product goes by pairs: store_pairs(p, first, second) of two
//   registers of 4 k, dot_pairs(acc, rows, w): acc[2 rows][2 columns] += rows[2][8] . w[2][8], and
//   split_pairs(left, right, even, odd): two such sums as 4 columns of the even and of the odd row
#pragma once

#include <utility>

#include "../linear_panel.h"

namespace tokenmill {
namespace {

// Compile-time unrolling: f(integral_constant<int, 0>) ... f(integral_constant<int, N - 1>).
template <class F, int... I>
TM_INLINE void unroll_impl(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
TM_INLINE void unroll(F&& f) {
  unroll_impl(f, std::make_integer_sequence<int, N>());
}

// What is known of a layout at compile time.
template <int kBitsValue, bool kLutValue, bool kMinValue, bool kSuperValue, bool kFineValue, bool kWideScaleValue>
struct Traits {
  static constexpr int kBits = kBitsValue;
  static constexpr bool kLut = kLutValue, kMin = kMinValue, kSuper = kSuperValue, kFine = kFineValue,
                        kWideScale = kWideScaleValue;
  static constexpr bool kSigned = kLut || kBits == 8;
};

// Vector V_J (16 columns x 4 k) of a group, register at byte `at` of it; see quant_panel.h for the planes.
template <class V, class T, int J>
TM_INLINE typename V::Bytes decode(const uint8_t* group, int at, typename V::Table table) {
  using Bytes = typename V::Bytes;
  if constexpr (T::kBits == 8) return V::load(group + J * 64 + at);
  if constexpr (T::kBits <= 3) {
    const Bytes low = V::template field<J % 4 * 2, 3>(V::load(group + J / 4 * 64 + at));
    if constexpr (T::kBits == 2) return low;
    const Bytes code = V::template insert<2 - J, 4>(low, V::load(group + 128 + at));
    if constexpr (T::kLut) return V::lookup(table, code);
    return code;
  }
  const Bytes low = V::template field<J / 4 * 4, 15>(V::load(group + J % 4 * 64 + at));
  if constexpr (T::kLut) return V::lookup(table, low);
  if constexpr (T::kBits == 4) return low;
  if constexpr (T::kBits == 5) return V::template insert<4 - J, 16>(low, V::load(group + 256 + at));
  return V::template insert<4 - J % 4 * 2, 48>(low, V::load(group + 256 + J / 4 * 64 + at));
}

template <class V, class T>
TM_INLINE int code_bias(const PanelLayout& layout) {
  if constexpr (T::kSigned) return V::kSignedBias;
  if constexpr (T::kMin) return 0;  // what minimums are for
  return layout.offset;
}

template <class V, class T, int Lane>
TM_INLINE typename V::Ints dot(typename V::Ints acc, typename V::Bytes w, typename V::X x) {
  if constexpr (T::kSigned) return V::template dot_signed<Lane>(acc, w, x);
  return V::template dot_unsigned<Lane>(acc, w, x);
}

template <class V, class T>
TM_INLINE typename V::Floats load_scale(const uint8_t* p) {
  return T::kWideScale ? V::load_bfloat(p) : V::load_half(p);
}

// Where the sum of 16 signed products begins: with what takes the bias of the weights out again.
template <class V>
TM_INLINE typename V::Ints start_half(typename V::X x) {
  auto start = V::splat_i(V::kFloatBase);
  if constexpr (V::kSignedBias != 0) {
    auto sum = V::splat_i(0);
    unroll<4>([&](auto lane) { sum = V::template dot_unsigned<lane.value>(sum, V::splat_bytes(1), x); });
    start = V::add_scaled_i(start, sum, V::splat_i(-V::kSignedBias));
  }
  return start;
}

// Plain formats: R rows x Q registers of columns starting at column `first`; sums per group of 32 go to float at once.
template <class V, class T, int R, int Q>
TM_INLINE void direct_plain(const PanelLayout& layout, const uint8_t* panel, const uint8_t* rows, int first,
                            float* out) {
  const RowForm form{layout.cols, 32};
  const int bias = code_bias<V, T>(layout);
  const typename V::Table table = V::load_table(layout.lut);
  typename V::Floats y[R][Q];
  const int8_t* q[R];
  const float *scale[R], *sum_scaled[R];
  const int32_t* sum[R];
  for (int r = 0; r < R; ++r) {
    const uint8_t* row = rows + r * form.bytes();
    q[r] = reinterpret_cast<const int8_t*>(row);
    scale[r] = reinterpret_cast<const float*>(row + form.scale());
    sum[r] = reinterpret_cast<const int32_t*>(row + form.sum32());
    sum_scaled[r] = reinterpret_cast<const float*>(row + form.extra());
    for (int i = 0; i < Q; ++i) y[r][i] = V::splat(0);
  }
  constexpr int kCodeBytes = 64 * T::kBits, kGroupBytes = kCodeBytes + (T::kMin || T::kFine ? 64 : 32);
  constexpr int kSums = T::kFine ? 2 : 1;  // of a group: of its halves, where these have scales of their own
  const int at = first * 4;
  for (int64_t g = 0; g < layout.cols / 32; ++g, panel += kGroupBytes) {
    for (int line = 0; line < kGroupBytes; line += 64) V::prefetch(panel + 512 + line);
    typename V::Ints acc[R][Q][kSums];
    typename V::X x[R][2];
    for (int r = 0; r < R; ++r) {
      x[r][0] = V::load_x(q[r] + g * 32);
      x[r][1] = V::load_x(q[r] + g * 32 + 16);
      for (int s = 0; s < kSums; ++s) {
        const auto begin = T::kFine ? start_half<V>(x[r][s]) : V::splat_i(V::kFloatBase - bias * sum[r][g]);
        for (int i = 0; i < Q; ++i) acc[r][i][s] = begin;
      }
    }
    unroll<8>([&](auto step) {
      constexpr int kHalf = step.value % 2, kLane = step.value / 2, kSum = kHalf * (kSums - 1);
      for (int i = 0; i < Q; ++i) {
        const auto w = decode<V, T, kHalf * 4 + kLane>(panel, at + i * V::kLanes * 4, table);
        for (int r = 0; r < R; ++r) acc[r][i][kSum] = dot<V, T, kLane>(acc[r][i][kSum], w, x[r][kHalf]);
      }
    });
    for (int i = 0; i < Q; ++i) {
      const uint8_t* p = panel + kCodeBytes + (first + i * V::kLanes) * 2;
      if constexpr (T::kMin) {
        const auto w_min = load_scale<V, T>(p + 32);
        for (int r = 0; r < R; ++r) y[r][i] = V::fma(w_min, V::splat(sum_scaled[r][g]), y[r][i]);
      }
      for (int s = 0; s < kSums; ++s) {
        const auto w_scale = load_scale<V, T>(p + s * 32);
        for (int r = 0; r < R; ++r) {
          // After the minimum and as add_scaled does it, so that both products have the same bits.
          const auto sums = V::based_to_float(acc[r][i][s]);
          y[r][i] = V::kFloatBase != 0 ? V::fma(V::mul(sums, w_scale), V::splat(scale[r][g]), y[r][i])
                                       : V::fma(sums, V::mul(w_scale, V::splat(scale[r][g])), y[r][i]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < Q; ++i) V::store_f(out + r * kPanelCols + first + i * V::kLanes, y[r][i]);
}

// Superblock formats: integer scales are applied to integer sums, one conversion per 256.
template <class V, class T, int R, int Q>
TM_INLINE void direct_super(const PanelLayout& layout, const uint8_t* panel, const uint8_t* rows, int first,
                            float* out) {
  const RowForm form{layout.cols, 256};
  const int bias = code_bias<V, T>(layout);
  const typename V::Table table = V::load_table(layout.lut);
  constexpr int kSubs = T::kFine ? 2 : 1, kCodeBytes = 64 * T::kBits;
  constexpr int kGroupBytes = kCodeBytes + kSubs * 16, kHeadBytes = T::kMin ? 64 + kSubs * 128 : 32;
  constexpr int kAsked = V::kAskForLines ? 320 : 64;  // all of a group of 4 bits; more was slower for 6
  typename V::Floats y[R][Q];
  const int8_t* q[R];
  const float* scale[R];
  const int32_t* sums[R];
  const int8_t* parts[R];
  for (int r = 0; r < R; ++r) {
    const uint8_t* row = rows + r * form.bytes();
    q[r] = reinterpret_cast<const int8_t*>(row);
    scale[r] = reinterpret_cast<const float*>(row + form.scale());
    parts[r] = reinterpret_cast<const int8_t*>(row + (T::kFine ? form.parts16() : form.parts32()));
    sums[r] = reinterpret_cast<const int32_t*>(row + (T::kFine ? form.extra() : form.sum32()));
    for (int i = 0; i < Q; ++i) y[r][i] = V::splat(0);
  }
  const int at = first * 4;
  for (int64_t b = 0; b < layout.cols / 256; ++b) {
    const uint8_t *head = panel + first * 2, *minimums = panel + 64 + at;
    panel += kHeadBytes;
    typename V::Ints total[R][Q];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < Q; ++i) total[r][i] = V::splat_i(0);
    for (int64_t g = b * 8; g < b * 8 + 8; ++g, panel += kGroupBytes) {
      for (int line = 0; line < kAsked; line += 64) V::prefetch(panel + 2048 + line);
      typename V::X x[R][2];
      for (int r = 0; r < R; ++r) {
        x[r][0] = V::load_x(q[r] + g * 32);
        x[r][1] = V::load_x(q[r] + g * 32 + 16);
      }
      typename V::Ints acc[R][Q];
      unroll<8>([&](auto step) {
        // Fine scales need the two halves apart; else alternate, so that a byte is loaded once for both its nibbles.
        constexpr int kHalf = T::kFine ? step.value / 4 : step.value % 2,
                      kLane = T::kFine ? step.value % 4 : step.value / 2;
        if constexpr (step.value == 0 || (T::kFine && step.value == 4))
          for (int r = 0; r < R; ++r)
            for (int i = 0; i < Q; ++i) acc[r][i] = V::splat_i(-bias * sums[r][g * kSubs + kHalf * (kSubs - 1)]);
        for (int i = 0; i < Q; ++i) {
          const auto w = decode<V, T, kHalf * 4 + kLane>(panel, at + i * V::kLanes * 4, table);
          for (int r = 0; r < R; ++r) acc[r][i] = dot<V, T, kLane>(acc[r][i], w, x[r][kHalf]);
        }
        if constexpr (step.value == 7 || (T::kFine && step.value == 3))
          for (int i = 0; i < Q; ++i) {
            const uint8_t* p = panel + kCodeBytes + (T::kFine ? kHalf * 16 : 0) + first + i * V::kLanes;
            // Formats with minimums have unsigned scales, which are cheaper to widen.
            const auto w_scale = T::kMin ? V::load_u8(p) : V::load_i8(p);
            for (int r = 0; r < R; ++r) total[r][i] = V::add_scaled_i(total[r][i], acc[r][i], w_scale);
          }
      });
    }
    for (int i = 0; i < Q; ++i) {
      const auto d = V::load_half(head + i * V::kLanes * 2);
      for (int r = 0; r < R; ++r)
        y[r][i] = V::fma(V::to_float(total[r][i]), V::mul(d, V::splat(layout.unit * scale[r][b])), y[r][i]);
      if constexpr (T::kMin) {
        // Minimums times block sums, four groups per dot product: sums are 64 * high + low.
        const auto dmin = V::load_half(head + 32 + i * V::kLanes * 2);
        for (int r = 0; r < R; ++r) {
          auto high = V::splat_i(0), low = high;
          const auto x_high = V::load_x(parts[r] + b * kSubs * 16);
          const auto x_low = T::kFine ? V::load_x(parts[r] + b * 32 + 16) : x_high;
          unroll<2 * kSubs>([&](auto quad) {
            const auto w = V::load(minimums + quad.value * 64 + i * V::kLanes * 4);
            high = V::template dot_unsigned<quad.value>(high, w, x_high);
            low = V::template dot_unsigned<T::kFine ? quad.value : 2 + quad.value % 2>(low, w, x_low);
          });
          low = V::add_scaled_i(low, high, V::splat_i(64));
          y[r][i] = V::fma(V::to_float(low), V::mul(dmin, V::splat(-layout.unit * scale[r][b])), y[r][i]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < Q; ++i) V::store_f(out + r * kPanelCols + first + i * V::kLanes, y[r][i]);
}

template <class V, class T, int R>
TM_INLINE void direct_rows(const PanelLayout& layout, const uint8_t* panel, const uint8_t* rows, float* out) {
  constexpr int kAll = kPanelCols / V::kLanes, kRegs = R == 1 ? kAll : V::kDirectRegs;
  for (int first = 0; first < kPanelCols; first += kRegs * V::kLanes) {
    if constexpr (T::kSuper) {
      direct_super<V, T, R, kRegs>(layout, panel, rows, first, out);
    } else {
      direct_plain<V, T, R, kRegs>(layout, panel, rows, first, out);
    }
  }
}

// Peak rate of integer products of this instruction set, from registers alone: the ceiling that benchmarks quote.
template <class V>
int64_t spin_dots(int64_t rounds) {
  alignas(64) uint8_t bytes[64] = {};
  const uint8_t* volatile hidden = bytes;  // or the compiler would know the sums
  const auto w = V::load(hidden);
  const auto x = V::load_x(reinterpret_cast<const int8_t*>(hidden));
  constexpr int kChains = 12;
  typename V::Ints acc[kChains];
  unroll<kChains>([&](auto i) { acc[i.value] = V::splat_i(hidden[i.value]); });
  for (int64_t round = 0; round < rounds; ++round)
    unroll<kChains>([&](auto i) {
      if constexpr (V::kQuadRun == 8) {
        acc[i.value] = V::dot_pairs(acc[i.value], x, w);
      } else {
        acc[i.value] = V::template dot_stored<0>(acc[i.value], w, x);
      }
    });
  auto total = acc[0];
  unroll<kChains>([&](auto i) { total = V::add_scaled_i(total, acc[i.value], V::splat_i(1)); });
  alignas(64) float out[kPanelCols];
  V::store_f(out, V::to_float(total));
  asm volatile("" : : "r"(out) : "memory");
  return rounds * kChains * V::kDotOperations;
}

template <class V, class T>
void direct(const PanelLayout& layout, const uint8_t* panel, const uint8_t* rows, int num_rows, float* out) {
  switch (num_rows) {
    case 1:
      return direct_rows<V, T, 1>(layout, panel, rows, out);
    case 2:
      return direct_rows<V, T, 2>(layout, panel, rows, out);
    case 3:
      return direct_rows<V, T, 3>(layout, panel, rows, out);
    default:
      return direct_rows<V, T, 4>(layout, panel, rows, out);
  }
}

}  // namespace
}  // namespace tokenmill

#include "panel_activations.h"
#include "adapter_panels.h"
#include "panel_expand.h"
