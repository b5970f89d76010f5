"""How large the whole numbers of an expression become: GPU kernels compute them in 32 bits, where larger ones would wrap without a word."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from tilewise.expr.operations import Expr, kind
from tilewise.expr.walk import nodes

Bounds = tuple[int, int]
LARGEST = (1 << 31) - 1
LARGEST_NUMBER = (1 << 30) - 2  # as an argument of a kernel it is 2 x + 3 (docs/decisions.md#triton-opaque-sizes)


def beyond_32_bits(roots: tuple[Expr, ...], sizes: Mapping[str, int]) -> str:
    """Return the first whole number of the expressions that may need more than 32 bits, as text; empty if none does.

    Numbers that depend on the values of a tensor are not judged.

    Args:
        sizes: how far ``b``, ``h``, ``i`` and ``j`` run.
    """
    queries, keys = sizes["i"], sizes["j"]
    known: dict[str, Bounds] = {name: (0, max(size - 1, 0)) for name, size in sizes.items()}
    known |= {"seqlen_q": (0, queries), "seqlen_k": (0, keys), "off": (-queries, keys)}
    found: dict[int, Bounds | None] = {}
    for e in nodes(*roots):
        found[id(e)] = bounds = _bounds(e, [found[id(a)] for a in e.args if isinstance(a, Expr)], known)
        largest = LARGEST_NUMBER if e.op == "number" else LARGEST
        if bounds is not None and max(-bounds[0], bounds[1]) > largest:
            return str(e)
    return ""


def _bounds(e: Expr, args: list[Bounds | None], known: Mapping[str, Bounds]) -> Bounds | None:
    """Return the least and the largest value of a node, from those of its arguments; None of floats, and of what is not known."""
    if kind(e) == "bool":
        return 0, 1
    if kind(e) == "float" or e.op in ("lookup", "param"):
        return None
    if e.op == "number":
        return e.args[0], e.args[0]
    if e.op == "symbol":
        return known[e.args[0]]
    if e.op == "where":
        args = args[1:]
    given = [x for x in args if x is not None]
    return None if len(given) < len(args) else _RULES.get(e.op, _hull)(*given)


def _hull(*args: Bounds) -> Bounds:
    """Return the bounds of what is one of the arguments."""
    return min(x[0] for x in args), max(x[1] for x in args)


def _corners(function, *args: Bounds) -> Bounds:
    """Return the bounds of what is largest and least at ends of the arguments."""
    values = [function(*at) for at in product(*args)]
    return min(values), max(values)


def _quotient(x: Bounds, y: Bounds) -> Bounds:
    size = max(-x[0], x[1])
    return _corners(lambda a, b: a // b, x, y) if y[0] > 0 else (-size, size)


def _rest(x: Bounds, y: Bounds) -> Bounds:
    return min(y[0] + 1, 0), max(y[1] - 1, 0)


def _power(x: Bounds, y: Bounds) -> Bounds:
    size, exponent = max(-x[0], x[1]), max(y[1], 0)
    largest = LARGEST + 1 if size > 1 and exponent > 31 else size**exponent if size > 1 else 1
    return (-largest if x[0] < 0 else 0), largest


def _shifted(x: Bounds, n: Bounds) -> Bounds:
    low, high = _corners(lambda a, count: a << min(max(count, 0), 32), x, n)
    return min(low, 0), max(high, 0)  # 0 of a negative count


def _bits(*args: Bounds) -> Bounds:
    """Return the bounds of as many bits as the longest argument has."""
    size = (1 << max(max(-x[0] - 1, x[1], 0).bit_length() for x in args)) - 1
    return (-size - 1 if min(x[0] for x in args) < 0 else 0), size


_RULES = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": lambda x, y: _corners(lambda a, b: a * b, x, y),
    "floordiv": _quotient,
    "mod": _rest,
    "pow": _power,
    "lshift": _shifted,
    "rshift": lambda x, n: (min(x[0], 0), max(x[1], 0)),
    "neg": lambda x: (-x[1], -x[0]),
    "not": lambda x: (-x[1] - 1, -x[0] - 1),
    "abs": lambda x: (0, max(-x[0], x[1])),
    "sign": lambda x: (-1, 1),
    "relu": lambda x: (max(x[0], 0), max(x[1], 0)),
    "and": _bits,
    "or": _bits,
    "xor": _bits,
}
