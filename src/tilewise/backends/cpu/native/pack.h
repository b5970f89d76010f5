// Tiles of q, k, v and dO, copied from the user's strides into the order in which product.h reads them: as numbers of the
// compute type or as pairs of bf16, padded with zeros to whole vectors, and zero where a key is seen by no query.
#pragma once
#include "product.h"

namespace tw::TW_ISA {

// A tile of rows of a tensor, `stride` apart, or each where `at` says (keys in pages), from `column` on. Rows from `count` on do
// not exist; rows that `seen` (null: all) marks 0 read as zeros. Of `cold` rows, which no cache holds, some are fetched ahead of
// the one that is packed.
template <class E>
struct Rows {
  const E *data;
  int64_t stride, count;
  const uint8_t *seen;
  const E *const *at = nullptr;
  int64_t column = 0;
  bool cold = false;
  TW_INLINE const E *place(int64_t n) const { return (at ? at[n] : data + n * stride) + column; }
  TW_INLINE const E *row(int64_t n) const { return n < count && (!seen || seen[n]) ? place(n) : nullptr; }

  // Brings the numbers [d, end) of row n closer.
  TW_INLINE void fetch(int64_t n, int64_t d, int64_t end) const {
    for (; d < end; d += 64 / int64_t(sizeof(E))) __builtin_prefetch(place(n) + d, 0, 3);
  }
  TW_INLINE void fetch_if_cold(int64_t n, int64_t d, int64_t end) const {
    if (cold && n < count) fetch(n, d, end);
  }
};

// How many rows ahead of the one that is packed a cold one is fetched (docs/decisions.md#cpu-packed-once).
constexpr int64_t kFetchAhead = 8;

// Rows [begin, end) of a tile that is packed next, brought closer while another is in use: the hardware's own prefetcher
// stops at each page, and two rows of 8 heads fill one (docs/decisions.md#cpu-prefetch-next-tile).
template <class E>
TW_INLINE void prefetch_rows(const Rows<E> &in, int64_t begin, int64_t end, int64_t width) {
  for (int64_t n = begin; n < end; ++n) in.fetch(n, 0, width);
}

// How many elements X hold `numbers` numbers of a depth.
template <class X>
TW_INLINE int64_t elements(int64_t numbers) {
  return __is_same(X, Pair) ? (numbers + 1) / 2 : numbers;
}

// Element d of a row of `width` numbers: one number, or the pair (2d, 2d + 1).
template <class X, class E>
TW_INLINE X element(const E *row, int64_t d, int64_t width) {
  if constexpr (__is_same(X, Pair)) return uint32_t(row[2 * d].bits) | (2 * d + 1 < width ? uint32_t(row[2 * d + 1].bits) << 16 : 0);
  else return X(widen(row[d]));
}
template <class X, class E>
TW_INLINE Vec<X> element_vector(const E *row, int64_t d) {
  if constexpr (__is_same(X, Pair)) return load<Pair>((const Pair *)(row + 2 * d));
  else return load_wide<X>(row + d);
}

// out[row][column], ld apart; columns from `width` up to `padded` become 0.
template <class T, class E>
void pack_plain(const Rows<E> &in, int64_t rows, int64_t width, int64_t padded, T *out, int64_t ld) {
  constexpr int W = kLanes<T>;
  for (int64_t n = 0; n < rows; ++n, out += ld) {
    in.fetch_if_cold(n + kFetchAhead, 0, width);
    const E *from = in.row(n);
    int64_t d = 0;
    if (from) {
      for (; d + W <= width; d += W) store(out + d, load_wide<T>(from + d));
      for (; d < width; ++d) out[d] = T(widen(from[d]));
    }
    for (; d < padded; ++d) out[d] = T(0);
  }
}

// A of a product whose depth is the columns: out[row][element].
template <class X, class E>
void pack_rows(const Rows<E> &in, int64_t rows, int64_t width, X *out) {
  const int64_t depth = elements<X>(width);
  if constexpr (__is_same(X, Pair)) {
    for (int64_t n = 0; n < rows; ++n, out += depth) {
      in.fetch_if_cold(n + kFetchAhead, 0, width);
      if (width % 2) out[depth - 1] = 0;
      __builtin_memcpy(out, in.data + n * in.stride, size_t(width) * 2);
    }
  } else {
    pack_plain<X, E>(in, rows, width, width, out, depth);
  }
}

#ifdef __AVX512BF16__
// One bf16 of each of two rows as pairs.
TW_INLINE Vec<Pair> interleaved(__m256i low, __m256i high) {
  return (Vec<Pair>)_mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

// Element n of row x beside element n of row y, for 32 elements: the first 16 pairs, and the others.
struct Interleaving {
  alignas(64) uint16_t low[32], high[32];
  constexpr Interleaving() : low(), high() {
    for (int n = 0; n < 32; ++n) low[n] = uint16_t(n / 2 + n % 2 * 32), high[n] = uint16_t(low[n] + 16);
  }
};
constexpr Interleaving kInterleaving{};

// 32 bf16 of each of two rows as two vectors of pairs.
TW_INLINE void interleave(const Bf16 *a, const Bf16 *b, Vec<Pair> *out) {
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  out[0] = (Vec<Pair>)_mm512_permutex2var_epi16(x, _mm512_load_si512(kInterleaving.low), y);
  out[1] = (Vec<Pair>)_mm512_permutex2var_epi16(x, _mm512_load_si512(kInterleaving.high), y);
}
#endif

// out[row / 2][column]: pairs of neighbouring rows; an odd last row is paired with zeros.
template <class E>
void pack_row_pairs(const Rows<E> &in, int64_t rows, int64_t width, int64_t padded, Pair *out) {
  for (int64_t n = 0; n < rows; n += 2, out += padded) {
    in.fetch_if_cold(n + kFetchAhead, 0, width), in.fetch_if_cold(n + kFetchAhead + 1, 0, width);
    const E *low = in.row(n), *high = n + 1 < rows ? in.row(n + 1) : nullptr;
    int64_t d = 0;
#ifdef __AVX512BF16__
    for (; d + 16 <= width; d += 16) {
      const __m256i zero = _mm256_setzero_si256();
      store(out + d, interleaved(low ? _mm256_loadu_si256((const __m256i *)(low + d)) : zero,
                                 high ? _mm256_loadu_si256((const __m256i *)(high + d)) : zero));
    }
#endif
    for (; d < width; ++d) out[d] = (low ? low[d].bits : 0) | uint32_t(high ? high[d].bits : 0) << 16;
    for (; d < padded; ++d) out[d] = 0;
  }
}

// Panels [panel][row][width of panel]: B of a product whose depth is the rows.
template <class X, class E>
void pack_panels(const Rows<E> &in, int64_t rows, int64_t width, X *out) {
  constexpr int W = kLanes<X>;
  const int64_t vectors = (width + W - 1) / W;
  for (int64_t v = 0; v < vectors; v += kPanel) {
    const int64_t columns = (vectors - v < kPanel ? vectors - v : kPanel) * W;
    const int64_t real = width - v * W < columns ? width - v * W : columns;
    Rows<E> part = in;
    part.column = v * W;
    if constexpr (__is_same(X, Pair)) pack_row_pairs<E>(part, rows, real, columns, out);
    else pack_plain<X, E>(part, rows, real, columns, out, columns);
    out += elements<X>(rows) * columns;
  }
}

// Panels [panel][element][width of panel] of the transposed tile: B of a product whose depth is the columns. `rows` is a
// multiple of a vector's lanes.
template <class X, class E>
void pack_transposed(const Rows<E> &in, int64_t rows, int64_t width, X *out) {
  constexpr int W = kLanes<X>, P = kPanelWidth<X>;
  constexpr int64_t numbers = __is_same(X, Pair) ? 2 : 1;
  const int64_t depth = elements<X>(width), whole = width / numbers;
  for (int64_t n = 0; n < rows; n += W) {
    const int64_t first = n / P * P, ld = rows - first < P ? rows - first : P;
    X *column = out + first * depth + n % P;
    const E *from[W];
    for (int r = 0; r < W; ++r) from[r] = in.row(n + r);
    int64_t d = 0;
    for (; d + W <= whole; d += W) {
      for (int r = 0; r < W; ++r) in.fetch_if_cold(n + W + r, d * numbers, (d + W) * numbers);
      Vec<X> block[W];
#pragma GCC unroll 16
      for (int r = 0; r < W; ++r) block[r] = from[r] ? element_vector<X>(from[r], d) : Vec<X>{};
      transpose<X>(block);
#pragma GCC unroll 16
      for (int r = 0; r < W; ++r) store(column + (d + r) * ld, block[r]);
    }
    for (; d < depth; ++d)
      for (int r = 0; r < W; ++r) column[d * ld + r] = from[r] ? element<X>(from[r], d, width) : X(0);
  }
}

#ifdef __AVX512BF16__
// -- P and dS, rounded to bf16 for the next product ------------------------------------------------------------------

// Neighbouring columns [begin, end) of a row as pairs, where the row's pair 0 is at `out`; zeros fill the last vector.
TW_INLINE void round_row(const float *x, int64_t begin, int64_t end, Pair *out) {
  for (int64_t n = begin; n < end; n += 32)
    store(out + n / 2, (Vec<Pair>)_mm512_cvtne2ps_pbh(n + 16 < end ? load(x + n + 16) : Vec<float>{}, load(x + n)));
}

// Two rows as pairs of neighbouring rows.
TW_INLINE void round_rows(const float *low, const float *high, int64_t begin, int64_t end, Pair *out) {
  for (int64_t n = begin; n < end; n += 16)
    store(out + n, interleaved((__m256i)_mm512_cvtneps_pbh(load(low + n)), (__m256i)_mm512_cvtneps_pbh(load(high + n))));
}
#endif

}  // namespace tw::TW_ISA
