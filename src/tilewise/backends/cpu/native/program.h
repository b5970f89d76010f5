// The score program: expressions as operations on registers, each register a row of values of one tile. What does not
// change along a row or a column is computed once per head, row or column (TwLevel), so the inner part stays short.
#pragma once
#include "exp.h"
#include "interface.h"
#include "operations.h"
#include "work.h"

namespace tw::TW_ISA {

// -- Scalar meaning of what torch defines in more than one line ------------------------------------------------------

TW_INLINE int64_t remainder_of(int64_t a, int64_t b) {  // the sign of b; 0 where b is 0
  if (b == 0 || b == -1) return 0;
  const int64_t r = a % b;
  return r && (r < 0) != (b < 0) ? r + b : r;
}
template <class T>
TW_INLINE T remainder_of(T a, T b) {
  const T r = T(std::fmod(a, b));
  return r != T(0) && (r < T(0)) != (b < T(0)) ? r + b : r;
}
TW_INLINE int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return int64_t(0 - uint64_t(a));
  return a / b - (a % b && (a % b < 0) != (b < 0));
}
template <class T>
TW_INLINE T floor_divide(T a, T b) {
  if (b == T(0)) return a / b;
  const T r = T(std::fmod(a, b));
  T quotient = (a - r) / b;
  if (r != T(0) && (b < T(0)) != (r < T(0))) quotient -= T(1);
  if (quotient == T(0)) return std::copysign(T(0), a / b);
  const T down = T(std::floor(quotient));
  return quotient - down > T(0.5) ? down + T(1) : down;
}
TW_INLINE int64_t power(int64_t a, int64_t b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
  uint64_t result = 1, base = uint64_t(a);
  for (; b; b >>= 1, base *= base)
    if (b & 1) result *= base;
  return int64_t(result);
}
template <class T>
TW_INLINE T power(T a, T b) {
  return T(std::pow(a, b));
}
template <class T>
TW_INLINE int64_t truncated(T x) {
  return x >= T(9.2e18) ? INT64_MAX : x <= T(-9.2e18) ? INT64_MIN : x == x ? int64_t(x) : 0;
}

// tanh: an odd polynomial near 0 (Cephes), where 1 - 2 / (e^2x + 1) cancels.
template <class T>
TW_INLINE Vec<T> tanh_of(Vec<T> x) {
  Vec<T> y = splat(T(1)) - splat(T(2)) / (exp<T>(x + x) + splat(T(1)));
  Vec<T> z = x * x;
  Vec<T> p = splat(T(-5.70498872745e-3f));
  p = p * z + splat(T(2.06390887954e-2f));
  p = p * z + splat(T(-5.37397155531e-2f));
  p = p * z + splat(T(1.33314422036e-1f));
  p = p * z + splat(T(-3.33332819422e-1f));
  p = p * z * x + x;
  return (z < splat(T(0.390625))) ? p : y;
}

// -- Rows of values: loops that the compiler turns into vectors -------------------------------------------------------

template <class O, class A, class F>
TW_INLINE void map(O *out, const A *a, int64_t n, F f) {
  for (int64_t c = 0; c < n; ++c) out[c] = f(a[c]);
}
template <class O, class A, class F>
TW_INLINE void map(O *out, const A *a, const A *b, int64_t n, F f) {
  for (int64_t c = 0; c < n; ++c) out[c] = f(a[c], b[c]);
}
template <class T, class F>
TW_INLINE void map_vectors(T *out, const T *a, int64_t n, F f) {  // n is a multiple of the vector
  for (int64_t c = 0; c < n; c += kLanes<T>) store(out + c, f(load(a + c)));
}

template <class T>
void fill(T *out, T value, int64_t n) {
  for (int64_t c = 0; c < n; ++c) out[c] = value;
}

template <class Out, class In>
void gather(const In *from, const int64_t *offset, Out *out, int64_t n) {
  for (int64_t c = 0; c < n; ++c) out[c] = Out(widen(from[offset[c]]));
}
template <class Out, class In>
void copy(const In *from, Out *out, int64_t n) {
  for (int64_t c = 0; c < n; ++c) out[c] = Out(widen(from[c]));
}

