// Backward (docs/algorithm.md#6-backward) in one pass: key tiles outside, the queries of the head group inside.
//
//   for each tile of keys:                 Kᵀ, Vᵀ and K packed; dK, dV of the tile, all in L2
//     for each head of the group, each tile of queries that the columns' ends reach:
//       S = Q Kᵀ   dP = dO Vᵀ              rows x keys, in L2
//       P = e^(S - lse)   dS = P (dP - delta)   in place, row by row
//       dV += (R ∘ P)ᵀ dO   dK += dSᵀ Q   dQ += dS K
//
// One thread walks all of a unit, and units that share a dq take turns (turns.h), so that every sum has one order and needs
// no lock. They start with the last queries: under a causal mask or a window those are the ones that no earlier key sees.
// dQ is summed where it is returned or, for 16-bit inputs, in fp32: of the first queries of a long head here, of the others
// in units of their own, which visit all keys for dQ alone.
#pragma once
#include "dropout.h"
#include "leaf_sums.h"
#include "tile.h"
#include "turns.h"

namespace tw::TW_ISA {

// delta = rowsum(dO ∘ O) - dlse of one head.
template <class E, class T>
void delta_head(const TwCall &c, int64_t b, int64_t head) {
  const Sequence s = sequence_of(c, b);
  const T *dlse = statistic<T>(c, c.dlse, s, head);
  T *delta = statistic<T>(c, c.delta, s, head);
  for (int64_t i = 0; i < s.seqlen_q; ++i) {
    const E *o = row_of<E>(c.o, s, s.row_q, i, head), *dout = row_of<E>(c.dout, s, s.row_q, i, head);
    Vec<T> sum{};
    int64_t d = 0;
    for (; d + kLanes<T> <= c.head_dim_v; d += kLanes<T>) sum += load_wide<T>(o + d) * load_wide<T>(dout + d);
    T total = sum_lanes<T>(sum);
    for (; d < c.head_dim_v; ++d) total += T(widen(o[d])) * T(widen(dout[d]));
    delta[i] = total - dlse[i];
  }
}

// E: the inputs' element; T: the compute type; X: the products' element, T or Pair (product.h).
template <class E, class T, class X>
class Backward {
 public:
  Backward(const TwCall &c, const GradientUnit &unit, char *scratch)
      : c(c), unit(unit), s(sequence_of(c, unit.b)), D(c.head_dim), Dv(c.head_dim_v), wide(round_up(D, kLanes<T>)),
        wide_v(round_up(Dv, kLanes<T>)) {
    Arena arena{scratch};
    kt = arena.take<X>(c.tile_n * elements<X>(D)), vt = arena.take<X>(c.tile_n * elements<X>(Dv));
    k = arena.take<X>(elements<X>(c.tile_n) * wide);
    dk = arena.take<T>(c.tile_n * wide), dv = arena.take<T>(c.tile_n * wide_v);
    q = arena.take<X>(c.tile_m * elements<X>(D)), qp = is_panel(D) ? q : arena.take<X>(elements<X>(c.tile_m) * wide);
    dout = arena.take<X>(c.tile_m * elements<X>(Dv)), dop = is_panel(Dv) ? dout : arena.take<X>(elements<X>(c.tile_m) * wide_v);
    p = arena.take<T>((c.tile_m + 1) * c.tile_n), dp = arena.take<T>((c.tile_m + 1) * c.tile_n);
    if constexpr (paired) {
      const int64_t pairs = (c.tile_m + 1) / 2 * c.tile_n;
      p_columns = arena.take<X>(pairs), ds_columns = arena.take<X>(pairs), ds_rows = arena.take<X>(pairs);
    }
    if constexpr (held) sums = arena.take<T>(own_rows_of_dq(c) * wide);
    else dq = arena.take<T>(c.tile_m * wide);
    factor = arena.take<T>(c.tile_n);
    first = arena.take<int32_t>(c.tile_n), last = arena.take<int32_t>(c.tile_n);
    machine = {&c.program, arena.take<char>(Machine::bytes(c.program, c.tile_n)), c.tile_n};
    bytes = arena.used;
  }

  int64_t bytes;

  void run() {
    if constexpr (held) start_sums();
    for (int64_t n0 = unit.n0; n0 < unit.n1; n0 += c.tile_n) key_tile(n0);
    if (unit.turns) unit.turns->pass(unit.share, Turns::kAll);
    if constexpr (held) write_sums();
  }

 private:
  static constexpr bool paired = !__is_same(X, T), held = !__is_same(E, T);

