// Packing adapters and multiplying by them. See adapters.h.
#include "adapters.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "float_kernels.h"

namespace tokenmill {
namespace {

constexpr int kMaxRows = 16;  // of one adapter that a call of the kernels takes: their pointers lie on the stack

int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

const AdapterKernels* rounded_kernels() {
  static const PanelKernels* const kernels = find_panel_kernels(best_isa());
  return kernels == nullptr ? nullptr : &kernels->adapters;
}

std::vector<float> copied(const float* values, int64_t count) {
  return values == nullptr ? std::vector<float>() : std::vector<float>(values, values + count);
}

int8_t code_of(float value, float inverse) {
  return static_cast<int8_t>(std::max(-127.0f, std::min(127.0f, std::nearbyint(value * inverse))));
}

// Ranks may differ in size by orders of magnitude: the peak of each column of B goes to A's scale of that rank, so that
// all columns of B share one grid.
void pack_rounded(const PartValues& values, int64_t inputs, AdapterPart& part) {
  const int rank = part.rank;
  const int64_t k_blocks = rounded_up(inputs, kInputBlock) / kInputBlock, panels = part.num_panels();
  part.a = std::make_unique<AlignedBytes>(part.blocks * k_blocks * kInputBlock * kPanelCols);
  part.b = std::make_unique<AlignedBytes>(panels * part.blocks * kRankBlock * kPanelCols);
  std::memset(part.a->data(), 0, part.a->size());
  std::memset(part.b->data(), 0, part.b->size());
  part.a_scales.assign(part.blocks * kRankBlock, 0.0f);
  part.b_factors.assign(panels, 0.0f);
  std::vector<float> b_peaks(rank, 0.0f);
  for (int64_t n = 0; n < part.outputs; ++n)
    for (int r = 0; r < rank; ++r) b_peaks[r] = std::fmax(b_peaks[r], std::fabs(values.b[n * rank + r]));
  for (int r = 0; r < rank; ++r) {
    const float* row = values.a + r * inputs;
    float peak = 0;
    for (int64_t k = 0; k < inputs; ++k) peak = std::fmax(peak, std::fabs(row[k]));
    if (peak == 0 || b_peaks[r] == 0) continue;
    part.a_scales[r] = peak / 127 * b_peaks[r];
    int8_t* panel = reinterpret_cast<int8_t*>(part.a->data()) + r / 16 * k_blocks * kInputBlock * kPanelCols;
    for (int64_t k = 0; k < inputs; ++k) panel[k / 4 * 64 + r % 16 * 4 + k % 4] = code_of(row[k], 127 / peak);
  }
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t first = p * kPanelCols, last = std::min(part.outputs, first + kPanelCols);
    float peak = 0;
    for (int64_t n = first; n < last; ++n)
      for (int r = 0; r < rank; ++r)
        if (b_peaks[r] > 0) peak = std::fmax(peak, std::fabs(values.b[n * rank + r]) / b_peaks[r]);
    if (peak == 0) continue;
    part.b_factors[p] = peak / 127;
    int8_t* panel = reinterpret_cast<int8_t*>(part.b->data()) + p * part.blocks * kRankBlock * kPanelCols;
    for (int64_t n = first; n < last; ++n)
      for (int r = 0; r < rank; ++r)
        if (b_peaks[r] > 0)
          panel[r / 4 * 64 + (n - first) * 4 + r % 4] = code_of(values.b[n * rank + r] / b_peaks[r], 127 / peak);
  }
}

void pack_exact(const PartValues& values, int64_t inputs, AdapterPart& part) {
  part.a_exact = copied(values.a, part.rank * inputs);
  part.b_exact.resize(part.rank * part.outputs);
  for (int64_t n = 0; n < part.outputs; ++n)
    for (int r = 0; r < part.rank; ++r) part.b_exact[r * part.outputs + n] = values.b[n * part.rank + r];
}

// fn(first row, number of rows) for stretches of rows that follow each other.
template <typename Function>
void for_stretches(const int* rows, int count, Function&& fn) {
  for (int begin = 0; begin < count;) {
    int end = begin + 1;
    while (end < count && rows[end] == rows[end - 1] + 1) ++end;
    fn(rows[begin], end - begin);
    begin = end;
  }
}

}  // namespace

