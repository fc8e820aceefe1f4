// How one token's key or value of one KV head lies in a page: a row of bytes, written and read through a RowFormat.
//
// A row is codes and, where the format has them, its own scale behind them. Formats that rotate hold the rotated vector:
// attention rotates the queries and turns the output back instead of every row. Keys may lie without a center (one vector
// for all keys of a head moves all scores of a query alike, which softmax does not see) and with their channels scaled
// (queries are divided by the same). Knows nothing of pages, batches or threads; the torch twins are
// tokenmill/model/kvstore/*. A new format is a kind here, a case in encode and one in decode.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tokenmill {

constexpr int kMaxHeadDim = 1024;  // of formats other than plain floats

// H (s * x): random signs, then an orthonormal Hadamard matrix of order power * rest, as tokenmill/kernels/hadamard.py.
struct Rotation {
  int power = 1, rest = 1;
  std::vector<float> signs;   // [power * rest]
  std::vector<float> matrix;  // [rest, rest], orthonormal; empty where rest is 1

  void turn(float* x) const;
  void turn_back(float* x) const;
};

// paired_zero has a scale for the even and one for the odd coordinates, halves with their zero points in the low bits.
enum class RowKind {
  float32,
  float16,
  bfloat16,
  float8_e4m3,
  float8_e5m2,
  int8,
  hidden_zero,
  paired_zero,
  uniform,
  codebook
};

struct RowFormat {
  RowKind kind = RowKind::float32;
  int head_dim = 0;
  int bits = 32;                   // of a code
  int scale_bytes = 0;             // of the row's own scale: 0 none, 2 half, 4 float
  bool renormalize = false;        // codebook: the centroids of a row are brought to length one before its norm is applied
  std::vector<float> centroids;    // codebook: [16], for coordinates of variance one
  std::vector<float> bounds;       // codebook: between neighbouring centroids
  std::vector<float> head_scales;  // float8 without scales of its own: [kv_heads]; empty: all one
  std::vector<float> centers;      // [kv_heads, head_dim] taken off before anything else; empty: neither
  std::vector<float> scales;       // [kv_heads, head_dim] multiplied with what is left
  std::vector<float> feedback;     // [kv_heads, head_dim, head_dim]: coordinate j is rounded less feedback[i][j] * error i
  std::vector<float> weights;      // [kv_heads, head_dim] with feedback: what the square of an error costs
  std::vector<float> gains;        // codebook: multiples of the norm to try, then lengths are unbiased; empty: the norm
  std::shared_ptr<const Rotation> rotation;

  int64_t row_bytes() const;
  bool is_plain() const { return kind <= RowKind::bfloat16; }
  void encode(const float* x, int kv_head, uint8_t* row) const;
  // What keys of this format are multiplied with instead of q: scaled and rotated as they are. In place.
  void turn_query(float* q, int kv_head) const;
  // `count` rows, `stride` bytes apart -> out [count, head_dim]
  void decode(const uint8_t* rows, int64_t stride, int count, int kv_head, float* out) const;

 private:
  void encode_codes(const float* x, int kv_head, uint8_t* row) const;
  template <typename Round>
  float round_all(const float* x, int kv_head, Round&& round) const;
  void decode_codes(const uint8_t* row, int kv_head, float* out) const;
  float head_scale(int kv_head) const { return head_scales.empty() ? 1.0f : head_scales[kv_head]; }
};

// False: no such kind.
bool row_kind(const std::string& name, RowKind* kind);

}  // namespace tokenmill
