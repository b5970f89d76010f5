// Forward (docs/algorithm.md#4-forward): one query tile against its keys.
//
//   for each tile of keys:            Kᵀ and V packed, in L2 (L1 for small head_dim)
//     for each block of 6 queries:    S in L1, the product's block in registers
//       S = Q Kᵀ, score, mask, m' = max(m, max S), P = e^(S - m'), l = l·α + ΣP, acc = acc·α + (R ∘ P) V
//
// Scores stay in natural units, so that the backward finds the same bits: with one visible key P is exactly 1.
#pragma once
#include "dropout.h"
#include "tile.h"

namespace tw::TW_ISA {

// A finished state of one row and its largest score, sink not yet in: written where they belong.
template <class E, class T>
void write_row(const TwCall &c, const Sequence &s, int64_t head, int64_t i, const T *o, T factor, T lse, T largest) {
  // A maximum passes over NaN, lse does not.
  if (c.max_logit) statistic<T>(c, c.max_logit, s, head)[i] = lse != lse ? lse : largest;
  if (c.sink) {
    const T sink = ((const T *)c.sink)[head];
    const T most = lse > sink ? lse : sink, least = lse > sink ? sink : lse;
    const bool undefined = lse != lse || (sink == T(INFINITY) && lse > T(-INFINITY));  // of a sink of inf as of a score of inf
    const T total = most == T(-INFINITY) ? most : undefined ? T(NAN) : most + std::log1p(std::exp(least - most));
    factor *= lse == T(-INFINITY) ? T(0) : std::exp(lse - total);
    lse = total;
  }
  E *out = row_of<E>(c.o, s, s.row_q, i, head);
  for (int64_t d = 0; d < c.head_dim_v; ++d) narrow(factor == T(0) ? T(0) : o[d] * factor, out + d);
  statistic<T>(c, c.lse, s, head)[i] = lse;
}

// Rows ahead of the one that is written, whose lines are fetched for writing: o is often memory that no cache holds.
constexpr int64_t kWriteAhead = 4;

// All rows of an item: normalised and written, or, where keys are split, left as partial states.
template <class E, class T>
void finish_rows(const TwCall &c, const Sequence &s, const QueryItem &item, const Partials &partials, const T *acc,
                 int64_t wide, const T *m, const T *l) {
  for (int64_t head = item.head; head < item.head + item.heads; ++head)
    for (int64_t i = item.m0; i < item.m1; ++i, acc += wide, ++m, ++l) {
      const T factor = *l == T(0) ? T(0) : T(1) / *l;
      const T lse = *l == T(0) ? T(-INFINITY) : *m + std::log(*l);
      if (item.part < 0) {
        if (i + kWriteAhead < item.m1) {
          const char *later = (const char *)row_of<E>(c.o, s, s.row_q, i + kWriteAhead, head);
          for (int64_t at = 0; at < c.head_dim_v * int64_t(sizeof(E)); at += 64) __builtin_prefetch(later + at, 1, 3);
        }
        write_row<E, T>(c, s, head, i, acc, factor, lse, *m);
        continue;
      }
      const int64_t line = item.part * lines_of(c) + line_of(c, s, head, i);
      T *out = (T *)partials.o + line * c.head_dim_v;
      for (int64_t d = 0; d < c.head_dim_v; ++d) out[d] = factor == T(0) ? T(0) : acc[d] * factor;
      ((T *)partials.lse)[line] = lse, ((T *)partials.largest)[line] = *m;
    }
}

// A tile of K and of V as the products read them; without memory, it counts `bytes`.
template <class E, class T, class X>
struct PackedKeys {
  X *k, *v;
  int64_t bytes;

  PackedKeys(const TwCall &c, char *memory) {
    Arena arena{memory};
    k = arena.take<X>(c.tile_n * elements<X>(c.head_dim));
    v = arena.take<X>(elements<X>(c.tile_n) * round_up(c.head_dim_v, kLanes<T>));
    bytes = arena.used;
  }

