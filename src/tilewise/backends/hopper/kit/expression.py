"""Masks' predicates and scores traced into the kernel: the trees of :mod:`tilewise.expr` for the pairs that a thread holds.

Every node is computed once for each of what it depends on: once, once a row, once a column, or once a pair. Numbers of an
expression are run-time arguments. Leaves are tensors in global memory; an index out of range is clamped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise import expr
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


FLOATS: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": divide,
    "floordiv": lambda a, b: cute.math.floor(divide(a, b)),
    "mod": lambda a, b: a - cute.math.floor(divide(a, b)) * b,
    "pow": power,
    "neg": lambda a: -a,
    "abs": lambda a: cute.arch.fmax(a, -a),
    "sign": lambda a: choose(a > 0.0, 1.0, choose(a < 0.0, -1.0, 0.0)),
    "floor": lambda a: cute.math.floor(a),
    "ceil": lambda a: -cute.math.floor(-a),
    "round": lambda a: cute.math.roundeven(a),
    "trunc": lambda a: choose(a < 0.0, -cute.math.floor(-a), cute.math.floor(a)),
    "maximum": lambda a, b: cute.arch.fmax(a, b),
    "minimum": lambda a, b: -cute.arch.fmax(-a, -b),
    "relu": lambda a: cute.arch.fmax(a, F32(0.0)),
    "exp": lambda a: cute.math.exp(a),
    "exp2": lambda a: cute.math.exp2(a),
    "expm1": lambda a: cute.math.expm1(a),
    "log": lambda a: cute.math.log(a),
    "log2": lambda a: cute.math.log2(a),
    "log1p": lambda a: cute.math.log1p(a),
    "sqrt": square_root,
    "rsqrt": lambda a: cute.math.rsqrt(a),
    "tanh": lambda a: cute.math.tanh(a),
    "sigmoid": lambda a: cute.arch.rcp_approx(1.0 + cute.math.exp(-a)),
    "erf": lambda a: cute.math.erf(a),
    "sin": lambda a: cute.math.sin(a),
    "cos": lambda a: cute.math.cos(a),
    "float": lambda a: a,
}
WHOLES: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": floor_divide,
    "mod": lambda a, b: a - floor_divide(a, b) * b,
    "pow": lambda a, b: I32(cute.math.roundeven(power(a, b))),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "abs": lambda a: larger(a, -a),
    "sign": lambda a: select(a > 0, 1, select(a < 0, -1, 0, "int"), "int"),
    "floor": lambda a: a,
    "ceil": lambda a: a,
    "round": lambda a: a,
    "trunc": lambda a: a,
    "maximum": larger,
    "minimum": smaller,
    "relu": lambda a: larger(a, 0),
    "int": lambda a: a,
}
TRUTHS: dict[str, Callable] = {
    "add": lambda a, b: (a | b) != 0,
    "mul": lambda a, b: (a & b) != 0,
    "and": lambda a, b: (a & b) != 0,
    "or": lambda a, b: (a | b) != 0,
    "xor": lambda a, b: (a ^ b) != 0,
    "maximum": lambda a, b: (a | b) != 0,
    "minimum": lambda a, b: (a & b) != 0,
    "not": lambda a: a == 0,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "bool": lambda a: a != 0,
}
SAME = {"clamp_min": "maximum", "clamp_max": "minimum"}
OPERATIONS = frozenset({*FLOATS, *WHOLES, *TRUTHS, *SAME, "where"})
"""The operations that a kernel can be traced with; ``operations.py`` knows them where the DSL is not installed."""


def operation(e: Expr, args: list):
    """An operation on values: all floats where one is or the result is one, else whole numbers, as truth values are too."""
    kind, kinds = expr.kind(e), [expr.kind(a) for a in e.args]
    if e.op == "where":
        return select(*args, kind)
    name = SAME.get(e.op, e.op)
    if e.op == "int":
        return args[0] if wide(args[0]) else I32(args[0])
    if kind == "float" or "float" in kinds:
        args = [F32(I32(a)) if k == "bool" else F32(a) for a, k in zip(args, kinds, strict=True)]
    else:
        args = whole(*args)
    return {"float": FLOATS, "int": WHOLES, "bool": TRUTHS}[kind][name](*args)