ProductAdapter::ProductAdapter(int64_t inputs, const std::vector<int64_t>& outputs,
                               const std::vector<PartValues>& values, bool exact_wanted)
    : inputs(inputs), exact(exact_wanted || rounded_kernels() == nullptr), parts(outputs.size()) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    AdapterPart& part = parts[i];
    const PartValues& from = values[i];
    part.outputs = outputs[i];
    part.rank = from.whole != nullptr ? 0 : from.rank;
    part.first_block = blocks;
    part.blocks = (part.rank + kRankBlock - 1) / kRankBlock;
    blocks += part.blocks;
    part.gain = copied(from.gain, part.outputs);
    part.shift = copied(from.shift, part.outputs);
    part.whole = copied(from.whole, part.outputs * inputs);
    part.bias = copied(from.bias, part.outputs);
    if (part.rank == 0) continue;
    if (exact) {
      pack_exact(from, inputs, part);
    } else {
      pack_rounded(from, inputs, part);
    }
  }
}

size_t ProductAdapter::bytes() const {
  size_t total = 0;
  for (const AdapterPart& part : parts) {
    for (const auto* codes : {part.a.get(), part.b.get()}) total += codes == nullptr ? 0 : codes->size();
    for (const auto* floats : {&part.a_scales, &part.b_factors, &part.a_exact, &part.b_exact, &part.gain, &part.shift,
                               &part.whole, &part.bias})
      total += floats->size() * sizeof(float);
  }
  return total;
}

void AdapterRows::build(const int32_t* given, const int64_t* picked, int count) {
  slots.resize(count);
  rows.clear();
  groups.clear();
  for (int i = 0; i < count; ++i) slots[i] = given[picked == nullptr ? i : picked[i]];
  for (int i = 0; i < count; ++i)
    if (slots[i] > 0) rows.push_back(i);
  std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return slots[a] < slots[b]; });
  for (int at = 0; at < static_cast<int>(rows.size()); ++at) {
    if (groups.empty() || groups.back().slot != slots[rows[at]]) groups.push_back({slots[rows[at]], at, at});
    groups.back().end = at + 1;
  }
}

void AdapterWorkspace::reserve(int max_rows, int64_t max_inputs) {
  max_rows_ = max_rows;
  max_inputs_ = rounded_up(max_inputs, kInputBlock);
  const size_t blocks = max_rows * max_inputs_ / kInputBlock;
  codes_ = allocate_aligned(max_rows * max_inputs_);
  scales_ = allocate_aligned(blocks * sizeof(float));
  sums_ = allocate_aligned(blocks * sizeof(int32_t));
  blocks_ = 0;
  bytes_ = max_rows * max_inputs_ + blocks * 8;
}

void AdapterWorkspace::take(const ProductAdapter& adapter) {
  if (adapter.blocks <= blocks_) return;
  bytes_ += size_t(max_rows_) * (adapter.blocks - blocks_) * (kRankBlock * 5 + 8);
  blocks_ = adapter.blocks;
  const size_t blocks = size_t(max_rows_) * blocks_;
  rank_codes_ = allocate_aligned(blocks * kRankBlock);
  rank_scales_ = allocate_aligned(blocks * sizeof(float));
  rank_sums_ = allocate_aligned(blocks * sizeof(int32_t));
  floats_ = allocate_aligned(blocks * kRankBlock * sizeof(float));
}

RoundedRow AdapterWorkspace::input_row(int row) const {
  const int64_t blocks = max_inputs_ / kInputBlock;
  return {reinterpret_cast<int8_t*>(codes_.get()) + row * max_inputs_,
          reinterpret_cast<float*>(scales_.get()) + row * blocks,
          reinterpret_cast<int32_t*>(sums_.get()) + row * blocks};
}

RoundedRow AdapterWorkspace::rank_block(int row, int block) const {
  const int64_t at = int64_t(row) * blocks_ + block;
  return {reinterpret_cast<int8_t*>(rank_codes_.get()) + at * kRankBlock,
          reinterpret_cast<float*>(rank_scales_.get()) + at, reinterpret_cast<int32_t*>(rank_sums_.get()) + at};
}

bool AdapterWorkspace::any(const AdapterSlots& slots, const AdapterRows& rows) {
  for (const auto& group : rows.groups)
    if (slots[group.slot] != nullptr) return true;
  return false;
}

