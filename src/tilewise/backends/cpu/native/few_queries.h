// Forward for as many rows as a vector has lanes, or fewer (decoding): each row is a lane.
//
//   S' = K Q'    keys x lanes: K's numbers are broadcast, so that K is read once, in order, and never transposed
//   P' = e^(S' - m), m and l one vector each
//   acc += P V   P' is A in its transposed form
//
// Memory is what bounds it; a step of 16 keys stays in L1 from its one read on.
#pragma once
#include "forward.h"

namespace tw::TW_ISA {

template <class E, class T, class X>
class FewQueries {
 public:
  static bool serves(const TwCall &c, const QueryItem &item) {
    const bool plain = c.program.score < 0 && c.program.keep < 0 && !c.keep_below;
    return plain && item.heads * (item.m1 - item.m0) <= W;
  }

  FewQueries(const TwCall &c, const QueryItem &item, char *scratch)
      : c(c), item(item), s(sequence_of(c, item.b)), wide(round_up(c.head_dim_v, W)), depth(elements<X>(c.head_dim)) {
    Arena arena{scratch};
    q = arena.take<X>(depth * W), k = arena.take<X>(kStep * depth), v = arena.take<X>(elements<X>(kStep) * wide);
    p = arena.take<T>((kStep + 1) * W), acc = arena.take<T>(W * wide), m = arena.take<T>(W), l = arena.take<T>(W);
    lo = arena.take<int64_t>(W), hi = arena.take<int64_t>(W);
    if constexpr (paired) rounded = arena.take<X>((kStep + 1) / 2 * W);
    bytes = arena.used;
  }

  int64_t bytes;

  void run(const Partials &partials) {
    rows = item.heads * (item.m1 - item.m0);
    int64_t begin, end;
    start(begin, end);
    for (int64_t n0 = begin; n0 < end; n0 += kStep) step(n0, smaller(kStep, end - n0));
    finish_rows<E, T>(c, s, item, partials, acc, wide, m, l);
  }

 private:
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kStep = 16, kAhead = 64;  // keys
  static constexpr bool paired = !__is_same(X, T);

  const TwCall &c;
  const QueryItem &item;
  const Sequence s;
  const int64_t wide, depth;
  int64_t rows, all_from, all_to;  // every row sees the keys [all_from, all_to)
  X *q, *k, *v, *rounded;
  T *p, *acc, *m, *l;
  int64_t *lo, *hi;

  void start(int64_t &begin, int64_t &end) {
    begin = item.n1, end = item.n0, all_from = item.n0, all_to = item.n1;
    for (int64_t r = 0; r < W; ++r) {
      m[r] = T(-INFINITY), l[r] = T(0), lo[r] = hi[r] = item.n0;
      for (int64_t d = 0; d < wide; ++d) acc[r * wide + d] = T(0);
      if (r < rows) read_row(r, begin, end);
      else
        for (int64_t d = 0; d < depth; ++d) q[d * W + r] = X(0);
    }
  }

  void read_row(int64_t r, int64_t &begin, int64_t &end) {
    const int64_t head = item.head_of(r), i = item.query_of(r);
    const E *from = row_of<E>(c.q, s, s.row_q, i, head);
    for (int64_t d = 0; d < depth; ++d) q[d * W + r] = element<X>(from, d, c.head_dim);
    const int32_t *low = ends_of(c.lo, s, head, s.row_q), *high = ends_of(c.hi, s, head, s.row_q);
    lo[r] = low ? greater(low[i], item.n0) : item.n0, hi[r] = high ? smaller(high[i], item.n1) : item.n1;
    all_from = greater(all_from, lo[r]), all_to = smaller(all_to, hi[r]);
    if (lo[r] < hi[r]) begin = smaller(begin, lo[r]), end = greater(end, hi[r]);
  }

  void step(int64_t n0, int64_t keys) {
    const int64_t head_k = item.head / (c.heads_q / c.heads_k);
    prefetch(c.k, head_k, n0 + kAhead, c.head_dim);
    pack_rows<X, E>(key_rows<E>(c, c.k, s, head_k, n0), keys, c.head_dim, k);
    prefetch(c.v, head_k, n0 + kAhead, c.head_dim_v);
    pack_panels<X, E>(key_rows<E>(c, c.v, s, head_k, n0), keys, c.head_dim_v, v);
    multiply<X, Form::plain, false>(keys, 1, depth, {k, depth}, q, p, W, T(c.softmax_scale));
    if (n0 < all_from || n0 + keys > all_to)
      for (int64_t n = 0; n < keys; ++n)
        for (int64_t r = 0; r < W; ++r)
          if (n0 + n < lo[r] || n0 + n >= hi[r]) p[n * W + r] = T(-INFINITY);
    softmax(keys);
    Operand<X> a;
    if constexpr (paired) {
      store(p + keys * W, Vec<T>{});
      for (int64_t n = 0; n < keys; n += 2) round_rows(p + n * W, p + (n + 1) * W, 0, W, rounded + n / 2 * W);
      a = {rounded, W};
    } else {
      a = {p, W};
    }
    multiply<X, Form::transposed, true>(rows, wide / W, elements<X>(keys), a, v, acc, wide);
  }

  // The hardware's own prefetcher stops at each page and while the products run.
  void prefetch(const TwTensor &t, int64_t head_k, int64_t n0, int64_t width) const {
    const E *row = row_of<E>(t, s, s.row_k, n0, head_k);
    for (int64_t n = n0; n < smaller(n0 + kStep, item.n1); ++n, row += t.row)
      for (int64_t d = 0; d < width; d += 64 / int64_t(sizeof(E))) __builtin_prefetch(row + d, 0, 3);
  }

  void softmax(int64_t keys) {
    const Vec<T> before = load(m), none = splat(T(-INFINITY));
    Vec<T> top = before;
    for (int64_t n = 0; n < keys; ++n) top = larger<T>(load(p + n * W), top);
    const Vec<T> shift = top == none ? Vec<T>{} : top;
    Vec<T> total{};
    for (int64_t n = 0; n < keys; ++n) {
      const Vec<T> e = softmax_exp<T>(load(p + n * W) - shift);
      total += e;
      store(p + n * W, e);
    }
    T alpha[W];
    store(alpha, softmax_exp<T>(before - shift));
    store(l, load(l) * load(alpha) + total);
    store(m, top);
    for (int64_t r = 0; r < rows; ++r)
      if (alpha[r] != T(1))
        for (int64_t d = 0; d < wide; d += W) store(acc + r * wide + d, load(acc + r * wide + d) * splat(alpha[r]));
  }
};

}  // namespace tw::TW_ISA
