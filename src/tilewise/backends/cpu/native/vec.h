// Vectors of TW_VECTOR_BYTES, by the compiler's vector extension: one source for every instruction set.
// Everything lives in a namespace per instruction set, so that the linker never mixes two objects' inline code.
#pragma once
#include <cmath>
#include <cstdint>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define TW_INLINE inline __attribute__((always_inline))

namespace tw::TW_ISA {

constexpr int kBytes = TW_VECTOR_BYTES;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
constexpr int kLanes = kBytes / int(sizeof(T));

template <class T>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};
template <>
struct IntOf<uint32_t> {
  using type = int32_t;
};
template <class T>
using Int = typename IntOf<T>::type;

template <class T>
TW_INLINE Vec<T> load(const T *p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
TW_INLINE void store(T *p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <class T>
TW_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // x - 0 is x, also for -0
}

template <class T>
TW_INLINE Vec<T> larger(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

// One number from all lanes, through memory: faster than by the shuffles that the compiler makes of a loop
// (docs/decisions.md#cpu-lane-sums).
template <class T>
TW_INLINE T sum_lanes(Vec<T> v) {
  T lanes[kLanes<T>];
  store(lanes, v);
  for (int step = kLanes<T> / 2; step; step /= 2)
    for (int n = 0; n < step; ++n) lanes[n] += lanes[n + step];
  return lanes[0];
}
template <class T>
TW_INLINE T max_lanes(Vec<T> v) {
  T lanes[kLanes<T>];
  store(lanes, v);
  for (int step = kLanes<T> / 2; step; step /= 2)
    for (int n = 0; n < step; ++n) lanes[n] = lanes[n] > lanes[n + step] ? lanes[n] : lanes[n + step];
  return lanes[0];
}
#ifdef __AVX512F__
template <>
TW_INLINE float sum_lanes<float>(Vec<float> v) {
  return _mm512_reduce_add_ps(v);
}
template <>
TW_INLINE float max_lanes<float>(Vec<float> v) {
  return _mm512_reduce_max_ps(v);
}
#endif

// Which lanes of two rows a and b, `step` apart, make the new rows where off-diagonal blocks of that size change places. As tables:
// the compiler builds such vectors lane by lane where they are used (docs/decisions.md#cpu-amx-tiles).
template <class T, int step>
struct Exchange {
  alignas(kBytes) Int<T> low[kLanes<T>], high[kLanes<T>];
  constexpr Exchange() : low(), high() {
    for (int n = 0; n < kLanes<T>; ++n)
      low[n] = Int<T>(n & step ? kLanes<T> + n - step : n), high[n] = Int<T>(n & step ? kLanes<T> + n : n + step);
  }
};
template <class T, int step>
constexpr Exchange<T, step> kExchange{};

// W rows of W elements, transposed in registers by swapping ever smaller off-diagonal blocks (Eklundh).
template <class T, int step = kLanes<T> / 2>
TW_INLINE void transpose(Vec<T> *rows) {
  const auto low = load(kExchange<T, step>.low), high = load(kExchange<T, step>.high);
#pragma GCC unroll 16
  for (int n = 0; n < kLanes<T>; ++n)
    if (!(n & step)) {
      const Vec<T> a = rows[n], b = rows[n + step];
      rows[n] = __builtin_shuffle(a, b, low);
      rows[n + step] = __builtin_shuffle(a, b, high);
    }
  if constexpr (step > 1) transpose<T, step / 2>(rows);
}

// -- Elements of the inputs: converted to the compute type as they are read -----------------------------------------

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

#ifdef __aarch64__
typedef __fp16 IeeeHalf;  // the same numbers; GCC's C++ has _Float16 there only since version 13
#else
typedef _Float16 IeeeHalf;
#endif

template <class I>
TW_INLINE I widen(I x) {  // numbers and integers as they are
  return x;
}
TW_INLINE float widen(Bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
TW_INLINE float widen(Half x) {
  IeeeHalf h;
  __builtin_memcpy(&h, &x, 2);
  return float(h);
}

TW_INLINE void narrow(float x, float *out) { *out = x; }
TW_INLINE void narrow(double x, double *out) { *out = x; }
TW_INLINE void narrow(float x, Bf16 *out) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  out->bits = x != x ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
TW_INLINE void narrow(float x, Half *out) {
  IeeeHalf h = IeeeHalf(x);
  __builtin_memcpy(out, &h, 2);
}

// kLanes<T> elements as a vector.
template <class T>
TW_INLINE Vec<T> load_wide(const T *p) {
  return load(p);
}
template <class T>
TW_INLINE Vec<T> load_wide(const Bf16 *p) {
  typedef uint16_t Narrow __attribute__((vector_size(kBytes / 2)));
  Narrow bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return (Vec<float>)(__builtin_convertvector(bits, Vec<uint32_t>) << 16);
}
template <class T>
TW_INLINE Vec<T> load_wide(const Half *p) {
  Vec<T> v;
  for (int n = 0; n < kLanes<T>; ++n) v[n] = widen(p[n]);
  return v;
}
#ifdef __AVX512F__
template <>
TW_INLINE Vec<float> load_wide<float>(const Half *p) {
  return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
#endif

}  // namespace tw::TW_ISA
