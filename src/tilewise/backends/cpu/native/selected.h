// Backward of queries that selected their keys: those of a query are gathered once for all heads of its group
// (docs/decisions.md#cpu-selected-keys).
//
//   for each query, some of its keys at a time:
//     K, V gathered                          keys x D and Dv
//     Sᵀ = K Qᵀ   dPᵀ = V dOᵀ                keys x heads
//     P = e^(S - lse)   dS = P (dP - delta)  in place
//     dV[keys] += Pᵀ dO   dK[keys] += dSᵀ Q   dQ += dS K
//
// A unit has all heads of a group and some of the queries, and adds to a dK and a dV of its own, so that every sum has one order.
#pragma once
#include "tile.h"

namespace tw::TW_ISA {

// E: the inputs' element; T: the compute type, in which dK and dV are summed; X: the products' element, T or Pair (product.h).
template <class E, class T, class X>
class SelectedBackward {
 public:
  SelectedBackward(const TwCall &c, const GradientUnit &unit, char *scratch)
      : c(c), unit(unit), s(sequence_of(c, unit.b)), D(c.head_dim), Dv(c.head_dim_v), heads(c.heads_q / c.heads_k),
        wide(round_up(D, W)), wide_v(round_up(Dv, W)), wide_h(round_up(heads, W)),
        depth_h(kTiled<X> ? round_up(wide_h / 2, W) : elements<X>(wide_h)), most(round_up(c.tile_n, W)) {
    Arena arena{scratch};
    at = arena.take<const E *>(2 * most), key = arena.take<int64_t>(most);
    k = arena.take<X>(elements<X>(most) * wide), v = arena.take<X>(most * greater(elements<X>(Dv), paired ? 1 : wide_v));
    if constexpr (paired) {
      k_rows = arena.take<X>(most * elements<X>(D)), ds_columns = arena.take<X>(most / 2 * wide_h);
      p_rows = arena.take<X>(most * depth_h + W), ds_rows = arena.take<X>(most * depth_h + W);
    }
    qt = arena.take<X>(elements<X>(D) * wide_h), dot = arena.take<X>(elements<X>(Dv) * wide_h);
    q = arena.take<X>(depth_h * wide), dout = arena.take<X>(depth_h * wide_v);
    p = arena.take<T>(most * wide_h), ds = arena.take<T>(most * wide_h), added = arena.take<T>(most * greater(wide, wide_v));
    dq = arena.take<T>(wide_h * wide), lse = arena.take<T>(wide_h), delta = arena.take<T>(wide_h);
    machine = {&c.program, arena.take<char>(Machine::bytes(c.program, c.tile_n)), c.tile_n};
    bytes = arena.used;
  }

  int64_t bytes;

  void run() {
    if (machine.scored()) machine.enter_head(anywhere()), machine.enter_tile(anywhere());
    for (int64_t i = unit.m0; i < unit.m1; ++i) {
      heed_signals();
      query(i);
    }
  }

 private:
  static constexpr int W = kLanes<T>;
  static constexpr bool paired = !__is_same(X, T);

  const TwCall &c;
  const GradientUnit &unit;
  const Sequence s;
  const int64_t D, Dv, heads, wide, wide_v, wide_h, depth_h, most;
  const E **at;  // of K, then of V
  int64_t *key;
  X *k, *v, *k_rows, *qt, *dot, *q, *dout, *p_rows, *ds_rows, *ds_columns;
  T *p, *ds, *added, *dq, *lse, *delta;
  Machine machine;

  // A score that is a function of s alone does not ask where it is.
  Place anywhere() const { return {s.b, unit.head, s.seqlen_q, s.seqlen_k, 0, 0}; }

