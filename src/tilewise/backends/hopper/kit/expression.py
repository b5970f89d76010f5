"""Scores traced into the kernel: the trees of :mod:`tilewise.expr` for the pairs that a thread holds.

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
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import after, choose
from tilewise.backends.hopper.kit.softmax import INF
from tilewise.backends.hopper.kit.tiles import constant_column
from tilewise.expr import Expr

GROUP = 4  # columns of a thread
BOOL = cutlass.Boolean


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


def pairs_of(ends, first_key, params) -> Pairs:
    """The pairs of a thread's rows, which are queries, in the block whose first key is ``first_key``."""
    return of_block(ends, ("i", "j"), ends.i, first_key + ends.column, params)


def of_block(tile, names: tuple[str, str], rows: list, column, params) -> Pairs:
    """The pairs of a thread's rows and columns; ``tile`` is anything that has a ``batch`` index and a query ``head``."""
    common = {
        "b": tile.batch,
        "h": tile.head,
        "seqlen_q": params.seqlen_q,
        "seqlen_k": params.seqlen_k,
        "off": params.seqlen_k - params.seqlen_q,
    }
    return Pairs(common, names, rows, column, params.extra.leaves, params.extra.numbers)


def scored(s: cute.Tensor, text: str, scale, pairs: Pairs) -> None:
    """Turns products into ``score(scale · product)``, in base e."""
    values = Values([expr.parse(text)], pairs)
    for c in range(cute.size(s, mode=[1])):
        values.begin(c, s)
        for r in range(2):
            # s is the (2, N/4) view of an fp32 accumulator of 64 × N; each product gives way to its score in the same
            # register.
            s[r, c] = F32(values.at(r, c, s[r, c] * scale)[0])


class Values:
    """The values of some expressions at a thread's pairs; each node is computed once for each of what it depends on."""

    def __init__(self, roots: Sequence[Expr], pairs: Pairs):
        self.roots, self.pairs = roots, pairs
        self.nodes = expr.nodes(*roots)
        self.depends = {id(e): expr.depends_on(e) for e in self.nodes}
        self.known: dict = {}
        self.rows, self.column = pairs.rows, pairs.column

    def begin(self, c: int, s: cute.Tensor) -> None:
        """Before column c: now and then no sooner than the scores before it are there.

        Most of an expression needs no score: the compiler would compute it for all columns ahead, and run out of registers
        (docs/decisions.md#hopper-held-exponentials).
        """
        if c % GROUP == 0:
            # The group before is finished with its last score; the first group waits for the products themselves.
            score = s[1, max(c - 1, 0)]
            # New names for i and j: whatever is computed from the old ones could be moved up, so nothing known is kept
            # either.
            self.rows = [after(n, score) for n in self.pairs.rows]
            self.column = after(self.pairs.column, score)
            self.known = {}

    def at(self, r: int, c: int, s) -> list:
        """The value of every expression at row r and column c of the thread, with the score s."""
        row, column = self.pairs.names

        def key(e: Expr) -> tuple:
            names = self.depends[id(e)]
            # None is for all rows, or all columns: a node of b and h alone has one value in the whole group of columns.
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
            # A thread's columns are a constant apart, so one register holds the place of all of them.
            of_pair = {"s": s, row: self.rows[r], column: self.column + constant_column(c)}
            return {**of_pair, **self.pairs.common}[e.args[0]]
        if e.op == "lookup":
            return read(self.pairs.leaves[e.args[0][1]], e, args)
        return operation(e, args)


def read(leaf: cute.Tensor, e: Expr, index: list):
    """The element of a leaf that a lookup reads, in 32 bits (64 for int64); truth values lie there as bytes."""
    inside = []
    for at, x, size in zip(e.args[1:], index, leaf.shape, strict=False):
        # Every index is clamped, as the reference clamps it; b, h, i and j are never negative, so their lower clamp is
        # left out.
        x = smaller(x, size - 1)
        inside.append(x if at.op == "symbol" and at.args[0] in "bhij" else larger(x, 0))
    # A tensor without axes comes as one of a single element.
    value = leaf[tuple(inside)] if index else leaf[0]
    kind = expr.kind(e)
    if kind == "float":
        return F32(value)
    return I32(value) != 0 if kind == "bool" else whole(value)[0]


# -- Operations ----------------------------------------------------------------------------------------------------


