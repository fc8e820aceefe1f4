// Blocks of huge pages. See memory.h.
#include "memory.h"

#include <sys/mman.h>

#include <mutex>

namespace tokenmill {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kBlock = size_t(64) << 20;  // of address space: only touched pages become resident

struct Block {
  explicit Block(size_t bytes) : size(bytes + kHugePage) {
    memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
    end = begin + bytes;
#ifdef MADV_HUGEPAGE
    madvise(reinterpret_cast<void*>(begin), bytes, MADV_HUGEPAGE);  // advisory: works without it
#endif
  }
  ~Block() { munmap(memory, size); }

  void* memory;
  size_t size;
  uintptr_t begin, end;  // the free rest of the block
};

}  // namespace

#ifdef TOKENMILL_SANITIZED

// One by one, so that the address sanitizer sees where each ends.
std::shared_ptr<void> allocate_huge(size_t bytes, uint8_t** data) {
  std::shared_ptr<char[]> buffer = allocate_aligned(bytes);
  *data = reinterpret_cast<uint8_t*>(buffer.get());
  return buffer;
}

#else

std::shared_ptr<void> allocate_huge(size_t bytes, uint8_t** data) {
  static std::mutex mutex;
  static std::weak_ptr<Block> current;  // kept alive by the allocations inside it
  const size_t needed = (bytes + 63) / 64 * 64;
  const std::lock_guard<std::mutex> lock(mutex);
  const bool alone = needed > kBlock / 4;  // or much of a block would stay unused
  std::shared_ptr<Block> block = alone ? nullptr : current.lock();
  if (!block || block->end - block->begin < needed) {
    block = std::make_shared<Block>(alone ? (needed + kHugePage - 1) / kHugePage * kHugePage : kBlock);
    if (!alone) current = block;
  }
  *data = reinterpret_cast<uint8_t*>(block->begin);
  block->begin += needed;
  return block;
}

#endif

}  // namespace tokenmill
