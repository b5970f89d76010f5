// The operations of the score program, by name: library.py reads the names from here, in this order.
#pragma once

#define TW_OPERATIONS(X)                                                                                              \
  X(constant) X(b) X(h) X(off) X(seqlen_q) X(seqlen_k) X(i) X(j) X(to_f32) X(to_f64) X(to_int) X(to_bool) X(lookup)   \
  X(add) X(sub) X(mul) X(div) X(floordiv) X(mod) X(pow) X(bit_and) X(bit_or) X(bit_xor) X(lt) X(le) X(gt) X(ge)       \
  X(eq) X(ne) X(maximum) X(minimum) X(bit_not) X(bool_not) X(neg) X(abs) X(sign) X(floor) X(ceil) X(round) X(trunc)   \
  X(exp) X(exp2) X(expm1) X(log) X(log2) X(log1p) X(sqrt) X(rsqrt) X(tanh) X(sigmoid) X(erf) X(sin) X(cos) X(relu)    \
  X(where)

namespace tw {
enum class Op : int {
#define TW_NAME(name) name##_,
  TW_OPERATIONS(TW_NAME)
#undef TW_NAME
};
}  // namespace tw
