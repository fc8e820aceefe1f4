// A byte-level BPE vocabulary as it stands in a file: strings that each follow their length. Small and quick to build,
// because a process that answers one prompt waits for it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tokenmill {

// Strings in a buffer: `starts` are the positions of their lengths (8 bytes), which the text follows.
struct StringTable {
  const uint8_t* buffer;
  uint64_t buffer_size;
  const uint64_t* starts;
  int64_t count;

  // Throws std::out_of_range if the string is not inside the buffer.
  std::string_view at(int64_t index) const;
};

// Positions of `count` strings from `position` on; returns the position after them, 0 if they run past `end`.
uint64_t walk_strings(const uint8_t* buffer, uint64_t end, uint64_t position, uint64_t count, uint64_t* starts);

class BytePairs {
 public:
  // `merges`: "left right", by rank; empty for a vocabulary that is only looked up. Pieces and merges are written in
  // GPT-2's alphabet of bytes. Throws std::invalid_argument if a merge names a piece that there is not.
  // `whole_words`: a word that is a piece is that token, whatever the merges say.
  BytePairs(const StringTable& pieces, const StringTable& merges, bool whole_words);

  int64_t size() const { return static_cast<int64_t>(begins_.size()) - 1; }
  std::string_view piece(int64_t id) const;
  int32_t find(std::string_view piece) const;  // the lowest id, -1 if there is none

  // Appends the tokens of one word (UTF-8). A byte that is no token becomes size().
  void encode(std::string_view word, std::vector<int32_t>& out) const;

 private:
  struct Merge {
    uint64_t pair = kNone;
    int32_t rank = 0, merged = 0;
  };
  static constexpr uint64_t kNone = ~uint64_t{0};

  const Merge* find_merge(int32_t left, int32_t right) const;
  void merge_short(std::vector<int32_t>& symbols) const;
  void merge_long(std::vector<int32_t>& symbols) const;

  std::string text_;                // of all pieces
  std::vector<uint32_t> begins_;    // of each piece in it, and its end
  std::vector<int32_t> ids_;        // hash table by text; -1: free
  std::vector<Merge> merges_;       // hash table by pair
  std::vector<int32_t> byte_ids_;   // of each byte
  std::string letters_[256];        // the bytes as pieces write them
  bool whole_words_;
};

}  // namespace tokenmill
