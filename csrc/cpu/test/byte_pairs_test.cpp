// Words merged by scanning and by the heap give the same tokens; damaged tables are refused.
#include "../byte_pairs.h"

#include <cstring>
#include <stdexcept>

#include "check.h"

namespace {

using tokenmill::BytePairs;
using tokenmill::StringTable;

struct Stored {
  std::vector<uint8_t> bytes;
  std::vector<uint64_t> starts;

  explicit Stored(const std::vector<std::string>& texts) {
    for (const std::string& text : texts) {
      starts.push_back(bytes.size());
      const uint64_t length = text.size();
      bytes.resize(bytes.size() + 8);
      std::memcpy(bytes.data() + starts.back(), &length, 8);
      bytes.insert(bytes.end(), text.begin(), text.end());
    }
  }
  StringTable table() const {
    return {bytes.data(), bytes.size(), starts.data(), static_cast<int64_t>(starts.size())};
  }
};

std::vector<int32_t> encoded(const BytePairs& pairs, const std::string& word) {
  std::vector<int32_t> out;
  pairs.encode(word, out);
  return out;
}

// The definition: the pair of the lowest rank, the leftmost of several.
std::vector<std::string> plain(std::vector<std::string> symbols, const std::vector<std::string>& merges) {
  while (true) {
    size_t best_rank = merges.size(), best = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i)
      for (size_t rank = 0; rank < best_rank; ++rank)
        if (symbols[i] + " " + symbols[i + 1] == merges[rank]) best_rank = rank, best = i;
    if (best_rank == merges.size()) return symbols;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + best + 1);
  }
}

}  // namespace

int main() {
  const std::vector<std::string> pieces = {"a", "b", "c", "ab", "abc", "bc", "aa", "aaaa", "abab", "ca", "cab"};
  const std::vector<std::string> merges = {"a b", "ab c", "b c", "a a", "aa aa", "ab ab", "c a", "ca b"};
  const Stored stored(pieces), joined(merges);
  const BytePairs pairs(stored.table(), joined.table(), false);
  CHECK(pairs.size() == 11 && pairs.find("abc") == 4 && pairs.find("abcd") == -1 && pairs.piece(3) == "ab");
  CHECK(pairs.piece(-1).empty() && pairs.piece(11).empty());
  uint32_t state = 1;
  for (size_t length : {0, 1, 2, 7, 48, 49, 50, 200, 1000}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::string word;
      std::vector<std::string> symbols;
      for (size_t i = 0; i < length; ++i) {
        state = state * 1664525u + 1013904223u;
        word += "abc"[(state >> 16) % 3];
        symbols.push_back(word.substr(i));
      }
      std::vector<int32_t> wanted;
      for (const std::string& symbol : plain(symbols, merges)) wanted.push_back(pairs.find(symbol));
      CHECK(encoded(pairs, word) == wanted);
    }
  }
  CHECK(encoded(pairs, "axb") == (std::vector<int32_t>{0, 11, 1}));  // no token for x: nothing merges over it
  const BytePairs whole(stored.table(), joined.table(), true);
  CHECK(encoded(whole, "abab") == (std::vector<int32_t>{8}) && encoded(whole, "abca") == (std::vector<int32_t>{4, 0}));

  const Stored unknown({"a z"});
  bool refused = false;
  try {
    BytePairs(stored.table(), unknown.table(), false);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
  Stored damaged(pieces);
  damaged.bytes[damaged.starts[5]] = 200;
  refused = false;
  try {
    BytePairs(damaged.table(), joined.table(), false);
  } catch (const std::out_of_range&) {
    refused = true;
  }
  CHECK(refused);
  std::vector<uint64_t> starts(pieces.size());
  CHECK(tokenmill::walk_strings(stored.bytes.data(), stored.bytes.size(), 0, pieces.size(), starts.data()) ==
        stored.bytes.size());
  CHECK(starts == stored.starts);
  CHECK(tokenmill::walk_strings(stored.bytes.data(), stored.bytes.size() - 1, 0, pieces.size(), starts.data()) == 0);
  CHECK(tokenmill::walk_strings(damaged.bytes.data(), damaged.bytes.size(), 0, pieces.size(), starts.data()) == 0);
  return report("byte pairs");
}
