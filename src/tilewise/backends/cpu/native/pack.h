// Tiles of q, k, v and dO, copied from the user's strides into the order in which product.h reads them: converted to
// the compute type, padded with zeros to whole vectors, and zero where a key is seen by no query.
#pragma once
#include "product.h"

namespace tw::TW_ISA {

// A tile of rows of a tensor. Rows from `count` on do not exist; rows that `seen` (null: all) marks 0 read as zeros.
template <class E>
struct Rows {
  const E *data;
  int64_t stride, count;
  const uint8_t *seen;
  TW_INLINE const E *row(int64_t n) const {
    return n < count && (!seen || seen[n]) ? data + n * stride : nullptr;
  }
};

// out[row][column], ld apart; columns from `width` up to `padded` become 0.
template <class T, class E>
void pack_plain(const Rows<E> &in, int64_t rows, int64_t width, int64_t padded, T *out, int64_t ld, T factor) {
  constexpr int W = kLanes<T>;
  for (int64_t n = 0; n < rows; ++n, out += ld) {
    const E *from = in.row(n);
    int64_t d = 0;
    if (from) {
      for (; d + W <= width; d += W) store(out + d, load_wide<T>(from + d) * splat(factor));
      for (; d < width; ++d) out[d] = T(widen(from[d])) * factor;
    }
    for (; d < padded; ++d) out[d] = T(0);
  }
}

// Panels [panel][row][width of panel]: B of a product whose depth is the rows.
template <class T, class E>
void pack_panels(const Rows<E> &in, int64_t rows, int64_t width, T *out) {
  constexpr int W = kLanes<T>;
  const int64_t vectors = (width + W - 1) / W;
  for (int64_t v = 0; v < vectors; v += kPanel) {
    const int64_t columns = (vectors - v < kPanel ? vectors - v : kPanel) * W;
    const int64_t real = width - v * W < columns ? width - v * W : columns;
    Rows<E> part = in;
    part.data += v * W;
    pack_plain<T, E>(part, rows, real, columns, out, columns, T(1));
    out += rows * columns;
  }
}

// W rows of W elements, transposed in registers by swapping ever smaller off-diagonal blocks (Eklundh).
template <class T>
TW_INLINE void transpose(Vec<T> *rows) {
  constexpr int W = kLanes<T>;
  typedef Vec<Int<T>> Index;
#pragma GCC unroll 8
  for (int step = W / 2; step; step /= 2) {
    Index low, high;
    for (int n = 0; n < W; ++n) {
      low[n] = n & step ? W + n - step : n;
      high[n] = n & step ? W + n : n + step;
    }
#pragma GCC unroll 16
    for (int n = 0; n < W; ++n)
      if (!(n & step)) {
        Vec<T> a = rows[n], b = rows[n + step];
        rows[n] = __builtin_shuffle(a, b, low);
        rows[n + step] = __builtin_shuffle(a, b, high);
      }
  }
}

// Panels [panel][d][width of panel] of the transposed tile: B of a product whose depth is d. `rows` is a multiple of
// the panel's width.
template <class T, class E>
void pack_transposed(const Rows<E> &in, int64_t rows, int64_t width, T *out) {
  constexpr int W = kLanes<T>, P = kPanelWidth<T>;
  for (int64_t n = 0; n < rows; n += W) {
    T *column = out + n / P * P * width + n % P;
    const E *from[W];
    for (int r = 0; r < W; ++r) from[r] = in.row(n + r);
    int64_t d = 0;
    for (; d + W <= width; d += W) {
      Vec<T> block[W];
#pragma GCC unroll 16
      for (int r = 0; r < W; ++r) block[r] = from[r] ? load_wide<T>(from[r] + d) : Vec<T>{};
      transpose<T>(block);
#pragma GCC unroll 16
      for (int r = 0; r < W; ++r) store(column + (d + r) * P, block[r]);
    }
    for (; d < width; ++d)
      for (int r = 0; r < W; ++r) column[d * P + r] = from[r] ? T(widen(from[r][d])) : T(0);
  }
}

}  // namespace tw::TW_ISA
