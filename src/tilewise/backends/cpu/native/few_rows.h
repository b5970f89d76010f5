// forward.h's work for 16 rows or fewer that have its tiles and its order of sums: decoding with deterministic="everywhere" or with
// scores, and in tile registers, whose time hardly depends on rows, of four or more. Packing a tile would take longer than its products, so K and V are read where they lie, and what comes next is fetched:
//
//   S        16 x 16 elements of K, transposed in registers, and each row's sums of 16 keys; in tile registers Sᵀ = K Qᵀ
//   P, m, l  forward.h's
//   acc      += P V from rows of V; in tile registers from 32 of them as pairs of keys
//
// Each number is the sum of the same terms in the same order as in forward.h (docs/algorithm.md#16-one-order-of-a-rows-sums);
// docs/decisions.md#cpu-few-rows, #cpu-amx-tiles have the figures.
#pragma once
#include "forward.h"

namespace tw::TW_ISA {

template <class E, class T, class X>
class FewRows : Forward<E, T, X> {
  using Base = Forward<E, T, X>;
  using Base::acc, Base::c, Base::D, Base::item, Base::p, Base::paired, Base::places, Base::q, Base::rounded, Base::rows;
  using Base::s, Base::wide;

 public:
  static bool serves(const TwCall &c, const QueryItem &item, const KeyTiles &packed) {
    const bool whole = c.head_dim % (numbers * W) == 0 && c.head_dim_v % (numbers * W) == 0;
    return whole && item.heads * (item.m1 - item.m0) <= kMost && !packed.memory;
  }

  FewRows(const TwCall &c, const QueryItem &item, char *scratch) : Base(c, item, scratch), depth(elements<X>(c.head_dim)) {
    Arena arena{scratch, Base::bytes};
    p = arena.take<T>(kMost * c.tile_n), acc = arena.take<T>(kMost * wide), zeros = arena.take<E>(wide);
    if constexpr (paired) rounded = arena.take<X>(kMost * c.tile_n / 2);
    if constexpr (kTiled<X>) turned = arena.take<X>(depth * W), copy = arena.take<X>(greater(depth, 4 * W) * W);
    bytes = arena.used;
  }

  int64_t bytes;

  void run(const Partials &partials) {
    const Range keys = Base::start();
    for (int64_t n = rows * wide; n < kMost * wide; ++n) acc[n] = T(0);  // tile registers have 16 rows
    for (int64_t d = 0; d < wide; ++d) zeros[d] = E{};
    if constexpr (kTiled<X>)
      for (int64_t d = 0; d < depth; ++d)
        for (int64_t r = 0; r < W; ++r) turned[d * W + r] = r < rows ? q[r * depth + d] : X(0);
    Base::each_tile(keys, [&](int64_t n0, int64_t) { key_tile(n0); });
    finish_rows<E, T>(c, s, item, partials, acc, wide, Base::m, Base::l);
  }

 private:
  static constexpr int W = kLanes<T>, numbers = paired ? 2 : 1;
  static constexpr int64_t kMost = 16;

  const int64_t depth;
  E *zeros;  // a row of V for keys that nobody sees
  X *turned, *copy;  // Qᵀ; 16 rows of K, or 32 of V as pairs of keys

  void key_tile(int64_t n0) {
    const int64_t width = PackedKeys<E, T, X>::width_of(c, s, n0);
    const auto [begin, end] = Base::reach(n0, width, 0, rows);
    if (begin >= end) return;
    const Rows<E> keys = Base::rows_at(c.k, n0, places[0]), values = Base::rows_at(c.v, n0, places[1]);
    const TileRegisters<X> registers;
    Base::entered = -1;
    for (int64_t n = begin; n < end; n += W) scores(keys, n);
    for (int64_t r = 0; r < rows; ++r) Base::softmax_row(n0, begin, end, r, p + r * c.tile_n);
    const Range deep = Base::template reach<kDeep<X>>(n0, width, 0, rows);
    const int64_t first = greater(deep.begin, begin), last = smaller(deep.end, end);
    const Operand<X> a = Base::weights(first, last, rows, p, rounded);
    int64_t d = 0;
    for (; d + 4 * W <= wide; d += 4 * W) add_values<4>(values, first, last, a, d);
    for (; d < wide; d += numbers * W) add_values<numbers>(values, first, last, a, d);
  }

