"""The operations of scores that kernels can be traced with, by the kind of their result; known without the DSL.

A value is the name of the function that computes the operation: one of :mod:`tilewise.backends.hopper.kit.expression`, of
Python's ``operator``, or of ``cute.math``.
"""

from __future__ import annotations

FLOATS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "divide", "floordiv": "floor_quotient", "mod": "remainder",
    "pow": "power", "neg": "neg", "abs": "float_abs", "sign": "float_sign", "floor": "floor", "ceil": "ceil",
    "round": "roundeven", "trunc": "truncate", "maximum": "float_maximum", "minimum": "float_minimum",
    "relu": "float_relu", "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log1p": "log1p",
    "sqrt": "square_root", "rsqrt": "rsqrt", "tanh": "tanh", "sigmoid": "sigmoid", "erf": "erf", "sin": "sin", "cos": "cos",
    "float": "unchanged",
}  # fmt: skip
WHOLES = {
    "add": "add", "sub": "sub", "mul": "mul", "floordiv": "floor_divide", "mod": "whole_remainder",
    "pow": "whole_power", "and": "and_", "or": "or_", "xor": "xor", "not": "invert", "lshift": "lshift", "rshift": "rshift", "neg": "neg",
    "abs": "whole_abs", "sign": "whole_sign", "floor": "unchanged", "ceil": "unchanged", "round": "unchanged",
    "trunc": "unchanged", "maximum": "larger", "minimum": "smaller", "relu": "whole_relu", "int": "unchanged",
}  # fmt: skip
TRUTHS = {
    "add": "either", "mul": "both_true", "and": "both_true", "or": "either", "xor": "differ", "maximum": "either",
    "minimum": "both_true", "not": "is_false", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
    "eq": "eq", "ne": "ne", "bool": "is_true",
}  # fmt: skip
SAME = {"clamp_min": "maximum", "clamp_max": "minimum"}
"""Operations that are another one by name."""


def traceable() -> frozenset[str]:
    """Every operation that a kernel can be traced with."""
    return frozenset({*FLOATS, *WHOLES, *TRUTHS, *SAME, "where"})
