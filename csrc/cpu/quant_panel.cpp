// Packing into panels and reading them back (layout in quant_panel.h).
//
// Plain C++ on purpose: it runs once per weight at load, one panel per call so that the caller may use all its threads.
#include "quant_panel.h"

namespace tokenmill {
namespace {

uint16_t to_scale_bits(const PanelLayout& layout, float value) {
  return layout.wide_scale ? float_to_bfloat(value) : float_to_half(value);
}

float from_scale_bits(const PanelLayout& layout, const uint8_t* p) {
  const uint16_t bits = uint16_t(p[0] | p[1] << 8);
  return layout.wide_scale ? bfloat_to_float(bits) : half_to_float(bits);
}

void store16(uint8_t* p, uint16_t value) {
  p[0] = uint8_t(value);
  p[1] = uint8_t(value >> 8);
}

// Bit planes of the eight vectors v[8][64]; returns the bytes written.
void store_codes(int bits, const uint8_t (*v)[64], uint8_t* out) {
  if (bits == 8) {
    for (int j = 0; j < 8; ++j)
      for (int i = 0; i < 64; ++i) *out++ = v[j][i] ^ 0x80;
    return;
  }
  if (bits >= 4)
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 64; ++i) *out++ = uint8_t((v[j][i] & 15) | v[j + 4][i] << 4);
  if (bits == 6 || bits <= 3) {
    const int shift = bits == 6 ? 4 : 0;
    for (int h = 0; h < 8; h += 4)
      for (int i = 0; i < 64; ++i) {
        unsigned byte = 0;
        for (int s = 0; s < 4; ++s) byte |= (v[h + s][i] >> shift & 3u) << (2 * s);
        *out++ = uint8_t(byte);
      }
  }
  if (bits == 5 || bits == 3) {
    const int shift = bits - 1;
    for (int i = 0; i < 64; ++i) {
      unsigned byte = 0;
      for (int j = 0; j < 8; ++j) byte |= (v[j][i] >> shift & 1u) << j;
      *out++ = uint8_t(byte);
    }
  }
}

int load_code(int bits, const uint8_t* codes, int j, int i) {
  if (bits == 8) return int8_t(codes[j * 64 + i]);
  int code = 0;
  if (bits >= 4) {
    code = codes[j % 4 * 64 + i] >> (j / 4 * 4) & 15;
    codes += 256;
  }
  if (bits == 6 || bits <= 3) {
    code |= (codes[j / 4 * 64 + i] >> (j % 4 * 2) & 3) << (bits == 6 ? 4 : 0);
    codes += 128;
  }
  if (bits == 5 || bits == 3) code |= (codes[i] >> j & 1) << (bits - 1);
  return code;
}

}  // namespace

void finish_layout(PanelLayout& layout, int64_t cols) {
  layout.cols = cols;
  layout.code_bytes = 64 * layout.bits;
  const int subs = layout.fine ? 32 : 16;
  layout.group_bytes = layout.code_bytes + (layout.superblock ? subs : layout.has_min || layout.fine ? 64 : 32);
  layout.head_bytes = layout.superblock ? (layout.has_min ? 64 + 8 * subs : 32) : 0;
  layout.panel_bytes = cols / 32 * layout.group_bytes + (layout.superblock ? cols / 256 * layout.head_bytes : 0);
}

PanelLayout make_layout(const QuantFormat& format, int64_t cols) {
  PanelLayout layout;
  layout.bits = format.bits;
  layout.offset = format.bits == 8 ? 0 : format.offset;
  layout.superblock = format.superblock();
  layout.fine = format.group == 16;
  layout.has_min = format.has_min;
  layout.wide_scale = format.wide_scale;
  layout.unit = format.unit;
  layout.has_lut = format.lut != nullptr;
  if (format.lut) std::memcpy(layout.lut, format.lut, 16);
  finish_layout(layout, cols);
  return layout;
}

