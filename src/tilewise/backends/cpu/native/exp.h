// 2^x and what follows from it, on vectors. Relative error of exp2 before the last rounding: 2e-9 (float), 4e-18
// (double); results below the smallest normal number become 0.
#pragma once
#include "vec.h"

namespace tw::TW_ISA {

template <class T>
struct Exp2;

// Minimax for the relative error on [-1/2, 1/2] with the constant term fixed at 1 (Lawson's iteration).
template <>
struct Exp2<float> {
  static constexpr float coefficients[] = {0x1.41fbbcp-13f, 0x1.5f3e52p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f,
                                           0x1.ebfbdcp-3f,  0x1.62e43p-1f,   1.0f};
  static constexpr float magic = 0x1.8p23f, lowest = -127.0f, highest = 128.0f;
  static constexpr int mantissa = 23;
};

// Taylor's: ln2^k / k! for k = 13 ... 0.
template <>
struct Exp2<double> {
  static constexpr double coefficients[] = {
      1.3691488853904128e-12, 2.5678435993488206e-11, 4.4455382718708116e-10, 7.0549116208011234e-09,
      1.0178086009239699e-07, 1.3215486790144309e-06, 1.5252733804059841e-05, 1.5403530393381608e-04,
      1.3333558146428443e-03, 9.6181291076284769e-03, 5.5504108664821583e-02, 2.4022650695910072e-01,
      6.9314718055994531e-01, 1.0};
  static constexpr double magic = 0x1.8p52, lowest = -1023.0, highest = 1024.0;
  static constexpr int mantissa = 52;
};

template <class T>
TW_INLINE Vec<T> horner(Vec<T> x) {
  constexpr int terms = sizeof(Exp2<T>::coefficients) / sizeof(T);
  Vec<T> p = splat(Exp2<T>::coefficients[0]);
#pragma GCC unroll 16
  for (int n = 1; n < terms; ++n) p = p * x + splat(Exp2<T>::coefficients[n]);
  return p;
}

// p · 2^n, n in the low bits of `shifted`; in two steps, since 2^128 has no exponent of its own.
template <class T>
TW_INLINE Vec<T> scaled(Vec<T> p, Vec<T> shifted) {
  using E = Exp2<T>;
  Vec<Int<T>> n = (Vec<Int<T>>)shifted - (Vec<Int<T>>)splat(E::magic);
  Vec<Int<T>> half = n >> 1, one = (Vec<Int<T>>)splat(T(1));
  return p * (Vec<T>)((half << E::mantissa) + one) * (Vec<T>)(((n - half) << E::mantissa) + one);
}

template <class T>
TW_INLINE Vec<T> between(Vec<T> x, T low, T high) {  // NaN stays
  x = x < splat(low) ? splat(low) : x;
  return x > splat(high) ? splat(high) : x;
}

// NaN gives NaN, +inf gives +inf.
template <class T>
TW_INLINE Vec<T> exp2(Vec<T> x) {
  using E = Exp2<T>;
  Vec<T> clamped = between<T>(x, E::lowest, E::highest);
  Vec<T> shifted = clamped + splat(E::magic);  // its low bits are x, rounded
  Vec<T> p = horner<T>(clamped - (shifted - splat(E::magic)));
  return x <= splat(E::lowest) ? Vec<T>{} : scaled<T>(p, shifted);
}

#ifdef __AVX512F__
// 2^f on [0, 1), f = x - floor(x) by one instruction; scalef floors x again. For -inf f is 0 and the result 0.
// Why so: docs/decisions.md#cpu-exp2.
template <>
TW_INLINE Vec<float> exp2<float>(Vec<float> x) {
  constexpr float coefficients[] = {0x1.c54174p-13f, 0x1.46d64ep-10f, 0x1.3d0b92p-7f, 0x1.c68912p-5f,
                                    0x1.ebfd58p-3f,  0x1.62e42cp-1f,  1.0f};
  Vec<float> f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  Vec<float> p = splat(coefficients[0]);
#pragma GCC unroll 8
  for (int n = 1; n < 7; ++n) p = p * f + splat(coefficients[n]);
  return _mm512_scalef_ps(p, x);
}
#endif

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.69314718055994531;

// e^x: x - n ln2 by Cody and Waite in two parts, so that large |x| keeps its last bits.
template <class T>
TW_INLINE Vec<T> exp(Vec<T> x) {
  using E = Exp2<T>;
  constexpr T high = sizeof(T) == 4 ? T(0x1.62e4p-1) : T(0x1.62e42fefa38p-1), low = T(kLn2 - double(high));
  constexpr T least = T(E::lowest * kLn2), most = T(E::highest * kLn2);
  Vec<T> clamped = between<T>(x, least, most);
  Vec<T> shifted = clamped * splat(T(kLog2E)) + splat(E::magic), n = shifted - splat(E::magic);
  Vec<T> rest = (clamped - n * splat(high)) - n * splat(low);
  Vec<T> y = scaled<T>(horner<T>(rest * splat(T(kLog2E))), shifted);
  return x <= splat(least) ? Vec<T>{} : x >= splat(most) ? splat(T(INFINITY)) : y;
}

// e^x for x of at most about 0, where every operation counts: with AVX-512 the rounding of x log2(e) stays in.
template <class T>
TW_INLINE Vec<T> softmax_exp(Vec<T> x) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) == 4) return exp2<T>(x * splat(T(kLog2E)));
#endif
  return exp<T>(x);
}

}  // namespace tw::TW_ISA
