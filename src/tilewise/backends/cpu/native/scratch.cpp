#include "scratch.h"

#include <cstdlib>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace tw {
namespace {

constexpr int64_t kHugePage = 2 << 20;

struct Memory {
  char *data = nullptr;
  int64_t size = 0;
  ~Memory() { std::free(data); }
};

thread_local Memory mine;

void use_huge_pages(char *memory, int64_t size) {
#ifdef MADV_HUGEPAGE
  madvise(memory, size_t(size), MADV_HUGEPAGE);  // a wish: whether it is granted changes nothing but the time
#else
  (void)memory, (void)size;
#endif
}

}  // namespace

char *scratch(int64_t bytes) {
  if (mine.size < bytes) {
    std::free(std::exchange(mine.data, nullptr));
    mine.size = 0;
    const int64_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    mine.data = (char *)std::aligned_alloc(kHugePage, size_t(size));
    if (!mine.data) throw std::bad_alloc();
    mine.size = size;
    use_huge_pages(mine.data, size);
  }
  return mine.data;
}

ScratchAside::ScratchAside() : data(std::exchange(mine.data, nullptr)), size(std::exchange(mine.size, 0)) {}

ScratchAside::~ScratchAside() {
  std::free(mine.data);
  mine.data = data, mine.size = size;
}

}  // namespace tw
