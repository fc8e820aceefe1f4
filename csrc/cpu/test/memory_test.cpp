// Blocks of huge pages: parts are aligned and apart, and live as long as their own share of a block.
#include "memory.h"

#include <cstdio>
#include <cstring>
#include <vector>

#include "check.h"

using namespace tokenmill;

namespace {

struct Part {
  std::shared_ptr<void> share;
  uint8_t* data = nullptr;
  size_t bytes = 0;
  uint8_t mark = 0;

  Part(size_t size, uint8_t value) : bytes(size), mark(value) {
    share = allocate_huge(size, &data);
    std::memset(data, value, size);
  }
  bool whole() const {
    for (size_t i = 0; i < bytes; ++i)
      if (data[i] != mark) return false;
    return true;
  }
};

void parts_are_aligned_and_apart() {
  std::vector<Part> parts;
  const size_t sizes[] = {1, 63, 64, 65, 100000, size_t(3) << 20, size_t(20) << 20, 5};  // one has a block to itself
  for (int round = 0; round < 6; ++round)  // more than one block of small ones
    for (size_t size : sizes) parts.emplace_back(size, uint8_t(parts.size() + 1));
  for (const Part& part : parts) {
    CHECK(reinterpret_cast<uintptr_t>(part.data) % 64 == 0);
    CHECK(part.whole());
  }
  for (size_t i = 0; i + 1 < parts.size(); i += 2) parts[i].share.reset();
  for (size_t i = 1; i < parts.size(); i += 2) CHECK(parts[i].whole());
}

void parked_parts_come_back() {
  std::vector<Part> parts;
  for (size_t size : {size_t(1000), size_t(20) << 20, size_t(3) << 20}) parts.emplace_back(size, uint8_t(parts.size() + 7));
  std::FILE* file = std::tmpfile();
  CHECK(file != nullptr);
  const size_t first = park_blocks(fileno(file));
  CHECK(unpark_blocks(fileno(file)) == first);
  for (const Part& part : parts) CHECK(part.whole());
  parts.emplace_back(5000, uint8_t(99));  // in a block of its own: parked ones are written only once
  const size_t second = park_blocks(fileno(file));
  CHECK(first == 0 || second > first);  // sanitized builds park nothing
  CHECK(park_blocks(fileno(file)) == 0);  // they are parked
  CHECK(unpark_blocks(fileno(file)) == second);
  for (const Part& part : parts) CHECK(part.whole());
  std::fclose(file);
}

}  // namespace

int main() {
  parts_are_aligned_and_apart();
  parked_parts_come_back();
  return report("memory");
}