  void query(int64_t i) {
    const int32_t *lengths = ends_of(c.hi, s, unit.head_k, 0);
    const int32_t *entries = c.block_table + (lengths - c.hi.data + i) * c.table_row;
    load_query(i);
    for (int64_t n0 = 0; n0 < lengths[i]; n0 += c.tile_n) keys(entries, n0, smaller(c.tile_n, lengths[i] - n0));
    for (int64_t h = 0; h < heads; ++h) {
      E *out = row_of<E>(c.dq, s, 0, i, unit.head + h);
      for (int64_t d = 0; d < D; ++d) narrow(dq[h * wide + d], out + d);
    }
  }

  void load_query(int64_t i) {
    const Rows<E> q_rows{row_of<E>(c.q, s, 0, i, unit.head), c.q.head, heads, nullptr};
    const Rows<E> do_rows{row_of<E>(c.dout, s, 0, i, unit.head), c.dout.head, heads, nullptr};
    const int64_t rows = paired ? 2 * depth_h : heads;
    pack_panels<X, E>(q_rows, rows, D, q), pack_panels<X, E>(do_rows, rows, Dv, dout);
    pack_transposed<X, E>(q_rows, wide_h, D, qt), pack_transposed<X, E>(do_rows, wide_h, Dv, dot);
    for (int64_t n = 0; n < wide_h * wide; ++n) dq[n] = T(0);
    for (int64_t h = 0; h < wide_h; ++h) {
      const T found = h < heads ? statistic<T>(c, c.lse, s, unit.head + h)[i] : T(-INFINITY);
      lse[h] = found == T(-INFINITY) ? T(INFINITY) : found;  // e^(s - inf) = 0: heads that saw nothing, and that are not there
      delta[h] = h < heads ? statistic<T>(c, c.delta, s, unit.head + h)[i] : T(0);
    }
  }

  // Some keys of a query: those of its entries from number n0 on.
  void keys(const int32_t *entries, int64_t n0, int64_t count) {
    for (int64_t n = 0; n < count; ++n) {
      key[n] = int64_t(entries[(n0 + n) / c.page_size]) * c.page_size + (n0 + n) % c.page_size - s.b * s.seqlen_k;
      at[n] = row_of<E>(c.k, s, 0, key[n], unit.head_k), at[most + n] = row_of<E>(c.v, s, 0, key[n], unit.head_k);
    }
    const int64_t whole = paired ? round_up(count, W) : count;
    const Rows<E> k_of{nullptr, 0, count, nullptr, at, 0, true}, v_of{nullptr, 0, count, nullptr, at + most, 0, true};
    const TileRegisters<X> registers;
    if constexpr (paired) {
      gather(k_of, whole, D, k_rows), gather(v_of, whole, Dv, v);
      pack_panels<X, E>({(const E *)k_rows, 2 * elements<X>(D), count, nullptr}, whole, D, k);
      by_heads(k_rows, elements<X>(D), elements<X>(D), qt, D, whole, p), by_heads(v, elements<X>(Dv), elements<X>(Dv), dot, Dv, whole, ds);
    } else {
      pack_panels<X, E>(k_of, whole, D, k), pack_panels<X, E>(v_of, whole, Dv, v);
      by_heads(k, kPanelWidth<T>, wide, qt, D, whole, p), by_heads(v, kPanelWidth<T>, wide_v, dot, Dv, whole, ds);
    }
    for (int64_t n = 0; n < count * wide_h; n += c.tile_n) gradients(n, smaller(n + c.tile_n, count * wide_h));
    if constexpr (paired) {
      for (int64_t n = count * wide_h; n < whole * wide_h; ++n) p[n] = ds[n] = T(0);
      for (int64_t n = 0; n < whole; n += 2)
        round_rows(ds + n * wide_h, ds + (n + 1) * wide_h, 0, wide_h, ds_columns + n / 2 * wide_h);
      for (int64_t n = 0; n < whole; ++n)
        round_row(p + n * wide_h, 0, wide_h, p_rows + n * depth_h), round_row(ds + n * wide_h, 0, wide_h, ds_rows + n * depth_h);
      multiply<X, Form::transposed, true>(wide_h, wide / W, whole / 2, {ds_columns, wide_h}, k, dq, wide);
      add({p_rows, depth_h}, dout, wide_v, c.dv, Dv, count), add({ds_rows, depth_h}, q, wide, c.dk, D, count);
    } else {
      multiply<X, Form::transposed, true>(heads, wide / W, whole, {ds, wide_h}, k, dq, wide);
      add({p, wide_h}, dout, wide_v, c.dv, Dv, count), add({ds, wide_h}, q, wide, c.dk, D, count);
    }
  }

