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

// f with the inputs' element, the compute type and the products' element of a call. A set that adds products of bf16 pairs to
// another is asked for bf16 alone (entry.cpp).
template <class F>
auto with_types(const TwCall &c, F f) {
#ifdef __AVX512BF16__
  (void)c;
  return f.template operator()<Bf16, float, Pair>();
#else
  switch (c.type) {
    case TW_F64: return f.template operator()<double, double, double>();
    case TW_BF16: return f.template operator()<Bf16, float, float>();
    case TW_F16: return f.template operator()<Half, float, float>();
    default: return f.template operator()<float, float, float>();
  }
#endif
}

static constexpr int64_t kTiledRows = 4;  // with fewer, dot products of vectors take less time than tile registers

static int64_t forward_bytes(const TwCall &c) {
  const QueryItem none{};
  return with_types(c, [&]<class E, class T, class X>() {
    const int64_t many = FewRows<E, T, X>(c, none, nullptr).bytes;  // Forward's and more
    const int64_t few = FewQueries<E, T, X>(c, none, nullptr).bytes;
    return greater(many, few);
  });
}

static void forward(const TwCall &c, const QueryItem &item, const Partials &partials, const KeyTiles &packed, char *scratch) {
  with_types(c, [&]<class E, class T, class X>() {
    const bool rows = FewRows<E, T, X>::serves(c, item, packed), many = item.heads * (item.m1 - item.m0) >= kTiledRows;
    const bool tiled = kTiled<X> && rows && many;
    if (!tiled && FewQueries<E, T, X>::serves(c, item)) FewQueries<E, T, X>(c, item, scratch).run(partials);
    else if (rows) FewRows<E, T, X>(c, item, scratch).run(partials);
    else Forward<E, T, X>(c, item, scratch, packed).run(partials);
  });
}

static int64_t key_tile_bytes(const TwCall &c) {
  return with_types(c, [&]<class E, class T, class X>() { return PackedKeys<E, T, X>(c, nullptr).bytes; });
}

static void pack_keys(const TwCall &c, const Sequence &s, int64_t head_k, int64_t n0, char *to) {
  with_types(c, [&]<class E, class T, class X>() { PackedKeys<E, T, X>(c, to).pack(c, s, head_k, n0); });
}

static int64_t list_bytes(const TwCall &c, const Blocks &blocks) { return MaskList(c, blocks, nullptr).bytes; }

static void list_mask(const TwCall &c, const Blocks &blocks, const ListUnit &unit, char *scratch) {
  MaskList(c, blocks, scratch).run(unit);
}

static void merge(const TwCall &c, const QueryItem &item, const Partials &partials) {
  with_types(c, [&]<class E, class T, class X>() { merge_rows<E, T>(c, item, partials); });
}

static int64_t tangent_bytes(const TwCall &c, const TwMoved &moved) {
  const QueryItem none{};
  return with_types(c, [&]<class E, class T, class X>() { return Tangent<E, T, X>(c, moved, none, nullptr).bytes; });
}

static void tangent(const TwCall &c, const TwMoved &moved, const QueryItem &item, char *scratch) {
  with_types(c, [&]<class E, class T, class X>() { Tangent<E, T, X>(c, moved, item, scratch).run(); });
}

static int64_t backward_bytes(const TwCall &c) {
  const GradientUnit none{};
  return with_types(c, [&]<class E, class T, class X>() {
    return c.block_table ? SelectedBackward<E, T, X>(c, none, nullptr).bytes : Backward<E, T, X>(c, none, nullptr).bytes;
  });
}

static void delta(const TwCall &c, int64_t b, int64_t head) {
  with_types(c, [&]<class E, class T, class X>() { delta_head<E, T>(c, b, head); });
}

static void backward(const TwCall &c, const GradientUnit &unit, char *scratch) {
  with_types(c, [&]<class E, class T, class X>() {
    if (c.block_table) SelectedBackward<E, T, X>(c, unit, scratch).run();
    else Backward<E, T, X>(c, unit, scratch).run();
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
