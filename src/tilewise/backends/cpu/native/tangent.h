// Forward mode (docs/algorithm.md#15-tangents-and-second-derivatives): one query tile against its keys, from the forward's lse.
//
//   S = Q Kᵀ   Ṡ = Q̇ Kᵀ + Q K̇ᵀ          6 rows x keys, in L1
//   P = e^(S - lse)   lsė += Σ P Ṡ   acc += (R ∘ P) V̇ + (R ∘ P ∘ Ṡ) V
//   Ȯ = acc - lsė O                       once at the end, with the sink's part of lsė
//
// A dot is a tangent. There is neither a maximum nor a rescaling. The products with a tangent that is zero are left out.
#pragma once
#include "forward.h"

namespace tw::TW_ISA {

// E: the inputs' element; T: the compute type; X: the products' element, T or Pair (product.h).
template <class E, class T, class X>
class Tangent : Forward<E, T, X> {
  using Base = Forward<E, T, X>;
  using Base::acc, Base::c, Base::D, Base::Dv, Base::entered, Base::factor, Base::head_k, Base::hi, Base::item, Base::k, Base::lo, Base::machine;
  using Base::p, Base::paired, Base::q, Base::queries, Base::rows, Base::s, Base::v, Base::wide;

 public:
  Tangent(const TwCall &c, const TwMoved &moved, const QueryItem &item, char *scratch) : Base(c, item, scratch), moved(moved) {
    const int64_t most = greater(c.tile_m * c.heads_per_item, 1);
    Arena arena{scratch, Base::bytes};
    mean = arena.take<T>(most);
    moved_q = arena.take<X>(most * elements<X>(D));
    moved_k = arena.take<X>(c.tile_n * elements<X>(D));
    moved_v = arena.take<X>(elements<X>(c.tile_n) * wide);
    ds = arena.take<T>(kRows<X> * c.tile_n);
    if constexpr (paired) pairs = arena.take<X>(kRows<X> * c.tile_n);
    bytes = arena.used;
  }

  int64_t bytes;

  void run() {
    const Range keys = Base::start();
    for (int64_t r = 0; r < rows; ++r) mean[r] = T(0);
    for (int64_t h = 0; moved.q.data && h < item.heads; ++h) {
      Rows<E> from{row_of<E>(moved.q, s, s.row_q, item.m0, item.head + h), moved.q.row, queries, nullptr};
      pack_rows<X, E>(from, queries, D, moved_q + h * queries * elements<X>(D));
    }
    Base::each_tile(keys, [&](int64_t n0, int64_t) { key_tile(n0); });
    finish();
  }

 private:
  const TwMoved &moved;
  T *mean, *ds;
  X *moved_q, *moved_k, *moved_v, *pairs;

  void key_tile(int64_t n0) {
    const int64_t width = smaller(c.tile_n, round_up(s.seqlen_k - n0, kPanelWidth<T>));
    pack_transposed<X, E>(key_rows<E>(c, c.k, s, head_k, n0), width, D, k);
    pack_panels<X, E>(key_rows<E>(c, c.v, s, head_k, n0), width, Dv, v);
    if (moved.k.data) pack_transposed<X, E>(key_rows<E>(c, moved.k, s, head_k, n0), width, D, moved_k);
    if (moved.v.data) pack_panels<X, E>(key_rows<E>(c, moved.v, s, head_k, n0), width, Dv, moved_v);
    entered = -1;
    const TileRegisters<X> registers;
    for (int64_t r = 0; r < rows; r += kRows<X>) row_block(n0, width, r, smaller(kRows<X>, rows - r));
  }