// f(data) with the leaf's element type.
template <class F>
TW_INLINE void with_leaf(const TwLeaf &leaf, F f) {
  switch (leaf.type) {
    case TW_F32: return f((const float *)leaf.data);
    case TW_F64: return f((const double *)leaf.data);
    case TW_BF16: return f((const Bf16 *)leaf.data);
    case TW_F16: return f((const Half *)leaf.data);
    case TW_I64: return f((const int64_t *)leaf.data);
    case TW_I32: return f((const int32_t *)leaf.data);
    case TW_I16: return f((const int16_t *)leaf.data);
    case TW_I8: return f((const int8_t *)leaf.data);
    default: return f((const uint8_t *)leaf.data);
  }
}

TW_INLINE int64_t clamped(int64_t x, int64_t size) { return x < 0 ? 0 : x < size ? x : size - 1; }

// The cases of the operations that another switch computes; one that is in no list, or has no case, is an error.
#define TW_CASE(name) case Op::name##_:
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wswitch"

// -- The machine --------------------------------------------------------------------------------------------------

// Where a row of pairs is: columns [begin, end) of the tile that starts at key j0, a column being `step` keys apart from the next.
struct Place {
  int64_t b, h, seqlen_q, seqlen_k, i, j0, step = 1;
};

struct Machine {
  const TwProgram *program;
  char *registers;
  int64_t width;  // columns of a tile

  static int64_t bytes(const TwProgram &p, int64_t width) { return int64_t(p.registers) * width * 8; }

  template <class T>
  T *at(int r) const {
    return (T *)(registers + int64_t(r) * width * 8);
  }

  void run(int part, int level, const Place &at, int64_t begin, int64_t end) const {
    const int32_t *range = program->range[part][level];
    for (int n = range[0]; n < range[1]; ++n) step(program->code[n], at, begin, end);
  }

  void enter_head(const Place &at) const {
    for (int part = 0; part < TW_PARTS; ++part) run(part, TW_PER_HEAD, at, 0, width);
  }
  void enter_tile(const Place &at) const {
    for (int part = 0; part < TW_PARTS; ++part) run(part, TW_PER_COLUMN, at, 0, width);
  }
  void run_row(int part, const Place &at, int64_t begin, int64_t end) const {
    run(part, TW_PER_ROW, at, begin, end);
    run(part, TW_PER_PAIR, at, begin, end);
  }

  bool scored() const { return program->score >= 0; }

  // The products of the columns [begin, end) of a row become scores. `x` has column `begin`, as below.
  template <class T>
  void score_row(const Place &place, int64_t begin, int64_t end, T *x) const {
    const size_t bytes = size_t(end - begin) * sizeof(T);
    if (program->raw >= 0) __builtin_memcpy(at<T>(program->raw) + begin, x, bytes);
    run_row(TW_SCORE, place, begin, end);
    __builtin_memcpy(x, at<T>(program->score) + begin, bytes);
  }

  // -inf where the predicate is false.
  template <class T>
  void hide_row(const Place &place, int64_t begin, int64_t end, T *x) const {
    run_row(TW_PREDICATE, place, begin, end);
    const int64_t *kept = at<int64_t>(program->keep) + begin;
    for (int64_t n = 0; n < end - begin; ++n) x[n] = kept[n] ? x[n] : T(-INFINITY);
  }

  // dz becomes ds = dz · (dz / ds), once TW_SLOPES has run. Where dz is 0 it stays so, whatever the slope.
  template <class T>
  void slope_row(int64_t begin, int64_t end, T *y) const {
    if (program->slope < 0) return;
    const T *slope = at<T>(program->slope) + begin;
    for (int64_t n = 0; n < end - begin; ++n) y[n] = y[n] == T(0) ? T(0) : y[n] * slope[n];
  }

  // The element that an index reads at column `begin`: the part of its offset that does not move along the row.
  template <class Access>
  int64_t fixed_offset(const Access &x, const int64_t *size, const int64_t *stride, int64_t column) const {
    int64_t offset = 0;
    for (int d = 0; d < x.dims; ++d)
      if (x.mode[d] == TW_UNIFORM) offset += clamped(at<int64_t>(x.index[d])[column], size[d]) * stride[d];
    return offset;
  }