  // Rows of pairs beside each other; those from the count on are zeros.
  static void gather(const Rows<E> &rows, int64_t whole, int64_t width, X *out) {
    const int64_t depth = elements<X>(width);
    for (int64_t n = 0; n < whole; ++n, out += depth) {
      rows.fetch_if_cold(n + kFetchAhead, 0, width);
      const E *from = rows.row(n);
      int64_t d = 0;
      for (; d + W <= width / 2; d += W) store(out + d, from ? element_vector<X>(from, d) : Vec<X>{});
      for (; d < depth; ++d) out[d] = from ? element<X>(from, d, width) : X(0);
    }
  }

  // Of the numbers [begin, end) of [key][head]: S becomes P, dP becomes dS.
  void gradients(int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    const Vec<T> scale = splat(T(c.softmax_scale));
    for (int64_t n = begin; n < end; n += W) store(p + n, load(p + n) * scale);
    if (machine.scored()) machine.score_row(anywhere(), 0, count, p + begin);
    for (int64_t n = begin; n < end; n += W) {
      const Vec<T> e = softmax_exp<T>(load(p + n) - load(lse + n % wide_h));
      const Vec<T> gradient = e * (load(ds + n) - load(delta + n % wide_h)) * scale;
      store(p + n, e);
      store(ds + n, e == Vec<T>{} ? Vec<T>{} : gradient);
    }
    if (machine.scored()) machine.run_row(TW_SLOPES, anywhere(), 0, count), machine.slope_row(0, count, ds + begin);
  }

  // The product of gathered rows, in panels `ld` wide of `padded` elements, with each head's: [key][head].
  void by_heads(const X *rows, int64_t ld, int64_t padded, const X *b, int64_t width, int64_t count, T *out) const {
    for (int64_t h0 = 0; h0 < wide_h; h0 += kPanelWidth<T>) {
      const int64_t columns = smaller(kPanelWidth<T>, wide_h - h0);
      const X *a = rows;
      for (int64_t d0 = 0; d0 < elements<X>(width); d0 += ld) {
        const int64_t panel = smaller(ld, padded - d0), depth = smaller(ld, elements<X>(width) - d0);
        if (d0) multiply<X, Form::plain, true>(count, columns / W, depth, {a, panel}, b, out + h0, wide_h);
        else multiply<X, Form::plain, false>(count, columns / W, depth, {a, panel}, b, out + h0, wide_h);
        a += count * panel, b += depth * columns;
      }
    }
  }

  // Adds the product of [key][head] with the heads' rows to the rows of the keys.
  void add(Operand<X> factors, const X *rows, int64_t padded, const TwTensor &to, int64_t width, int64_t count) const {
    const int64_t whole = paired ? round_up(count, W) : count;
    multiply<X, Form::plain, false>(whole, padded / W, paired ? depth_h : heads, factors, rows, added, padded);
    T *const first = row_of<T>(to, s, 0, 0, unit.head_k) + unit.share * (to.batch / c.shares);
    for (int64_t n = 0; n < count; ++n) {
      T *out = first + key[n] * to.row;
      const T *from = added + n * padded;
      if (n + kFetchAhead < count)
        for (int64_t d = 0; d < width; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(first + key[n + kFetchAhead] * to.row + d, 1, 3);
      int64_t d = 0;
      for (; d + W <= width; d += W) store(out + d, load(out + d) + load(from + d));
      for (; d < width; ++d) out[d] += from[d];
    }
  }
};

}  // namespace tw::TW_ISA