  static int64_t width_of(const TwCall &c, const Sequence &s, int64_t n0) {
    return smaller(c.tile_n, round_up(s.seqlen_k - n0, kDeep<X>));
  }

  void pack(const TwCall &c, const Sequence &s, int64_t head_k, int64_t n0) const {
    const int64_t width = width_of(c, s, n0);
    Rows<E> k_rows = key_rows<E>(c, c.k, s, head_k, n0), v_rows = key_rows<E>(c, c.v, s, head_k, n0);
    k_rows.cold = v_rows.cold = true;
    pack_transposed<X, E>(k_rows, width, c.head_dim, k);
    pack_panels<X, E>(v_rows, width, c.head_dim_v, v);
  }
};

// E: the inputs' element; T: the compute type; X: the products' element, T or Pair (product.h).
template <class E, class T, class X>
class Forward {
 public:
  Forward(const TwCall &c, const QueryItem &item, char *scratch, const KeyTiles &packed = {})
      : c(c), item(item), packed(packed), s(sequence_of(c, item.b)), D(c.head_dim), Dv(c.head_dim_v), wide(round_up(Dv, kLanes<T>)),
        queries(item.m1 - item.m0), rows(item.heads * queries), head_k(item.head / (c.heads_q / c.heads_k)) {
    const int64_t most = greater(c.tile_m * c.heads_per_item, 1);
    Arena arena{scratch};
    q = arena.take<X>(most * elements<X>(D));
    acc = arena.take<T>(most * wide);
    m = arena.take<T>(most);
    l = arena.take<T>(most);
    lo = arena.take<int64_t>(most);
    hi = arena.take<int64_t>(most);
    k = arena.take<X>(c.tile_n * elements<X>(D));
    v = arena.take<X>(elements<X>(c.tile_n) * wide);
    p = arena.take<T>(kRows<X> * c.tile_n);
    if constexpr (paired) rounded = arena.take<X>(kRows<X> * c.tile_n / 2);
    factor = arena.take<T>(c.tile_n);
    if (c.block_table) {
      for (const E **&at : places) at = arena.take<const E *>(c.tile_n);
      marks = arena.take<uint8_t>(c.tile_n);
    }
    machine = {&c.program, arena.take<char>(Machine::bytes(c.program, c.tile_n)), c.tile_n};
    bytes = arena.used;
  }

  int64_t bytes;

  void run(const Partials &partials) {
    const Range keys = start();
    each_tile(keys, [&](int64_t n0, int64_t after) { key_tile(n0, after); });
    finish_rows<E, T>(c, s, item, partials, acc, wide, m, l);
  }

 protected:
  static constexpr bool paired = !__is_same(X, T);

  const TwCall &c;
  const QueryItem &item;
  const KeyTiles packed;
  const Sequence s;
  const int64_t D, Dv, wide, queries, rows, head_k;
  int64_t entered = -1, next_keys;
  Rows<E> next_k, next_v;
  const char *next_tile_at = nullptr;  // where the next tile is packed already
  const E **places[4];  // of keys in pages: this tile's K and V, the next one's
  uint8_t *marks;
  T *acc, *m, *l, *p, *factor;
  X *q, *k, *v, *rounded;
  int64_t *lo, *hi;
  Machine machine;

  int64_t head_of(int64_t row) const { return item.head_of(row); }
  int64_t query_of(int64_t row) const { return item.query_of(row); }
  Place place(int64_t n0, int64_t row) const { return {s.b, head_of(row), s.seqlen_q, s.seqlen_k, query_of(row), n0}; }