void AdapterWorkspace::round_row(const AdapterSlots& slots, const AdapterRows& rows, int row, const float* x) const {
  const ProductAdapter* adapter = rows.slots[row] > 0 ? slots[rows.slots[row]].get() : nullptr;
  if (adapter == nullptr || adapter->exact || adapter->blocks == 0) return;
  const RoundedRow out = input_row(row);
  const int64_t whole = adapter->inputs / kInputBlock * kInputBlock, rest = adapter->inputs - whole;
  rounded_kernels()->round_input(x, whole, out);
  if (rest > 0) {
    alignas(64) float last[kInputBlock] = {};
    std::copy_n(x + whole, rest, last);
    const int64_t block = whole / kInputBlock;
    rounded_kernels()->round_input(last, kInputBlock, {out.codes + whole, out.scales + block, out.sums + block});
  }
}

void AdapterWorkspace::shrink_rounded(const ProductAdapter& adapter, const AdapterPart& part, int block,
                                      const int* rows, int count) const {
  const int64_t k_blocks = rounded_up(adapter.inputs, kInputBlock) / kInputBlock;
  const int8_t* panel = reinterpret_cast<const int8_t*>(part.a->data()) + block * k_blocks * kInputBlock * kPanelCols;
  RoundedRow in[kMaxRows], out[kMaxRows];
  for (int r = 0; r < count; ++r) {
    in[r] = input_row(rows[r]);
    out[r] = rank_block(rows[r], part.first_block + block);
  }
  rounded_kernels()->shrink(panel, k_blocks, part.a_scales.data() + block * kRankBlock, in, count, out);
}

void AdapterWorkspace::shrink(const AdapterSlots& slots, const AdapterRows& rows, const float* x, int64_t ldx,
                              int thread, int threads) const {
  int task = 0;
  for (const auto& group : rows.groups) {
    const ProductAdapter* adapter = slots[group.slot].get();
    if (adapter == nullptr) continue;
    for (const AdapterPart& part : adapter->parts)
      for (int block = 0; block < part.blocks; ++block)
        for (int begin = group.begin; begin < group.end; begin += kMaxRows) {
          if (task++ % threads != thread) continue;
          const int count = std::min(kMaxRows, group.end - begin);
          const int* own = rows.rows.data() + begin;
          if (!adapter->exact) {
            shrink_rounded(*adapter, part, block, own, count);
            continue;
          }
          const int first = block * kRankBlock, ranks = std::min(kRankBlock, part.rank - first);
          for_stretches(own, count, [&](int row, int length) {
            float_kernels().scores(x + row * ldx, ldx, length, part.a_exact.data() + first * adapter->inputs,
                                   adapter->inputs, ranks, adapter->inputs,
                                   rank_floats(row) + part.first_block * kRankBlock + first, blocks_ * kRankBlock);
          });
        }
  }
}

// Columns [first, last), both multiples of 16 but for the end of the matrix.
void AdapterWorkspace::expand_rounded(const AdapterPart& part, const int* rows, int count, const ProductOutput& out,
                                      int64_t first, int64_t last) const {
  RoundedRow in[kMaxRows];
  float* y[kMaxRows];
  for (int r = 0; r < count; ++r) {
    in[r] = rank_block(rows[r], part.first_block);
    y[r] = out.y + rows[r] * out.ldy + first;
  }
  const int64_t p = first / kPanelCols, whole = last / kPanelCols - p;
  const int64_t panel_bytes = part.blocks * kRankBlock * kPanelCols;
  const int8_t* panels = reinterpret_cast<const int8_t*>(part.b->data()) + p * panel_bytes;
  const float* factors = part.b_factors.data() + p;
  rounded_kernels()->expand(panels, factors, whole, part.blocks, in, count, y);
  if (last % kPanelCols == 0) return;
  for (int r = 0; r < count; ++r) {
    alignas(64) float sums[kPanelCols] = {};
    float* const to[1] = {sums};
    rounded_kernels()->expand(panels + whole * panel_bytes, factors + whole, 1, part.blocks, in + r, 1, to);
    for (int64_t i = 0; i < last % kPanelCols; ++i) y[r][whole * kPanelCols + i] += sums[i];
  }
}