  void row_block(int64_t n0, int64_t width, int64_t r0, int64_t count) {
    const auto [begin, end] = Base::reach(n0, width, r0, count);
    if (begin >= end) return;
    const int64_t vectors = (end - begin) / kLanes<T>, depth = elements<X>(D);
    multiply<X, Form::plain, false>(count, vectors, depth, {q + r0 * depth, depth}, k + begin * depth, p + begin, c.tile_n,
                                    T(c.softmax_scale));
    for (int64_t n = 0; n < count * c.tile_n; ++n) ds[n] = T(0);
    if (moved.q.data)
      multiply<X, Form::plain, true>(count, vectors, depth, {moved_q + r0 * depth, depth}, k + begin * depth, ds + begin, c.tile_n);
    if (moved.k.data)
      multiply<X, Form::plain, true>(count, vectors, depth, {q + r0 * depth, depth}, moved_k + begin * depth, ds + begin, c.tile_n);
    for (int64_t n = 0; n < count; ++n) tangent_row(n0, begin, end, r0 + n, p + n * c.tile_n, ds + n * c.tile_n);
    if (moved.v.data) Base::add_product(width, begin, end, r0, count, p, pairs, moved_v);
    Base::add_product(width, begin, end, r0, count, ds, pairs, v);
  }

  // S becomes R ∘ P, the products of tangents R ∘ P ∘ Ṡ; lse's tangent follows.
  void tangent_row(int64_t n0, int64_t begin, int64_t end, int64_t row, T *x, T *y) {
    const T scale = T(c.softmax_scale);
    for (int64_t n = begin; n < end; ++n) y[n] *= scale;
    if (machine.scored()) __builtin_memcpy(machine.template at<T>(moved.raw) + begin, y + begin, (end - begin) * sizeof(T));
    if (c.program.score >= 0 || c.program.keep >= 0) Base::scores_row(n0, begin, end, row, x);
    if (machine.scored()) {
      machine.run_row(TW_SLOPES, Base::place(n0, row), begin, end);
      __builtin_memcpy(y + begin, machine.template at<T>(c.program.slope) + begin, (end - begin) * sizeof(T));
    }
    const int64_t from = greater(lo[row] - n0, begin), to = smaller(hi[row] - n0, end);
    const T lse = statistic<T>(c, c.lse, s, item.head_of(row))[item.query_of(row)];
    const T shift = lse == T(-INFINITY) ? T(INFINITY) : lse;  // of a row that sees no key every P is 0
    for (int64_t n = begin; n < smaller(from, end); ++n) x[n] = T(-INFINITY);
    for (int64_t n = greater(to, begin); n < end; ++n) x[n] = T(-INFINITY);
    Vec<T> total[kPanel] = {};
    for (int64_t n = begin; n < end; n += kPanelWidth<T>)
#pragma GCC unroll 4
      for (int v = 0; v < kPanel; ++v) {
        T *at = x + n + v * kLanes<T>, *moving = y + n + v * kLanes<T>;
        const Vec<T> e = softmax_exp<T>(load(at) - splat(shift)), product = e == splat(T(0)) ? splat(T(0)) : e * load(moving);
        total[v] += product, store(at, e), store(moving, product);
      }
    for (int v = 1; v < kPanel; ++v) total[0] += total[v];
    mean[row] += sum_lanes<T>(total[0]);
    if (c.keep_below) {
      Dropout{c}.row(Base::place(n0, row), begin, end, factor);
      for (int64_t n = begin; n < end; ++n) x[n] *= factor[n], y[n] *= factor[n];
    }
  }

  void finish() {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t head = item.head_of(r), i = item.query_of(r);
      const T lse = statistic<T>(c, c.lse, s, head)[i];
      if (c.sink && moved.sink && lse > T(-INFINITY)) mean[r] += std::exp(((const T *)c.sink)[head] - lse) * ((const T *)moved.sink)[head];
      const E *o = row_of<E>(c.o, s, s.row_q, i, head);
      E *out = row_of<E>(moved.o, s, s.row_q, i, head);
      for (int64_t d = 0; d < Dv; ++d) narrow(acc[r * wide + d] - mean[r] * T(widen(o[d])), out + d);
      statistic<T>(c, moved.lse, s, head)[i] = mean[r];
    }
  }
};

}  // namespace tw::TW_ISA
