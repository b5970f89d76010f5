// One instruction set's kernels: compiled once per set, with TW_ISA its name and flags to match (CMakeLists.txt).
// Nothing here may instantiate inline functions of the standard library: the linker keeps one copy for all objects.
#include "backward.h"
#include "few_queries.h"
#include "few_rows.h"
#include "list_mask.h"
#include "forward.h"
#include "selected.h"
#include "tangent.h"

namespace tw::TW_ISA {

// The inputs' element, the compute type and the products' element of a call, as one type.
template <class Element, class Compute, class Product>
struct Types {
  using E = Element;
  using T = Compute;
  using X = Product;
};

// A set that adds products of bf16 pairs to another is asked for bf16 alone (entry.cpp).
template <class F>
auto with_types(const TwCall &c, F f) {
#ifdef __AVX512BF16__
  (void)c;
  return f(Types<Bf16, float, Pair>{});
#else
  switch (c.type) {
    case TW_F64: return f(Types<double, double, double>{});
    case TW_BF16: return f(Types<Bf16, float, float>{});
    case TW_F16: return f(Types<Half, float, float>{});
    default: return f(Types<float, float, float>{});
  }
#endif
}

template <class Y>
using ForwardOf = Forward<typename Y::E, typename Y::T, typename Y::X>;
template <class Y>
using PackedKeysOf = PackedKeys<typename Y::E, typename Y::T, typename Y::X>;
template <class Y>
using FewQueriesOf = FewQueries<typename Y::E, typename Y::T, typename Y::X>;
template <class Y>
using FewRowsOf = FewRows<typename Y::E, typename Y::T, typename Y::X>;
template <class Y>
using TangentOf = Tangent<typename Y::E, typename Y::T, typename Y::X>;
template <class Y>
using BackwardOf = Backward<typename Y::E, typename Y::T, typename Y::X>;
template <class Y>
using SelectedOf = SelectedBackward<typename Y::E, typename Y::T, typename Y::X>;

static constexpr int64_t kTiledRows = 4;  // with fewer, dot products of vectors take less time than tile registers

static int64_t forward_bytes(const TwCall &c) {
  const QueryItem none{};
  return with_types(c, [&](auto y) {
    const int64_t many = FewRowsOf<decltype(y)>(c, none, nullptr).bytes;  // Forward's and more
    const int64_t few = FewQueriesOf<decltype(y)>(c, none, nullptr).bytes;
    return greater(many, few);
  });
}

static void forward(const TwCall &c, const QueryItem &item, const Partials &partials, const KeyTiles &packed, char *scratch) {
  with_types(c, [&](auto y) {
    const bool rows = FewRowsOf<decltype(y)>::serves(c, item, packed), many = item.heads * (item.m1 - item.m0) >= kTiledRows;
    const bool tiled = kTiled<typename decltype(y)::X> && rows && many;
    if (!tiled && FewQueriesOf<decltype(y)>::serves(c, item)) FewQueriesOf<decltype(y)>(c, item, scratch).run(partials);
    else if (rows) FewRowsOf<decltype(y)>(c, item, scratch).run(partials);
    else ForwardOf<decltype(y)>(c, item, scratch, packed).run(partials);
  });
}

static int64_t key_tile_bytes(const TwCall &c) {
  return with_types(c, [&](auto y) { return PackedKeysOf<decltype(y)>(c, nullptr).bytes; });
}

static void pack_keys(const TwCall &c, const Sequence &s, int64_t head_k, int64_t n0, char *to) {
  with_types(c, [&](auto y) { PackedKeysOf<decltype(y)>(c, to).pack(c, s, head_k, n0); });
}

static int64_t list_bytes(const TwCall &c, const Blocks &blocks) { return MaskList(c, blocks, nullptr).bytes; }

static void list_mask(const TwCall &c, const Blocks &blocks, const ListUnit &unit, char *scratch) {
  MaskList(c, blocks, scratch).run(unit);
}

static void merge(const TwCall &c, const QueryItem &item, const Partials &partials) {
  with_types(c, [&](auto y) { merge_rows<typename decltype(y)::E, typename decltype(y)::T>(c, item, partials); });
}

static int64_t tangent_bytes(const TwCall &c, const TwMoved &moved) {
  const QueryItem none{};
  return with_types(c, [&](auto y) { return TangentOf<decltype(y)>(c, moved, none, nullptr).bytes; });
}

static void tangent(const TwCall &c, const TwMoved &moved, const QueryItem &item, char *scratch) {
  with_types(c, [&](auto y) { TangentOf<decltype(y)>(c, moved, item, scratch).run(); });
}

static int64_t backward_bytes(const TwCall &c) {
  const GradientUnit none{};
  return with_types(c, [&](auto y) {
    return c.block_table ? SelectedOf<decltype(y)>(c, none, nullptr).bytes : BackwardOf<decltype(y)>(c, none, nullptr).bytes;
  });
}

static void delta(const TwCall &c, int64_t b, int64_t head) {
  with_types(c, [&](auto y) { delta_head<typename decltype(y)::E, typename decltype(y)::T>(c, b, head); });
}

static void backward(const TwCall &c, const GradientUnit &unit, char *scratch) {
  with_types(c, [&](auto y) {
    if (c.block_table) SelectedOf<decltype(y)>(c, unit, scratch).run();
    else BackwardOf<decltype(y)>(c, unit, scratch).run();
  });
}

#ifdef __AVX512BF16__
constexpr int64_t kBlockRows = kRows<Pair>;
#else
constexpr int64_t kBlockRows = kRows<float>;
#endif

#define TW_STRING_OF(x) #x
#define TW_STRING(x) TW_STRING_OF(x)

extern const Kernels kernels;
const Kernels kernels = {TW_STRING(TW_ISA), kBlockRows, forward_bytes, forward, key_tile_bytes, pack_keys, list_bytes, list_mask, merge,
                         tangent_bytes, tangent, backward_bytes, delta, backward};

}  // namespace tw::TW_ISA