  // Packs Q, reads the ends of every row. Returns the keys that hold all of them.
  Range start() {
    Range all{item.n1, item.n0};
    for (int64_t h = 0; h < item.heads; ++h) {
      const int64_t head = item.head + h, first = h * queries;
      Rows<E> from{row_of<E>(c.q, s, s.row_q, item.m0, head), c.q.row, queries, nullptr};
      from.cold = true;
      pack_rows<X, E>(from, queries, D, q + first * elements<X>(D));
      for (int64_t r = 0; r < queries; ++r) {
        const Range keys = seen_keys(c, s, item, head, item.m0 + r);
        lo[first + r] = keys.begin, hi[first + r] = keys.end;
        if (keys.begin < keys.end) all = {smaller(all.begin, keys.begin), greater(all.end, keys.end)};
      }
    }
    for (int64_t r = 0; r < rows; ++r) m[r] = T(-INFINITY), l[r] = T(0);
    for (int64_t n = 0; n < rows * wide; ++n) acc[n] = T(0);
    return all;
  }

  // f(n0, after) for each tile of `keys` that the mask does not empty; the last one comes after itself.
  template <class F>
  void each_tile(const Range &keys, F f) const {
    for (int64_t n0 = next_tile(keys.begin / c.tile_n * c.tile_n, keys.end), after; n0 < keys.end; n0 = after) {
      after = next_tile(n0 + c.tile_n, keys.end);
      heed_signals(), f(n0, after < keys.end ? after : n0);
    }
  }

  // The first tile from n0 on that the mask does not empty.
  int64_t next_tile(int64_t n0, int64_t end) const {
    while (n0 < end && c.status && all_empty(n0)) n0 += c.tile_n;
    return n0;
  }

  // The tile at n0; meanwhile the rows of the one at `after` come closer.
  void key_tile(int64_t n0, int64_t after) {
    const int64_t width = PackedKeys<E, T, X>::width_of(c, s, n0);
    if (packed.memory) {
      const PackedKeys<E, T, X> tile(c, packed.at(c, s, head_k, n0));
      k = tile.k, v = tile.v;
      next_tile_at = packed.at(c, s, head_k, after), next_keys = after == n0 ? 0 : packed.bytes / 64;
    } else {
      pack_transposed<X, E>(rows_at(c.k, n0, places[0]), width, D, k);
      pack_panels<X, E>(rows_at(c.v, n0, places[1]), width, Dv, v);
      next_k = rows_at(c.k, after, places[2]), next_v = rows_at(c.v, after, places[3]);
      next_keys = after == n0 ? 0 : smaller(c.tile_n, s.seqlen_k - after);
    }
    entered = -1;
    const TileRegisters<X> registers;
    for (int64_t r = 0; r < rows; r += kRows<X>) row_block(n0, width, r, smaller(kRows<X>, rows - r));
  }

  // The keys from n0 on, of a tile.
  Rows<E> rows_at(const TwTensor &t, int64_t n0, const E **at) {
    if (!c.block_table) return key_rows<E>(c, t, s, head_k, n0);
    const int64_t count = smaller(c.tile_n, s.seqlen_k - n0);
    place_keys<E>(c, t, s, head_k, n0, count, at);
    const uint8_t *seen = c.seen ? listed_seen(c, s, head_k, n0) : seen_by_rows(lo, hi, rows, n0, count, marks);
    return {nullptr, 0, count, seen, at};
  }

  bool all_empty(int64_t n0) const {
    for (int64_t h = 0; h < item.heads; ++h)
      if (tile_state(c, s, item.head + h, item.m0 / c.tile_m, n0 / c.tile_n) != TW_EMPTY) return false;
    return true;
  }

  // The columns [begin, end) of the tile at n0 that some of the rows see, in multiples of `step`: whole panels for S.
  template <int64_t step = kPanelWidth<T>>
  TW_INLINE Range reach(int64_t n0, int64_t width, int64_t r0, int64_t count) const {
    int64_t begin = width, end = 0;
    for (int64_t r = r0; r < r0 + count; ++r)
      if (lo[r] < hi[r]) begin = smaller(begin, lo[r] - n0), end = greater(end, hi[r] - n0);
    return {greater(begin, 0) / step * step, smaller(round_up(end, step), width)};
  }

