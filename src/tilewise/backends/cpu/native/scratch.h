// A thread's memory for tiles, kept from call to call: docs/decisions.md#cpu-kept-scratch.
#pragma once
#include <cstdint>

namespace tw {

// At least so many bytes, at a cache line; the same memory each time.
// Throws std::bad_alloc.
char *scratch(int64_t bytes);

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
