// What products multiply: their elements, and how tiles lie in memory.
#pragma once
#include "vec.h"

namespace tw::TW_ISA {

// Two bf16 of neighbouring depth, the lower half first: one instruction multiplies and adds both.
using Pair = uint32_t;

template <class X>
struct SumOf {
  using type = X;
};
template <>
struct SumOf<Pair> {
  using type = float;
};
template <class X>
using Sum = typename SumOf<X>::type;

#ifdef TW_TILE_REGISTERS
constexpr bool kTileRegisters = true;
#else
constexpr bool kTileRegisters = false;
#endif

// Whether products of X are made in tile registers (tile_product.h) instead of vectors.
template <class X>
constexpr bool kTiled = kTileRegisters && __is_same(X, Pair);

// Rows and columns of a product's block: 6 x 4 vectors of AVX-512, or 2 x 2 tile registers; columns come in panels.
template <class X>
constexpr int kRows = kTiled<X> ? 32 : 6;
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

}  // namespace tw::TW_ISA
