// Forward for as many rows as a vector has lanes, or fewer (decoding). Memory is what bounds it: K and V are read once,
// in order, where they lie, and all rows of the head group share what is loaded.
//
// For G rows, a power of two, a vector holds R = W / G neighbouring elements of each:
//
//   q'[d]    lanes (g, r): element d R + r of row g
//   S[n]  += q'[d] · (elements d R ... of key n, G times over by one load)
//   R keys'  vectors of partial sums become one with lanes (g, key), halved log2 R times
//   P      = e^(S - m), m and l one vector each
//   acc   += P V
#pragma once
#include "step_keys.h"

namespace tw::TW_ISA {

// `count` neighbouring elements, over and over until the vector is full.
template <class X, int count>
TW_INLINE Vec<X> repeated(const char *from) {
  constexpr int size = count * int(sizeof(X));
  if constexpr (count == 1) {
    X x;
    __builtin_memcpy(&x, from, sizeof x);
    return splat(x);
  } else if constexpr (size == kBytes) {
    return load((const X *)from);
#ifdef __AVX512F__
  } else if constexpr (size == 32) {
    return (Vec<X>)_mm512_broadcast_f64x4(_mm256_loadu_pd((const double *)from));
  } else if constexpr (size == 16) {
    return (Vec<X>)_mm512_broadcast_f32x4(_mm_loadu_ps((const float *)from));
#elif defined(__AVX2__)
  } else if constexpr (size == 16) {
    return (Vec<X>)_mm256_broadcast_ps((const __m128 *)from);
#endif
  } else {
    static_assert(size == 8);
    double pair;
    __builtin_memcpy(&pair, from, 8);
    return (Vec<X>)splat(pair);
  }
}

// For two vectors x, y: lane n of the result adds lanes n and n ^ step of x where n has no bit `step`, else of y.
template <class T, int step>
struct Halving {
  alignas(kBytes) Int<T> even[kLanes<T>], odd[kLanes<T>];
  constexpr Halving() : even(), odd() {
    for (int n = 0; n < kLanes<T>; ++n) even[n] = Int<T>((n & step ? kLanes<T> : 0) + (n & ~step)), odd[n] = even[n] + step;
  }
};
template <class T, int step>
constexpr Halving<T, step> kHalving{};

// R vectors with lanes (g, r), one a key: their sums over r as one vector with lanes (g, key).
template <class T, int R, int step = 1>
TW_INLINE Vec<T> sums_by_key(Vec<T> *x) {
  if constexpr (step < R) {
    const auto even = load(kHalving<T, step>.even), odd = load(kHalving<T, step>.odd);
#pragma GCC unroll 8
    for (int n = 0; n < R; n += 2 * step)
      x[n] = __builtin_shuffle(x[n], x[n + step], even) + __builtin_shuffle(x[n], x[n + step], odd);
    return sums_by_key<T, R, 2 * step>(x);
  } else {
    return x[0];
  }
}

template <class E, class T, class X>
class FewQueries {
 public:
  static bool serves(const TwCall &c, const QueryItem &item) {
    const bool plain = !c.one_order && c.program.score < 0 && c.program.keep < 0 && !c.keep_below;
    return plain && item.heads * (item.m1 - item.m0) <= W;
  }

  FewQueries(const TwCall &c, const QueryItem &item, char *scratch)
      : c(c), item(item), s(sequence_of(c, item.b)), rows(item.heads * (item.m1 - item.m0)), wide(round_up(c.head_dim_v, W)),
        depth(round_up(elements<X>(c.head_dim), W)), ends(c, s, item, rows), arena{scratch},
        at(c, s, item.head / (c.heads_q / c.heads_k), kBlock, arena) {
    q = arena.take<X>(depth * W), k = arena.take<X>(kBlock * depth), v = arena.take<E>(kStep * wide);
    p = arena.take<T>(kStep * W), acc = arena.take<T>(W * wide), m = arena.take<T>(W), l = arena.take<T>(W);
    if constexpr (paired) rounded = arena.take<X>(kStep * W / 2), zeros = arena.take<E>(wide);
    marks = arena.take<uint8_t>(kStep);
    bytes = arena.used;
  }

  int64_t bytes;

  void run(const Partials &partials) {
    attend_by<W>();
    finish_rows<E, T>(c, s, item, partials, acc, wide, m, l);
  }

