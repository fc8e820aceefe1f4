// Routing, the order of assignments and the parallel phases of an expert layer. See experts.h.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace tokenmill {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kSwigluAlpha = 1.702f;  // steepness of the sigmoid of the clamped activation
constexpr int kFewRows = 8;             // up to this many, one thread routes them all: cheaper than a barrier
constexpr int kBlockRows = 16;          // rows prepared at a time
constexpr int kManyRows = 8;            // rows of an expert above which its tiles compute more than they read
constexpr int kManyGrain = 4;
constexpr int kSingleRows = 64;  // tokens of a step up to which most experts have too few rows for the expanded product

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

float* floats(const AlignedBuffer& buffer) { return reinterpret_cast<float*>(buffer.get()); }

// Marks the `count` largest of values[0, n), of equals the first, by `mark(index)` in descending order. Destroys values.
template <typename Function>
void take_largest(float* values, int n, int count, Function&& mark) {
  for (int taken = 0; taken < count; ++taken) {
    int best = -1;
    for (int i = 0; i < n; ++i)
      if (!std::isnan(values[i]) && (best < 0 || values[i] > values[best])) best = i;
    mark(best);
    values[best] = std::numeric_limits<float>::quiet_NaN();  // taken
  }
}

void softmax(float* values, int n) {
  const float highest = *std::max_element(values, values + n);
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += values[i] = std::exp(values[i] - highest);
  for (int i = 0; i < n; ++i) values[i] /= sum;
}

// Upper bound of what `product` needs for rows spread over experts: a first row, and each further one.
std::pair<double, double> activation_cost(const Product& product, int max_rows) {
  const double first = double(aligned(product.activation_bytes(1)));
  double further = 0;
  for (int m = 2; m <= max_rows; ++m)
    further = std::max(further, (double(aligned(product.activation_bytes(m))) - first) / (m - 1));
  return {first, further};
}

}  // namespace

ExpertLayer::ExpertLayer(ExpertRouting routing, std::vector<Expert> experts)
    : routing_(std::move(routing)), experts_(std::move(experts)), shares_rows_(!routing_.weights_on_input) {
  for (const Expert& expert : experts_)
    shares_rows_ = shares_rows_ && expert.inputs.takes_single_rows(1) &&
                   expert.inputs.row_kind() == experts_[0].inputs.row_kind();
}

void ExpertLayer::route(const float* logits, int32_t* ids, float* weights, float* scratch) const {
  const int n = num_experts(), k = per_token();
  float *scores = scratch, *choice = scratch + n;
  for (int i = 0; i < n; ++i) scores[i] = std::isnan(logits[i]) ? std::numeric_limits<float>::lowest() : logits[i];
  if (routing_.score == ExpertRouting::Score::softmax) softmax(scores, n);
  if (routing_.score == ExpertRouting::Score::sigmoid)
    for (int i = 0; i < n; ++i) scores[i] = 1 / (1 + std::exp(-scores[i]));
  std::copy_n(scores, n, choice);
  if (!routing_.correction_bias.empty())
    for (int i = 0; i < n; ++i) choice[i] += routing_.correction_bias[size_t(i)];
  if (routing_.num_groups > 1) {
    std::vector<float> groups(size_t(routing_.num_groups));
    keep_best_groups(choice, groups.data());
  }
  int32_t* next = ids;
  take_largest(choice, n, k, [&](int index) { *next++ = index; });
  std::sort(ids, ids + k);
  for (int i = 0; i < k; ++i) weights[i] = scores[ids[i]];
  if (routing_.score == ExpertRouting::Score::softmax_of_selected) {
    softmax(weights, k);
  } else if (routing_.normalize) {
    float sum = 0;
    for (int i = 0; i < k; ++i) sum += weights[i];
    for (int i = 0; i < k; ++i) weights[i] /= sum + 1e-20f;
  }
  for (int i = 0; i < k; ++i) weights[i] *= routing_.scale;
}

