// few_queries.h's work for bf16 where products are made in tile registers: 4 to 16 rows, 32 keys at a time. K is read where it lies,
// since its rows are those of a tile already:
//
//   Sᵀ = K Qᵀ          tiles of 16 keys x 16 rows; Qᵀ is packed once, as pairs of depth
//   P  = e^(S - m)     a vector for each key, its lanes are the rows: m, l and the largest need no shuffle
//   acc = acc α + P V  tiles of 16 rows x 16 columns; P is transposed in registers, V packed as pairs of keys
//
// The time hardly depends on the rows, and of fewer rows dot products of vectors take less (docs/decisions.md#cpu-amx-tiles).
#pragma once
#include "few_queries.h"

namespace tw::TW_ISA {

#ifdef TW_TILE_REGISTERS
class FewQueriesTiled {
 public:
  static bool serves(const TwCall &c, const QueryItem &item) {
    return FewQueries<Bf16, float, Pair>::serves(c, item) && item.heads * (item.m1 - item.m0) >= kLeastRows;
  }

  FewQueriesTiled(const TwCall &c, const QueryItem &item, char *scratch) : FewQueriesTiled(c, item, Arena{scratch}) {}

  int64_t bytes;

  void run(const Partials &partials) {
    start();
    const int64_t begin = greater(ends.begin / W * W, item.n0);  // blocks that lie in one page
    at.place(begin, ends.end);
    const TileRegisters<Pair> registers;
    for (int64_t n0 = begin; n0 < ends.end; n0 += at.keys) step(n0, smaller(at.keys, ends.end - n0));
    finish_rows<Bf16, float>(c, s, item, partials, acc, wide, m, l);
  }

 private:
  static constexpr int64_t kLeastRows = 4;
  static constexpr int W = kLanes<float>, kTile = W * W, kKeys = 2 * W, kGroup = 4;  // rows; keys, tiles of columns at a time
  static constexpr int64_t kStep = StepKeys<Bf16>::kMost;

  FewQueriesTiled(const TwCall &c, const QueryItem &item, Arena arena)
      : c(c), item(item), s(sequence_of(c, item.b)), rows(item.heads * (item.m1 - item.m0)),
        depth(whole_tiles(elements<Pair>(c.head_dim))), wide(round_up(c.head_dim_v, 2 * W)),
        lines((greater(c.head_dim, c.head_dim_v) * int64_t(sizeof(Bf16)) + 63) / 64), ends(c, s, item, rows),
        at(c, item.b, item.head / (c.heads_q / c.heads_k), kKeys, arena) {
    q = arena.take<Pair>(depth * kTile), k = arena.take<Pair>(2 * depth * kTile);
    v = arena.take<Pair>(2 * kGroup * kTile), rounded = arena.take<Pair>(kStep / 2 * W);
    p = arena.take<float>(kStep * W), sums = arena.take<float>(kGroup * kTile), acc = arena.take<float>(W * wide);
    m = arena.take<float>(W), l = arena.take<float>(W);
    marks = arena.take<uint8_t>(kStep), zeros = arena.take<Bf16>(wide);
    bytes = arena.used;
  }

  const TwCall &c;
  const QueryItem &item;
  const Sequence s;
  const int64_t rows, depth, wide, lines;  // tiles of Q's depth; columns of acc; lines of a row
  const RowEnds<W> ends;
  StepKeys<Bf16> at;
  Pair *q, *k, *v, *rounded;
  float *p, *sums, *acc, *m, *l;
  uint8_t *marks;
  Bf16 *zeros;  // a row of V for keys that nobody sees

  void start() {
    for (int64_t n = 0; n < W; ++n) m[n] = -INFINITY, l[n] = 0;
    for (int64_t n = 0; n < W * wide; ++n) acc[n] = 0;
    for (int64_t n = 0; n < wide; ++n) zeros[n] = {};
    for (int64_t g = 0; g < W; ++g) {
      const int64_t real = g < rows ? elements<Pair>(c.head_dim) : 0;
      const Bf16 *row = g < rows ? row_of<Bf16>(c.q, s, s.row_q, item.query_of(g), item.head_of(g)) : nullptr;
      for (int64_t d = 0; d < depth * W; ++d) q[d * W + g] = d < real ? element<Pair>(row, d, c.head_dim) : 0;
    }
  }