 private:
  static constexpr int W = kLanes<T>;
  static constexpr int kBlock = W > 8 ? W : 8, kStep = StepKeys<E>::kMost;  // keys
  static constexpr int kLine = 64 / int(sizeof(E));
  template <int R>
  static constexpr int block_of = R > 8 ? R : 8;
  static constexpr bool paired = !__is_same(X, T), as_they_lie = paired || __is_same(E, T);

  // Rows as bytes, all equally far apart.
  struct Bytes {
    const char *at;
    int64_t stride;
    TW_INLINE const char *row(int64_t n) const { return at + n * stride; }
    TW_INLINE void advance(int64_t bytes) { at += bytes; }
  };
  // The same where each row lies in a page of its own.
  struct Places {
    const E *const *at;
    int64_t offset = 0;
    TW_INLINE const char *row(int64_t n) const { return (const char *)at[n] + offset; }
    TW_INLINE void advance(int64_t bytes) { offset += bytes; }
  };
  static TW_INLINE Bytes bytes_of(const E *first, const TwTensor &t) { return {(const char *)first, t.row * int64_t(sizeof(E))}; }

  const TwCall &c;
  const QueryItem &item;
  const Sequence s;
  const int64_t rows, wide, depth;
  const RowEnds<W> ends;
  Arena arena;
  StepKeys<E> at;
  X *q, *k, *rounded;
  E *v, *zeros;  // of a step's odd last key the other of its pair
  T *p, *acc, *m, *l;
  uint8_t *marks;

  template <int R>
  void attend_by() {
    if constexpr (R > 1)
      if (rows > W / R) return attend_by<R / 2>();
    attend<R>();
  }

  template <int R>
  void attend() {
    start<R>();
    int64_t begin = ends.begin;
    if (c.block_table) begin = greater(begin / block_of<R> * block_of<R>, item.n0);  // blocks that lie in one page
    at.place(begin, ends.end);
    for (int64_t n0 = begin; n0 < ends.end; n0 += at.keys) step<R>(n0, smaller(at.keys, ends.end - n0));
    for (int g = 0; g < W / R; ++g) {
      T sum = T(0);
      for (int r = 0; r < R; ++r) sum += l[g * R + r];
      m[g] = m[g * R], l[g] = sum;
    }
  }

  template <int R>
  void start() {
    for (int64_t n = 0; n < W; ++n) m[n] = T(-INFINITY), l[n] = T(0);
    for (int64_t n = 0; n < W * wide; ++n) acc[n] = T(0);
    for (int64_t d = 0; paired && d < wide; ++d) zeros[d] = E{};
    for (int64_t g = 0; g < W / R; ++g) {
      const int64_t real = g < rows ? elements<X>(c.head_dim) : 0;
      const E *row = g < rows ? row_of<E>(c.q, s, s.row_q, item.query_of(g), item.head_of(g)) : nullptr;
      for (int64_t d = 0; d < depth; ++d) q[d / R * W + g * R + d % R] = d < real ? element<X>(row, d, c.head_dim) : X(0);
    }
  }

  template <int R>
  void step(int64_t n0, int64_t keys) {
    at.advance(n0 + keys, ends.end);
    constexpr int block = block_of<R>;
    const bool direct = as_they_lie && c.head_dim % (R * int(sizeof(X) / sizeof(E))) == 0;
    for (int64_t n = 0; n < keys; n += block) {
      const int64_t count = smaller(block, keys - n);
      const Bytes key = bytes_of(at.k[n], c.k);
      const Places soon{(c.block_table ? at.ahead_k : at.v) + n};
      const bool together = !c.block_table || (n0 + n) % c.page_size + block <= c.page_size;
      if (direct && count == block && !together) {
        scores<R, block>(Places{at.k + n}, elements<X>(c.head_dim), p + n * (W / R), soon);
      } else if (direct && count == block) {
        scores<R, block>(key, elements<X>(c.head_dim), p + n * (W / R), soon);
      } else {
        pack_keys({nullptr, 0, count, nullptr, at.k + n}, block);
        scores<R, block>(Bytes{(const char *)k, depth * int64_t(sizeof(X))}, depth, p + n * (W / R), soon);
      }
    }
    const int64_t whole = round_up(keys, block);
    if (n0 < ends.all_from || n0 + whole > ends.all_to) hide<R>(n0, whole);
    softmax<R>(whole);
    const uint8_t *seen = listed_seen(c, s, at.head_k, n0);
    if (!seen && c.block_table) seen = seen_by_rows(ends.lo, ends.hi, rows, n0, keys, marks);
    add_values<R>(keys, seen, c.block_table ? at.ahead_v : n0 + keys < ends.end ? at.next_k : at.k);
  }

