"""Masks' predicates and scores traced into the kernel: the trees of :mod:`tilewise.expr` for the pairs that a thread holds.

Every node is computed once for each of what it depends on: once, once a row, once a column, or once a pair. Numbers of an
expression are run-time arguments. Leaves are tensors in global memory; an index out of range is clamped.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise import expr
from tilewise.backends.hopper import operations
from tilewise.backends.hopper.kit.instructions import after, choose
from tilewise.backends.hopper.kit.softmax import INF
from tilewise.backends.hopper.kit.tiles import constant_column
from tilewise.expr import Expr

GROUP = 4  # columns of a thread
F32, I32, BOOL = cutlass.Float32, cutlass.Int32, cutlass.Boolean


class Pairs(NamedTuple):
    """The pairs of a thread in a block, and what the expressions about them read.

    ``common``: the symbols that are the same for all of them; ``rows`` of its rows, ``column`` of its first column, and ``names``,
    the symbols that these are: i and j, or, of a block that is transposed, j and i; ``leaves``, ``numbers``: of all expressions of
    the kernel.
    """

    common: dict
    names: tuple[str, str]
    rows: list
    column: I32
    leaves: tuple | None
    numbers: tuple | None


def pairs_of(line, first_key, work) -> Pairs:
    """Of a thread's rows, a line, in the block whose first key is ``first_key``."""
    return of_block(line, ("i", "j"), line.i, first_key + line.column, work)


def of_block(at, names: tuple[str, str], rows: list, column, work) -> Pairs:
    """Of a thread's rows and its first column, for the batch index and head of ``at``."""
    common = {
        "b": at.batch,
        "h": at.head,
        "seqlen_q": work.seqlen_q,
        "seqlen_k": work.seqlen_k,
        "off": work.seqlen_k - work.seqlen_q,
    }
    return Pairs(common, names, rows, column, work.extra.leaves, work.extra.numbers)


def scored(s: cute.Tensor, text: str, scale, pairs: Pairs) -> None:
    """Products become ``score(scale · product)``, natural."""
    values = Values([expr.parse(text)], pairs)
    for c in range(cute.size(s, mode=[1])):
        values.begin(c, s)
        for r in range(2):
            s[r, c] = F32(values.at(r, c, s[r, c] * scale)[0])


def hide(s: cute.Tensor, text: str, pairs: Pairs) -> None:
    """Scores of pairs that the predicate does not keep become -inf."""
    values = Values([expr.parse(text)], pairs)
    for c in range(cute.size(s, mode=[1])):
        values.begin(c, s)
        for r in range(2):
            s[r, c] = choose(values.at(r, c, None)[0], s[r, c], -INF)


class Values:
    """Some expressions' values at a thread's pairs."""

    def __init__(self, roots: Sequence[Expr], pairs: Pairs):
        self.roots, self.pairs = roots, pairs
        self.nodes = expr.nodes(*roots)
        self.depends = {id(e): expr.depends_on(e) for e in self.nodes}
        self.known: dict = {}
        self.rows, self.column = pairs.rows, pairs.column

    def begin(self, c: int, s: cute.Tensor) -> None:
        """Before column c: now and then no sooner than the scores before it are there.

        Most of an expression needs no score: the compiler would compute it for all columns ahead, and run out of registers
        (docs/decisions.md#hopper-held-expressions).
        """
        if c % GROUP == 0:
            score = s[1, max(c - 1, 0)]
            self.rows = [after(n, score) for n in self.pairs.rows]
            self.column = after(self.pairs.column, score)
            self.known = {}

    def at(self, r: int, c: int, s) -> list:
        """Of every expression at row r and column c of the thread, with the score s."""
        row, column = self.pairs.names

        def key(e: Expr) -> tuple:
            names = self.depends[id(e)]
            return id(e), r if names & {"s", row} else None, c if names & {"s", column} else None

        for e in self.nodes:
            if key(e) not in self.known:
                args = [self.known[key(a)] for a in expr.children(e)]
                self.known[key(e)] = self._value(e, args, r, c, s)
        return [self.known[key(e)] for e in self.roots]

    def _value(self, e: Expr, args: list, r: int, c: int, s):
        if e.op == "number":
            return {"float": F32, "int": I32, "bool": BOOL}[expr.kind(e)](e.args[0])
        if e.op == "param":
            return self.pairs.numbers[e.args[0]]
        if e.op == "symbol":
            row, column = self.pairs.names
            of_pair = {"s": s, row: self.rows[r], column: self.column + constant_column(c)}
            return {**of_pair, **self.pairs.common}[e.args[0]]
        if e.op == "lookup":
            return read(self.pairs.leaves[e.args[0][1]], e, args)
        return operation(e, args)


def read(leaf: cute.Tensor, e: Expr, index: list):
    """The element of a leaf that a lookup reads, in 32 bits (64 for int64); truth values lie there as bytes."""
    inside = []
    for at, x, size in zip(e.args[1:], index, leaf.shape, strict=False):
        x = smaller(x, size - 1)
        inside.append(x if at.op == "symbol" and at.args[0] in "bhij" else larger(x, 0))
    value = leaf[tuple(inside)] if index else leaf[0]
    kind = expr.kind(e)
    if kind == "float":
        return F32(value)
    return I32(value) != 0 if kind == "bool" else whole(value)[0]


# -- Operations ----------------------------------------------------------------------------------------------------


def wide(x) -> bool:
    return getattr(x, "width", 32) == 64


