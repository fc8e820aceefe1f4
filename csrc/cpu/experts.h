// A mixture of experts: which experts a token goes to, and one step through them.
//
// Tokens are sorted by expert, so that each expert is a product of its own rows with its own matrices, in whatever format
// they are; the tiles of all experts are one parallel region. Outputs are added in the order of experts, so that a token
// gives the same bits alone and in a batch. Knows nothing of Python or of names; a stage of Program runs it.
#pragma once

#include <vector>

#include "float_kernels.h"
#include "memory.h"
#include "pool.h"
#include "product.h"

namespace tokenmill {

// As RoutingSpec in kernels/ref_experts.py, which is the spec.
struct ExpertRouting {
  enum class Score { softmax, sigmoid, softmax_of_selected };
  int experts_per_token = 0;
  Score score = Score::softmax;
  bool normalize = true;
  float scale = 1;
  int num_groups = 1, top_groups = 1;
  bool group_maximum = false;            // a group's score is its best, instead of the sum of its two best
  std::vector<float> correction_bias;  // empty, or one per expert
  Activation activation = Activation::silu;
  float clamp = 0;
  bool weights_on_input = false;
};

struct Expert {
  Product inputs;  // gate, up
  Product output;  // down
  const float* biases[3];  // gate, up, down; may be null
};

class ExpertLayer {
 public:
  ExpertLayer(ExpertRouting routing, std::vector<Expert> experts);

  int num_experts() const { return static_cast<int>(experts_.size()); }
  int per_token() const { return routing_.experts_per_token; }
  int64_t hidden() const { return experts_[0].inputs.weight(0).cols; }
  int64_t width() const { return experts_[0].inputs.weight(0).rows; }
  const ExpertRouting& routing() const { return routing_; }
  const Expert& expert(int number) const { return experts_[number]; }
  // Whether all experts take the same activations of a token, so that it is quantized once for all of them.
  bool shares_rows() const { return shares_rows_; }

  // One token: its experts in ascending order and their weights, `per_token` each. `scratch` holds 2 * num_experts.
  void route(const float* logits, int32_t* ids, float* weights, float* scratch) const;
  // gate[i] = activation(gate[i]) * up[i]; `up` is overwritten where the activation is clamped.
  void activate(float* gate, float* up) const;

 private:
  void keep_best_groups(float* choice, float* group_scores) const;

  ExpertRouting routing_;
  std::vector<Expert> experts_;
  bool shares_rows_;
};

// Memory and order of one step's assignments; shared by all layers of a program, which run one after the other.
class ExpertWorkspace {
 public:
  void reserve(const ExpertLayer& layer, int max_tokens);  // before `allocate`, for every layer
  void allocate();
  size_t bytes() const { return bytes_; }
  size_t scratch_bytes() const { return scratch_bytes_; }  // per thread

  // x [rows, hidden] and router logits [rows, experts] -> y [rows, hidden]. Called by all threads of a team.
  void run(Team& team, const ExpertLayer& layer, const float* x, const float* logits, int rows, float* y, char* scratch);

 private:
  struct Hit {  // an expert with rows
    int expert, first, count;
    char *input, *output;                // its activations
    int input_tiles, output_tiles;       // of the experts before it
  };
  struct Block {  // rows [begin, end) of a hit, prepared by one thread
    int hit, begin, end;
  };

  void quantize_tokens(Team& team, const ExpertLayer& layer, const float* x, int rows);
  void sort(const ExpertLayer& layer, int rows);
  void prepare(const ExpertLayer& layer, const float* x, const Block& block);
  template <typename Function>
  void spread(Team& team, int tiles, Function&& fn) const;

  int64_t assignments_ = 0, hidden_ = 0, width_ = 0;  // largest of all layers
  int experts_ = 0;
  size_t activation_bytes_ = 0, token_bytes_ = 0, scratch_bytes_ = 0, bytes_ = 0;
  std::vector<int32_t> ids_, counts_, places_, tokens_;  // places: of each assignment among the sorted; tokens: inverse
  std::vector<float> weights_;
  std::vector<Hit> hits_;
  std::vector<Block> blocks_;
  std::vector<int> unprepared_;  // blocks whose input activations are not those of a token
  size_t token_row_ = 0;         // bytes of a token's activations in this step; 0: tokens are not quantized by themselves
  int input_tiles_ = 0, output_tiles_ = 0;
  AlignedBuffer rows_, gate_, up_, activations_, token_activations_;
};

}  // namespace tokenmill
