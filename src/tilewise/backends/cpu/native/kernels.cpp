// One instruction set's kernels: compiled once per set, with TW_ISA its name and flags to match (CMakeLists.txt).
// Nothing here may instantiate inline functions of the standard library: the linker keeps one copy for all objects.
#include "backward.h"
#include "forward.h"

namespace tw::TW_ISA {

// Calls f with a value of the inputs' element type and one of the compute type.
template <class F>
auto with_types(const TwCall &c, F f) {
  switch (c.type) {
    case TW_F64: return f(double{}, double{});
    case TW_BF16: return f(Bf16{}, float{});
    case TW_F16: return f(Half{}, float{});
    default: return f(float{}, float{});
  }
}

static int64_t forward_bytes(const TwCall &c) {
  const QueryItem none{};
  return with_types(c, [&](auto e, auto t) { return Forward<decltype(e), decltype(t)>(c, none, nullptr).bytes; });
}

static void forward(const TwCall &c, const QueryItem &item, const Partials &partials, char *scratch) {
  with_types(c, [&](auto e, auto t) { Forward<decltype(e), decltype(t)>(c, item, scratch).run(partials); });
}

static void merge(const TwCall &c, const Partials &partials, int64_t b, int64_t head) {
  with_types(c, [&](auto e, auto t) { merge_head<decltype(e), decltype(t)>(c, partials, b, head); });
}

static int64_t backward_bytes(const TwCall &c) {
  const KeyUnit none{};
  return with_types(c, [&](auto e, auto t) { return Backward<decltype(e), decltype(t)>(c, none, nullptr).bytes; });
}

static void delta(const TwCall &c, int64_t b, int64_t head) {
  with_types(c, [&](auto e, auto t) { delta_head<decltype(e), decltype(t)>(c, b, head); });
}

static void backward(const TwCall &c, const KeyUnit &unit, char *scratch) {
  with_types(c, [&](auto e, auto t) { Backward<decltype(e), decltype(t)>(c, unit, scratch).run(); });
}

#define TW_STRING_OF(x) #x
#define TW_STRING(x) TW_STRING_OF(x)

extern const Kernels kernels;
const Kernels kernels = {TW_STRING(TW_ISA), forward_bytes, forward, merge, backward_bytes, delta, backward};

}  // namespace tw::TW_ISA