  const TwCall &c;
  const GradientUnit &unit;
  const Sequence s;
  const int64_t D, Dv, wide, wide_v;
  int64_t real, width;  // keys of the tile; the same, padded
  X *kt, *vt, *k, *q, *qp, *dout, *dop, *p_columns, *ds_columns, *ds_rows;
  T *dk, *dv, *p, *dp, *dq, *sums, *factor;  // sums: (head, query, d), where dQ is not summed where it is returned
  int32_t *first, *last;
  Machine machine;

  void key_tile(int64_t n0) {
    real = smaller(c.tile_n, unit.n1 - n0), width = smaller(c.tile_n, round_up(real, kDeep<X>));
    if (!unit.keys && visible(n0, unit.head).begin < 0) return;
    pack_transposed<X, E>(key_rows<E>(c, c.k, s, unit.head_k, n0), width, D, kt);
    pack_transposed<X, E>(key_rows<E>(c, c.v, s, unit.head_k, n0), width, Dv, vt);
    pack_panels<X, E>(key_rows<E>(c, c.k, s, unit.head_k, n0), width, D, k);
    for (int64_t n = 0; n < width * wide; ++n) dk[n] = T(0);
    for (int64_t n = 0; n < width * wide_v; ++n) dv[n] = T(0);
    for (int64_t h = 0; h < unit.heads; ++h) query_head(n0, unit.head + h);
    if (!unit.keys) return;
    store_keys(c.dk, n0, dk, wide, D, T(c.softmax_scale));
    store_keys(c.dv, n0, dv, wide_v, Dv, T(1));
  }

  void store_keys(const TwTensor &to, int64_t n0, const T *from, int64_t ld, int64_t columns, T scale) const {
    for (int64_t n = 0; n < real; ++n) {
      E *out = row_of<E>(to, s, s.row_k, n0 + n, unit.head_k);
      for (int64_t d = 0; d < columns; ++d) narrow(from[n * ld + d] * scale, out + d);
    }
  }

  // Queries that some column of the tile sees, of those that concern the unit; none: {-1, -1}.
  Range visible(int64_t n0, int64_t head) {
    const int32_t *from = ends_of(c.first, s, head, s.row_k), *to = ends_of(c.last, s, head, s.row_k);
    Range all{s.seqlen_q, 0};
    for (int64_t n = 0; n < width; ++n) {
      first[n] = n >= real ? 0 : from ? from[n0 + n] : 0;
      last[n] = n >= real ? 0 : to ? to[n0 + n] : int32_t(s.seqlen_q);
      if (first[n] < last[n]) all = {smaller(all.begin, first[n]), greater(all.end, last[n])};
    }
    if (!unit.keys) all = {greater(all.begin, unit.m0), smaller(all.end, unit.m1)};
    return all.begin < all.end ? all : Range{-1, -1};
  }

  void query_head(int64_t n0, int64_t head) {
    const Range all = visible(n0, head);
    if (all.begin < 0) return;
    const Place at{s.b, head, s.seqlen_q, s.seqlen_k, 0, n0};
    if (machine.scored() || c.program.keep >= 0) machine.enter_head(at), machine.enter_tile(at);
    for (int64_t m0 = (all.end - 1) / c.tile_m * c.tile_m; m0 + c.tile_m > all.begin; m0 -= c.tile_m) {
      const uint8_t state = tile_state(c, s, head, m0 / c.tile_m, n0 / c.tile_n);
      if (state == TW_EMPTY) continue;
      heed_signals();
      tile(at, {greater(m0, all.begin), smaller(smaller(m0 + c.tile_m, s.seqlen_q), all.end)}, state == TW_PARTIAL);
    }
  }

  // Columns that some query of `rows` sees, in whole panels; `masked`: not all of them do.
  Range columns_of(const Range &rows, bool &masked) const {
    Range columns{width, 0};
    masked = false;
    for (int64_t n = 0; n < width; ++n)
      if (first[n] < rows.end && last[n] > rows.begin) columns = {smaller(columns.begin, n), n + 1};
    columns.begin = columns.begin / kPanelWidth<T> * kPanelWidth<T>;
    columns.end = smaller(round_up(columns.end, kPanelWidth<T>), width);
    for (int64_t n = columns.begin; n < columns.end; ++n) masked |= first[n] > rows.begin || last[n] < rows.end;
    return columns;
  }

