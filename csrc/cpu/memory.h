// Memory for vector code: aligned to a cache line, never initialised (untouched pages are never resident).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace tokenmill {

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using AlignedBuffer = std::unique_ptr<char[], FreeDeleter>;

inline AlignedBuffer allocate_aligned(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, (bytes + 63) / 64 * 64 + 64) != 0) throw std::bad_alloc();
  return AlignedBuffer(static_cast<char*>(memory));
}

// For what is read through at every step: 2 MiB pages of the machine where it has them (thousands of small ones miss in
// its address cache), several allocations to a block. Aligned to a cache line; freed with the last share of the block.
std::shared_ptr<void> allocate_huge(size_t bytes, uint8_t** data);

// What such blocks hold is written once and then only read, so a model that nobody uses for a while needs no memory for
// it: `park_blocks` writes the blocks to `file`, unless it did before, and gives their memory back; `unpark_blocks` reads
// them back to the addresses where recorded programs expect them. In between nothing may be read or allocated. Both
// return bytes and throw std::system_error; the same file must be given each time.
size_t park_blocks(int file);
size_t unpark_blocks(int file);

}  // namespace tokenmill