  // Brings the rows of `count` keys of the next step closer, spread over a step: 8 of 32 keys while S is computed, 8 with P and 16
  // with P V. L1 has no room for them.
  TW_INLINE void fetch(int64_t first, int64_t count) const {
    for (int64_t n = first; n < first + count; ++n)
      for (int64_t line = 0; line < lines; ++line) {
        __builtin_prefetch((const char *)at.ahead_k[n] + line * 64, 0, 2);
        __builtin_prefetch((const char *)at.ahead_v[n] + line * 64, 0, 2);
      }
  }

  void step(int64_t n0, int64_t keys) {
    at.advance(n0 + keys, ends.end);
    const int64_t whole = round_up(keys, kKeys);
    for (int64_t n = 0; n < whole; n += kKeys) scores(n0, n, keys);
    float alpha[W];
    if (n0 < ends.all_from || n0 + whole > ends.all_to) softmax<false>(n0, whole, alpha);
    else softmax<true>(n0, whole, alpha);
    const uint8_t *seen = listed_seen(c, s, at.head_k, n0);
    if (!seen && c.block_table) seen = seen_by_rows(ends.lo, ends.hi, rows, n0, keys, marks);
    for (int64_t n = 0; n < whole; ++n)
      if (n >= keys || (seen && !seen[n])) at.v[n] = zeros;
    for (int64_t d = 0; d < wide; d += kGroup * W)
      if (wide - d > 2 * W) add_values<4>(whole, d, alpha);
      else add_values<2>(whole, d, alpha);
  }

  // 16 keys of a step as a tile reads them: as they lie, or copied where they lie apart, are too few or end within a tile.
  struct Block {
    const char *at;
    int64_t stride;
  };
  TW_INLINE Block block(int64_t n0, int64_t n, int64_t keys, Pair *copy) const {
    const bool together = !c.block_table || (n0 + n) % c.page_size + W <= c.page_size;
    if (together && n + W <= keys && c.head_dim % 32 == 0) return {(const char *)at.k[n], c.k.row * int64_t(sizeof(Bf16))};
    const int64_t row = depth * W;
    for (int64_t x = 0; x < W; ++x) {
      for (int64_t d = n + x < keys ? c.head_dim / 2 : 0; d < row; ++d) copy[x * row + d] = 0;
      if (n + x < keys) __builtin_memcpy(copy + x * row, at.k[n + x], size_t(c.head_dim) * 2);
    }
    return {(const char *)copy, row * int64_t(sizeof(Pair))};
  }

  // Sᵀ of 32 keys.
  void scores(int64_t n0, int64_t n, int64_t keys) {
    const Block low = block(n0, n, keys, k), high = block(n0, n + W, keys, k + depth * kTile);
    tiles::zero<0>(), tiles::zero<1>();
    for (int64_t d = 0; d < depth; ++d) {
      tiles::load<6>(q + d * kTile, 64);
      tiles::load<4>(low.at + d * 64, low.stride);
      tiles::dot<0, 4, 6>();
      tiles::load<5>(high.at + d * 64, high.stride);
      tiles::dot<1, 5, 6>();
    }
    tiles::store<0>(p + n * W, 64), tiles::store<1>(p + (n + W) * W, 64);
    fetch(n / 4, W / 2);
  }

  // S, hidden where a row does not see a key; its largest of each row.
  template <bool all>
  Vec<float> scaled_scores(int64_t n0, int64_t keys, Vec<float> before) {
    Vec<Int<float>> from{}, to{};
    for (int g = 0; g < W; ++g) {
      from[g] = int32_t(greater(ends.lo[g] - n0, 0));
      to[g] = int32_t(greater(smaller(ends.hi[g] - n0, keys), 0));
    }
    Vec<float> most[4] = {before, before, before, before};
    for (int64_t n = 0; n < keys; n += 4)
#pragma GCC unroll 4
      for (int x = 0; x < 4; ++x) {
        Vec<float> scores = load(p + (n + x) * W) * splat(float(c.softmax_scale));
        const Vec<Int<float>> key = Vec<Int<float>>{} + int32_t(n + x);
        if constexpr (!all) scores = (key >= from) & (key < to) ? scores : splat(-INFINITY);
        store(p + (n + x) * W, scores);
        most[x] = larger<float>(scores, most[x]);
      }
    return larger<float>(larger<float>(most[0], most[1]), larger<float>(most[2], most[3]));
  }