def whole(*args) -> list:
    """Whole numbers and truth values as whole numbers of one width."""
    kind = cutlass.Int64 if any(wide(x) for x in args) else I32
    return [kind(x) for x in args]


def smaller(a, b):
    return cutlass.min(*whole(a, b))


def larger(a, b):
    return cutlass.max(*whole(a, b))


def unchanged(a):
    """The operand itself."""
    return a


def divide(a, b):
    """``a / b`` right to an ulp: a quotient by the reciprocal and its correction, without a branch as IEEE's has.

    Where the correction is no number, of infinities and zeros, the first quotient stands.
    """
    inverse = cute.arch.rcp_approx(b)
    first = a * inverse
    better = cute.math.fma(cute.math.fma(-first, b, a), inverse, first)
    return choose(better == better, better, first)


def floor_divide(a, b):
    """``a // b``, rounded down; of 32 bits by the reciprocal, twice, since one product of floats has but 24, and a correction:
    the chip divides in a subroutine, which a loop with products in flight cannot call."""
    if wide(a):
        return a // b
    inverse = cute.arch.rcp_approx(F32(b))
    quotient = I32(cute.math.floor(F32(a) * inverse))
    quotient = quotient + I32(cute.math.floor(F32(a - quotient * b) * inverse))
    rest = a - quotient * b
    below = (rest != 0) & ((rest < 0) != (b < 0))
    beyond = ((rest >= b) & (b > 0)) | ((rest <= b) & (b < 0))
    return quotient + select(beyond, 1, select(below, -1, 0, "int"), "int")


def square_root(x):
    root = x * cute.math.rsqrt(x, fastmath=True)
    return choose((x == 0.0) | (x == INF), x, root)


def power(a, b):
    return cute.math.pow(F32(a), F32(b))


def select(condition, a, b, kind: str):
    if kind == "float":
        return choose(condition, a, b)
    if kind == "bool":
        return cutlass.select_(condition, I32(a), I32(b)) != 0
    a, b = whole(a, b)
    return (cutlass.Int64 if wide(a) else I32)(cutlass.select_(condition, a, b))


def floor_quotient(a, b):
    """The floats' ``a / b``, rounded down."""
    return cute.math.floor(divide(a, b))


def remainder(a, b):
    """The floats' ``a - b · floor(a / b)``."""
    return a - cute.math.floor(divide(a, b)) * b


def float_abs(a):
    """The magnitude of a float."""
    return cute.arch.fmax(a, -a)


def float_sign(a):
    """The sign of a float: 1, 0 or -1."""
    return choose(a > 0.0, 1.0, choose(a < 0.0, -1.0, 0.0))


def ceil(a):
    """A float rounded up."""
    return -cute.math.floor(-a)


def truncate(a):
    """A float rounded towards 0."""
    return choose(a < 0.0, -cute.math.floor(-a), cute.math.floor(a))


def float_maximum(a, b):
    """The larger of two floats."""
    return cute.arch.fmax(a, b)


def float_minimum(a, b):
    """The smaller of two floats."""
    return -cute.arch.fmax(-a, -b)


def float_relu(a):
    """The float, or 0 where it is negative."""
    return cute.arch.fmax(a, F32(0.0))


def sigmoid(a):
    """``1 / (1 + exp(-a))``."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp(-a))


def whole_remainder(a, b):
    """The whole numbers' ``a - b · (a // b)``."""
    return a - floor_divide(a, b) * b


def whole_power(a, b):
    """A whole number to a whole power, by way of floats."""
    return I32(cute.math.roundeven(power(a, b)))


def whole_abs(a):
    """The magnitude of a whole number."""
    return larger(a, -a)


def whole_sign(a):
    """The sign of a whole number: 1, 0 or -1."""
    return select(a > 0, 1, select(a < 0, -1, 0, "int"), "int")


def whole_relu(a):
    """The whole number, or 0 where it is negative."""
    return larger(a, 0)


def either(a, b):
    """Whether one of two truth values holds."""
    return (a | b) != 0


def both_true(a, b):
    """Whether two truth values hold."""
    return (a & b) != 0


def differ(a, b):
    """Whether two truth values differ."""
    return (a ^ b) != 0


def is_false(a):
    """Whether a truth value does not hold."""
    return a == 0


def is_true(a):
    """Whether a number is not 0."""
    return a != 0


def function(name: str) -> Callable:
    """The function that ``operations`` names: of this module, of Python's ``operator``, or of ``cute.math``."""
    return next(vars(room)[name] for room in (sys.modules[__name__], operator, cute.math) if name in vars(room))


FUNCTIONS: dict[str, dict[str, Callable]] = {
    kind: {operation: function(name) for operation, name in table.items()}
    for kind, table in (("float", operations.FLOATS), ("int", operations.WHOLES), ("bool", operations.TRUTHS))
}
"""The function of an operation, by the kind of its result."""


def operation(e: Expr, args: list):
    """An operation on values: all floats where one is or the result is one, else whole numbers, as truth values are too."""
    kind, kinds = expr.kind(e), [expr.kind(a) for a in e.args]
    if e.op == "where":
        return select(*args, kind)
    name = operations.SAME.get(e.op, e.op)
    if e.op == "int":
        return args[0] if wide(args[0]) else I32(args[0])
    if kind == "float" or "float" in kinds:
        args = [F32(I32(a)) if k == "bool" else F32(a) for a, k in zip(args, kinds, strict=True)]
    else:
        args = whole(*args)
    return FUNCTIONS[kind][name](*args)