  // offset[c] of every pair of the row, and 0. Or, where the first columns read elements one behind the other and all columns after
  // them the last of these again, the offset of the first, and how many they are: a row of keys that ends in the tile is so.
  template <class Access>
  int64_t offsets(const Access &x, const int64_t *size, const int64_t *stride, const Place &p, int64_t begin, int64_t end,
               int64_t *offset) const {
    const int64_t fixed = fixed_offset(x, size, stride, begin);
    int moving = 0, last = 0;
    for (int d = 0; d < x.dims; ++d)
      if (x.mode[d] != TW_UNIFORM) ++moving, last = d;
    if (moving == 1 && x.mode[last] == TW_COLUMN && stride[last] == 1 && p.step == 1 && p.j0 + begin < size[last]) {
      offset[begin] = fixed + p.j0 + begin;
      return size[last] - p.j0 < end ? size[last] - p.j0 - begin : end - begin;
    }
    for (int64_t c = begin; c < end; ++c) offset[c] = fixed;
    for (int d = 0; d < x.dims; ++d) {
      if (x.mode[d] == TW_UNIFORM) continue;
      const int64_t *index = at<int64_t>(x.index[d]);
      for (int64_t c = begin; c < end; ++c) offset[c] += clamped(index[c], size[d]) * stride[d];
    }
    return 0;
  }

  void lookup(const TwInstruction &x, const Place &p, int64_t begin, int64_t end) const {
    if (x.type == TW_F32) lookup_as<float>(x, p, begin, end);
    else if (x.type == TW_F64) lookup_as<double>(x, p, begin, end);
    else lookup_as<int64_t>(x, p, begin, end);
  }

  // The row after next of a tensor (..., query, key), which no processor expects where rows lie apart:
  // docs/decisions.md#cpu-prefetch-next-tile.
  template <class In>
  static TW_INLINE void prefetch_row(const In *row, int64_t stride, int64_t count) {
    const int64_t line = 64 / sizeof(In);
    if (stride < 32 * line) return;
    for (int64_t n = 0; n < count; n += line) __builtin_prefetch((const void *)(uintptr_t(row) + (2 * stride + n) * sizeof(In)), 0, 3);
  }

  template <class T>
  void lookup_as(const TwInstruction &x, const Place &p, int64_t begin, int64_t end) const {
    const TwLeaf &leaf = program->leaves[x.b];
    T *out = at<T>(x.out) + begin;
    bool moving = false;
    for (int d = 0; d < x.dims; ++d) moving |= x.mode[d] != TW_UNIFORM;
    with_leaf(leaf, [&](auto *data) {
      if (!moving) {
        fill(out, T(widen(data[fixed_offset(x, leaf.size, leaf.stride, begin)])), end - begin);
        return;
      }
      int64_t offset[kMaxTileN];
      const int64_t consecutive = offsets(x, leaf.size, leaf.stride, p, begin, end, offset);
      if (!consecutive) return gather(data, offset + begin, out, end - begin);
      if (x.dims > 1) prefetch_row(data + offset[begin], leaf.stride[x.dims - 2], consecutive);
      copy(data + offset[begin], out, consecutive);
      fill(out + consecutive, out[consecutive - 1], end - begin - consecutive);
    });
  }

  // Whether each pair's key, in register `a`, is in the row of leaf `b` that the registers `index` name. Rows lie along the last
  // dimension and are sorted, and keys never decrease along a row of pairs, so one walk over both finds all.
  void selected(const TwInstruction &x, int64_t begin, int64_t end) const {
    const TwLeaf &leaf = program->leaves[x.b];
    const int32_t *row = (const int32_t *)leaf.data + fixed_offset(x, leaf.size, leaf.stride, begin);
    const int64_t count = leaf.size[x.dims], stride = leaf.stride[x.dims];
    const int64_t *key = at<int64_t>(x.a);
    int64_t *out = at<int64_t>(x.out), n = 0;
    for (int64_t above = count; n < above;) {  // the first that is not below the first key
      const int64_t middle = (n + above) / 2;
      if (row[middle * stride] < key[begin]) n = middle + 1;
      else above = middle;
    }
    for (int64_t c = begin; c < end; ++c) {
      while (n < count && row[n * stride] < key[c]) ++n;
      out[c] = n < count && row[n * stride] == key[c];
    }
  }

