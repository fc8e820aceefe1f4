// Recurrent ops in a recorded program: a prompt at once, in chunks, token by token, beside others, as drafts of which some
// hold, and with any number of threads gives the same states to the bit, and the same logits. Against plain loops.
#include "program.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <string>

#include "check.h"

using namespace tokenmill;

namespace {

constexpr int kVocabulary = 40, kSlots = 5, kWidth = 4;
constexpr int kHeads = 3, kDim = 5, kSize = 18, kGroups = 1;  // Mamba 2
constexpr int kChannels = kHeads * kDim + 2 * kGroups * kSize;
constexpr int kKeyHeads = 2, kKeys = 6, kValueHeads = 4, kValues = 9;  // delta rule
constexpr int kDelta = 2 * kKeyHeads * kKeys + kValueHeads * kValues;
constexpr int kInner = 7, kStates = 3;  // Mamba
constexpr int kHidden = kChannels + kHeads + kDelta + 2 * kValueHeads + 2 * kInner + 2 * kStates;
constexpr int kOutput = kHeads * kDim + kValueHeads * kValues + kInner;

std::vector<float> negative(std::vector<float> values) {
  for (float& value : values) value = -std::fabs(value);
  return values;
}

// The embedding is what a model would project to: the inputs of all ops side by side.
struct Instance {
  std::vector<float> table = random_floats(kVocabulary * kHidden, 1), norm = random_floats(kOutput, 2);
  std::vector<float> taps = random_floats(kWidth * kChannels, 3), bias = random_floats(kChannels, 4);
  std::vector<float> a = negative(random_floats(kHeads, 5)), d = random_floats(kHeads, 6), dt = random_floats(kHeads, 7);
  std::vector<float> delta_a = negative(random_floats(kValueHeads, 8)), delta_dt = random_floats(kValueHeads, 9);
  std::vector<float> mamba_a = negative(random_floats(kInner * kStates, 10)), mamba_d = random_floats(kInner, 11);
  std::vector<float> states[4];
  std::unique_ptr<Linear> head;
  std::vector<float> head_data = random_floats(kVocabulary * kOutput, 12, 0.3f);
  Program program;

  Instance(int threads, int max_tokens) : program(max_tokens, 4, std::make_shared<ThreadPool>(threads)) {
    const int64_t sizes[4] = {(kWidth - 1) * kChannels, kHeads * kDim * kSize, kValueHeads * kKeys * kValues,
                              kInner * kStates};
    for (int i = 0; i < 4; ++i) states[i].assign(kSlots * sizes[i], 0.0f);
    std::string why;
    head = pack_linear("F32", head_data.data(), kVocabulary, kOutput, Isa::portable, &why);
    const int x = program.embed("F32", table.data(), kHidden, 1.0f);
    const std::vector<int> in = program.split(
        x, {kChannels, kHeads, kDelta, kValueHeads, kValueHeads, kInner, kInner, kStates, kStates}, 1);
    const int convolved = program.recurrence(
        {in[0]}, std::make_shared<Convolution>(taps.data(), bias.data(), kWidth, kChannels), states[0].data());
    const Mamba2Shape shape{kHeads, kDim, kSize, kGroups, 1.1f, 0.01f, 3.0f};
    const int first = program.recurrence(
        {convolved, in[1]}, std::make_shared<Mamba2Scan>(a.data(), d.data(), dt.data(), shape), states[1].data());
    const DeltaShape delta{kValueHeads, kKeyHeads, kKeys, kValues};
    const int second =
        program.recurrence({in[2], in[3], in[4]}, std::make_shared<DeltaScan>(delta_a.data(), delta_dt.data(), delta),
                           states[2].data());
    const int third =
        program.recurrence({in[5], in[6], in[7], in[8]},
                           std::make_shared<MambaScan>(mamba_a.data(), mamba_d.data(), kInner, kStates),
                           states[3].data());
    const int joined = program.join({first, second, third});
    const int gated = program.gated_norm(joined, joined, {norm.data(), kOutput, kOutput, 1e-5f, 0.7f, true});
    program.end_body();
    program.finish(program.linear(program.select_rows(gated), {head.get()}, {nullptr})[0]);
  }

  // (slot, first position, count) of each sequence; logits of every row. `drafted`: numbers of sequences.
  struct Row {
    int slot, start, count;
  };
  std::vector<float> step(const std::vector<Row>& rows, const std::vector<int>& drafted = {}) {
    std::vector<int64_t> ids, positions, slots, wanted;
    std::vector<int32_t> starts = {0};
    for (const Row& row : rows) {
      for (int i = 0; i < row.count; ++i) {
        ids.push_back(((row.start + i) * 7 + row.slot * 3) % kVocabulary);
        positions.push_back(row.start + i);
        wanted.push_back(int64_t(wanted.size()));
      }
      slots.push_back(row.slot);
      starts.push_back(int32_t(ids.size()));
    }
    std::vector<float> logits(ids.size() * kVocabulary, NAN);
    StepInputs inputs;
    inputs.num_tokens = inputs.num_logit_rows = int(ids.size());
    inputs.token_ids = ids.data();
    inputs.positions = positions.data();
    inputs.logit_rows = wanted.data();
    inputs.logits = logits.data();
    inputs.num_sequences = int(rows.size());
    inputs.starts = starts.data();
    inputs.state_slots = slots.data();
    inputs.drafted = drafted;
    program.run(inputs);
    return logits;
  }

