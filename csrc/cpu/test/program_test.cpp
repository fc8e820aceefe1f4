// A small recorded decoder: same results for a prompt at once, in chunks, token by token, beside another sequence, and with
// any number of threads; and against the ops called one by one. Buffers are reused, so a wrong liveness shows here.
#include "program.h"

#include "check.h"
#include "plain_pages.h"

using namespace tokenmill;

namespace {

constexpr int kHidden = 24, kHeads = 4, kKvHeads = 2, kDim = 6, kInner = 40, kVocabulary = 50, kPage = 4, kPages = 64;
constexpr int kLayers = 3, kPositions = 64;

struct Model {
  std::vector<float> table = random_floats(kVocabulary * kHidden, 1), norm = random_floats(kHidden, 2);
  std::vector<float> cosines = random_floats(kPositions * kDim / 2, 3), sines = random_floats(kPositions * kDim / 2, 4);
  std::vector<std::vector<float>> data;
  std::vector<std::unique_ptr<Linear>> weights;

  const Linear* weight(int rows, int cols) {
    data.push_back(random_floats(rows * cols, 10 + data.size(), 0.2f));
    std::string why;
    weights.push_back(pack_linear("F32", data.back().data(), rows, cols, Isa::portable, &why));
    CHECK(weights.back() != nullptr);
    return weights.back().get();
  }
};

struct Instance {
  Model model;
  std::vector<float> k, v;
  Program program;
  int hidden = 0;
  bool all_hidden = true;

  Instance(int threads, int max_tokens)
      : k(kLayers * kPages * kKvHeads * kPage * kDim), v(k.size()),
        program(max_tokens, 8, std::make_shared<ThreadPool>(threads)) {
    Model& m = model;
    int residual = program.embed("F32", m.table.data(), kHidden, 1.5f), update = -1;
    for (int layer = 0; layer < kLayers; ++layer) {
      int x;
      if (update < 0) {
        x = program.rms_norm(residual, m.norm.data(), 1e-5f, 0);
      } else {
        std::tie(residual, x) = program.add_rms_norm(residual, update, m.norm.data(), 1e-5f);
      }
      const std::vector<int> qkv = program.linear(
          x, {m.weight(kHeads * kDim, kHidden), m.weight(kKvHeads * kDim, kHidden), m.weight(kKvHeads * kDim, kHidden)},
          {nullptr, m.norm.data(), nullptr});
      const int q = program.rope(qkv[0], m.cosines.data(), m.sines.data(), kDim / 2, kDim, false);
      const int key = program.rope(program.rms_norm(qkv[1], m.norm.data(), 1e-5f, kDim), m.cosines.data(),
                                   m.sines.data(), kDim / 2, kDim, true);
      const size_t at = size_t(layer) * kPages * kKvHeads * kPage * kDim;
      const KVPages pages = plain_pages(&k[at], &v[at], kKvHeads, kPage, kDim);
      const int attended =
          program.attention(q, key, qkv[2], pages, 0, {kHeads, kKvHeads, kDim, 0.4f, layer == 1 ? 5 : 0, 0.0f});
      update = program.linear(attended, {m.weight(kHidden, kHeads * kDim)}, {nullptr})[0];
      std::tie(residual, x) = program.add_rms_norm(residual, update, m.norm.data(), 1e-5f);
      const std::vector<int> inner = program.linear(x, {m.weight(kInner, kHidden), m.weight(kInner, kHidden)},
                                                    {nullptr, nullptr});
      const int gated = program.gated(inner[0], inner[1], Activation::silu);
      update = program.linear(gated, {m.weight(kHidden, kInner)}, {nullptr})[0];
    }
    hidden = program.add(residual, update);
    program.end_body();
    const int x = program.rms_norm(program.select_rows(hidden), m.norm.data(), 1e-5f, 0);
    program.finish(program.softcap(program.linear(x, {m.weight(kVocabulary, kHidden)}, {nullptr})[0], 3.0f));
  }

  // Sequences as (first position, count); sequence s owns pages s * 10 ...; logits of every sequence's last token.
  // `wants` false: of none.
  std::vector<float> step(const std::vector<std::pair<int, int>>& rows, bool twice = false, bool wants = true) {
    std::vector<int64_t> ids, positions, slots, last;
    std::vector<int32_t> starts = {0}, lengths, table(rows.size() * 10);
    for (size_t s = 0; s < rows.size(); ++s) {
      for (int page = 0; page < 10; ++page) table[s * 10 + page] = int32_t(s * 10 + page);
      for (int i = 0; i < rows[s].second; ++i) {
        const int position = rows[s].first + i;
        ids.push_back((position * 7 + int(s) * 3) % kVocabulary);
        positions.push_back(position);
        slots.push_back(int64_t(table[s * 10 + position / kPage]) * kPage + position % kPage);
      }
      starts.push_back(int32_t(ids.size()));
      lengths.push_back(rows[s].first + rows[s].second);
      last.push_back(int64_t(ids.size()) - 1);
    }
    std::vector<float> logits(rows.size() * kVocabulary, NAN);
    StepInputs inputs;
    inputs.num_tokens = int(ids.size());
    inputs.token_ids = ids.data();
    inputs.positions = positions.data();
    inputs.slots = {slots.data()};
    inputs.batches = {{int(rows.size()), starts.data(), lengths.data(), table.data(), 10}};
    inputs.num_logit_rows = wants ? int(last.size()) : 0;
    inputs.all_hidden = all_hidden;
    inputs.logit_rows = last.data();
    inputs.logits = logits.data();
    inputs.head = !twice;
    program.run(inputs);
    if (twice) {  // the head in a call of its own
      inputs.body = false;
      inputs.head = true;
      program.run(inputs);
    }
    return logits;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b, double tolerance) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!near(a[i], b[i], tolerance)) return false;
  return true;
}

}  // namespace

int main() {
  std::vector<std::vector<float>> pair_logits;
  for (int threads : {1, 2, 4}) {
    Instance whole(threads, 40), chunks(threads, 16), tokens(threads, 16), beside(threads, 40), narrow(threads, 40);
    const std::vector<float> expected = whole.step({{0, 23}});
    CHECK(same(whole.step({{22, 1}}, true), expected, 1e-5));
    chunks.step({{0, 10}});
    chunks.step({{10, 9}});
    CHECK(same(chunks.step({{19, 4}}), expected, 1e-5));
    for (int position = 0; position < 22; ++position) tokens.step({{position, 1}});
    CHECK(same(tokens.step({{22, 1}}), expected, 1e-5));
    beside.step({{0, 20}, {0, 7}, {0, 1}});
    beside.step({{20, 2}, {7, 1}, {1, 5}});
    const std::vector<float> three = beside.step({{22, 1}, {8, 1}, {6, 1}});
    CHECK(same({three.begin(), three.begin() + kVocabulary}, expected, 1e-5));
    pair_logits.push_back(three);
    narrow.all_hidden = false;  // behind the last attention only rows with logits are computed
    narrow.step({{0, 20}, {0, 7}, {0, 1}}, false, false);
    narrow.step({{20, 2}, {7, 1}, {1, 5}});
    CHECK(same(narrow.step({{22, 1}, {8, 1}, {6, 1}}), three, 1e-5));
    CHECK(same(narrow.step({{0, 23}}), expected, 1e-5));
    const std::vector<float> again = narrow.step({{20, 3}, {7, 2}, {2, 5}});
    CHECK(same(again, three, 1e-5));
  }
  CHECK(pair_logits[0] == pair_logits[1] && pair_logits[0] == pair_logits[2]);  // to the bit
  return report("program");
}
