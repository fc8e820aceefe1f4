// Which instruction set this CPU has, and which implementation a weight gets.
//
// The only file that knows all of arch/: each compiled-in instruction set defines TOKENMILL_HAS_<ISA> for this file.
// TOKENMILL_CPU_ISA names a lesser set for tests. The bindings and the model loader call it.
#include <cmath>
#include <cstdlib>
#include <vector>

#include "linear_panel.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace tokenmill {

#ifdef TOKENMILL_HAS_NEON_DOTPROD
const PanelKernels* neon_dotprod_kernels();
#endif
#ifdef TOKENMILL_HAS_NEON_I8MM
const PanelKernels* neon_i8mm_kernels();
#endif
#ifdef TOKENMILL_HAS_AVX2
const PanelKernels* avx2_kernels();
#endif
#ifdef TOKENMILL_HAS_AVX512_VNNI
const PanelKernels* avx512_vnni_kernels();
#endif
#ifdef TOKENMILL_HAS_AMX
const PanelKernels* amx_kernels();
#endif

namespace {

const char* const kNames[] = {"portable", "neon_dotprod", "neon_i8mm", "avx2", "avx512_vnni", "amx"};

#if defined(__x86_64__)
bool cpu_has_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned kTiles = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTiles) != kTiles) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);  // AVX512-BF16, which rounds what tiles read
}
#endif

// Linux keeps the 8 KiB of tiles per thread only for a process that has asked for them.
bool system_grants_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

bool cpu_has(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return true;
#if defined(__aarch64__) && defined(__linux__)
    case Isa::neon_dotprod:
      return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
    case Isa::neon_i8mm:
#ifdef HWCAP2_I8MM
      return getauxval(AT_HWCAP2) & HWCAP2_I8MM;
#else
      return getauxval(AT_HWCAP2) & (1u << 13);
#endif
#elif defined(__aarch64__) && defined(__APPLE__)
    case Isa::neon_dotprod:
      return true;
#elif defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::avx512_vnni:
      return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl");
    case Isa::amx:
      return cpu_has(Isa::avx512_vnni) && cpu_has_tiles();
#endif
    default:
      return false;
  }
}

std::unique_ptr<Linear> decline(std::string* why, const std::string& reason) {
  if (why) *why = reason;
  return nullptr;
}

// Halves keep 11 bits of a scale but a narrow range; bfloat16 the reverse. Takes what loses less.
bool needs_wide_scale(const std::vector<float>& values) {
  double half = 0, wide = 0;
  for (float value : values) {
    if (value == 0) continue;
    half += std::fabs(half_to_float(float_to_half(value)) / value - 1);
    wide += std::fabs(bfloat_to_float(float_to_bfloat(value)) / value - 1);
  }
  return wide < half;
}

// The step of which all 16 values of a table are whole multiples up to 127, or their peak / 127 where there is none.
float table_step(const float* table) {
  float peak = 0, least = INFINITY;
  for (int i = 0; i < 16; ++i) {
    peak = std::fmax(peak, std::fabs(table[i]));
    if (table[i] != 0) least = std::fmin(least, std::fabs(table[i]));
  }
  bool whole = peak > 0 && peak / least <= 127;
  for (int i = 0; i < 16; ++i) whole = whole && table[i] == least * std::nearbyint(table[i] / least);
  return whole ? least : peak / 127;
}

// Asked without calling anything of arch/: even the functions that return tables are compiled for CPUs that have the
// instructions.
bool in_this_build(Isa isa) {
  switch (isa) {
#ifdef TOKENMILL_HAS_NEON_DOTPROD
    case Isa::neon_dotprod:
#endif
#ifdef TOKENMILL_HAS_NEON_I8MM
    case Isa::neon_i8mm:
#endif
#ifdef TOKENMILL_HAS_AVX2
    case Isa::avx2:
#endif
#ifdef TOKENMILL_HAS_AVX512_VNNI
    case Isa::avx512_vnni:
#endif
#ifdef TOKENMILL_HAS_AMX
    case Isa::amx:
#endif
    case Isa::portable:
      return true;
    default:
      return false;
  }
}

}  // namespace

const PanelKernels* find_panel_kernels(Isa isa) {
  switch (isa) {
#ifdef TOKENMILL_HAS_NEON_DOTPROD
    case Isa::neon_dotprod:
      return neon_dotprod_kernels();
#endif
#ifdef TOKENMILL_HAS_NEON_I8MM
    case Isa::neon_i8mm:
      return neon_i8mm_kernels();
#endif
#ifdef TOKENMILL_HAS_AVX2
    case Isa::avx2:
      return avx2_kernels();
#endif
#ifdef TOKENMILL_HAS_AVX512_VNNI
    case Isa::avx512_vnni:
      return avx512_vnni_kernels();
#endif
#ifdef TOKENMILL_HAS_AMX
    case Isa::amx:
      return amx_kernels();
#endif
    default:
      return nullptr;
  }
}

const char* isa_name(Isa isa) { return kNames[int(isa)]; }

const char* isa_missing(Isa isa) {
  if (isa == Isa::portable) return nullptr;
  if (!in_this_build(isa)) return "not in this build (another architecture, or a compiler that cannot emit it)";
  if (!cpu_has(isa)) return "this CPU does not have it";
  if (isa == Isa::amx && !system_grants_tiles()) return "the system does not grant tiles to this process";
  return nullptr;
}