void ExpertLayer::keep_best_groups(float* choice, float* group_scores) const {
  const int groups = routing_.num_groups, size = num_experts() / groups;
  for (int group = 0; group < groups; ++group) {
    float best = kMinusInfinity, second = kMinusInfinity;
    for (int i = group * size; i < (group + 1) * size; ++i) {
      second = std::max(second, std::min(best, choice[i]));
      best = std::max(best, choice[i]);
    }
    group_scores[group] = routing_.group_maximum || size == 1 ? best : best + second;
  }
  std::vector<bool> kept(size_t(groups), false);
  take_largest(group_scores, groups, routing_.top_groups, [&](int group) { kept[size_t(group)] = true; });
  for (int group = 0; group < groups; ++group)
    if (!kept[size_t(group)]) std::fill_n(choice + group * size, size, kMinusInfinity);
}

void ExpertLayer::activate(float* gate, float* up) const {
  const FloatKernels& kernels = float_kernels();
  const int64_t n = width();
  if (routing_.clamp <= 0) return kernels.gated(gate, up, routing_.activation, n, gate);
  // g * sigmoid(a g) * (u + 1) = silu(a g) * (u + 1) / a
  for (int64_t i = 0; i < n; ++i) {
    gate[i] = kSwigluAlpha * std::min(gate[i], routing_.clamp);
    up[i] = (std::min(std::max(up[i], -routing_.clamp), routing_.clamp) + 1) / kSwigluAlpha;
  }
  kernels.gated(gate, up, Activation::silu, n, gate);
}

void ExpertWorkspace::reserve(const ExpertLayer& layer, int max_tokens) {
  assignments_ = std::max(assignments_, int64_t(max_tokens) * layer.per_token());
  hidden_ = std::max(hidden_, layer.hidden());
  width_ = std::max(width_, layer.width());
  experts_ = std::max(experts_, layer.num_experts());
  const double hits = double(std::min<int64_t>(layer.num_experts(), int64_t(max_tokens) * layer.per_token()));
  const double further = double(max_tokens) * layer.per_token();
  double bytes = 0;
  const Expert* seen = nullptr;
  for (int number = 0; number < layer.num_experts(); ++number) {
    const Expert& expert = layer.expert(number);
    const auto same = [](const Product& a, const Product& b) {
      for (int i = 0; i < a.size(); ++i)
        if (std::strcmp(a.weight(i).kernel(), b.weight(i).kernel()) != 0) return false;
      return true;
    };
    if (seen != nullptr && same(seen->inputs, expert.inputs) && same(seen->output, expert.output)) continue;
    seen = &expert;
    for (const Product* product : {&expert.inputs, &expert.output}) {
      const auto [first, each] = activation_cost(*product, max_tokens);
      bytes = std::max(bytes, hits * first + further * each);
      for (int m = 1; m <= max_tokens; ++m) scratch_bytes_ = std::max(scratch_bytes_, product->scratch_bytes(m));
    }
  }
  activation_bytes_ = std::max(activation_bytes_, size_t(bytes) + 64);
  if (layer.shares_rows())
    token_bytes_ = std::max(token_bytes_, layer.expert(0).inputs.activation_bytes(1) *
                                              size_t(std::min(max_tokens, kSingleRows)));
  scratch_bytes_ = std::max(scratch_bytes_, 2 * sizeof(float) * size_t(layer.num_experts()));
}

void ExpertWorkspace::allocate() {
  if (assignments_ == 0) return;
  const size_t count = size_t(assignments_);
  ids_.resize(count), places_.resize(count), tokens_.resize(count), weights_.resize(count);
  counts_.resize(size_t(experts_) + 1);
  hits_.reserve(std::min(count, size_t(experts_)));
  blocks_.reserve(count), unprepared_.reserve(count);
  // Sized for the most tokens; what is never touched is never resident.
  rows_ = allocate_aligned(count * size_t(hidden_) * sizeof(float));
  gate_ = allocate_aligned(count * size_t(width_) * sizeof(float));
  up_ = allocate_aligned(count * size_t(width_) * sizeof(float));
  activations_ = allocate_aligned(activation_bytes_);
  token_activations_ = allocate_aligned(token_bytes_);
  bytes_ = count * size_t(hidden_ + 2 * width_) * sizeof(float) + activation_bytes_ + token_bytes_;
}

