// What a call leaves to the library: tiles, and the ends of its window.
#pragma once
#include <vector>

#include "work.h"

namespace tw {

// See tw_choose. `kernels` run the call.
void choose(TwCall &c, const Kernels &kernels, bool backward);

// A call with all that kernels read, and the memory of what its caller left out.
class Complete {
 public:
  Complete(const TwCall &given, const Kernels &kernels, bool backward);
  Complete(const Complete &) = delete;

  TwCall call;

 private:
  std::vector<int32_t> starts, stops;
  std::vector<uint8_t> seen;

  void fill_window(bool backward);
  void mark_seen();
};

}  // namespace tw
