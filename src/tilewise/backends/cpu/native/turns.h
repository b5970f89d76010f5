// The order in which parts of the keys add to one dq, where threads share a head: a part adds to a tile of queries once all
// parts before it have. So its sums have one order, whatever the threads, and the parts need no dq of their own
// (docs/decisions.md#cpu-dq-in-turns).
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

namespace tw {

class Turns {
 public:
  static constexpr int64_t kAll = INT64_MAX;

  explicit Turns(int64_t parts);
  ~Turns();
  Turns(const Turns &) = delete;
  Turns &operator=(const Turns &) = delete;

  // `part` is done with all steps before `step`.
  void pass(int64_t part, int64_t step);

  // Until all parts before `part` are done with `step`. They must have started: hand out parts in their order.
  // Throws where the call shall end (signals.h).
  void wait(int64_t part, int64_t step);

 private:
  std::vector<std::atomic<int64_t>> passed;
  std::atomic<int64_t> over{0};  // the parts before this one are done with everything
};

}  // namespace tw