  void pack_keys(const Rows<E> &from, int64_t block) {
    if constexpr (!paired) return pack_plain<T, E>(from, block, c.head_dim, depth, k, depth);
    else
      for (int64_t n = 0; n < block; ++n) {
        const int64_t numbers = from.row(n) ? c.head_dim : 0;
        for (int64_t d = numbers / 2; d < depth; ++d) k[n * depth + d] = X(0);
        if (numbers) __builtin_memcpy(k + n * depth, from.row(n), size_t(numbers) * sizeof(E));  // a pair is two neighbours
      }
  }

  // S of `block` keys, R of them a vector. While a line of each key is in use, the same line of as many rows comes closer: those
  // keys' V, or, over pages, rows of the next step's K.
  template <int R, int block, class Keys>
  void scores(Keys key, int64_t elements, T *out, Places soon) const {
    constexpr int steps = 64 / (R * int(sizeof(X)));  // of a line
    constexpr int64_t same = 64 / int64_t(sizeof(X)) * (paired ? 2 : 1) * int64_t(sizeof(E));
    const int64_t whole = elements / (steps * R) * (steps * R);
    Vec<T> sum[block] = {};
    const X *x = q;
    int64_t d = 0;
    for (; d < whole; d += steps * R, soon.advance(same))
#pragma GCC unroll 16
      for (int step = 0; step < steps; ++step, x += W, key.advance(R * sizeof(X))) {
#pragma GCC unroll 16
        for (int n = step; n < block; n += steps) __builtin_prefetch(soon.row(n), 0, 3);
        add_depth<R, block>(sum, x, key);
      }
    for (; d < elements; d += R, x += W, key.advance(R * sizeof(X))) add_depth<R, block>(sum, x, key);
#pragma GCC unroll 8
    for (int n = 0; n < block; n += R, out += W) store(out, sums_by_key<T, R>(sum + n) * splat(T(c.softmax_scale)));
  }

  template <int R, int block, class Keys>
  static TW_INLINE void add_depth(Vec<T> *sum, const X *x, Keys key) {
    const Vec<X> row = load(x);
#pragma GCC unroll 16
    for (int n = 0; n < block; ++n) sum[n] = multiply_add<X>(sum[n], row, repeated<X, R>(key.row(n)));
  }

  template <int R>
  void hide(int64_t n0, int64_t keys) {
    for (int64_t n = 0; n < keys; ++n)
      for (int64_t g = 0; g < W / R; ++g)
        if (n0 + n < ends.lo[g] || n0 + n >= ends.hi[g]) p[n / R * W + g * R + n % R] = T(-INFINITY);
  }

  template <int R>
  void softmax(int64_t keys) {
    const Vec<T> before = load(m), none = splat(T(-INFINITY));
    constexpr int vectors = block_of<R> / R;
    Vec<T> most[vectors];
    for (int x = 0; x < vectors; ++x) most[x] = before;
    for (int64_t n = 0; n < keys * (W / R); n += vectors * W)
#pragma GCC unroll 8
      for (int x = 0; x < vectors; ++x) most[x] = larger<T>(load(p + n + x * W), most[x]);
    Vec<T> top = most[0];
    for (int x = 1; x < vectors; ++x) top = larger<T>(most[x], top);
    for (int step = 1; step < R; step *= 2) {
      Vec<Int<T>> other;
      for (int n = 0; n < W; ++n) other[n] = n ^ step;
      top = larger<T>(__builtin_shuffle(top, other), top);
    }
    const Vec<T> shift = top == none ? Vec<T>{} : top;
    Vec<T> total{};
    for (int64_t n = 0; n < keys * (W / R); n += W) {
      const Vec<T> e = softmax_exp<T>(load(p + n) - shift);
      total += e;
      store(p + n, e);
    }
    T alpha[W];
    store(alpha, softmax_exp<T>(before - shift));
    store(l, load(l) * load(alpha) + total);
    store(m, top);
    for (int64_t g = 0; g < rows; ++g)
      if (alpha[g * R] != T(1))
        for (int64_t d = 0; d < wide; d += W) store(acc + g * wide + d, load(acc + g * wide + d) * splat(alpha[g * R]));
  }