  // S of the W keys from n on, in chains of as many terms as product.h's.
  void scores(const Rows<E> &keys, int64_t n) {
    const int64_t chain = kTiled<X> ? depth : kChain;
    for (int64_t begin = 0; begin < depth; begin += chain) {
      const int64_t end = smaller(begin + chain, depth);
      T sums[kMost * W] = {};
      if constexpr (kTiled<X>) tile_scores(keys, n, sums);
      else add_chain(keys, n, begin, end, sums);
      for (int64_t r = 0; r < rows; ++r) {
        T *at = p + r * c.tile_n + n;
        const Vec<T> total = begin ? load(at) + load(sums + r * W) : load(sums + r * W);
        store(at, end == depth ? total * splat(T(c.softmax_scale)) : total);
      }
    }
  }

  void add_chain(const Rows<E> &keys, int64_t n, int64_t begin, int64_t end, T *sums) {
    const E *from[W];
    for (int k = 0; k < W; ++k) from[k] = keys.row(n + k);
    for (int64_t d = begin; d < end; d += W) {
      fetch(keys, n + W, n + 2 * W, d * numbers, (d + W) * numbers);
      Vec<X> block[W];
#pragma GCC unroll 16
      for (int k = 0; k < W; ++k) block[k] = from[k] ? element_vector<X>(from[k], d) : Vec<X>{};
      transpose<X>(block);
      int64_t r = 0;
      for (; r + 4 <= rows; r += 4) add_depth<4>(block, q + r * depth + d, sums + r * W);
      for (; r < rows; ++r) add_depth<1>(block, q + r * depth + d, sums + r * W);
    }
  }

  static TW_INLINE void fetch(const Rows<E> &of, int64_t begin, int64_t end, int64_t from, int64_t to) {
    for (int64_t n = begin; n < smaller(end, of.count); ++n) of.fetch(n, from, to);
  }

  template <int MR>
  TW_INLINE void add_depth(const Vec<X> *block, const X *x, T *sums) const {
    Vec<T> sum[MR];
    for (int m = 0; m < MR; ++m) sum[m] = load(sums + m * W);
#pragma GCC unroll 16
    for (int k = 0; k < W; ++k)
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m) sum[m] = multiply_add<X>(sum[m], splat(x[m * depth + k]), block[k]);
    for (int m = 0; m < MR; ++m) store(sums + m * W, sum[m]);
  }

  // acc += P V of NV vectors of columns from d on and the keys [first, last) of a tile.
  template <int NV>
  void add_values(const Rows<E> &values, int64_t first, int64_t last, Operand<X> a, int64_t d) {
    if constexpr (kTiled<X>) return tile_values<NV>(values, first, last, a, d);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) value_rows<4, NV>(values, first, last, a, d, r);
    for (; r < rows; ++r) value_rows<1, NV>(values, first, last, a, d, r);
  }

  template <int MR, int NV>
  void value_rows(const Rows<E> &values, int64_t first, int64_t last, Operand<X> a, int64_t d, int64_t r) {
    Vec<T> sum[MR][NV] = {};
    const X *weight = a.data + r * a.ld;
    for (int64_t n = first; n < last; n += numbers, ++weight) {
      if (!r) fetch(values, n + kFetchAhead, n + kFetchAhead + numbers, d, d + NV * W);
      Vec<X> row[NV];
      read_values<NV>(values, n, d, row);
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int x = 0; x < NV; ++x) sum[m][x] = multiply_add<X>(sum[m][x], splat(weight[m * a.ld]), row[x]);
    }
    for (int m = 0; m < MR; ++m)
      for (int x = 0; x < NV; ++x) {
        T *at = acc + (r + m) * wide + d + x * W;
        store(at, load(at) + sum[m][x]);
      }
  }

  // NV vectors of V of key n, or of keys n and n + 1 as pairs.
  template <int NV>
  TW_INLINE void read_values(const Rows<E> &values, int64_t n, int64_t d, Vec<X> *row) const {
    const E *low = values.row(n), *high = paired ? values.row(n + 1) : nullptr;
    low = low ? low + d : zeros, high = high ? high + d : zeros;
#pragma GCC unroll 4
    for (int x = 0; x < NV; x += numbers) {
      if constexpr (!paired) row[x] = load_wide<T>(low + x * W);
#ifdef __AVX512BF16__
      else interleave(low + x * W, high + x * W, row + x);
#endif
    }
  }