  void step(const TwInstruction &x, const Place &p, int64_t begin, int64_t end) const {
    const int64_t n = end - begin;
    int64_t *ints = at<int64_t>(x.out) + begin;
    switch (Op(x.op)) {
      case Op::constant_:
        if (x.type == TW_F32) fill(at<float>(x.out) + begin, float(x.number), n);
        else if (x.type == TW_F64) fill(at<double>(x.out) + begin, x.number, n);
        else fill(ints, x.integer, n);
        return;
      case Op::b_: return fill(ints, p.b, n);
      case Op::h_: return fill(ints, p.h, n);
      case Op::off_: return fill(ints, p.seqlen_k - p.seqlen_q, n);
      case Op::seqlen_q_: return fill(ints, p.seqlen_q, n);
      case Op::seqlen_k_: return fill(ints, p.seqlen_k, n);
      case Op::i_: return fill(ints, p.i, n);
      case Op::j_:
        for (int64_t c = 0; c < n; ++c) ints[c] = p.j0 + (begin + c) * p.step;
        return;
      case Op::lookup_: return lookup(x, p, begin, end);
      case Op::selected_: return selected(x, begin, end);
      TW_COMMON_OPERATIONS(TW_CASE) TW_NUMBER_OPERATIONS(TW_CASE) TW_INTEGER_OPERATIONS(TW_CASE)
      TW_FLOAT_OPERATIONS(TW_CASE) break;
    }
    if (x.type == TW_F32) floating<float>(x, begin, n);
    else if (x.type == TW_F64) floating<double>(x, begin, n);
    else integer(x, begin, n);
  }

  // Operations whose meaning is the same for all types. False: none of them.
  template <class T>
  bool common(const TwInstruction &x, int64_t begin, int64_t n) const {
    T *out = at<T>(x.out) + begin;
    int64_t *truth = at<int64_t>(x.out) + begin;
    const T *a = at<T>(x.a) + begin, *b = at<T>(x.b) + begin;
    using I = int64_t;
    switch (Op(x.op)) {
      case Op::to_f32_: map(at<float>(x.out) + begin, a, n, [](T v) { return float(v); }); return true;
      case Op::to_f64_: map(at<double>(x.out) + begin, a, n, [](T v) { return double(v); }); return true;
      case Op::to_bool_: map(truth, a, n, [](T v) { return I(v != T(0)); }); return true;
      case Op::lt_: map(truth, a, b, n, [](T v, T w) { return I(v < w); }); return true;
      case Op::le_: map(truth, a, b, n, [](T v, T w) { return I(v <= w); }); return true;
      case Op::gt_: map(truth, a, b, n, [](T v, T w) { return I(v > w); }); return true;
      case Op::ge_: map(truth, a, b, n, [](T v, T w) { return I(v >= w); }); return true;
      case Op::eq_: map(truth, a, b, n, [](T v, T w) { return I(v == w); }); return true;
      case Op::ne_: map(truth, a, b, n, [](T v, T w) { return I(v != w); }); return true;
      case Op::floordiv_: map(out, a, b, n, [](T v, T w) { return floor_divide(v, w); }); return true;
      case Op::mod_: map(out, a, b, n, [](T v, T w) { return remainder_of(v, w); }); return true;
      case Op::pow_: map(out, a, b, n, [](T v, T w) { return power(v, w); }); return true;
      case Op::maximum_: map(out, a, b, n, [](T v, T w) { return v != v ? v : w != w ? w : v > w ? v : w; }); return true;
      case Op::minimum_: map(out, a, b, n, [](T v, T w) { return v != v ? v : w != w ? w : v < w ? v : w; }); return true;
      case Op::sign_: map(out, a, n, [](T v) { return T((v > T(0)) - (v < T(0))); }); return true;
      case Op::relu_: map(out, a, n, [](T v) { return v < T(0) ? T(0) : v; }); return true;
      case Op::where_: {  // the condition is c
        const int64_t *condition = at<int64_t>(x.c) + begin;
        for (int64_t c = 0; c < n; ++c) out[c] = condition[c] ? a[c] : b[c];
        return true;
      }
      TW_PLACE_OPERATIONS(TW_CASE) TW_NUMBER_OPERATIONS(TW_CASE) TW_INTEGER_OPERATIONS(TW_CASE)
      TW_FLOAT_OPERATIONS(TW_CASE) break;
    }
    return false;
  }

