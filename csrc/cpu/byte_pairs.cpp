// See byte_pairs.h.
#include "byte_pairs.h"

#include <algorithm>
#include <cstring>
#include <queue>
#include <stdexcept>

namespace tokenmill {
namespace {

constexpr size_t kShortWord = 48;  // symbols: below this looking through all pairs beats a heap

uint64_t read_length(const uint8_t* buffer, uint64_t position) {
  uint64_t length;
  std::memcpy(&length, buffer + position, sizeof length);  // files are little endian, as all machines that we build for
  return length;
}

uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char each : text) hash = (hash ^ static_cast<uint8_t>(each)) * 0x100000001b3u;
  return hash ^ hash >> 29;
}

uint64_t hash_of(uint64_t pair) {
  pair *= 0x9e3779b97f4a7c15u;
  return pair ^ pair >> 31;
}

size_t table_size(int64_t count) {
  size_t size = 16;
  while (size * 3 < static_cast<size_t>(count) * 4) size *= 2;
  return size;
}

// GPT-2 writes printable Latin-1 bytes as themselves, the others as the code points from 256 on.
std::string letter_of(int byte, int& num_others) {
  const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
  const int point = printable ? byte : 256 + num_others++;
  if (point < 0x80) return std::string(1, static_cast<char>(point));
  return {static_cast<char>(0xc0 | point >> 6), static_cast<char>(0x80 | (point & 0x3f))};
}

}  // namespace

std::string_view StringTable::at(int64_t index) const {
  const uint64_t start = starts[index];
  if (start > buffer_size || buffer_size - start < 8) throw std::out_of_range("a string lies outside its buffer");
  const uint64_t length = read_length(buffer, start);
  if (length > buffer_size - start - 8) throw std::out_of_range("a string runs past the end of its buffer");
  return {reinterpret_cast<const char*>(buffer) + start + 8, length};
}

uint64_t walk_strings(const uint8_t* buffer, uint64_t end, uint64_t position, uint64_t count, uint64_t* starts) {
  for (uint64_t i = 0; i < count; ++i) {
    if (position > end || end - position < 8) return 0;
    starts[i] = position;
    const uint64_t length = read_length(buffer, position);
    if (length > end - position - 8) return 0;
    position += 8 + length;
  }
  return position;
}

BytePairs::BytePairs(const StringTable& pieces, const StringTable& merges, bool whole_words)
    : ids_(table_size(pieces.count), -1), byte_ids_(256), whole_words_(whole_words) {
  size_t total = 0;
  for (int64_t id = 0; id < pieces.count; ++id) total += pieces.at(id).size();
  if (total > UINT32_MAX) throw std::invalid_argument("the pieces have more than 4 GiB");
  text_.reserve(total);
  begins_.reserve(pieces.count + 1);
  for (int64_t id = 0; id < pieces.count; ++id) {
    begins_.push_back(static_cast<uint32_t>(text_.size()));
    text_.append(pieces.at(id));
  }
  begins_.push_back(static_cast<uint32_t>(text_.size()));
  const size_t mask = ids_.size() - 1;
  for (int64_t id = 0; id < pieces.count; ++id) {
    const std::string_view text = piece(id);
    size_t at = hash_of(text) & mask;
    while (ids_[at] >= 0 && piece(ids_[at]) != text) at = (at + 1) & mask;
    if (ids_[at] < 0) ids_[at] = static_cast<int32_t>(id);
  }
  for (int byte = 0, num_others = 0; byte < 256; ++byte) {
    letters_[byte] = letter_of(byte, num_others);
    const int32_t id = find(letters_[byte]);
    byte_ids_[byte] = id < 0 ? static_cast<int32_t>(pieces.count) : id;
  }
  if (merges.count == 0) return;
  merges_.resize(table_size(merges.count));
  std::string joined;
  for (int64_t rank = 0; rank < merges.count; ++rank) {
    const std::string_view line = merges.at(rank), left = line.substr(0, line.find(' '));
    const std::string_view right = left.size() < line.size() ? line.substr(left.size() + 1) : std::string_view();
    joined.assign(left).append(right);
    const int32_t ids[] = {find(left), find(right), find(joined)};
    for (const int32_t id : ids)
      if (id < 0) throw std::invalid_argument("merge '" + std::string(line) + "' names a piece that there is not");
    const uint64_t pair = static_cast<uint64_t>(ids[0]) << 32 | static_cast<uint32_t>(ids[1]);
    size_t at = hash_of(pair) & (merges_.size() - 1);
    while (merges_[at].pair != kNone && merges_[at].pair != pair) at = (at + 1) & (merges_.size() - 1);
    merges_[at] = {pair, static_cast<int32_t>(rank), ids[2]};
  }
}