def wide(value) -> bool:
    """Whether a number has 64 bits."""
    return getattr(value, "width", 32) == 64


def whole(*args) -> list:
    """Whole numbers and truth values as whole numbers of one width."""
    kind = cutlass.Int64 if any(wide(x) for x in args) else I32
    return [kind(x) for x in args]


def smaller(left, right):
    """The smaller of two whole numbers."""
    return cutlass.min(*whole(left, right))


def larger(left, right):
    """The larger of two whole numbers."""
    return cutlass.max(*whole(left, right))


def unchanged(value):
    """The operand itself."""
    return value


def divide(left, right):
    """``left / right`` right to an ulp: a quotient by the reciprocal and its correction, without a branch as IEEE's has.

    Where the correction is no number, of infinities and zeros, the first quotient stands.
    """
    inverse = cute.arch.rcp_approx(right)
    first = left * inverse
    # One step of Newton's: first + (left - first · right) / right, the rest exact because an fma rounds once.
    better = cute.math.fma(cute.math.fma(-first, right, left), inverse, first)
    return choose(better == better, better, first)


def floor_divide(left, right):
    """``left // right``, rounded down.

    The chip divides whole numbers in a subroutine, which a loop with products in flight cannot call. Numbers of 32 bits are
    multiplied by the reciprocal instead, twice, since one product of floats has 24 bits, and then corrected.
    """
    if wide(left):
        return left // right
    inverse = cute.arch.rcp_approx(F32(right))
    quotient = I32(cute.math.floor(F32(left) * inverse))
    quotient = quotient + I32(cute.math.floor(F32(left - quotient * right) * inverse))
    rest = left - quotient * right
    # Rounded down means a rest with the sign of `right`, and smaller than it.
    below = (rest != 0) & ((rest < 0) != (right < 0))
    beyond = ((rest >= right) & (right > 0)) | ((rest <= right) & (right < 0))
    return quotient + select(beyond, 1, select(below, -1, 0, "int"), "int")


def square_root(value):
    """The square root of a float, exact for 0 and infinity."""
    root = value * cute.math.rsqrt(value, fastmath=True)
    # There the product is 0 · ∞, a NaN, and the root is the number itself.
    return choose((value == 0.0) | (value == INF), value, root)


def power(left, right):
    """A float to the power of another."""
    return cute.math.pow(F32(left), F32(right))


def select(condition, left, right, kind: str):
    """One of two values of a kind, without a branch."""
    if kind == "float":
        return choose(condition, left, right)
    if kind == "bool":
        # Selections are of registers, and a truth value has none of its own.
        return cutlass.select_(condition, I32(left), I32(right)) != 0
    left, right = whole(left, right)
    return (cutlass.Int64 if wide(left) else I32)(cutlass.select_(condition, left, right))


def scaled(left, right) -> tuple:
    """Two floats times a power of two, or minus one, that makes ``right`` positive, its inverse finite; that inverse, 1 over the power."""
    size, sign = float_abs(right), choose(right < 0.0, -1.0, 1.0)
    tiny, quarter = size < 2.0**-100, choose(size > 2.0**100, 0.25, 1.0)
    scale, unit = sign * choose(tiny, 2.0**100, 1.0), sign * choose(tiny, 2.0**-100, 1.0)
    left, right = left * scale, right * scale
    # The instruction takes an inverse below 2**-126 for 0.
    return left, right, cute.arch.rcp_approx(right * quarter) * quarter, unit


def quotient_and_rest(left, right, units: tuple[int, ...]) -> tuple:
    """The quotient of two floats, rounded down, and the rest as torch has it; exact while the quotient is below 2**20 of the first unit.

    A quotient by the inverse has some 22 right bits, so 20 at a time are taken: those above 2**n for each n of ``units``. Each product is a
    multiple of ``right`` so near to the rest that the difference is exact. The inverse is a little too small: else what is just
    below half of a multiple could be rounded up, and the difference would need one bit more than there are.
    """
    finite, by_zero = float_abs(left) < INF, right == 0.0
    left, right, inverse, unit = scaled(left, right)
    rest, ratio, quotient = left, left * inverse, F32(0.0)
    for n in units:
        rounder = F32(1.5 * 2.0 ** (23 + n))
        digits = cute.math.fma(rest, inverse * F32(1 - 2.0**-22), rounder) - rounder
        rest = cute.math.fma(-digits, right, rest)
        quotient = quotient + digits
    # A number below ``right`` is its own rest, also where that is infinite. Zeros have the signs of ``left`` and of the quotient.
    small = float_abs(left) < right
    rest = choose(small, left, choose(rest == 0.0, left * 0.0, rest))
    quotient = choose(small | (quotient == 0.0), ratio * 0.0, quotient)
    quotient = choose((float_abs(ratio) > 2.0**30) & (finite | by_zero), ratio, quotient)
    below = rest < 0.0
    return choose(below, quotient - 1.0, quotient), choose(below, rest + right, rest) * unit