// Every token once, for whichever experts it goes to: this need not wait for the routing.
void ExpertWorkspace::quantize_tokens(Team& team, const ExpertLayer& layer, const float* x, int rows) {
  const Product& inputs = layer.expert(0).inputs;
  const int64_t hidden = layer.hidden();
  const size_t bytes = inputs.activation_bytes(1);
  team.for_each(rows, 1, [&](int row) {
    inputs.quantize(x + row * hidden, hidden, 0, 1, 1, token_activations_.get() + row * bytes);
  });
}

// Counting sort of the assignments by expert, and what each expert's products need.
void ExpertWorkspace::sort(const ExpertLayer& layer, int rows) {
  const int k = layer.per_token(), count = rows * k;
  std::fill(counts_.begin(), counts_.end(), 0);
  for (int i = 0; i < count; ++i) ++counts_[size_t(ids_[i]) + 1];
  for (int expert = 0; expert < layer.num_experts(); ++expert) counts_[size_t(expert) + 1] += counts_[expert];
  for (int i = 0; i < count; ++i) {
    const int place = counts_[ids_[i]]++;  // ends as the first of the next expert
    places_[i] = place;
    tokens_[place] = i;
  }
  hits_.clear(), blocks_.clear(), unprepared_.clear();
  char *input = activations_.get(), *output = activations_.get();
  input_tiles_ = output_tiles_ = 0;
  for (int expert = 0, first = 0; expert < layer.num_experts(); first = counts_[expert++]) {
    const int m = counts_[expert] - first;
    if (m == 0) continue;
    const Product &inputs = layer.expert(expert).inputs, &outputs = layer.expert(expert).output;
    const int hit = static_cast<int>(hits_.size());
    const bool in_place = token_row_ > 0 && m == 1;
    char* own = in_place ? token_activations_.get() + tokens_[first] / k * token_row_ : input;
    hits_.push_back({expert, first, m, own, output, input_tiles_, output_tiles_});
    if (!in_place) input += aligned(inputs.activation_bytes(m));
    output += aligned(outputs.activation_bytes(m));
    input_tiles_ += inputs.num_tiles(m);
    output_tiles_ += outputs.num_tiles(m);
    const int unit = std::max(inputs.row_block(m), outputs.row_block(m));
    const int step = (kBlockRows + unit - 1) / unit * unit;
    for (int begin = 0; begin < m; begin += step) {
      if (!in_place) unprepared_.push_back(static_cast<int>(blocks_.size()));
      blocks_.push_back({hit, begin, std::min(m, begin + step)});
    }
  }
}

// Input activations of a block: gathered from those of tokens where that is possible, else of the gathered tokens.
void ExpertWorkspace::prepare(const ExpertLayer& layer, const float* x, const Block& block) {
  const Hit& hit = hits_[block.hit];
  const Product& inputs = layer.expert(hit.expert).inputs;
  const int k = layer.per_token();
  if (token_row_ > 0 && inputs.takes_single_rows(hit.count)) {
    for (int row = block.begin; row < block.end; ++row)
      std::memcpy(hit.input + row * token_row_, token_activations_.get() + tokens_[hit.first + row] / k * token_row_,
                  token_row_);
    return;
  }
  const int64_t hidden = layer.hidden();
  float* gathered = floats(rows_) + hit.first * hidden;
  for (int row = block.begin; row < block.end; ++row) {
    const int assignment = tokens_[hit.first + row];
    const float* from = x + assignment / k * hidden;
    if (layer.routing().weights_on_input) {
      float_kernels().scale(from, weights_[assignment], hidden, gathered + row * hidden);
    } else {
      std::memcpy(gathered + row * hidden, from, hidden * sizeof(float));
    }
  }
  inputs.quantize(gathered, hidden, block.begin, block.end, hit.count, hit.input);
}

