// A thread's memory for tiles, kept from call to call: docs/decisions.md#cpu-kept-scratch.
#pragma once
#include <cstdint>

namespace tw {

// At least so many bytes, at a cache line; the same memory each time.
// Throws std::bad_alloc.
char *scratch(int64_t bytes);

// Memory of one call, at a cache line and in huge pages where the system grants them. A thread keeps up to 64 MiB of it for its next
// call, as the system clears new pages: that took some 2 % of a block-sparse call at N 4096.
class HugePages {
 public:
  HugePages() = default;
  ~HugePages();
  HugePages(const HugePages &) = delete;
  HugePages &operator=(const HugePages &) = delete;
  char *take(int64_t bytes);  // once; throws std::bad_alloc

 private:
  char *data = nullptr;
  int64_t size = 0;
};

// While it lives the thread's memory is out of reach, and scratch() finds other.
class ScratchAside {
 public:
  ScratchAside();
  ~ScratchAside();
  ScratchAside(const ScratchAside &) = delete;
  ScratchAside &operator=(const ScratchAside &) = delete;

 private:
  char *data;
  int64_t size;
};

}  // namespace tw
