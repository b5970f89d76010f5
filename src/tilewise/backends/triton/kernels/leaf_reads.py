"""How a mask and a score read their tensors, the leaves: what kernels gain from it is decided here, on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewise import expr
from tilewise.expr import Expr
from tilewise.problem import Problem, TensorFacts


def described_lookup(problem: Problem) -> Expr | None:
    """The lookup of the score whose tiles a tensor descriptor can bring.

    Its index is ``[.., i, j]`` with at most two axes before, each b, h or a number, and its tensor is at least as large as that.
    None where the score has no such lookup, has several at i and j, or reads the same tensor elsewhere too.
    """
    if problem.spec.score is None:
        return None
    lookups = expr.lookups(problem.spec.score)
    at_pairs = [x for x in lookups if {"i", "j"} <= expr.depends_on(*x.args[1:])]
    if len(at_pairs) != 1 or sum(x.args[0][1] == at_pairs[0].args[0][1] for x in lookups) > 1:
        return None
    lookup = at_pairs[0]
    leaf, index = problem.extras[lookup.args[0][1]], lookup.args[1:]
    lengths = {"b": problem.batch, "h": problem.heads_q, "i": problem.seqlen_q, "j": problem.seqlen_k}
    # i and j must be the last axes, in this order, so that a tile of pairs is a rectangle of the tensor; the axes
    # before pick a matrix.
    names = [x.args[0] for x in index if x.op in ("symbol", "number")]
    if len(names) != len(index) or not 2 <= len(index) <= 4 or names[-2:] != ["i", "j"] or "i" in names[:-2]:
        return None
    # Emitted code clamps an index into its axis, and a descriptor brings 0 from outside: they agree where no index is
    # outside.
    fits = all(
        size > name if isinstance(name, int) else size >= lengths.get(name, math.inf)
        for name, size in zip(names, leaf.shape, strict=True)
    )
    # A descriptor wants unit strides along rows and all others at multiples of 16 bytes, none of them 0.
    unit = 16 // leaf.dtype.itemsize
    strided = leaf.stride[-1] == 1 and all(x and x % unit == 0 for x in leaf.stride[:-1])
    return lookup if fits and strided and leaf.dtype.is_floating_point else None


AXES = 4  # of a leaf's extents at least: those before its own have one element


def all_axes(root: Expr, leaves: Sequence[TensorFacts]) -> Expr:
    """``root`` with tensors of pairs, of rows and of columns read at [b, h, i, j], [b, h, i, 0] and [b, h, 0, j].

    Kernels clamp an index into its axis, so they read an axis of one element at it, and one kernel serves masks of every shape that
    broadcasts to another's (docs/decisions.md#triton-all-axes).
    """

    def made(e: Expr, inner: list[Expr]) -> Expr:
        head = e.args[:1] if e.op in expr.READS else ()
        if head and head[0][1] < len(leaves):
            inner = _at_all_axes(inner, e.op, leaves[head[0][1]].shape)
        return Expr(e.op, (*head, *inner)) if inner else e

    return expr.fold(root, made)


_FIRST = expr.symbol("b"), expr.symbol("h"), expr.ZERO, expr.ZERO


def _at_all_axes(index: list[Expr], op: str, shape: tuple[int, ...]) -> list[Expr]:
    """The indices of one read as :func:`all_axes` has them; as they are where they are of another form."""
    missing = AXES - len(index)
    found, sizes = [*_FIRST[: max(missing, 0)], *index], (1,) * missing + shape
    found[:2] = [
        new if size == 1 and expr.is_number(x, 0) else x for new, x, size in zip(_FIRST, found, sizes, strict=False)
    ][:2]
    b, h, i, j, *more = map(expr.depends_on, found)
    if more or not index or (b, h) != ({"b"}, {"h"}) or not (i <= {"i"} and j <= {"j"}):
        return index
    if op == "selected" and found[1].op != "floordiv":  # the rows of a group of heads
        found[1] = Expr("floordiv", (found[1], expr.number(1)))
    return found


@dataclass(frozen=True)
class LeafLayout:
    """The part of a leaf's layout that is known when a kernel is compiled.

    Attributes:
        whole: of "i" and "j", those that index axes at least as long as their sequence: they need no clamp.
        unit: the elements of 16 bytes, where the last stride is 1 and the other strides and the last size are multiples of them; else 1.
    """

    whole: tuple[str, ...] = ()
    unit: int = 1

    def holds(self, index: Expr) -> bool:
        """Whether an index lies inside its axis wherever it lies inside its sequence."""
        return index.op == "symbol" and index.args[0] in self.whole


def leaf_layouts(
    leaves: Mapping[int, TensorFacts], lengths: tuple[int, int], lookups: list[Expr]
) -> dict[int, LeafLayout]:
    """The layout of each leaf, by its slot, as these lookups read it; ``lengths`` are seqlen_q and seqlen_k."""
    found = {}
    for slot, leaf in leaves.items():
        unit = 16 // leaf.dtype.itemsize
        indices = [pair for x in lookups if x.args[0][1] == slot for pair in enumerate(x.args[1:])]
        # The axes that i and j index by themselves, over all reads of this leaf.
        axes = [(axis, x.args[0]) for axis, x in indices if x.op == "symbol"]
        whole = [
            name
            for name, length in zip("ij", lengths, strict=True)
            if all(leaf.shape[axis] >= length for axis, index in axes if index == name)
        ]
        # Then every row begins at a multiple of 16 bytes, and a vector of 16 bytes lies inside a row or outside as a
        # whole.
        multiples = (*leaf.stride[:-1], *leaf.shape[-1:])
        units = bool(leaf.shape) and leaf.stride[-1] == 1 and all(x % unit == 0 for x in multiples)
        found[slot] = LeafLayout(tuple(whole), unit if units else 1)
    return found


def is_wide(leaf: TensorFacts) -> bool:
    """Whether an element may lie 2**31 elements from the first."""
    return (
        sum((size - 1) * abs(stride) for size, stride in zip(leaf.shape, leaf.stride, strict=True) if size) >= 1 << 31
    )