  void integer(const TwInstruction &x, int64_t begin, int64_t n) const {
    using I = int64_t;
    using U = uint64_t;  // torch's integers wrap around
    if (common<I>(x, begin, n)) return;
    I *out = at<I>(x.out) + begin;
    const I *a = at<I>(x.a) + begin, *b = at<I>(x.b) + begin;
    switch (Op(x.op)) {
      case Op::add_: return map(out, a, b, n, [](I v, I w) { return I(U(v) + U(w)); });
      case Op::sub_: return map(out, a, b, n, [](I v, I w) { return I(U(v) - U(w)); });
      case Op::mul_: return map(out, a, b, n, [](I v, I w) { return I(U(v) * U(w)); });
      case Op::bit_and_: return map(out, a, b, n, [](I v, I w) { return v & w; });
      case Op::bit_or_: return map(out, a, b, n, [](I v, I w) { return v | w; });
      case Op::bit_xor_: return map(out, a, b, n, [](I v, I w) { return v ^ w; });
      case Op::bit_not_: return map(out, a, n, [](I v) { return ~v; });
      case Op::bool_not_: return map(out, a, n, [](I v) { return I(!v); });
      case Op::lshift_: return map(out, a, b, n, [](I v, I w) { return w < 0 || w > 63 ? 0 : I(U(v) << w); });
      case Op::rshift_: return map(out, a, b, n, [](I v, I w) { return v >> (w < 0 || w > 63 ? 63 : w); });
      case Op::neg_: return map(out, a, n, [](I v) { return I(U(0) - U(v)); });
      case Op::abs_: return map(out, a, n, [](I v) { return v < 0 ? I(U(0) - U(v)) : v; });
      case Op::floor_: case Op::ceil_: case Op::round_: case Op::trunc_: case Op::to_int_:
        return map(out, a, n, [](I v) { return v; });
      TW_PLACE_OPERATIONS(TW_CASE) TW_COMMON_OPERATIONS(TW_CASE) TW_FLOAT_OPERATIONS(TW_CASE) break;
    }
  }

  template <class T>
  void floating(const TwInstruction &x, int64_t begin, int64_t n) const {
    if (common<T>(x, begin, n)) return;
    T *out = at<T>(x.out) + begin;
    const T *a = at<T>(x.a) + begin, *b = at<T>(x.b) + begin;
    using V = Vec<T>;
    const bool single = sizeof(T) == 4;
    switch (Op(x.op)) {
      case Op::add_: return map(out, a, b, n, [](T v, T w) { return v + w; });
      case Op::sub_: return map(out, a, b, n, [](T v, T w) { return v - w; });
      case Op::mul_: return map(out, a, b, n, [](T v, T w) { return v * w; });
      case Op::div_: return map(out, a, b, n, [](T v, T w) { return v / w; });
      case Op::neg_: return map(out, a, n, [](T v) { return -v; });
      case Op::abs_: return map(out, a, n, [](T v) { return std::fabs(v); });
      case Op::floor_: return map(out, a, n, [](T v) { return std::floor(v); });
      case Op::ceil_: return map(out, a, n, [](T v) { return std::ceil(v); });
      case Op::round_: return map(out, a, n, [](T v) { return std::nearbyint(v); });
      case Op::trunc_: return map(out, a, n, [](T v) { return std::trunc(v); });
      case Op::to_int_: return map(at<int64_t>(x.out) + begin, a, n, [](T v) { return truncated(v); });
      case Op::exp_: return map_vectors(out, a, n, [](V v) { return exp<T>(v); });
      case Op::exp2_: return map_vectors(out, a, n, [](V v) { return exp2<T>(v); });
      case Op::sigmoid_: return map_vectors(out, a, n, [](V v) { return splat(T(1)) / (splat(T(1)) + exp<T>(-v)); });
      case Op::tanh_:
        if (single) return map_vectors(out, a, n, [](V v) { return tanh_of<T>(v); });
        return map(out, a, n, [](T v) { return std::tanh(v); });
      case Op::expm1_: return map(out, a, n, [](T v) { return std::expm1(v); });
      case Op::log_: return map(out, a, n, [](T v) { return std::log(v); });
      case Op::log2_: return map(out, a, n, [](T v) { return std::log2(v); });
      case Op::log1p_: return map(out, a, n, [](T v) { return std::log1p(v); });
      case Op::sqrt_: return map(out, a, n, [](T v) { return std::sqrt(v); });
      case Op::rsqrt_: return map(out, a, n, [](T v) { return T(1) / std::sqrt(v); });
      case Op::erf_: return map(out, a, n, [](T v) { return std::erf(v); });
      case Op::sin_: return map(out, a, n, [](T v) { return std::sin(v); });
      case Op::cos_: return map(out, a, n, [](T v) { return std::cos(v); });
      TW_PLACE_OPERATIONS(TW_CASE) TW_COMMON_OPERATIONS(TW_CASE) TW_INTEGER_OPERATIONS(TW_CASE) break;
    }
  }
};
#pragma GCC diagnostic pop
#undef TW_CASE

}  // namespace tw::TW_ISA