std::string_view BytePairs::piece(int64_t id) const {
  if (id < 0 || id >= size()) return {};
  return std::string_view(text_).substr(begins_[id], begins_[id + 1] - begins_[id]);
}

int32_t BytePairs::find(std::string_view text) const {
  const size_t mask = ids_.size() - 1;
  for (size_t at = hash_of(text) & mask; ids_[at] >= 0; at = (at + 1) & mask)
    if (piece(ids_[at]) == text) return ids_[at];
  return -1;
}

const BytePairs::Merge* BytePairs::find_merge(int32_t left, int32_t right) const {
  const uint64_t pair = static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  const size_t mask = merges_.size() - 1;
  for (size_t at = hash_of(pair) & mask; merges_[at].pair != kNone; at = (at + 1) & mask)
    if (merges_[at].pair == pair) return &merges_[at];
  return nullptr;
}

void BytePairs::encode(std::string_view word, std::vector<int32_t>& out) const {
  if (whole_words_) {
    std::string written;
    for (const char byte : word) written += letters_[static_cast<uint8_t>(byte)];
    const int32_t id = written.empty() ? -1 : find(written);
    if (id >= 0) {
      out.push_back(id);
      return;
    }
  }
  std::vector<int32_t> symbols(word.size());
  for (size_t i = 0; i < word.size(); ++i) symbols[i] = byte_ids_[static_cast<uint8_t>(word[i])];
  if (!merges_.empty()) {
    if (symbols.size() <= kShortWord) {
      merge_short(symbols);
    } else {
      merge_long(symbols);
    }
  }
  out.insert(out.end(), symbols.begin(), symbols.end());
}

// The pair of the lowest rank, the leftmost of several, until no pair is left.
void BytePairs::merge_short(std::vector<int32_t>& symbols) const {
  const Merge* found[kShortWord];
  for (size_t i = 0; i + 1 < symbols.size(); ++i) found[i] = find_merge(symbols[i], symbols[i + 1]);
  while (symbols.size() > 1) {
    const size_t pairs = symbols.size() - 1;
    size_t best = pairs;
    for (size_t i = 0; i < pairs; ++i)
      if (found[i] != nullptr && (best == pairs || found[i]->rank < found[best]->rank)) best = i;
    if (best == pairs) return;
    symbols[best] = found[best]->merged;
    symbols.erase(symbols.begin() + best + 1);
    std::copy(found + best + 1, found + pairs, found + best);
    if (best > 0) found[best - 1] = find_merge(symbols[best - 1], symbols[best]);
    if (best + 1 < symbols.size()) found[best] = find_merge(symbols[best], symbols[best + 1]);
  }
}

// The same with a heap: a word of a million letters takes seconds otherwise.
void BytePairs::merge_long(std::vector<int32_t>& symbols) const {
  struct Candidate {
    int32_t rank, merged;
    uint32_t at;
    bool operator<(const Candidate& other) const { return rank != other.rank ? rank > other.rank : at > other.at; }
  };
  const uint32_t count = static_cast<uint32_t>(symbols.size());
  std::vector<uint32_t> next(count), before(count);
  for (uint32_t i = 0; i < count; ++i) {
    next[i] = i + 1;
    before[i] = i - 1;  // of the first: not used
  }
  std::priority_queue<Candidate> heap;
  const auto offer = [&](uint32_t at) {
    if (next[at] >= count) return;
    if (const Merge* merge = find_merge(symbols[at], symbols[next[at]])) heap.push({merge->rank, merge->merged, at});
  };
  for (uint32_t i = 0; i + 1 < count; ++i) offer(i);
  while (!heap.empty()) {
    const Candidate top = heap.top();
    heap.pop();
    if (symbols[top.at] < 0 || next[top.at] >= count) continue;  // it was merged into another
    const Merge* merge = find_merge(symbols[top.at], symbols[next[top.at]]);
    if (merge == nullptr || merge->rank != top.rank) continue;  // one of the two has changed
    const uint32_t gone = next[top.at];
    symbols[top.at] = merge->merged;
    symbols[gone] = -1;
    next[top.at] = next[gone];
    if (next[gone] < count) before[next[gone]] = top.at;
    offer(top.at);
    if (top.at > 0) offer(before[top.at]);
  }
  symbols.erase(std::remove(symbols.begin(), symbols.end(), -1), symbols.end());
}

}  // namespace tokenmill
