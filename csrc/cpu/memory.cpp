// Blocks of huge pages. See memory.h.
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <vector>

namespace tokenmill {

#ifdef TOKENMILL_SANITIZED

// One by one, so that the address sanitizer sees where each ends; they cannot be parked.
std::shared_ptr<void> allocate_huge(size_t bytes, uint8_t** data) {
  std::shared_ptr<char[]> buffer = allocate_aligned(bytes);
  *data = reinterpret_cast<uint8_t*>(buffer.get());
  return buffer;
}

size_t park_blocks(int) { return 0; }
size_t unpark_blocks(int) { return 0; }

#else

namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kBlock = size_t(64) << 20;  // of address space: only touched pages become resident

struct Block;

struct Blocks {
  std::recursive_mutex mutex;  // the last share of a block may go while another is allocated
  std::vector<Block*> all;
  std::weak_ptr<Block> current;  // kept alive by the allocations inside it
  off_t file_end = 0;            // of the file that blocks are parked in
};

Blocks& blocks() {
  static Blocks& shared = *new Blocks;  // never destroyed: blocks may live as long as the process
  return shared;
}

struct Block {
  explicit Block(size_t bytes) : size(bytes + kHugePage) {
    memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base = begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
    end = begin + bytes;
#ifdef MADV_HUGEPAGE
    madvise(reinterpret_cast<void*>(begin), bytes, MADV_HUGEPAGE);  // advisory: works without it
#endif
    blocks().all.push_back(this);
  }
  ~Block() {
    const std::lock_guard<std::recursive_mutex> lock(blocks().mutex);
    std::vector<Block*>& all = blocks().all;
    all.erase(std::find(all.begin(), all.end(), this));
    munmap(memory, size);
  }
  size_t used() const { return begin - base; }
  char* at(size_t offset) const { return reinterpret_cast<char*>(base + offset); }

  void* memory;
  size_t size;
  uintptr_t base;        // of the first allocation
  uintptr_t begin, end;  // the free rest of the block
  off_t place = -1;      // in the file, once it was written
  bool parked = false;
};

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

void write_block(int file, const Block& block, off_t place) {
  for (size_t done = 0; done < block.used();) {
    const ssize_t count = pwrite(file, block.at(done), block.used() - done, place + off_t(done));
    if (count < 0 && errno != EINTR) fail("cannot write weights");
    done += size_t(std::max<ssize_t>(count, 0));
  }
}

void read_block(int file, const Block& block) {
  for (size_t done = 0; done < block.used();) {
    const ssize_t count = pread(file, block.at(done), block.used() - done, block.place + off_t(done));
    if (count == 0) errno = EIO;  // the file is shorter than it was
    if (count == 0 || (count < 0 && errno != EINTR)) fail("cannot read weights");
    done += size_t(std::max<ssize_t>(count, 0));
  }
}

}  // namespace

std::shared_ptr<void> allocate_huge(size_t bytes, uint8_t** data) {
  const size_t needed = (bytes + 63) / 64 * 64;
  const std::lock_guard<std::recursive_mutex> lock(blocks().mutex);
  const bool alone = needed > kBlock / 4;  // or much of a block would stay unused
  std::shared_ptr<Block> block = alone ? nullptr : blocks().current.lock();
  if (!block || block->end - block->begin < needed) {
    block = std::make_shared<Block>(alone ? (needed + kHugePage - 1) / kHugePage * kHugePage : kBlock);
    if (!alone) blocks().current = block;
  }
  *data = reinterpret_cast<uint8_t*>(block->begin);
  block->begin += needed;
  return block;
}

size_t park_blocks(int file) {
  Blocks& shared = blocks();
  const std::lock_guard<std::recursive_mutex> lock(shared.mutex);
  shared.current.reset();  // what is allocated later lies in other blocks: these do not change any more
  size_t bytes = 0;
  for (Block* block : shared.all) {
    if (block->parked) continue;
    if (block->place < 0) {
      write_block(file, *block, shared.file_end);
      block->place = shared.file_end;
      shared.file_end += off_t(block->used());
    }
    if (madvise(block->at(0), block->end - block->base, MADV_DONTNEED) != 0) fail("cannot give memory back");
    block->parked = true;
    bytes += block->used();
  }
  return bytes;
}

size_t unpark_blocks(int file) {
  Blocks& shared = blocks();
  const std::lock_guard<std::recursive_mutex> lock(shared.mutex);
  size_t bytes = 0;
  for (Block* block : shared.all) {
    if (!block->parked) continue;
    read_block(file, *block);
    block->parked = false;
    bytes += block->used();
  }
  return bytes;
}

#endif

}  // namespace tokenmill
