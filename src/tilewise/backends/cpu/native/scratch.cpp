#include "scratch.h"

#include <cstdlib>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace tw {
namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kMostKept = 64 << 20;

struct Memory {
  char *data = nullptr;
  int64_t size = 0;
  ~Memory() { std::free(data); }
};

thread_local Memory mine;   // scratch()
thread_local Memory whole;  // of the last HugePages, which its next one takes

void use_huge_pages(char *memory, int64_t size) {
#ifdef MADV_HUGEPAGE
  madvise(memory, size_t(size), MADV_HUGEPAGE);  // a wish: whether it is granted changes nothing but the time
#else
  (void)memory, (void)size;
#endif
}

char *new_pages(int64_t size) {
  char *data = (char *)std::aligned_alloc(kHugePage, size_t(size));
  if (!data) throw std::bad_alloc();
  use_huge_pages(data, size);
  return data;
}

int64_t whole_pages(int64_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

char *HugePages::take(int64_t bytes) {
  data = std::exchange(whole.data, nullptr), size = std::exchange(whole.size, 0);
  if (size >= bytes) return data;
  std::free(std::exchange(data, nullptr));
  size = 0;  // also where there is no memory
  data = new_pages(whole_pages(bytes)), size = whole_pages(bytes);
  return data;
}

HugePages::~HugePages() {
  if (size > kMostKept || size <= whole.size) {
    std::free(data);
    return;
  }
  std::free(std::exchange(whole.data, data));
  whole.size = size;
}

char *scratch(int64_t bytes) {
  if (mine.size < bytes) {
    std::free(std::exchange(mine.data, nullptr));
    mine.size = 0;
    const int64_t size = whole_pages(bytes);
    mine.data = new_pages(size);
    mine.size = size;
  }
  return mine.data;
}

ScratchAside::ScratchAside() : data(std::exchange(mine.data, nullptr)), size(std::exchange(mine.size, 0)) {}

ScratchAside::~ScratchAside() {
  std::free(mine.data);
  mine.data = data, mine.size = size;
}

}  // namespace tw
