// Backward of queries that selected their keys: those of a query are gathered once for all heads of its group
// (docs/decisions.md#cpu-selected-keys).
//
//   for each query, some of its keys at a time:
//     K, V gathered                          keys x D and Dv, in panels
//     Sᵀ = K Qᵀ   dPᵀ = V dOᵀ                keys x heads
//     P = e^(S - lse)   dS = P (dP - delta)  in place
//     dV[keys] += Pᵀ dO   dK[keys] += dSᵀ Q   dQ += dS K
//
// A unit has all heads of a group and some of the queries, and adds to a dK and a dV of its own, so that every sum has one order.
#pragma once
#include "tile.h"

namespace tw::TW_ISA {

// E: the inputs' element; T: the compute type, in which dK and dV are summed.
template <class E, class T>
class SelectedBackward {
 public:
  SelectedBackward(const TwCall &c, const GradientUnit &unit, char *scratch)
      : c(c), unit(unit), s(sequence_of(c, unit.b)), D(c.head_dim), Dv(c.head_dim_v), heads(c.heads_q / c.heads_k),
        wide(round_up(D, kLanes<T>)), wide_v(round_up(Dv, kLanes<T>)), wide_h(round_up(heads, kLanes<T>)) {
    Arena arena{scratch};
    at = arena.take<const E *>(2 * c.tile_n), key = arena.take<int64_t>(c.tile_n);
    k = arena.take<T>(c.tile_n * wide), v = arena.take<T>(c.tile_n * wide_v);
    qt = arena.take<T>(D * wide_h), dot = arena.take<T>(Dv * wide_h);
    q = arena.take<T>(heads * wide), dout = arena.take<T>(heads * wide_v), dq = arena.take<T>(heads * wide);
    p = arena.take<T>(c.tile_n * wide_h), ds = arena.take<T>(c.tile_n * wide_h);
    added = arena.take<T>(c.tile_n * greater(wide, wide_v));
    lse = arena.take<T>(wide_h), delta = arena.take<T>(wide_h);
    machine = {&c.program, arena.take<char>(Machine::bytes(c.program, c.tile_n)), c.tile_n};
    bytes = arena.used;
  }

  int64_t bytes;

  void run() {
    if (scored()) machine.enter_head(anywhere()), machine.enter_tile(anywhere());
    for (int64_t i = unit.m0; i < unit.m1; ++i) {
      heed_signals();
      query(i);
    }
  }

 private:
  const TwCall &c;
  const GradientUnit &unit;
  const Sequence s;
  const int64_t D, Dv, heads, wide, wide_v, wide_h;
  const E **at;  // of K, then of V
  int64_t *key;
  T *k, *v, *qt, *dot, *q, *dout, *dq, *p, *ds, *added, *lse, *delta;
  Machine machine;

  bool scored() const { return c.program.score >= 0; }

  // A score that is a function of s alone does not ask where it is.
  Place anywhere() const { return {s.b, unit.head, s.seqlen_q, s.seqlen_k, 0, 0}; }

  void query(int64_t i) {
    const int32_t *lengths = ends_of(c.hi, s, unit.head_k, 0);
    const int32_t *entries = c.block_table + (lengths - c.hi.data + i) * c.table_row;
    load_query(i);
    for (int64_t n0 = 0; n0 < lengths[i]; n0 += c.tile_n) keys(entries, n0, smaller(c.tile_n, lengths[i] - n0));
    for (int64_t h = 0; h < heads; ++h) {
      E *out = row_of<E>(c.dq, s, 0, i, unit.head + h);
      for (int64_t d = 0; d < D; ++d) narrow(dq[h * wide + d] * T(c.softmax_scale), out + d);
    }
  }

  void load_query(int64_t i) {
    const Rows<E> q_rows{row_of<E>(c.q, s, 0, i, unit.head), c.q.head, heads, nullptr};
    const Rows<E> do_rows{row_of<E>(c.dout, s, 0, i, unit.head), c.dout.head, heads, nullptr};
    pack_panels<T, E>(q_rows, heads, D, q), pack_panels<T, E>(do_rows, heads, Dv, dout);
    pack_heads(q_rows, D, qt, T(c.softmax_scale)), pack_heads(do_rows, Dv, dot, T(1));
    for (int64_t n = 0; n < heads * wide; ++n) dq[n] = T(0);
    for (int64_t h = 0; h < wide_h; ++h) {
      const T found = h < heads ? statistic<T>(c, c.lse, s, unit.head + h)[i] : T(-INFINITY);
      lse[h] = found == T(-INFINITY) ? T(INFINITY) : found;  // e^(s - inf) = 0: heads that saw nothing, and that are not there
      delta[h] = h < heads ? statistic<T>(c, c.delta, s, unit.head + h)[i] : T(0);
    }
  }