def floor_quotient(left, right):
    """The floats' ``left / right``, rounded down; above 2**30 no fp32 number has all of its digits."""
    return quotient_and_rest(left, right, (20, 0))[0]


def remainder(left, right):
    """The floats' ``left - right · floor(left / right)``, exact while that quotient is below 2**80."""
    return quotient_and_rest(left, right, (60, 40, 20, 0))[1]


def float_abs(value):
    """The magnitude of a float."""
    return cute.arch.fmax(value, -value)


def float_sign(value):
    """The sign of a float: 1, 0 or -1."""
    return choose(value > 0.0, 1.0, choose(value < 0.0, -1.0, 0.0))


def ceil(value):
    """A float rounded up."""
    return -cute.math.floor(-value)


def truncate(value):
    """A float rounded towards 0."""
    return choose(value < 0.0, -cute.math.floor(-value), cute.math.floor(value))


def float_maximum(left, right):
    """The larger of two floats, NaN if one of them is."""
    return choose((left == left) & (right == right), cute.arch.fmax(left, right), left + right)


def float_minimum(left, right):
    """The smaller of two floats, NaN if one of them is."""
    return -float_maximum(-left, -right)


def float_relu(value):
    """The float, or 0 where it is negative."""
    return float_maximum(value, F32(0.0))


def sigmoid(value):
    """``1 / (1 + exp(-value))``."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp(-value))


def whole_remainder(left, right):
    """The whole numbers' ``left - right · (left // right)``."""
    return left - floor_divide(left, right) * right


def whole_power(left, right):
    """A whole number to a whole power, by its squares: floats would round above 2**24."""
    found, square = left * 0 + 1, left
    # Six bits of the exponent: with more of them a power fits 64 bits only where the number is 0, 1 or -1.
    for bit in range(6):
        found = select((right >> bit) & 1 == 1, found * square, found, "int")
        square = square * square
    found = select((left == 0) & (right > 0), 0, found, "int")
    below = select(left == 1, 1, select(left == -1, 1 - 2 * (right & 1), 0, "int"), "int")
    return select(right >= 0, found, below, "int")


def lshift(left, right):
    """``left << right``, 0 for a place that is no bit."""
    inside = (right >= 0) & (right < (64 if wide(left) else 32))
    return select(inside, left << select(inside, right, 0, "int"), 0, "int")


def rshift(left, right):
    """``left >> right``, the sign for a place that is no bit."""
    last = 63 if wide(left) else 31
    return left >> select((right >= 0) & (right < last), right, last, "int")


def whole_abs(value):
    """The magnitude of a whole number."""
    return larger(value, -value)


def whole_sign(value):
    """The sign of a whole number: 1, 0 or -1."""
    return select(value > 0, 1, select(value < 0, -1, 0, "int"), "int")


def whole_relu(value):
    """The whole number, or 0 where it is negative."""
    return larger(value, 0)


def either(left, right):
    """Whether one of two truth values holds."""
    return (left | right) != 0


def both_true(left, right):
    """Whether two truth values hold."""
    return (left & right) != 0


def differ(left, right):
    """Whether two truth values differ."""
    return (left ^ right) != 0


def is_false(value):
    """Whether a truth value does not hold."""
    return value == 0


def is_true(value):
    """Whether a number is not 0."""
    return value != 0


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
        # A truth value becomes 0 or 1 first, as in torch.
        args = [F32(I32(a)) if k == "bool" else F32(a) for a, k in zip(args, kinds, strict=True)]
    else:
        # 64 bits if one of them has 64: torch's rule for whole numbers.
        args = whole(*args)
    return FUNCTIONS[kind][name](*args)
