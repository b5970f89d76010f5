#include "turns.h"

#include <thread>

#include "signals.h"

namespace tw {

Turns::Turns(int64_t parts) : passed(size_t(parts)) {}

Turns::~Turns() = default;

void Turns::pass(int64_t part, int64_t step) { passed[size_t(part)].store(step, std::memory_order_release); }

void Turns::wait(int64_t part, int64_t step) {
  int64_t first = over.load(std::memory_order_acquire);
  while (first < part && passed[size_t(first)].load(std::memory_order_acquire) == kAll) ++first;
  over.store(first, std::memory_order_release);  // another's larger one may be lost: that costs a look, no more
  for (int64_t n = first; n < part; ++n)
    while (passed[size_t(n)].load(std::memory_order_acquire) <= step) heed_signals(), std::this_thread::yield();
}

}  // namespace tw
