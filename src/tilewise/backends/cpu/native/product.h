// Products of packed tiles: C (=|+=) A B with the block of C held in registers.
//
//            B: panels of up to kPanel vectors, each [depth][width]
//   A        +-----------+
//   +---+    | one panel |        6 rows x 4 vectors of 16 floats = 24 of AVX-512's 32 registers; each step of the
//   | 6 | -> |  6 x 64   |        depth takes 4 loads of B, 6 broadcasts of A and 24 multiply-adds
//   +---+    +-----------+
#pragma once
#include "vec.h"

namespace tw::TW_ISA {

constexpr int kRows = 6;
constexpr int kPanel = TW_PANEL_VECTORS;
template <class T>
constexpr int kPanelWidth = kPanel * kLanes<T>;

// A is read as a[row * lda + depth], or, transposed, as a[depth * lda + row].
enum class Form { plain, transposed };

template <class T>
struct Operand {
  const T *data;
  int64_t ld;
};

template <class T, int MR, int NV, Form form, bool accumulate>
TW_INLINE void micro(Operand<T> a, const T *b, int64_t depth, T *c, int64_t ldc) {
  constexpr int W = kLanes<T>;
  Vec<T> sum[MR][NV];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) sum[m][n] = accumulate ? load(c + m * ldc + n * W) : Vec<T>{};
  for (int64_t p = 0; p < depth; ++p, b += NV * W) {
    Vec<T> row[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) row[n] = load(b + n * W);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      Vec<T> x = splat(form == Form::plain ? a.data[m * a.ld + p] : a.data[p * a.ld + m]);
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) sum[m][n] += x * row[n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) store(c + m * ldc + n * W, sum[m][n]);
}

template <class T, int NV, Form form, bool accumulate>
void panel(int64_t rows, Operand<T> a, const T *b, int64_t depth, T *c, int64_t ldc) {
  const int64_t step = form == Form::plain ? a.ld : 1;
  int64_t m = 0;
  auto at = [&](int64_t row) { return Operand<T>{a.data + row * step, a.ld}; };
  for (; m + kRows <= rows; m += kRows) micro<T, kRows, NV, form, accumulate>(at(m), b, depth, c + m * ldc, ldc);
  for (; m + 4 <= rows; m += 4) micro<T, 4, NV, form, accumulate>(at(m), b, depth, c + m * ldc, ldc);
  for (; m + 2 <= rows; m += 2) micro<T, 2, NV, form, accumulate>(at(m), b, depth, c + m * ldc, ldc);
  if (m < rows) micro<T, 1, NV, form, accumulate>(at(m), b, depth, c + m * ldc, ldc);
}

// C[rows][vectors · lanes], B packed in panels of `depth` rows; C's columns are contiguous.
template <class T, Form form, bool accumulate>
TW_INLINE void multiply(int64_t rows, int64_t vectors, int64_t depth, Operand<T> a, const T *b, T *c, int64_t ldc) {
  constexpr int W = kLanes<T>;
  for (int64_t v = 0; v < vectors; v += kPanel, b += depth * kPanel * W) {
    T *columns = c + v * W;
    const int64_t left = vectors - v;
    if (left >= kPanel) panel<T, kPanel, form, accumulate>(rows, a, b, depth, columns, ldc);
    if constexpr (kPanel > 3)
      if (left == 3) panel<T, 3, form, accumulate>(rows, a, b, depth, columns, ldc);
    if constexpr (kPanel > 2)
      if (left == 2) panel<T, 2, form, accumulate>(rows, a, b, depth, columns, ldc);
    if (left == 1) panel<T, 1, form, accumulate>(rows, a, b, depth, columns, ldc);
  }
}

}  // namespace tw::TW_ISA