  bool same_states(const Instance& other, int slot) const {
    for (int i = 0; i < 4; ++i) {
      const size_t floats = states[i].size() / kSlots;
      if (std::memcmp(&states[i][slot * floats], &other.states[i][slot * floats], floats * sizeof(float)) != 0)
        return false;
    }
    return true;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!near(a[i], b[i], 1e-5)) return false;
  return true;
}

// Mamba 2 by its formula, a token at a time.
void check_against_loops() {
  const std::vector<float> xbc = random_floats(30 * kChannels, 20), dt = random_floats(30 * kHeads, 21);
  const std::vector<float> a = negative(random_floats(kHeads, 5)), d = random_floats(kHeads, 6);
  const std::vector<float> bias = random_floats(kHeads, 7);
  const Mamba2Scan scan(a.data(), d.data(), bias.data(), {kHeads, kDim, kSize, kGroups, 1.0f, 0.0f, 1e9f});
  std::vector<float> state(scan.state_floats()), scratch(scan.scratch_floats()), out(30 * scan.out_width());
  const float* inputs[] = {xbc.data(), dt.data()};
  for (int head = 0; head < kHeads; ++head)
    scan.run({inputs, 0, 30, out.data()}, head, state.data(), true, scratch.data());
  std::vector<double> expected(state.size());
  for (int t = 0; t < 30; ++t) {
    const float *b = &xbc[t * kChannels + kHeads * kDim], *c = b + kSize;
    for (int head = 0; head < kHeads; ++head) {
      const double time = std::log1p(std::exp(double(dt[t * kHeads + head]) + bias[head]));
      for (int i = 0; i < kDim; ++i) {
        const double x = xbc[t * kChannels + head * kDim + i];
        double y = d[head] * x;
        for (int n = 0; n < kSize; ++n) {
          double& s = expected[(head * kDim + i) * kSize + n];
          s = std::exp(time * a[head]) * s + time * x * b[n];
          y += s * c[n];
        }
        CHECK(near(out[t * kHeads * kDim + head * kDim + i], y, 2e-5));
      }
    }
  }
}

}  // namespace

int main() {
  check_against_loops();
  std::vector<std::vector<float>> by_threads;
  for (int threads : {1, 2, 4}) {
    Instance whole(threads, 64), chunks(threads, 64), tokens(threads, 8), drafts(threads, 64);
    const std::vector<float> expected = whole.step({{1, 0, 37}});
    by_threads.push_back(expected);
    const auto rows = [&](int begin, int end) {
      return std::vector<float>(expected.begin() + begin * kVocabulary, expected.begin() + end * kVocabulary);
    };
    chunks.step({{1, 0, 2}, {0, 0, 9}});
    chunks.step({{1, 2, 17}});
    chunks.step({{2, 0, 1}, {1, 19, 1}, {0, 9, 30}});
    CHECK(same(chunks.step({{1, 20, 17}}), rows(20, 37)));
    CHECK(chunks.same_states(whole, 1));
    for (int position = 0; position < 37; ++position)
      CHECK(same(tokens.step({{1, position, 1}}), rows(position, position + 1)));
    CHECK(tokens.same_states(whole, 1));
    // Drafts: the states wait for `settle`, those of the other sequence do not.
    drafts.step({{1, 0, 20}, {3, 0, 3}});
    Instance before(threads, 64);
    before.step({{1, 0, 20}, {3, 0, 4}});
    drafts.step({{3, 3, 1}, {1, 20, 6}}, {1});
    CHECK(drafts.same_states(before, 1) && drafts.same_states(before, 3));
    drafts.program.settle({2});
    std::vector<float> both = rows(22, 27);
    const std::vector<float> other = before.step({{3, 4, 4}});
    both.insert(both.end(), other.begin(), other.end());
    CHECK(same(drafts.step({{1, 22, 5}, {3, 4, 4}}, {0, 1}), both));
    drafts.program.settle({5, 4});
    CHECK(drafts.same_states(before, 3));
    CHECK(same(drafts.step({{1, 27, 10}}), rows(27, 37)));
    CHECK(drafts.same_states(whole, 1));
  }
  CHECK(by_threads[0] == by_threads[1] && by_threads[0] == by_threads[2]);
  return report("recurrent");
}