#ifdef TW_TILE_REGISTERS
  // The tile's rows are keys as they lie, or copied where they lie apart or nobody sees one.
  void tile_scores(const Rows<E> &keys, int64_t n, float *sums) {
    const char *at = (const char *)keys.row(n);
    int64_t line = (keys.at ? c.k.row : keys.stride) * int64_t(sizeof(E));
    bool lies = true;
    for (int64_t k = 0; k < W; ++k) lies = lies && keys.row(n + k) && (const char *)keys.row(n + k) == at + k * line;
    for (int64_t k = 0; !lies && k < W; ++k) {
      const E *row = keys.row(n + k);
      for (int64_t d = 0; d < depth; ++d) copy[k * depth + d] = row ? element<X>(row, d, D) : X(0);
    }
    if (!lies) at = (const char *)copy, line = depth * int64_t(sizeof(X));
    tiles::zero<0>();
    for (int64_t d = 0; d < depth; d += W) {
      fetch(keys, n + W, n + 2 * W, 2 * d, 2 * (d + W));
      tiles::load<4>(at + d * 4, line), tiles::load<5>(turned + d * W, 64), tiles::dot<0, 4, 5>();
    }
    tiles::store<0>(sums, 64);
    Vec<float> block[W];
    for (int k = 0; k < W; ++k) block[k] = load(sums + k * W);
    transpose<float>(block);
    for (int k = 0; k < W; ++k) store(sums + k * W, block[k]);
  }

  template <int NV>
  void tile_values(const Rows<E> &values, int64_t first, int64_t last, Operand<X> a, int64_t d) {
    constexpr int kTile = W * W;
    const int64_t line = wide * int64_t(sizeof(T));
    float *to = acc + d;
    tiles::load<0>(to, line), tiles::load<1>(to + W, line);
    if constexpr (NV > 2) tiles::load<2>(to + 2 * W, line), tiles::load<3>(to + 3 * W, line);
    for (int64_t n = first; n < last; n += 2 * W) {
      for (int x = 0; x < W; ++x) {
        Vec<X> row[NV];
        fetch(values, n + 2 * (x + W), n + 2 * (x + W) + 2, d, d + NV * W);
        read_values<NV>(values, n + 2 * x, d, row);
        for (int y = 0; y < NV; ++y) store(copy + y * kTile + x * W, row[y]);
      }
      tiles::load<4>(a.data + (n - first) / 2, a.ld * int64_t(sizeof(X)));
      tiles::load<5>(copy, 64), tiles::dot<0, 4, 5>();
      tiles::load<6>(copy + kTile, 64), tiles::dot<1, 4, 6>();
      if constexpr (NV > 2) {
        tiles::load<5>(copy + 2 * kTile, 64), tiles::dot<2, 4, 5>();
        tiles::load<6>(copy + 3 * kTile, 64), tiles::dot<3, 4, 6>();
      }
    }
    tiles::store<0>(to, line), tiles::store<1>(to + W, line);
    if constexpr (NV > 2) tiles::store<2>(to + 2 * W, line), tiles::store<3>(to + 3 * W, line);
  }
#endif
};

}  // namespace tw::TW_ISA
