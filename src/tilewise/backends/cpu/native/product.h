// Products of packed tiles: C (=|+=) A B with the block of C held in registers.
//
// An element X of A and B is one number, or a Pair: two bf16 of neighbouring depth, which one instruction multiplies
// and adds to a float (docs/decisions.md#cpu-bf16-pairs). The shapes below count elements, so that a product of pairs is
// half as deep.
//
//            B: panels of up to kPanel vectors, each [depth][width]
//   A        +-----------+
//   +---+    | one panel |        6 rows x 4 vectors of 16 floats = 24 of AVX-512's 32 registers; each step of the
//   | 6 | -> |  6 x 64   |        depth takes 4 loads of B, 6 broadcasts of A and 24 multiply-adds
//   +---+    +-----------+
//
// Where the instruction set has tile registers, products of pairs are made there (tile_product.h).
#pragma once
#include "tile_product.h"

namespace tw::TW_ISA {

template <class X>
TW_INLINE Vec<Sum<X>> multiply_add(Vec<Sum<X>> sum, Vec<X> x, Vec<X> y) {
#ifdef __AVX512BF16__
  if constexpr (__is_same(X, Pair)) return (Vec<float>)_mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
  else
#endif
    return sum + x * y;
}

// The most terms of one sum in registers; its total then joins C. Two short chains of additions round less than a long one
// (docs/decisions.md#cpu-short-sums).
constexpr int64_t kChain = 256;

template <class X, int MR, int NV, Form form, bool accumulate>
TW_INLINE void micro(Operand<X> a, const X *b, int64_t depth, Sum<X> *c, int64_t ldc, Sum<X> scale) {
  using T = Sum<X>;
  constexpr int W = kLanes<T>;
  for (int64_t begin = 0; begin < depth; begin += kChain) {
    Vec<T> sum[MR][NV] = {};
    const int64_t end = begin + kChain < depth ? begin + kChain : depth;
    for (int64_t p = begin; p < end; ++p, b += NV * W) {
      Vec<X> row[NV];
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) row[n] = load(b + n * W);
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m) {
        Vec<X> x = splat(form == Form::plain ? a.data[m * a.ld + p] : a.data[p * a.ld + m]);
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) sum[m][n] = multiply_add<X>(sum[m][n], x, row[n]);
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) {
        T *at = c + m * ldc + n * W;
        const Vec<T> total = accumulate || begin ? load(at) + sum[m][n] : sum[m][n];
        store(at, !accumulate && end == depth ? total * splat(scale) : total);
      }
  }
}

template <class X, int NV, Form form, bool accumulate>
void panel(int64_t rows, Operand<X> a, const X *b, int64_t depth, Sum<X> *c, int64_t ldc, Sum<X> scale) {
  const int64_t step = form == Form::plain ? a.ld : 1;
  int64_t m = 0;
  auto at = [&](int64_t row) { return Operand<X>{a.data + row * step, a.ld}; };
  if constexpr (NV == 1)  // twice the rows: six sums would wait for each other
    for (; m + 2 * kRows<X> <= rows; m += 2 * kRows<X>)
      micro<X, 2 * kRows<X>, NV, form, accumulate>(at(m), b, depth, c + m * ldc, ldc, scale);
  for (; m + kRows<X> <= rows; m += kRows<X>)
    micro<X, kRows<X>, NV, form, accumulate>(at(m), b, depth, c + m * ldc, ldc, scale);
  for (; m + 4 <= rows; m += 4) micro<X, 4, NV, form, accumulate>(at(m), b, depth, c + m * ldc, ldc, scale);
  for (; m + 2 <= rows; m += 2) micro<X, 2, NV, form, accumulate>(at(m), b, depth, c + m * ldc, ldc, scale);
  if (m < rows) micro<X, 1, NV, form, accumulate>(at(m), b, depth, c + m * ldc, ldc, scale);
}

// C[rows][vectors · lanes], B packed in panels of `depth` rows; C's columns are contiguous. `scale` multiplies what is
// not accumulated. Products of a transposed A in tile registers need a multiple of 16 rows.
template <class X, Form form, bool accumulate>
TW_INLINE void multiply(int64_t rows, int64_t vectors, int64_t depth, Operand<X> a, const X *b, Sum<X> *c, int64_t ldc,
                        Sum<X> scale = 1) {
  if constexpr (kTiled<X>) {
    multiply_tiles<form, accumulate>(rows, vectors, depth, a, b, c, ldc, scale);
  } else {
    constexpr int W = kLanes<X>;
    for (int64_t v = 0; v < vectors; v += kPanel, b += depth * kPanel * W) {
      Sum<X> *columns = c + v * W;
      const int64_t left = vectors - v;
      if (left >= kPanel) panel<X, kPanel, form, accumulate>(rows, a, b, depth, columns, ldc, scale);
      if constexpr (kPanel > 3)
        if (left == 3) panel<X, 3, form, accumulate>(rows, a, b, depth, columns, ldc, scale);
      if constexpr (kPanel > 2)
        if (left == 2) panel<X, 2, form, accumulate>(rows, a, b, depth, columns, ldc, scale);
      if (left == 1) panel<X, 1, form, accumulate>(rows, a, b, depth, columns, ldc, scale);
    }
  }
}

}  // namespace tw::TW_ISA