void store_group(const PanelLayout& layout, const PanelGroup& group, uint8_t* out) {
  uint8_t v[8][64];
  for (int j = 0; j < 8; ++j)
    for (int c = 0; c < kPanelCols; ++c) std::memcpy(&v[j][c * 4], &group.code[c][j * 4], 4);
  store_codes(layout.bits, v, out);
  out += layout.code_bytes;
  if (layout.superblock) {
    std::memcpy(out, group.sub_scale, layout.fine ? 32 : 16);
    return;
  }
  for (int c = 0; c < kPanelCols; ++c) {
    store16(out + 2 * c, to_scale_bits(layout, group.scale[c]));
    if (layout.has_min) store16(out + 32 + 2 * c, to_scale_bits(layout, group.minimum[c]));
    if (layout.fine) store16(out + 32 + 2 * c, to_scale_bits(layout, group.second_scale[c]));
  }
}

void pack_panel(const PanelLayout& layout, const QuantFormat& format, const void* data, int64_t begin, int64_t rows,
                uint8_t* panel) {
  const int64_t row_bytes = layout.cols / format.block * format.bytes;
  const int subs = layout.fine ? 2 : 1, groups = format.block / 32;
  static const SplitBlock kZero = {};
  SplitBlock split[kPanelCols];
  PanelGroup group;
  for (int64_t b = 0; b < layout.cols / format.block; ++b) {
    for (int c = 0; c < kPanelCols; ++c) {
      if (begin + c < rows) {
        format.split(static_cast<const uint8_t*>(data) + (begin + c) * row_bytes + b * format.bytes, split[c]);
      } else {
        split[c] = kZero;
      }
      if (layout.superblock) {
        store16(panel + 2 * c, float_to_half(split[c].d));
        if (layout.has_min) {
          store16(panel + 32 + 2 * c, float_to_half(split[c].dmin));
          for (int g = 0; g < 256 / format.group; ++g) panel[64 + g / 4 * 64 + c * 4 + g % 4] = split[c].minimum[g];
        }
      }
    }
    panel += layout.head_bytes;
    for (int g = 0; g < groups; ++g, panel += layout.group_bytes) {
      for (int c = 0; c < kPanelCols; ++c) {
        std::memcpy(group.code[c], split[c].code + g * 32, 32);
        group.scale[c] = split[c].d * float(split[c].scale[g * subs]);
        group.second_scale[c] = split[c].d * float(split[c].scale[g * subs + subs - 1]);
        group.minimum[c] = -split[c].dmin;
        for (int s = 0; s < subs; ++s) group.sub_scale[s][c] = int8_t(split[c].scale[g * subs + s]);
      }
      store_group(layout, group, panel);
    }
  }
}

void dequantize_panel_column(const PanelLayout& layout, const uint8_t* panel, int column, float* out) {
  const uint8_t* head = nullptr;
  for (int64_t g = 0; g < layout.cols / 32; ++g, panel += layout.group_bytes) {
    if (layout.superblock && g % 8 == 0) {
      head = panel;
      panel += layout.head_bytes;
    }
    const uint8_t* scales = panel + layout.code_bytes;
    for (int k = 0; k < 32; ++k) {
      const int sub = layout.fine ? k / 16 : 0;
      float scale, minimum = 0;
      if (layout.superblock) {
        scale = layout.unit * half_to_float(uint16_t(head[2 * column] | head[2 * column + 1] << 8));
        scale *= float(int8_t(scales[sub * 16 + column]));
        if (layout.has_min) {
          minimum = -layout.unit * half_to_float(uint16_t(head[32 + 2 * column] | head[33 + 2 * column] << 8));
          const int64_t index = layout.fine ? g % 8 * 2 + sub : g % 8;
          minimum *= float(head[64 + index / 4 * 64 + column * 4 + index % 4]);
        }
      } else {
        scale = from_scale_bits(layout, scales + 32 * sub + 2 * column);
        if (layout.has_min) minimum = from_scale_bits(layout, scales + 32 + 2 * column);
      }
      const int code = load_code(layout.bits, panel, k / 4, column * 4 + k % 4);
      const float value = scale * float(layout.has_lut ? layout.lut[code] : code - layout.offset);
      out[g * 32 + k] = layout.has_min ? value + minimum : value;
    }
  }
}

}  // namespace tokenmill
