// The second part of panel_kernels.h: panels to int8, the product of those, and the whole table of kernels.
//
// Included by panel_kernels.h only, after panel_activations.h. `expand_exact` keeps codes and scales per 32.
// `expand_requantized` makes one scale per 128: the value of a weight is (code * A + B) >> 8 in 16-bit arithmetic, where
// A and B come from the group's scale and minimum relative to the largest magnitude the codes of the block can have.
#pragma once

namespace tokenmill {
namespace {

// Scales and minimums of one group (or sub-group) of 16 columns: w = scale * code + minimum.
template <class V>
struct GroupScales {
  static constexpr int kRegs = kPanelCols / V::kLanes;
  typename V::Floats scale[kRegs], minimum[kRegs];
};

template <class V, class T>
TM_INLINE void load_group_scales(const PanelLayout& layout, const uint8_t* head, const uint8_t* p, int index, int sub,
                                 GroupScales<V>& out) {
  const typename V::Floats bias = V::splat(float(T::kSigned ? 0 : -layout.offset));
  for (int i = 0; i < out.kRegs; ++i) {
    const int c = i * V::kLanes;
    typename V::Floats scale, minimum = V::splat(0);
    if constexpr (T::kSuper) {
      scale = V::mul(V::load_half(head + c * 2), V::to_float(V::load_i8(p + sub * 16 + c)));
      scale = V::mul(scale, V::splat(layout.unit));
      if constexpr (T::kMin) {
        const int number = T::kFine ? index * 2 + sub : index;
        const auto units = V::to_float(V::load_byte_of(head + 64 + number / 4 * 64 + c * 4, number % 4));
        minimum = V::mul(V::mul(V::load_half(head + 32 + c * 2), units), V::splat(-layout.unit));
      }
    } else {
      scale = load_scale<V, T>(p + sub * 32 + c * 2);
      if constexpr (T::kMin) minimum = load_scale<V, T>(p + 32 + c * 2);
    }
    out.scale[i] = scale;
    out.minimum[i] = V::fma(scale, bias, minimum);
  }
}

// Smallest and largest value a decoded code can have. -128 is left out for bytes: it fits int8 beside a peak of 127.
template <class T>
TM_INLINE void code_range(const PanelLayout& layout, float& low, float& high) {
  low = T::kBits == 8 ? -127.0f : 0.0f;
  high = T::kBits == 8 ? 127.0f : float((1 << T::kBits) - 1);
  if (!T::kLut) return;
  low = high = layout.lut[0];
  for (int i = 1; i < 16; ++i) {
    low = layout.lut[i] < low ? layout.lut[i] : low;
    high = layout.lut[i] > high ? layout.lut[i] : high;
  }
}

constexpr int kByteGroup = 512 + 32;  // of a panel of 8-bit codes: codes of 32 k, then scales

// The scales of a register of columns; where sums begin with a base, also what that base comes to.
template <class V>
TM_INLINE void store_scale(float* to, typename V::Floats scale) {
  V::store_f(to, scale);
  if constexpr (V::kFloatBase != 0) V::store_f(to + 2 * kPanelCols, V::mul(scale, V::splat(-V::kFloatBaseValue)));
}

// The eight vectors of a group to where the product reads them: `code(j)` is V_j, its register at byte `at` of 4 k.
// The two halves of a group alternate, so that a byte is loaded once for both its nibbles.
template <class V, class Code>
TM_INLINE void store_expanded(int8_t* to, int at, Code&& code) {
  constexpr int kWide = V::kWideRegs * V::kLanes * 4;
  if constexpr (V::kQuadRun == 8) {
    unroll<4>([&](auto step) {
      constexpr int kPair = step.value % 2 * 2 + step.value / 2;
      const auto first = code(std::integral_constant<int, 2 * kPair>());
      V::store_pairs(to + 2 * (kPair * kWide + at), first, code(std::integral_constant<int, 2 * kPair + 1>()));
    });
  } else {
    unroll<8>([&](auto step) {
      constexpr int kStep = step.value % 2 * 4 + step.value / 2;
      V::store_weights(to + kStep * kWide + at, code(std::integral_constant<int, kStep>()));
    });
  }
}

template <class V, class T>
const int8_t* expand_requantized(const PanelLayout& layout, const uint8_t* panel, int64_t begin, int64_t end,
                                 int8_t* w8, float* scales) {
  constexpr int kSubs = T::kFine ? 2 : 1,
                kWide = V::kWideRegs * V::kLanes * 4;  // bytes of a k-quad in one multiply panel
  constexpr int kRegs = kPanelCols / V::kLanes, kGroups = kQuantBlock / 32;
  const typename V::Table table = V::load_table(layout.lut);
  // The step of three levels divides this one, so that they stay exact.
  constexpr float kTop = T::kBits == 2 && !T::kMin ? 126 : 127;
  const int64_t quads = (end - begin) / 4;
  float low, high;
  code_range<T>(layout, low, high);
  for (int64_t k = begin; k < end; k += kQuantBlock, scales += kBlockScales) {
    const int groups = int((k + kQuantBlock < end ? kQuantBlock : end - k) / 32);
    GroupScales<V> group[kGroups * kSubs];
    const uint8_t* codes[kGroups];
    typename V::Floats peak[kRegs], inverse[kRegs];
    // The floor keeps the inverse finite; a block that small is zero in the product anyway.
    for (int i = 0; i < kRegs; ++i) peak[i] = V::splat(1e-30f);
    for (int g = 0; g < groups; ++g) {
      const int64_t index = k / 32 + g;
      const uint8_t* head = nullptr;
      if constexpr (T::kSuper) {
        head = panel + index / 8 * (layout.head_bytes + 8 * layout.group_bytes);
        codes[g] = head + layout.head_bytes + index % 8 * layout.group_bytes;
      } else {
        codes[g] = panel + index * layout.group_bytes;
      }
      for (int s = 0; s < kSubs; ++s) {
        GroupScales<V>& one = group[g * kSubs + s];
        load_group_scales<V, T>(layout, head, codes[g] + layout.code_bytes, int(index % 8), s, one);
        for (int i = 0; i < kRegs; ++i) {
          peak[i] = V::max_abs(peak[i], V::fma(one.scale[i], V::splat(low), one.minimum[i]));
          peak[i] = V::max_abs(peak[i], V::fma(one.scale[i], V::splat(high), one.minimum[i]));
        }
      }
    }
    for (int i = 0; i < kRegs; ++i) {
      inverse[i] = V::div(V::splat(kTop * 256.0f), peak[i]);
      store_scale<V>(scales + i * V::kLanes, V::mul(peak[i], V::splat(1.0f / kTop)));
    }
    for (int g = 0; g < groups; ++g)
      for (int i = 0; i < kRegs; ++i) {
        const int at = i * V::kLanes * 4;
        // The product between two expansions leaves the hardware prefetcher no stream to follow.
        for (int line = i * 64; line < layout.group_bytes; line += kRegs * 64)
          V::prefetch(codes[g] + 4 * layout.group_bytes + line);
        int8_t* to = w8 + at / kWide * (quads * kWide) + ((k - begin) / 4 + g * 8) * kWide;
        typename V::Fixed a[kSubs], b[kSubs];
        for (int s = 0; s < kSubs; ++s) {
          const GroupScales<V>& one = group[g * kSubs + s];
          a[s] = V::fixed(V::mul(one.scale[i], inverse[i]));
          b[s] = V::fixed(V::fma(one.minimum[i], inverse[i], V::splat(128.0f)));
        }
        store_expanded<V>(to, at % kWide, [&](auto step) {
          constexpr int kSub = step.value / 4 * (kSubs - 1);
          return V::requantize(decode<V, T, step.value>(codes[g], at, table), a[kSub], b[kSub]);
        });
      }
  }
  return w8;
}

// Codes less their offset, as they are, with scale and minimum of each group of 32; or of each 128, where groups are at
// least that long (and then never need requantizing).
template <class V, class T, int B = 32>
const int8_t* expand_exact(const PanelLayout& layout, const uint8_t* panel, int64_t begin, int64_t end, int8_t* w8,
                           float* scales) {
  constexpr int kWide = V::kWideRegs * V::kLanes * 4, kRegs = kPanelCols / V::kLanes;
  constexpr int kCodeBytes = 64 * T::kBits, kGroupBytes = kCodeBytes + (T::kMin ? 64 : 32);
  const typename V::Table table = V::load_table(layout.lut);
  const typename V::Bytes offset = V::splat_bytes(T::kSigned ? 0 : layout.offset);
  const int64_t quads = (end - begin) / 4;
  const uint8_t* group = panel + begin / 32 * kGroupBytes;
  for (int64_t k = begin; k < end; k += 32, group += kGroupBytes) {
    const bool opens = (k - begin) % B == 0;
    for (int i = 0; i < kRegs; ++i) {
      const int at = i * V::kLanes * 4;
      for (int line = i * 64; line < kGroupBytes; line += kRegs * 64) V::prefetch(group + 4 * kGroupBytes + line);
      const uint8_t* p = group + kCodeBytes + i * V::kLanes * 2;
      if (opens) store_scale<V>(scales + i * V::kLanes, load_scale<V, T>(p));
      if constexpr (T::kMin) V::store_f(scales + kPanelCols + i * V::kLanes, load_scale<V, T>(p + 32));
      int8_t* to = w8 + at / kWide * (quads * kWide) + (k - begin) / 4 * kWide;
      store_expanded<V>(to, at % kWide, [&](auto step) {
        const auto code = decode<V, T, step.value>(group, at, table);
        if constexpr (!T::kSigned && !T::kMin) return V::sub_bytes(code, offset);
        return code;
      });
    }
    if (opens) scales += kBlockScales;
  }
  return w8;
}

// Bytes are codes as they are: only the scales become floats, and the product reads the panel (multiply_in_blocks).
template <class V, class T, int B = 32>
const int8_t* expand_scales(const PanelLayout&, const uint8_t* panel, int64_t begin, int64_t end, int8_t*, float* scales) {
  static_assert(T::kBits == 8 && !T::kMin, "other codes must be unpacked");
  const uint8_t* group = panel + begin / 32 * kByteGroup;
  for (int64_t k = begin; k < end; k += 32, group += kByteGroup) {
    for (int line = 0; line < kByteGroup; line += 64) V::prefetch(group + 4 * kByteGroup + line);
    if ((k - begin) % B != 0) continue;
    for (int c = 0; c < kPanelCols; c += V::kLanes) store_scale<V>(scales + c, load_scale<V, T>(group + 512 + c * 2));
    scales += kBlockScales;
  }
  return reinterpret_cast<const int8_t*>(panel + begin / 32 * kByteGroup);
}

// Integer sums begin here: with the base that makes them floats, or with what takes the bias of stored weights out again.
template <class V>
TM_INLINE typename V::Ints start(int32_t sum) {
  if constexpr (V::kFloatBase != 0) return V::float_base();
  return V::splat_i(-V::kSignedBias * sum);
}

// Integer sums of `steps` x 4 k, for N quads of rows `pitch` bytes apart and kWideRegs registers of columns.
template <class V, int N, int Q>
TM_INLINE void sum_words(const int8_t* w8, const int8_t* x, int64_t pitch, int64_t steps,
                         typename V::Ints (&acc)[N * 4][Q]) {
  constexpr int kRow = V::kLanes * 4;
#pragma GCC unroll 8
  for (int64_t step = 0; step < steps; ++step, x += 16, w8 += Q * kRow) {
    typename V::Bytes w[Q];
    for (int i = 0; i < Q; ++i) w[i] = V::load(reinterpret_cast<const uint8_t*>(w8) + i * kRow);
    for (int n = 0; n < N; ++n) {
      const typename V::X four = V::load_x(x + n * pitch);
      unroll<4>([&](auto t) {
        for (int i = 0; i < Q; ++i)
          acc[n * 4 + t.value][i] = V::template dot_stored<t.value>(acc[n * 4 + t.value][i], w[i], four);
      });
    }
  }
}

// The same by 2 rows x 2 columns x 8 k; the sums are put back in order once.
template <class V, int N, int Q>
TM_INLINE void sum_pairs(const int8_t* w8, const int8_t* x, int64_t pitch, int64_t steps,
                         typename V::Ints (&acc)[N * 4][Q]) {
  constexpr int kRow = V::kLanes * 4;
  typename V::Ints pair[N * 2][Q * 2];
  for (int h = 0; h < N * 2; ++h)
    for (int i = 0; i < Q * 2; ++i) pair[h][i] = start<V>(0);
#pragma GCC unroll 4
  for (int64_t step = 0; step < steps; step += 2, x += 32, w8 += 2 * Q * kRow) {
    typename V::Bytes w[Q * 2];
    for (int i = 0; i < Q * 2; ++i) w[i] = V::load(reinterpret_cast<const uint8_t*>(w8) + i * kRow);
    for (int h = 0; h < N * 2; ++h) {
      const typename V::X rows = V::load_x(x + h / 2 * pitch + h % 2 * 16);
      for (int i = 0; i < Q * 2; ++i) pair[h][i] = V::dot_pairs(pair[h][i], rows, w[i]);
    }
  }
  for (int h = 0; h < N * 2; ++h)
    for (int i = 0; i < Q; ++i) V::split_pairs(pair[h][2 * i], pair[h][2 * i + 1], acc[2 * h][i], acc[2 * h + 1][i]);
}

// y += sums of a block x scales of its columns x scales of its rows. A sum on a base is a float without being converted,
// and one multiply-add with the scaled base takes the base out: exactly, for scales of up to 22 bits.
template <class V, int N, int Q>
TM_INLINE void add_scaled(const typename V::Ints (&acc)[N * 4][Q], const float* scales, const uint8_t* row_scales,
                          int64_t pitch, typename V::Floats (&y)[N * 4][Q]) {
  for (int i = 0; i < Q; ++i) {
    const auto w_scale = V::load_f(scales + i * V::kLanes);
    for (int t = 0; t < N * 4; ++t) {
      const float* four = reinterpret_cast<const float*>(row_scales + t / 4 * pitch);
      if constexpr (V::kFloatBase != 0) {
        const auto base = V::load_anew(scales + 2 * kPanelCols + i * V::kLanes);
        y[t][i] = V::fma_lane(V::fma(V::as_float(acc[t][i]), w_scale, base), V::load_f(four), t % 4, y[t][i]);
      } else {
        y[t][i] = V::fma(V::to_float(acc[t][i]), V::mul(w_scale, V::splat(four[t % 4])), y[t][i]);
      }
    }
  }
}

// N quads of rows x kWideRegs registers of columns: integer sums of blocks of B, added up in float.
template <class V, int N, int B, bool kMin>
TM_INLINE void multiply_block(const int8_t* w8, const float* scales, int64_t begin, int64_t end, const uint8_t* quads,
                              const QuadForm& form, int first, float* sums) {
  constexpr int Q = V::kWideRegs;
  typename V::Floats y[N * 4][Q];
  for (int t = 0; t < N * 4; ++t)
    for (int i = 0; i < Q; ++i)
      y[t][i] = begin ? V::load_f(sums + t * kPanelCols + first + i * V::kLanes) : V::splat(0);
  for (int64_t k = begin; k < end; k += B, scales += kBlockScales) {
    const int64_t steps = B == 32 ? 8 : (k + B < end ? B : end - k) / 4, block = k / B;
    typename V::Ints acc[N * 4][Q];
    const int8_t* x = reinterpret_cast<const int8_t*>(quads) + k * 4;
    if constexpr (V::kQuadRun == 8) {
      sum_pairs<V, N, Q>(w8, x, form.bytes(), steps, acc);
    } else {
      for (int n = 0; n < N; ++n) {
        const int32_t* sum = reinterpret_cast<const int32_t*>(quads + n * form.bytes() + form.sum(block, 0));
        for (int t = 0; t < 4; ++t)
          for (int i = 0; i < Q; ++i) acc[n * 4 + t][i] = start<V>(sum[t]);
      }
      sum_words<V, N, Q>(w8, x, form.bytes(), steps, acc);
    }
    w8 += steps * Q * V::kLanes * 4;
    if constexpr (kMin)
      for (int i = 0; i < Q; ++i) {
        const auto w_min = V::load_f(scales + kPanelCols + first + i * V::kLanes);
        for (int t = 0; t < N * 4; ++t) {
          const float* sum = reinterpret_cast<const float*>(quads + t / 4 * form.bytes() + form.scaled_sum(block, 0));
          y[t][i] = V::fma(w_min, V::splat(sum[t % 4]), y[t][i]);
        }
      }
    add_scaled<V, N, Q>(acc, scales + first, quads + form.scale(block, 0), form.bytes(), y);
  }
  for (int t = 0; t < N * 4; ++t)
    for (int i = 0; i < Q; ++i) V::store_f(sums + t * kPanelCols + first + i * V::kLanes, y[t][i]);
}

template <class V, int B, bool kMin>
void multiply(const int8_t* w8, const float* scales, int64_t begin, int64_t end, const uint8_t* quads, int64_t cols,
              int num_quads, NextBytes, float* sums) {
  const QuadForm form{cols, B, V::kQuadRun};
  constexpr int kColumns = V::kWideRegs * V::kLanes;
  int n = 0;
  for (; n + V::kQuads <= num_quads; n += V::kQuads)
    for (int first = 0; first < kPanelCols; first += kColumns)
      multiply_block<V, V::kQuads, B, kMin>(w8 + (end - begin) * first, scales, begin, end, quads + n * form.bytes(),
                                            form, first, sums + n * 4 * kPanelCols);
  for (; n < num_quads; ++n)
    for (int first = 0; first < kPanelCols; first += kColumns)
      multiply_block<V, 1, B, kMin>(w8 + (end - begin) * first, scales, begin, end, quads + n * form.bytes(), form,
                                    first, sums + n * 4 * kPanelCols);
}

// As `multiply`, by what an instruction set wrote by hand; in place: on the bytes of the panel.
template <class V, int B, bool kMin, bool kInPlace>
void multiply_in_blocks(const int8_t* codes, const float* scales, int64_t begin, int64_t end, const uint8_t* quads,
                        int64_t cols, int num_quads, NextBytes next, float* sums) {
  const QuadForm form{cols, B, V::kQuadRun};
  constexpr int kColumns = V::kWideRegs * V::kLanes, kStep = kInPlace ? 4 * kPanelCols : 4 * kColumns;
  const int64_t groups = (end - begin) / 32;
  for (int n = 0; n < num_quads; ++n, quads += form.bytes(), sums += 4 * kPanelCols)
    for (int first = 0; first < kPanelCols; first += kColumns) {
      if (begin == 0)
        for (int t = 0; t < 4; ++t) __builtin_memset(sums + t * kPanelCols + first, 0, kColumns * sizeof(float));
      V::template multiply_blocks<B, kMin, kStep, kInPlace ? kByteGroup : 8 * kStep>(
          codes + first * (kInPlace ? 4 : end - begin), reinterpret_cast<const int8_t*>(quads) + begin * 4,
          scales + first, quads + form.scale(begin / B, 0), quads + form.scaled_sum(begin / B, 0), groups, next.begin,
          sums + first);
      if (next.begin < next.end) next.begin += groups * 64;
    }
}

template <class V>
MultiplyFn choose_multiply(const PanelLayout& layout) {
  if constexpr (V::kBlocks) {
    if (layout.coarse) return multiply_in_blocks<V, kQuantBlock, false, true>;
    if (requantizes(layout)) return multiply_in_blocks<V, kQuantBlock, false, false>;
    if (layout.bits == 8) return multiply_in_blocks<V, 32, false, true>;
    return layout.has_min ? multiply_in_blocks<V, 32, true, false> : multiply_in_blocks<V, 32, false, false>;
  } else {
    if (requantizes(layout)) return multiply<V, kQuantBlock, false>;
    return layout.has_min ? multiply<V, 32, true> : multiply<V, 32, false>;
  }
}

// Of a layout with a scale, and perhaps a minimum, for each group of 32, and no table.
template <template <class> class Pick, int Bits>
auto choose_plain(const PanelLayout& l) -> decltype(Pick<Traits<Bits, false, false, false, false, false>>::get()) {
  if (l.has_min)
    return l.wide_scale ? Pick<Traits<Bits, false, true, false, false, true>>::get()
                        : Pick<Traits<Bits, false, true, false, false, false>>::get();
  return l.wide_scale ? Pick<Traits<Bits, false, false, false, false, true>>::get()
                      : Pick<Traits<Bits, false, false, false, false, false>>::get();
}

// The kernel of a layout, as template instance: `Pick<T>::get()` for the matching Traits.
template <template <class> class Pick>
auto choose(const PanelLayout& l) -> decltype(Pick<Traits<4, false, false, false, false, false>>::get()) {
  if (l.superblock) {
    if (l.bits == 2 && !l.has_min) return Pick<Traits<2, false, false, true, false, false>>::get();
    if (l.bits == 2) return Pick<Traits<2, false, true, true, true, false>>::get();
    if (l.bits == 3 && l.has_lut)
      return l.fine ? Pick<Traits<3, true, false, true, true, false>>::get()
                    : Pick<Traits<3, true, false, true, false, false>>::get();
    if (l.bits == 3) return Pick<Traits<3, false, false, true, true, false>>::get();
    if (l.bits == 5) return Pick<Traits<5, false, true, true, false, false>>::get();
    if (l.bits == 6) return Pick<Traits<6, false, false, true, true, false>>::get();
    if (l.has_lut) return Pick<Traits<4, true, false, true, false, false>>::get();
    return Pick<Traits<4, false, true, true, false, false>>::get();
  }
  if (l.bits == 8)
    return l.wide_scale ? Pick<Traits<8, false, false, false, false, true>>::get()
                        : Pick<Traits<8, false, false, false, false, false>>::get();
  if (l.bits == 2) return choose_plain<Pick, 2>(l);
  if (l.bits == 3) return choose_plain<Pick, 3>(l);
  if (l.bits == 5) return choose_plain<Pick, 5>(l);
  if (l.bits == 6) return choose_plain<Pick, 6>(l);
  if (l.fine) return Pick<Traits<4, true, false, false, true, false>>::get();
  if (l.has_lut)
    return l.wide_scale ? Pick<Traits<4, true, false, false, false, true>>::get()
                        : Pick<Traits<4, true, false, false, false, false>>::get();
  return choose_plain<Pick, 4>(l);
}

template <class V>
struct Pick {
  template <class T>
  struct Direct {
    static DirectFn get() { return direct<V, T>; }
  };
  template <class T>
  struct Expand {
    static ExpandFn get() {
      // Superblocks and groups of 16 are always requantized.
      if constexpr (V::kByteFactors && T::kSuper && !T::kLut && T::kBits >= 4) return V::template by_bytes<V, T>();
      if constexpr (T::kSuper || T::kFine) return expand_requantized<V, T>;
      if constexpr (V::kBlocks && T::kBits == 8) return expand_scales<V, T>;
      return expand_exact<V, T>;
    }
  };
};

template <class V>
ExpandFn choose_expand(const PanelLayout& layout) {
  using Wide = Traits<8, false, false, false, false, true>;
  using Half = Traits<8, false, false, false, false, false>;
  if constexpr (V::kBlocks) {
    if (layout.coarse) return layout.wide_scale ? expand_scales<V, Wide, kQuantBlock> : expand_scales<V, Half, kQuantBlock>;
  } else {
    if (layout.coarse) return layout.wide_scale ? expand_exact<V, Wide, kQuantBlock> : expand_exact<V, Half, kQuantBlock>;
  }
  return choose<Pick<V>::template Expand>(layout);
}

// The whole table of an instruction set; one with an expanded product of its own says so.
template <class V>
PanelKernels make_kernels(const char* name, int (*expand_from)(const PanelLayout&),
                          MultiplyFn (*multiply)(const PanelLayout&) = choose_multiply<V>,
                          int64_t (*spin)(int64_t) = spin_dots<V>) {
  return {name,
          V::kQuadRun,
          quantize_row<V>,
          quantize_quad<V>,
          choose<Pick<V>::template Direct>,
          choose_expand<V>,
          multiply,
          expand_from,
          spin,
          make_adapter_kernels<V>(),
          nullptr};
}

}  // namespace
}  // namespace tokenmill