// Few rows read matrices, which goes faster in runs; many rows compute, and experts differ in how many they have.
template <typename Function>
void ExpertWorkspace::spread(Team& team, int tiles, Function&& fn) const {
  const int rows = hits_.back().first + hits_.back().count;
  if (rows < kManyRows * static_cast<int>(hits_.size())) {
    team.for_runs(tiles, fn);
  } else {
    team.for_each(tiles, kManyGrain, fn);
  }
}

void ExpertWorkspace::run(Team& team, const ExpertLayer& layer, const float* x, const float* logits, int rows, float* y,
                          char* scratch) {
  const int k = layer.per_token(), n = layer.num_experts();
  const int64_t hidden = layer.hidden(), width = layer.width();
  const bool on_input = layer.routing().weights_on_input;
  float *sorted = floats(rows_), *gate = floats(gate_), *up = floats(up_);
  const auto route = [&](int row) {
    layer.route(logits + int64_t(row) * n, &ids_[size_t(row) * k], &weights_[size_t(row) * k],
                reinterpret_cast<float*>(scratch));
  };
  const bool single = layer.shares_rows() && rows <= kSingleRows;
  if (rows > kFewRows) {
    team.for_each(rows, 4, route);
    team.barrier();
  } else if (team.thread == 0) {
    for (int row = 0; row < rows; ++row) route(row);
  }
  if (team.thread == 0) {
    token_row_ = single ? layer.expert(0).inputs.activation_bytes(1) : 0;
    sort(layer, rows);
  }
  if (single) quantize_tokens(team, layer, x, rows);
  team.barrier();

  if (!unprepared_.empty()) {
    team.for_each(static_cast<int>(unprepared_.size()), 1,
                  [&](int number) { prepare(layer, x, blocks_[unprepared_[number]]); });
    team.barrier();
  }

  const auto hit_of = [&](int tile, int Hit::*first_tile) -> const Hit& {
    return *(std::upper_bound(hits_.begin(), hits_.end(), tile,
                              [&](int value, const Hit& hit) { return value < hit.*first_tile; }) - 1);
  };
  spread(team, input_tiles_, [&](int tile) {
    const Hit& hit = hit_of(tile, &Hit::input_tiles);
    const Expert& expert = layer.expert(hit.expert);
    const ProductOutput outputs[2] = {{expert.biases[0], gate + hit.first * width, width},
                                      {expert.biases[1], up + hit.first * width, width}};
    expert.inputs.run_tile(tile - hit.input_tiles, hit.count, hit.input, outputs, scratch);
  });
  team.barrier();

  team.for_each(static_cast<int>(blocks_.size()), 1, [&](int number) {
    const Block& block = blocks_[number];
    const Hit& hit = hits_[block.hit];
    for (int row = hit.first + block.begin; row < hit.first + block.end; ++row)
      layer.activate(gate + row * width, up + row * width);
    layer.expert(hit.expert).output.quantize(gate + hit.first * width, width, block.begin, block.end, hit.count,
                                             hit.output);
  });
  team.barrier();

  spread(team, output_tiles_, [&](int tile) {
    const Hit& hit = hit_of(tile, &Hit::output_tiles);
    const Expert& expert = layer.expert(hit.expert);
    const ProductOutput output{expert.biases[2], sorted + hit.first * hidden, hidden};
    expert.output.run_tile(tile - hit.output_tiles, hit.count, hit.output, &output, scratch);
  });
  team.barrier();

  team.for_each(rows, 1, [&](int row) {
    float* out = y + row * hidden;
    std::memset(out, 0, hidden * sizeof(float));
    for (int i = row * k; i < (row + 1) * k; ++i) {
      const float weight = on_input ? 1.0f : weights_[i];
      float_kernels().accumulate(&weight, 1, 1, sorted + places_[i] * hidden, hidden, 1, hidden, out, hidden);
    }
  });
}

}  // namespace tokenmill