void AdapterWorkspace::expand(const AdapterSlots& slots, const AdapterRows& rows, const float* x, int64_t ldx,
                              const ProductOutput* outputs, int thread, int threads) const {
  const FloatKernels& kernels = float_kernels();
  for (const auto& group : rows.groups) {
    const ProductAdapter* adapter = slots[group.slot].get();
    if (adapter == nullptr) continue;
    for (size_t i = 0; i < adapter->parts.size(); ++i) {
      const AdapterPart& part = adapter->parts[i];
      if (part.empty()) continue;
      const ProductOutput& out = outputs[i];
      const int64_t panels = part.num_panels(), first = panels * thread / threads * kPanelCols;
      const int64_t last = std::min(part.outputs, panels * (thread + 1) / threads * kPanelCols);
      if (first >= last) continue;
      for (int begin = group.begin; begin < group.end; begin += kMaxRows) {
        const int count = std::min(kMaxRows, group.end - begin);
        const int* own = rows.rows.data() + begin;
        if (!part.whole.empty()) {
          for_stretches(own, count, [&](int row, int length) {
            float* y = out.y + row * out.ldy;
            kernels.scores(x + row * ldx, ldx, length, part.whole.data() + first * adapter->inputs, adapter->inputs,
                           static_cast<int>(last - first), adapter->inputs, y + first, out.ldy);
            for (int r = 0; !part.bias.empty() && r < length; ++r)
              for (int64_t n = first; n < last; ++n) y[r * out.ldy + n] += part.bias[n];
          });
          continue;
        }
        for (int r = 0; r < count && !part.gain.empty(); ++r) {
          float* y = out.y + own[r] * out.ldy;
          for (int64_t n = first; n < last; ++n) y[n] *= part.gain[n];
          for (int64_t n = first; n < last && !part.shift.empty(); ++n) y[n] += part.shift[n];
        }
        if (part.rank == 0) continue;
        if (!adapter->exact) {
          expand_rounded(part, own, count, out, first, last);
          continue;
        }
        for_stretches(own, count, [&](int row, int length) {
          kernels.accumulate(rank_floats(row) + part.first_block * kRankBlock, blocks_ * kRankBlock, length,
                             part.b_exact.data() + first, part.outputs, part.rank, last - first,
                             out.y + row * out.ldy + first, out.ldy);
        });
      }
    }
  }
}

void AdapterPrefetch::add(const void* begin, size_t bytes) {
  if (count_ == kMaxRanges) return;
  const char* first = static_cast<const char*>(begin);
  ranges_[count_++] = {first, first + bytes};
  lines_ += (bytes + 63) / 64;
}

void AdapterPrefetch::spread(int pieces) {
  each_ = pieces > 0 ? std::min(kMaxLines, lines_ / pieces + 1) : 0;
}

void AdapterPrefetch::some() {
  for (size_t left = each_; left > 0 && at_ < count_;) {
    Range& range = ranges_[at_];
    for (; left > 0 && range.begin < range.end; range.begin += 64, --left) __builtin_prefetch(range.begin, 0, 2);
    if (range.begin >= range.end) ++at_;
  }
}

void AdapterWorkspace::ask_for_shrink(const AdapterSlots& slots, const AdapterRows& rows, int thread, int threads,
                                      AdapterPrefetch& ahead) {
  int task = 0;
  for (const auto& group : rows.groups) {
    const ProductAdapter* adapter = slots[group.slot].get();
    if (adapter == nullptr) continue;
    const int pieces = (group.end - group.begin + kMaxRows - 1) / kMaxRows;
    for (const AdapterPart& part : adapter->parts)
      for (int block = 0; block < part.blocks; ++block, task += pieces) {
        if (adapter->exact || (task % threads != thread && pieces == 1)) continue;
        const size_t bytes = part.a->size() / part.blocks;
        ahead.add(part.a->data() + block * bytes, bytes);
      }
  }
}

void AdapterWorkspace::ask_for_expand(const AdapterSlots& slots, const AdapterRows& rows, int thread, int threads,
                                      AdapterPrefetch& ahead) {
  for (const auto& group : rows.groups) {
    const ProductAdapter* adapter = slots[group.slot].get();
    if (adapter == nullptr || adapter->exact) continue;
    for (const AdapterPart& part : adapter->parts) {
      if (part.rank == 0) continue;
      const int64_t panels = part.num_panels(), first = panels * thread / threads;
      const int64_t last = panels * (thread + 1) / threads, bytes = part.blocks * kRankBlock * kPanelCols;
      ahead.add(part.b->data() + first * bytes, (last - first) * bytes);
    }
  }
}

void EmbeddingAdapter::apply(int64_t id, float* row) const {
  if (!whole.empty()) {
    std::memcpy(row, whole.data() + id * width, width * sizeof(float));
    return;
  }
  float_kernels().accumulate(b.data() + id * rank, rank, 1, a.data(), width, rank, width, row, width);
}

}  // namespace tokenmill