  void tile(Place at, const Range &rows, bool predicate) {
    bool masked;
    const Range columns = columns_of(rows, masked);
    if (columns.begin >= columns.end) return;
    const int64_t count = rows.end - rows.begin, begin = columns.begin, vectors = (columns.end - begin) / kLanes<T>;
    const int64_t depth = elements<X>(D), depth_v = elements<X>(Dv);
    load_queries(at.h, rows);
    const TileRegisters<X> registers;
    multiply<X, Form::plain, false>(count, vectors, depth, {q, depth}, kt + begin * depth, p + begin, c.tile_n,
                                    T(c.softmax_scale));
    multiply<X, Form::plain, false>(count, vectors, depth_v, {dout, depth_v}, vt + begin * depth_v, dp + begin, c.tile_n);
    for (int64_t r = 0; r < count; ++r) {
      at.i = rows.begin + r;
      gradient_row(at, columns, masked, predicate, p + r * c.tile_n, dp + r * c.tile_n);
    }
    if constexpr (paired) {
      round_tile(columns, count);
      if (unit.keys) add_to_keys(columns, count, {p_columns + begin, c.tile_n}, {ds_columns + begin, c.tile_n});
      add_to_queries(columns, at, rows, {ds_rows + begin / 2, c.tile_n / 2});
    } else {
      if (unit.keys) add_to_keys(columns, count, {p + begin, c.tile_n}, {dp + begin, c.tile_n});
      add_to_queries(columns, at, rows, {dp + begin, c.tile_n});
    }
  }

  // P and dS in the forms that the products take: pairs of rows for dV and dK, pairs of columns for dQ.
  void round_tile(const Range &columns, int64_t count) {
    if constexpr (paired) {
      if (count % 2)
        for (int64_t n = 0; n < c.tile_n; ++n) p[count * c.tile_n + n] = dp[count * c.tile_n + n] = T(0);
      for (int64_t r = 0; r < count; r += 2) {
        const T *p0 = p + r * c.tile_n, *ds0 = dp + r * c.tile_n;
        round_rows(p0, p0 + c.tile_n, columns.begin, columns.end, p_columns + r / 2 * c.tile_n);
        round_rows(ds0, ds0 + c.tile_n, columns.begin, columns.end, ds_columns + r / 2 * c.tile_n);
        round_row(ds0, columns.begin, columns.end, ds_rows + r * c.tile_n / 2);
        round_row(ds0 + c.tile_n, columns.begin, columns.end, ds_rows + (r + 1) * c.tile_n / 2);
      }
    }
  }

  void add_to_keys(const Range &columns, int64_t count, Operand<X> p_t, Operand<X> ds_t) {
    const int64_t begin = columns.begin, keys = columns.end - begin, depth = elements<X>(count);
    multiply<X, Form::transposed, true>(keys, wide_v / kLanes<T>, depth, p_t, dop, dv + begin * wide_v, wide_v);
    multiply<X, Form::transposed, true>(keys, wide / kLanes<T>, depth, ds_t, qp, dk + begin * wide, wide);
  }

  void add_to_queries(const Range &columns, const Place &at, const Range &rows, Operand<X> ds) {
    if (rows.begin < unit.m0 || rows.end > unit.m1) return;
    const int64_t tiles = (s.seqlen_q + c.tile_m - 1) / c.tile_m;
    const int64_t step = (at.h - unit.head) * tiles + tiles - 1 - rows.begin / c.tile_m;  // as query_head() walks
    const bool passes = unit.turns && at.j0 + c.tile_n >= unit.n1;  // with the unit's last keys it is done with a step
    if (passes) unit.turns->pass(unit.share, step);
    if (unit.turns) unit.turns->wait(unit.share, step);
    const TileRegisters<X> registers;  // again: signal handlers may have run meanwhile
    const int64_t count = rows.end - rows.begin, keys = columns.end - columns.begin;
    T *to = dq;
    if constexpr (held) to = row_of_sums(at.h, rows.begin);
    for (int64_t d = 0; d < wide; d += kPanelWidth<T>) {
      const int64_t part = smaller(kPanelWidth<T>, wide - d);
      multiply<X, Form::plain, held>(count, part / kLanes<T>, elements<X>(keys), ds,
                                     k + d * elements<X>(width) + elements<X>(columns.begin) * part, to + d, wide);
    }
    if constexpr (!held) add_dq(at.h, rows);
    if (passes) unit.turns->pass(unit.share, step + 1);
  }

  // -- The fp32 sums of a 16-bit dQ --

  T *row_of_sums(int64_t head, int64_t i) {
    return sums + ((head - unit.head) * (unit.m1 - unit.m0) + i - unit.m0) * wide;
  }