  // Panels [panel][number][heads of panel]: B of a product whose depth is the numbers of a row. Heads may be fewer than a panel has.
  void pack_heads(const Rows<E> &rows, int64_t width, T *out, T scale) const {
    for (int64_t h0 = 0; h0 < wide_h; h0 += kPanelWidth<T>) {
      const int64_t columns = smaller(kPanelWidth<T>, wide_h - h0);
      for (int64_t h = 0; h < columns; ++h) {
        const E *from = rows.row(h0 + h);
        for (int64_t d = 0; d < width; ++d) out[d * columns + h] = from ? T(widen(from[d])) * scale : T(0);
      }
      out += width * columns;
    }
  }

  // Some keys of a query: those of its entries from number n0 on.
  void keys(const int32_t *entries, int64_t n0, int64_t count) {
    for (int64_t n = 0; n < count; ++n) {
      key[n] = int64_t(entries[(n0 + n) / c.page_size]) * c.page_size + (n0 + n) % c.page_size - s.b * s.seqlen_k;
      at[n] = row_of<E>(c.k, s, 0, key[n], unit.head_k), at[c.tile_n + n] = row_of<E>(c.v, s, 0, key[n], unit.head_k);
    }
    pack_panels<T, E>({nullptr, 0, count, nullptr, at, 0, true}, count, D, k);
    pack_panels<T, E>({nullptr, 0, count, nullptr, at + c.tile_n, 0, true}, count, Dv, v);
    by_heads(k, qt, D, wide, count, p);
    by_heads(v, dot, Dv, wide_v, count, ds);
    for (int64_t n = 0; n < count * wide_h; n += c.tile_n) gradients(n, smaller(n + c.tile_n, count * wide_h));
    multiply<T, Form::transposed, true>(heads, wide / kLanes<T>, count, {ds, wide_h}, k, dq, wide);
    add(p, dout, wide_v, c.dv, Dv, count, T(1));
    add(ds, q, wide, c.dk, D, count, T(c.softmax_scale));
  }

  // Of the numbers [begin, end) of [key][head]: S becomes P, dP becomes dS.
  void gradients(int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    if (scored()) {
      if (c.program.raw >= 0) __builtin_memcpy(machine.at<T>(c.program.raw), p + begin, size_t(count) * sizeof(T));
      machine.run_row(TW_SCORE, anywhere(), 0, count);
      __builtin_memcpy(p + begin, machine.at<T>(c.program.score), size_t(count) * sizeof(T));
    }
    for (int64_t n = begin; n < end; n += kLanes<T>) {
      const Vec<T> e = softmax_exp<T>(load(p + n) - load(lse + n % wide_h));
      const Vec<T> gradient = e * (load(ds + n) - load(delta + n % wide_h));
      store(p + n, e);
      store(ds + n, e == Vec<T>{} ? Vec<T>{} : gradient);
    }
    if (!scored()) return;
    machine.run_row(TW_SLOPES, anywhere(), 0, count);
    if (c.program.slope < 0) return;
    const T *slope = machine.at<T>(c.program.slope);
    for (int64_t n = 0; n < count; ++n) ds[begin + n] = ds[begin + n] == T(0) ? T(0) : ds[begin + n] * slope[n];
  }

  // The product of gathered rows, in panels, with each head's: [key][head].
  void by_heads(const T *rows, const T *b, int64_t width, int64_t padded, int64_t count, T *out) const {
    for (int64_t h0 = 0; h0 < wide_h; h0 += kPanelWidth<T>) {
      const int64_t columns = smaller(kPanelWidth<T>, wide_h - h0);
      const T *a = rows;
      for (int64_t d0 = 0; d0 < width; d0 += kPanelWidth<T>) {
        const int64_t ld = smaller(kPanelWidth<T>, padded - d0), depth = smaller(kPanelWidth<T>, width - d0);
        if (d0) multiply<T, Form::plain, true>(count, columns / kLanes<T>, depth, {a, ld}, b, out + h0, wide_h);
        else multiply<T, Form::plain, false>(count, columns / kLanes<T>, depth, {a, ld}, b, out + h0, wide_h);
        a += count * ld, b += depth * columns;
      }
    }
  }

  // Adds the product of [key][head] with the heads' rows to the rows of the keys.
  void add(const T *factors, const T *rows, int64_t padded, const TwTensor &to, int64_t width, int64_t count, T scale) const {
    multiply<T, Form::plain, false>(count, padded / kLanes<T>, heads, {factors, wide_h}, rows, added, padded, scale);
    for (int64_t n = 0; n < count; ++n) {
      T *out = row_of<T>(to, s, 0, key[n], unit.head_k) + unit.share * (to.batch / c.shares);
      const T *from = added + n * padded;
      int64_t d = 0;
      for (; d + kLanes<T> <= width; d += kLanes<T>) store(out + d, load(out + d) + load(from + d));
      for (; d < width; ++d) out[d] += from[d];
    }
  }
};

}  // namespace tw::TW_ISA