  // acc += P V. While V is in use, the next step's keys come closer; over pages, its V.
  template <int R>
  void add_values(int64_t keys, const uint8_t *seen, const E *const *next) {
    if (seen || c.head_dim_v % W) copy_values({nullptr, 0, keys, seen, at.v}, keys);
    if constexpr (paired) round_weights<R>(keys);
    if (paired && keys % 2) at.v[keys] = zeros;
    constexpr int G = W / R, MR = G < 8 ? G : 8;
    for (int64_t g = 0; g < rows; g += MR) {
      int64_t d = 0;
      for (; d + 2 * W <= wide; d += 2 * W) value_columns<R, MR, 2>(keys, next, g, d);
      if (d < wide) value_columns<R, MR, 1>(keys, next, g, d);
    }
  }

  // V of a step beside each other, with zeros for keys that nobody sees and for columns that fill a vector.
  void copy_values(const Rows<E> &from, int64_t keys) {
    for (int64_t n = 0; n < keys; ++n) {
      const E *row = from.row(n);
      for (int64_t d = 0; d < wide; ++d) v[n * wide + d] = row && d < c.head_dim_v ? row[d] : E{};
      at.v[n] = v + n * wide;
    }
  }

  template <int R>
  void round_weights(int64_t keys) {
    if constexpr (paired) {
      if constexpr (R > 1) round_row(p, 0, round_up(keys, kBlock) * (W / R), rounded);
      else
        for (int64_t n = 0; n < keys; n += 2) round_rows(p + n * W, p + (n + 1) * W, 0, W, rounded + n / 2 * W);
    }
  }

  template <int R, int MR, int NV>
  void value_columns(int64_t keys, const E *const *next, int64_t g0, int64_t d) {
    Vec<T> sum[MR][NV] = {};
    constexpr int at_once = paired ? 2 : 1, K = R / at_once > 0 ? R / at_once : 1, lanes = W;
    for (int64_t n = 0; n < keys; n += at_once) {
      Vec<X> row[NV];
      values<NV>(n, d, row);
      prefetch_keys<NV * W>(next, n, at_once, d);
      const int64_t step = n / at_once;
      const X *weight = weights() + step / K * (K * (lanes / R)) + step % K + g0 * K;
#pragma GCC unroll 8
      for (int g = 0; g < MR; ++g)
#pragma GCC unroll 2
        for (int x = 0; x < NV; ++x) sum[g][x] = multiply_add<X>(sum[g][x], splat(weight[g * K]), row[x]);
    }
#pragma GCC unroll 8
    for (int g = 0; g < MR; ++g)
#pragma GCC unroll 2
      for (int x = 0; x < NV; ++x) {
        T *to = acc + (g0 + g) * wide + d + x * W;
        store(to, load(to) + sum[g][x]);
      }
  }

  const X *weights() const {
    if constexpr (paired) return rounded;
    else return p;
  }

  // Elements d ... of key n, or of keys n and n + 1 as pairs.
  template <int NV>
  TW_INLINE void values(int64_t n, int64_t d, Vec<X> *row) const {
    const E *one = at.v[n] + d;
    if constexpr (!paired) {
#pragma GCC unroll 2
      for (int x = 0; x < NV; ++x) row[x] = load_wide<T>(one + x * W);
    } else {
#ifdef __AVX512BF16__
      const E *other = at.v[n + 1] + d;
      if constexpr (NV == 2) interleave(one, other, row);
      else row[0] = interleaved(_mm256_loadu_si256((const __m256i *)one), _mm256_loadu_si256((const __m256i *)other));
#endif
    }
  }

  // The hardware's own prefetcher stops at each page. V comes while S is computed, the next step's K while V is in use, so
  // that memory never waits (docs/decisions.md#cpu-decode-prefetch).
  template <int columns>
  TW_INLINE void prefetch_keys(const E *const *keys, int64_t begin, int count, int64_t d) const {
    for (int64_t n = begin; n < begin + count; ++n)
      for (int x = 0; x < columns; x += kLine) __builtin_prefetch(keys[n] + d + x, 0, 3);
  }
};

}  // namespace tw::TW_ISA