  void start_sums() {
    if (unit.dq) sums = (T *)unit.dq;
    if (unit.share) return;
    for (int64_t n = 0; n < unit.heads * (unit.m1 - unit.m0) * wide; ++n) sums[n] = T(0);
  }

  // By the last of the units that share them.
  void write_sums() {
    if (unit.turns) {
      if (unit.share + 1 < c.shares) return;
      unit.turns->wait(unit.share, Turns::kAll - 1);
    }
    for (int64_t head = unit.head; head < unit.head + unit.heads; ++head)
      for (int64_t i = unit.m0; i < unit.m1; ++i) {
        const T *from = row_of_sums(head, i);
        E *to = row_of<E>(c.dq, s, s.row_q, i, head);
        for (int64_t d = 0; d < D; ++d) narrow(from[d] * T(c.softmax_scale), to + d);
      }
  }

  void load_queries(int64_t head, const Range &rows) {
    const int64_t count = rows.end - rows.begin;
    const Rows<E> q_rows{row_of<E>(c.q, s, s.row_q, rows.begin, head), c.q.row, count, nullptr};
    const Rows<E> do_rows{row_of<E>(c.dout, s, s.row_q, rows.begin, head), c.dout.row, count, nullptr};
    pack_rows<X, E>(q_rows, count, D, q);
    pack_rows<X, E>(do_rows, count, Dv, dout);
    if (!unit.keys) return;
    if (qp != q) pack_panels<X, E>(q_rows, count, D, qp);
    if (dop != dout) pack_panels<X, E>(do_rows, count, Dv, dop);
  }

  // Whether rows of `width` numbers are a panel as they are packed for the left side of a product.
  static constexpr bool is_panel(int64_t width) { return !paired && width % kLanes<T> == 0 && width <= kPanelWidth<T>; }

  void add_dq(int64_t head, const Range &rows) {
    const T scale = T(c.softmax_scale);
    for (int64_t r = 0; r < rows.end - rows.begin; ++r) {
      T *out = row_of<T>(c.dq, s, s.row_q, rows.begin + r, head);
      const T *from = dq + r * wide;
      for (int64_t d = 0; d < D; ++d) out[d] += from[d] * scale;
    }
  }

  // One row: S becomes R ∘ P, dP becomes dS.
  void gradient_row(const Place &at, const Range &columns, bool masked, bool predicate, T *x, T *y) {
    const T lse = statistic<T>(c, c.lse, s, at.h)[at.i], delta = statistic<T>(c, c.delta, s, at.h)[at.i];
    const T shift = lse == T(-INFINITY) ? T(INFINITY) : lse;  // e^(s - inf) = 0: rows that saw nothing
    if (machine.scored() || masked || predicate) hide(at, columns, masked, predicate, x);
    if (c.keep_below) Dropout{c}.row(at, columns.begin, columns.end, factor);
    constexpr int W = kLanes<T>;
    for (int64_t n = columns.begin; n < columns.end; n += W) {
      const Vec<T> e = softmax_exp<T>(load(x + n) - splat(shift));
      const Vec<T> f = c.keep_below ? load(factor + n) : splat(T(1));
      const Vec<T> ds = e * (load(y + n) * f - splat(delta));
      store(x + n, e * f);
      store(y + n, e == Vec<T>{} ? Vec<T>{} : ds);  // what is hidden gives nothing, whatever its dP
    }
    if (machine.scored()) through_score(at, columns, y);
  }

  // The score program, and -inf where the mask hides.
  void hide(const Place &at, const Range &columns, bool masked, bool predicate, T *x) {
    const int64_t begin = columns.begin, end = columns.end;
    if (machine.scored()) machine.score_row(at, begin, end, x + begin);
    const int32_t i = int32_t(at.i);
    if (masked)
      for (int64_t n = begin; n < end; ++n) x[n] = first[n] <= i && i < last[n] ? x[n] : T(-INFINITY);
    if (predicate) machine.hide_row(at, begin, end, x + begin);
  }

  // dz becomes ds = dz · (dz / ds); before that the leaves take theirs.
  void through_score(const Place &at, const Range &columns, T *y) {
    machine.run_row(TW_SLOPES, at, columns.begin, columns.end);
    for (int n = 0; n < c.program.leaf_gradients && unit.keys; ++n)
      add_leaf_gradient<T>(machine, c.program.gradients[n], unit.group, at, columns.begin, columns.end, y);
    machine.slope_row(columns.begin, columns.end, y + columns.begin);
  }
};

}  // namespace tw::TW_ISA