  template <bool all>
  void softmax(int64_t n0, int64_t keys, float *alpha) {
    const Vec<float> before = load(m), top = scaled_scores<all>(n0, keys, before), none = splat(-INFINITY);
    const Vec<float> shift = top == none ? Vec<float>{} : top;
    Vec<float> total{};
    for (int64_t n = 0; n < keys; n += kKeys) {
      Vec<Pair> pairs[W];
#pragma GCC unroll 16
      for (int x = 0; x < W; ++x) {
        const Vec<float> e = softmax_exp<float>(load(p + (n + 2 * x) * W) - shift);
        const Vec<float> f = softmax_exp<float>(load(p + (n + 2 * x + 1) * W) - shift);
        total += e + f;
        pairs[x] = interleaved((__m256i)_mm512_cvtneps_pbh((__m512)e), (__m256i)_mm512_cvtneps_pbh((__m512)f));
        if (x % 2) fetch(keys / 4 + n / 4 + x / 2, 1);
      }
      transpose<Pair>(pairs);
#pragma GCC unroll 16
      for (int g = 0; g < W; ++g) store(rounded + n / 2 * W + g * W, pairs[g]);
    }
    store(alpha, softmax_exp<float>(before - shift));
    store(l, load(l) * load(alpha) + total);
    store(m, top);
  }

  // acc = acc α + P V of `tiles` tiles of columns.
  template <int count>
  void add_values(int64_t keys, int64_t d, const float *alpha) {
    tiles::zero<0>(), tiles::zero<1>();
    if constexpr (count == 4) tiles::zero<2>(), tiles::zero<3>();
    pack_values<count>(keys, 0, d, v);
    for (int64_t n = 0; n < keys; n += kKeys) {
      const Pair *from = v + n / kKeys % 2 * kGroup * kTile;
      if (n + kKeys < keys) pack_values<count>(keys, n + kKeys, d, v + (n / kKeys + 1) % 2 * kGroup * kTile);
      tiles::load<4>(rounded + n / 2 * W, 64);
      tiles::load<5>(from, 64), tiles::dot<0, 4, 5>();
      tiles::load<6>(from + kTile, 64), tiles::dot<1, 4, 6>();
      if constexpr (count == 4) {
        tiles::load<5>(from + 2 * kTile, 64), tiles::dot<2, 4, 5>();
        tiles::load<6>(from + 3 * kTile, 64), tiles::dot<3, 4, 6>();
      }
    }
    tiles::store<0>(sums, 64), tiles::store<1>(sums + kTile, 64);
    if constexpr (count == 4) tiles::store<2>(sums + 2 * kTile, 64), tiles::store<3>(sums + 3 * kTile, 64);
    for (int64_t g = 0; g < rows; ++g)
      for (int x = 0; x < count; x += 2) {
        const Vec<float> a = load(sums + x * kTile + g * W), b = load(sums + (x + 1) * kTile + g * W);
        float *to = acc + g * wide + d + x * W;
        const Vec<Int<float>> low = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23}, high = low + 8;
        store(to, load(to) * splat(alpha[g]) + __builtin_shuffle(a, b, low));
        store(to + W, load(to + W) * splat(alpha[g]) + __builtin_shuffle(a, b, high));
      }
  }

  // V of 32 keys as pairs of keys. The columns of two tiles are those of 128-bit lanes, lower halves and higher halves.
  template <int count>
  TW_INLINE void pack_values(int64_t keys, int64_t n, int64_t d, Pair *out) const {
#pragma GCC unroll 2
    for (int y = 0; y < count; y += 2) {
      const int64_t left = c.head_dim_v - d - y * W;
      const __mmask32 real = left >= 2 * W ? ~0u : left <= 0 ? 0u : ~0u >> (2 * W - left);
      for (int x = 0; x < W; ++x) {
        const __m512i low = _mm512_maskz_loadu_epi16(real, at.v[n + 2 * x] + d + y * W);
        const __m512i high = _mm512_maskz_loadu_epi16(real, at.v[n + 2 * x + 1] + d + y * W);
        store(out + y * kTile + x * W, (Vec<Pair>)_mm512_unpacklo_epi16(low, high));
        store(out + (y + 1) * kTile + x * W, (Vec<Pair>)_mm512_unpackhi_epi16(low, high));
        if (!d && !y) fetch(keys / 2 + n / 2 + x, 1);
      }
    }
  }
};
#endif

}  // namespace tw::TW_ISA