  void row_block(int64_t n0, int64_t width, int64_t r0, int64_t count) {
    const auto [begin, end] = reach(n0, width, r0, count);
    if (begin >= end) return;
    const int64_t vectors = (end - begin) / kLanes<T>, depth = elements<X>(D);
    multiply<X, Form::plain, false>(count, vectors, depth, {q + r0 * depth, depth}, k + begin * depth, p + begin,
                                    c.tile_n, T(c.softmax_scale));
    for (int64_t n = 0; n < count; ++n) {
      const int64_t from = next_keys * (r0 + n) / rows, to = next_keys * (r0 + n + 1) / rows;
      if (next_tile_at)
        for (int64_t line = from; line < to; ++line) __builtin_prefetch(next_tile_at + line * 64, 0, 3);
      else prefetch_rows(next_k, from, to, D), prefetch_rows(next_v, from, to, Dv);
      softmax_row(n0, begin, end, r0 + n, p + n * c.tile_n);
    }
    const Range deep = reach<kDeep<X>>(n0, width, r0, count);
    add_product(width, greater(deep.begin, begin), smaller(deep.end, end), r0, count, p, rounded, v);
  }

  // The columns [begin, end) of x as a product reads them.
  TW_INLINE Operand<X> weights(int64_t begin, int64_t end, int64_t count, const T *x, X *rounded) const {
    if constexpr (paired) {
      for (int64_t n = 0; n < count; ++n) round_row(x + n * c.tile_n, begin, end, rounded + n * c.tile_n / 2);
      return {rounded + begin / 2, c.tile_n / 2};
    } else {
      return {x + begin, c.tile_n};
    }
  }

  // acc += x values, P V for one. The panels of `values` hold all keys of the tile: they start at `begin`.
  TW_INLINE void add_product(int64_t width, int64_t begin, int64_t end, int64_t r0, int64_t count, const T *x, X *rounded,
                             const X *values) {
    const Operand<X> a = weights(begin, end, count, x, rounded);
    const int64_t first = elements<X>(begin), depth = elements<X>(end - begin);
    for (int64_t d = 0; d < wide; d += kPanelWidth<T>) {
      const int64_t columns = smaller(kPanelWidth<T>, wide - d);
      multiply<X, Form::plain, true>(count, columns / kLanes<T>, depth, a, values + d * elements<X>(width) + first * columns,
                                     acc + r0 * wide + d, wide);
    }
  }

  // S becomes R ∘ P; m, l and acc of the row follow.
  void softmax_row(int64_t n0, int64_t begin, int64_t end, int64_t row, T *x) {
    if (c.program.score >= 0 || c.program.keep >= 0) scores_row(n0, begin, end, row, x);
    const int64_t from = greater(lo[row] - n0, begin), to = smaller(hi[row] - n0, end);
    for (int64_t n = begin; n < smaller(from, end); ++n) x[n] = T(-INFINITY);
    const int64_t stop = round_up(end, kPanelWidth<T>);  // of whole panels, behind the last keys of all
    for (int64_t n = greater(to, begin); n < stop; ++n) x[n] = T(-INFINITY);
    const T top = largest(x, begin, stop, m[row]), shift = top == T(-INFINITY) ? T(0) : top;
    const T sum = exponentials(x, begin, stop, shift);
    if (top != m[row]) rescale(row, m[row] - shift);
    m[row] = top;
    l[row] += sum;
    if (c.keep_below) drop_row(n0, begin, end, row, x);
  }

  // A panel's vectors at a time: the polynomial's coefficients are loaded once for all of them.
  static TW_INLINE T largest(const T *x, int64_t begin, int64_t end, T before) {
    Vec<T> most[kPanel];
    for (int v = 0; v < kPanel; ++v) most[v] = splat(before);
    for (int64_t n = begin; n < end; n += kPanelWidth<T>)
#pragma GCC unroll 4
      for (int v = 0; v < kPanel; ++v) most[v] = larger<T>(load(x + n + v * kLanes<T>), most[v]);
    for (int v = 1; v < kPanel; ++v) most[0] = larger<T>(most[0], most[v]);
    return max_lanes<T>(most[0]);
  }

