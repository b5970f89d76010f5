// product.h's products of pairs in tile registers: a block of C is 32 x 32 in four of them, and each step of 16 pairs loads
// two tiles of A and two of B for four products. C's sums start from what is there, so that a chain has a term for 32.
// Why 2 x 2 tiles: docs/decisions.md#cpu-amx-tiles.
//
//              B: tmm6   tmm7       [pair][column], as pack.h's panels hold it
//   A: tmm4   C: tmm0   tmm1        rows of A as they lie, or, where a tile is cut off or transposed, from a strip of 32 rows
//      tmm5      tmm2   tmm3        that is padded with zeros
#pragma once
#include "tile_registers.h"

namespace tw::TW_ISA {

constexpr int64_t kStripPairs = 128;

struct Strip {
  alignas(64) Pair a[kRows<Pair>][kStripPairs];
  alignas(64) Pair b[2][tiles::kSide][tiles::kSide];    // the last tiles of B, where the depth is no multiple of 16
  alignas(64) float c[2][tiles::kSide][tiles::kSide];   // the last row of tiles of C, where the rows are none
};

TW_INLINE int64_t whole_tiles(int64_t n) { return (n + tiles::kSide - 1) / tiles::kSide; }

// Rows [0, rows) and pairs [0, pairs) of A, zeros up to whole tiles.
inline void fill_plain(Operand<Pair> a, int64_t rows, int64_t pairs, Strip &strip) {
  const int64_t padded = whole_tiles(pairs) * tiles::kSide;
  for (int64_t m = 0; m < whole_tiles(rows) * tiles::kSide; ++m)
    for (int64_t k = 0; k < padded; ++k) strip.a[m][k] = m < rows && k < pairs ? a.data[m * a.ld + k] : 0;
}

// The same of a transposed A, whose rows are whole tiles.
inline void fill_transposed(Operand<Pair> a, int64_t rows, int64_t pairs, Strip &strip) {
  constexpr int W = tiles::kSide;
  for (int64_t m = 0; m < rows; m += W)
    for (int64_t k = 0; k < pairs; k += W) {
      Vec<Pair> block[W];
#pragma GCC unroll 16
      for (int n = 0; n < W; ++n) block[n] = k + n < pairs ? load(a.data + (k + n) * a.ld + m) : Vec<Pair>{};
      transpose<Pair>(block);
#pragma GCC unroll 16
      for (int n = 0; n < W; ++n) store(&strip.a[m + n][k], block[n]);
    }
}

// One block: `MT` x `NT` tiles of C, the last row of them with `last` rows. A's tiles are whole; B's are, but for the last step.
template <int MT, int NT>
void tile_block(Operand<Pair> a, const Pair *b, int64_t ldb, int64_t pairs, bool keep, int64_t last, float *c, int64_t ldc,
                Strip &strip) {
  constexpr int W = tiles::kSide;
  const int64_t line = ldc * int64_t(sizeof(float));
  const bool cut = last < W;
  float *bottom = cut ? &strip.c[0][0][0] : c + (MT - 1) * W * ldc;
  const int64_t bottom_line = cut ? W * int64_t(sizeof(float)) : line, next = cut ? W * W : W;
  if (cut && keep)
    for (int64_t m = 0; m < last; ++m)
      for (int n = 0; n < NT; ++n) store(&strip.c[n][m][0], load(c + ((MT - 1) * W + m) * ldc + n * W));
  if (keep) {
    if constexpr (MT > 1) {
      tiles::load<0>(c, line);
      if constexpr (NT > 1) tiles::load<1>(c + W, line);
    }
    tiles::load<2>(bottom, bottom_line);
    if constexpr (NT > 1) tiles::load<3>(bottom + next, bottom_line);
  } else {
    tiles::zero<0>(), tiles::zero<1>(), tiles::zero<2>(), tiles::zero<3>();
  }
  for (int64_t k = 0; k < pairs; k += W) {
    const Pair *from = b + k * ldb;
    int64_t b_line = ldb * int64_t(sizeof(Pair)), b_next = W;
    if (pairs - k < W) {
      for (int64_t n = 0; n < NT; ++n)
        for (int64_t r = 0; r < W; ++r)
          store(&strip.b[n][r][0], k + r < pairs ? load(from + r * ldb + n * W) : Vec<Pair>{});
      from = &strip.b[0][0][0], b_line = W * sizeof(Pair), b_next = W * W;
    }
    const int64_t a_line = a.ld * int64_t(sizeof(Pair));
    tiles::load<6>(from, b_line);
    if constexpr (NT > 1) tiles::load<7>(from + b_next, b_line);
    if constexpr (MT > 1) {
      tiles::load<4>(a.data + k, a_line);
      tiles::dot<0, 4, 6>();
      if constexpr (NT > 1) tiles::dot<1, 4, 7>();
    }
    tiles::load<5>(a.data + (MT - 1) * W * a.ld + k, a_line);
    tiles::dot<2, 5, 6>();
    if constexpr (NT > 1) tiles::dot<3, 5, 7>();
  }
  if constexpr (MT > 1) {
    tiles::store<0>(c, line);
    if constexpr (NT > 1) tiles::store<1>(c + W, line);
  }
  tiles::store<2>(bottom, bottom_line);
  if constexpr (NT > 1) tiles::store<3>(bottom + next, bottom_line);
  if (cut)
    for (int64_t m = 0; m < last; ++m)
      for (int n = 0; n < NT; ++n) store(c + ((MT - 1) * W + m) * ldc + n * W, load(&strip.c[n][m][0]));
}

// A strip of at most 32 rows and kStripPairs pairs against a panel of B.
inline void tile_strip(Operand<Pair> a, int64_t rows, int64_t pairs, const Pair *b, int64_t vectors, bool keep, float *c,
                       int64_t ldc, Strip &strip) {
  constexpr int W = tiles::kSide;
  const int64_t last = rows - (whole_tiles(rows) - 1) * W, ldb = vectors * W;
  for (int64_t n = 0; n < vectors; n += 2, b += 2 * W, c += 2 * W) {
    const bool tall = rows > W, wide = vectors - n > 1;
    if (tall && wide) tile_block<2, 2>(a, b, ldb, pairs, keep, last, c, ldc, strip);
    if (tall && !wide) tile_block<2, 1>(a, b, ldb, pairs, keep, last, c, ldc, strip);
    if (!tall && wide) tile_block<1, 2>(a, b, ldb, pairs, keep, last, c, ldc, strip);
    if (!tall && !wide) tile_block<1, 1>(a, b, ldb, pairs, keep, last, c, ldc, strip);
  }
}

// As multiply() in product.h.
template <Form form, bool accumulate>
void multiply_tiles(int64_t rows, int64_t vectors, int64_t depth, Operand<Pair> a, const Pair *b, float *c, int64_t ldc,
                    float scale) {
  constexpr int W = tiles::kSide;
  Strip strip;
  for (int64_t m = 0; m < rows; m += kRows<Pair>) {
    const int64_t count = rows - m < kRows<Pair> ? rows - m : kRows<Pair>;
    for (int64_t k = 0; k < depth; k += kStripPairs) {
      const int64_t pairs = depth - k < kStripPairs ? depth - k : kStripPairs;
      Operand<Pair> lies{a.data + (form == Form::plain ? m * a.ld + k : k * a.ld + m), a.ld};
      if (form == Form::transposed) fill_transposed(lies, count, pairs, strip);
      else if (count % W || pairs % W) fill_plain(lies, count, pairs, strip);
      if (form == Form::transposed || count % W || pairs % W) lies = {&strip.a[0][0], kStripPairs};
      for (int64_t v = 0; v < vectors; v += kPanel) {
        const int64_t panel = vectors - v < kPanel ? vectors - v : kPanel;
        tile_strip(lies, count, pairs, b + v * W * depth + k * panel * W, panel, accumulate || k, c + m * ldc + v * W, ldc,
                   strip);
      }
    }
    if (!accumulate && scale != 1)
      for (int64_t r = m; r < m + count; ++r)
        for (int64_t v = 0; v < vectors; ++v) store(c + r * ldc + v * W, load(c + r * ldc + v * W) * splat(scale));
  }
}

}  // namespace tw::TW_ISA
