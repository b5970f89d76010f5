// The operations of the score program, by name: library.py reads the names from here, in this order. Each stands in the list
// of the function of program.h that computes it. A switch there has a case for each operation of its own lists, names the
// lists of the others and has no default, so that an operation without a case does not compile.
#pragma once

// step: what needs the place of the pairs, or a tensor.
#define TW_PLACE_OPERATIONS(X) X(constant) X(b) X(h) X(off) X(seqlen_q) X(seqlen_k) X(i) X(j) X(lookup) X(selected)
// common: one meaning for every type.
#define TW_COMMON_OPERATIONS(X)                                                                                        \
  X(to_f32) X(to_f64) X(to_bool) X(lt) X(le) X(gt) X(ge) X(eq) X(ne) X(floordiv) X(mod) X(pow) X(maximum) X(minimum)   \
  X(sign) X(relu) X(where)
// integer and floating: a meaning for each.
#define TW_NUMBER_OPERATIONS(X) X(add) X(sub) X(mul) X(neg) X(abs) X(floor) X(ceil) X(round) X(trunc) X(to_int)
// integer: bits and truth values.
#define TW_INTEGER_OPERATIONS(X) X(bit_and) X(bit_or) X(bit_xor) X(bit_not) X(bool_not) X(lshift) X(rshift)
// floating: Python converts the operands first.
#define TW_FLOAT_OPERATIONS(X)                                                                                         \
  X(div) X(exp) X(exp2) X(expm1) X(log) X(log2) X(log1p) X(sqrt) X(rsqrt) X(tanh) X(sigmoid) X(erf) X(sin) X(cos)

#define TW_OPERATIONS(X)                                                                                               \
  TW_PLACE_OPERATIONS(X) TW_COMMON_OPERATIONS(X) TW_NUMBER_OPERATIONS(X) TW_INTEGER_OPERATIONS(X) TW_FLOAT_OPERATIONS(X)

namespace tw {
enum class Op : int {
#define TW_NAME(name) name##_,
  TW_OPERATIONS(TW_NAME)
#undef TW_NAME
};
}  // namespace tw