Isa best_isa() {
  const char* wanted = std::getenv("TOKENMILL_CPU_ISA");
  Isa best = Isa::portable;
  for (int i = 0; i <= int(Isa::amx); ++i) {
    if (!isa_missing(Isa(i))) best = Isa(i);
    if (wanted && std::string(wanted) == kNames[i]) break;
  }
  return best;
}

std::unique_ptr<Linear> make_linear(const std::string& type, int64_t rows, int64_t cols, Isa isa, std::string* why,
                                    bool precise) {
  const QuantFormat* format = find_quant_format(type);
  if (!format) return decline(why, "no CPU kernel for type " + type);
  if (rows <= 0 || cols <= 0 || cols % format->block)
    return decline(why, type + " needs a positive multiple of " + std::to_string(format->block) + " columns, not " +
                            std::to_string(cols));
  if (format->bits == 0) return make_plain_linear(*format, rows, cols, isa);
  return make_panel_linear(type, make_layout(*format, cols), format, rows, isa, precise);
}

std::unique_ptr<Linear> pack_linear(const std::string& type, const void* data, int64_t rows, int64_t cols, Isa isa,
                                    std::string* why, bool precise) {
  std::unique_ptr<Linear> linear = make_linear(type, rows, cols, isa, why, precise);
  if (linear) linear->pack_rows(data, 0, rows);
  return linear;
}

std::unique_ptr<Linear> pack_grouped(const GroupedCodes& weight, int64_t rows, int64_t cols, Isa isa, std::string* why,
                                     bool precise) {
  if (weight.bits < 2 || weight.bits > 6) return decline(why, "codes in groups have 2 to 6 bits");
  if (rows <= 0 || cols <= 0 || cols % 32 || weight.group <= 0 || cols % weight.group || weight.group % 32)
    return decline(why, "codes in groups need columns and group size to be multiples of 32");
  PanelLayout layout;
  layout.bits = weight.bits;
  layout.has_lut = weight.table != nullptr;
  layout.has_min = weight.zeros != nullptr;
  layout.offset = weight.table || weight.zeros ? 0 : 1 << (weight.bits - 1);
  float table_scale = 1;
  if (weight.table) {
    table_scale = table_step(weight.table);
    for (int i = 0; i < 16; ++i) layout.lut[i] = int8_t(std::lround(table_scale > 0 ? weight.table[i] / table_scale : 0));
  }
  const int64_t groups = cols / weight.group;
  std::vector<float> scales(weight.scales, weight.scales + rows * groups), minimums;
  if (weight.zeros)
    for (size_t i = 0; i < scales.size(); ++i) minimums.push_back(-scales[i] * weight.zeros[i]);
  for (float& scale : scales) scale *= table_scale;
  layout.wide_scale = needs_wide_scale(scales) || needs_wide_scale(minimums);
  finish_layout(layout, cols);
  const std::string name = "int" + std::to_string(weight.bits) + "-group";
  std::unique_ptr<PanelLinear> linear = make_panel_linear(name, layout, nullptr, rows, isa, precise);
  PanelGroup group = {};
  for (int64_t p = 0; p < linear->num_panels(); ++p)
    for (int64_t g = 0; g < cols / 32; ++g) {
      for (int c = 0; c < kPanelCols; ++c) {
        const int64_t row = p * kPanelCols + c, index = row * groups + g * 32 / weight.group;
        group.scale[c] = row < rows ? scales[size_t(index)] : 0;
        group.minimum[c] = row < rows && weight.zeros ? minimums[size_t(index)] : 0;
        for (int k = 0; row < rows && k < 32; ++k) {
          const int64_t place = row * cols + g * 32 + k;
          group.code[c][k] = weight.bits == 4 ? weight.codes[place / 2] >> (k % 2 * 4) & 15 : weight.codes[place];
        }
      }
      store_group(layout, group, linear->panel(p) + g * layout.group_bytes);
    }
  return linear;
}

std::unique_ptr<Linear> pack_int8(const int8_t* codes, const float* scales, int group_size, int64_t rows, int64_t cols,
                                  Isa isa, std::string* why, bool precise) {
  if (rows <= 0 || cols <= 0 || cols % 32 || group_size <= 0 || cols % group_size || group_size % 32)
    return decline(why, "int8 weights need columns and group size to be multiples of 32");
  PanelLayout layout;
  layout.bits = 8;
  layout.coarse = group_size % kQuantBlock == 0 || group_size == cols;
  const int64_t groups = cols / group_size;
  layout.wide_scale = needs_wide_scale(std::vector<float>(scales, scales + rows * groups));
  finish_layout(layout, cols);
  std::unique_ptr<PanelLinear> linear = make_panel_linear("int8", layout, nullptr, rows, isa, precise);
  PanelGroup group = {};
  for (int64_t p = 0; p < linear->num_panels(); ++p)
    for (int64_t g = 0; g < cols / 32; ++g) {
      for (int c = 0; c < kPanelCols; ++c) {
        const int64_t row = p * kPanelCols + c;
        group.scale[c] = row < rows ? scales[row * groups + g * 32 / group_size] : 0;
        for (int k = 0; row < rows && k < 32; ++k) group.code[c][k] = uint8_t(codes[row * cols + g * 32 + k]) ^ 0x80;
      }
      store_group(layout, group, linear->panel(p) + g * layout.group_bytes);
    }
  return linear;
}

}  // namespace tokenmill