  static TW_INLINE T exponentials(T *x, int64_t begin, int64_t end, T shift) {
    Vec<T> total[kPanel] = {};
    for (int64_t n = begin; n < end; n += kPanelWidth<T>) {
      Vec<T> e[kPanel];
#pragma GCC unroll 4
      for (int v = 0; v < kPanel; ++v) e[v] = softmax_exp<T>(load(x + n + v * kLanes<T>) - splat(shift));
#pragma GCC unroll 4
      for (int v = 0; v < kPanel; ++v) total[v] += e[v], store(x + n + v * kLanes<T>, e[v]);
    }
    for (int v = 1; v < kPanel; ++v) total[0] += total[v];
    return sum_lanes<T>(total[0]);
  }

  void rescale(int64_t row, T exponent) {
    const Vec<T> alpha = softmax_exp<T>(splat(exponent));
    l[row] *= alpha[0];
    T *a = acc + row * wide;
    for (int64_t d = 0; d < wide; d += kLanes<T>) store(a + d, load(a + d) * alpha);
  }

  // The score program, and -inf where the predicate is false.
  void scores_row(int64_t n0, int64_t begin, int64_t end, int64_t row, T *x) {
    const int64_t head = head_of(row);
    const bool partial = c.program.keep >= 0 && tile_state(c, s, head, item.m0 / c.tile_m, n0 / c.tile_n) != TW_FULL;
    if (!machine.scored() && !partial) return;
    const Place at = place(n0, row);
    if (entered != head) machine.enter_head(at), machine.enter_tile(at), entered = head;
    if (machine.scored()) machine.score_row(at, begin, end, x + begin);
    if (partial) machine.hide_row(at, begin, end, x + begin);
  }

  void drop_row(int64_t n0, int64_t begin, int64_t end, int64_t row, T *x) {
    Dropout{c}.row(place(n0, row), begin, end, factor);
    for (int64_t n = begin; n < end; ++n) x[n] *= factor[n];
  }
};

// The states of all splits of an item's rows, merged in the order of the splits (docs/algorithm.md#5-merging):
// lse = max + log Σ e^(lse_part - max), o = Σ e^(lse_part - lse) o_part.
template <class E, class T>
void merge_rows(const TwCall &c, const QueryItem &item, const Partials &partials) {
  const Sequence s = sequence_of(c, item.b);
  const int64_t stride = lines_of(c), parts = parts_of(c, s);
  for (int64_t r = 0; r < item.heads * (item.m1 - item.m0); ++r) {
    const int64_t head = item.head_of(r), i = item.query_of(r), line = line_of(c, s, head, i);
    const T *lse = (const T *)partials.lse + line, *m = (const T *)partials.largest + line;
    T *o = (T *)partials.o + line * c.head_dim_v, most = T(-INFINITY), largest = most, sum = T(0);
    for (int64_t part = 0; part < parts; ++part) {
      most = lse[part * stride] > most ? lse[part * stride] : most;
      largest = m[part * stride] > largest ? m[part * stride] : largest;
    }
    const T shift = most == T(-INFINITY) ? T(0) : most;
    for (int64_t part = 0; part < parts; ++part) {
      const T weight = std::exp(lse[part * stride] - shift);
      const T *from = o + part * stride * c.head_dim_v;
      sum += weight;
      if (!part)
        for (int64_t d = 0; d < c.head_dim_v; ++d) o[d] *= weight;
      else if (weight != T(0))
        for (int64_t d = 0; d < c.head_dim_v; ++d) o[d] += weight * from[d];
    }
    const bool none = sum == T(0);
    write_row<E, T>(c, s, head, i, o, none ? T(0) : T(1) / sum, none ? T(-INFINITY) : shift + std::log(sum), largest);
  }
}

}  // namespace tw::TW_ISA
