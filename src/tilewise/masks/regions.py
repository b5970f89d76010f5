"""The meaning of a mask's text: *interval and predicate*.

A :class:`Region` has one half-open key interval per row, ``lo(i) <= j < hi(i)``, whose ends never decrease in ``i``; the same set by
columns, ``first(j) <= i < last(j)``; and a predicate for everything else. ``&`` of two masks takes the maximum of the starts, the
minimum of the ends and both predicates. ``|`` takes the bounding interval and a predicate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from operator import or_
from typing import Any

import torch

from tilewise import expr
from tilewise.caching import cached_property
from tilewise.expr import Expr, apply, number, symbol

I, J, OFF, SEQLEN_Q = (symbol(name) for name in ("i", "j", "off", "seqlen_q"))


@dataclass(frozen=True)
class Prepared:
    """The slots of the two tensors that ``Mask.prepare`` made for a ``shape`` (batch, heads_q, seqlen_q, seqlen_k).

    They are the status on blocks of ``block`` x ``block``, and the keys that some query sees.
    """

    block: int
    status_slot: int
    seen_slot: int
    shape: tuple[int, int, int, int]


UNKNOWN, SQUARE, ALWAYS = range(3)  # the weakest first: & takes the least, | the greatest


@dataclass(frozen=True, eq=False)
class Region:
    """A mask as kernels read it. ``None`` as an end means unbounded, as a predicate it keeps all pairs.

    Attributes:
        lo, hi: key interval of row ``i``: expressions of ``b, h, i`` and the lengths.
        first, last: query interval of column ``j``: expressions of ``b, h, j`` and the lengths.
        predicate: bool expression of ``b, h, i, j``.
        prepared: the tensors of ``Mask.prepare``, and their shapes.
        diagonal: where every query sees the key at its own position ``i + off``, whatever the mask's tensors hold: UNKNOWN, SQUARE, where
            there are as many queries as keys, or ALWAYS.
        covers: every key is seen by some query, whatever the mask's tensors hold.
        sorted_leaves: the slots of tensors without negative elements that never decrease along the last axis.
    """

    lo: Expr | None = None
    hi: Expr | None = None
    first: Expr | None = None
    last: Expr | None = None
    predicate: Expr | None = None
    prepared: Prepared | None = None
    diagonal: int = UNKNOWN
    covers: bool = False
    sorted_leaves: frozenset[int] = frozenset()

    @property
    def everything(self) -> bool:
        return not self.parts

    @property
    def where_diagonal(self) -> int:
        """Return :attr:`diagonal`, which a mask of every pair keeps, too."""
        return ALWAYS if self.everything else self.diagonal

    @property
    def ends(self) -> tuple[Expr | None, ...]:
        return self.lo, self.hi, self.first, self.last

    @cached_property
    def parts(self) -> tuple[Expr, ...]:
        return tuple(e for e in (*self.ends, self.predicate) if e is not None)

    @property
    def interval(self) -> Region:
        """The region without its predicate."""
        return replace(self, predicate=None, prepared=None)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The slots of the tensors that the parts read."""
        return tuple(dict.fromkeys(e.args[0][1] for e in expr.lookups(*self.parts)))

    @cached_property
    def selections(self) -> tuple[Expr, ...]:
        """The parts that look for a key among those that a row was given."""
        return tuple(expr.selections(*self.parts))

    def compared_in(self, leaves: Any) -> torch.dtype:
        """Return the dtype of the mask's arithmetic: fp64 if it reads an fp64 tensor, whose numbers may be equal in fp32, else fp32.

        Args:
            leaves: tensors, or facts of them, by slot.
        """
        return torch.float64 if any(leaves[n].dtype == torch.float64 for n in self.slots) else torch.float32

    @cached_property
    def inside(self) -> Expr | None:
        """Return the interval, by rows, and the predicate as one bool expression."""
        terms = [] if self.lo is None else [apply("ge", J, self.lo)]
        terms += [] if self.hi is None else [apply("lt", J, self.hi)]
        terms += [] if self.predicate is None else [self.predicate]
        return _all(terms)


def _all(terms: Sequence[Expr]) -> Expr | None:
    total = None
    for term in terms:
        total = term if total is None else total & term
    return total


def _tighter(op: str, a: Expr | None, b: Expr | None) -> Expr | None:
    """Return the maximum or minimum of two ends, which may be unbounded. Two numbers on equal ends are folded."""
    if a is None or b is None:
        return b if a is None else a
    (x, m), (y, n) = _plus_number(a), _plus_number(b)
    if expr.same(x, y) and all(e.op != "number" for e in expr.nodes(x)):  # a fold must not depend on numbers
        return _add_number(x, max(m, n) if op == "maximum" else min(m, n))
    return apply(op, a, b)


def _plus_number(e: Expr) -> tuple[Expr, int]:
    if e.op == "add" and e.args[1].op == "number":
        return e.args[0], e.args[1].args[0]
    return e, 0


def _add_number(e: Expr, n: int) -> Expr:
    return e + number(n)


def _intersect(a: Region, b: Region) -> Region:
    return Region(
        _tighter("maximum", a.lo, b.lo),
        _tighter("minimum", a.hi, b.hi),
        _tighter("maximum", a.first, b.first),
        _tighter("minimum", a.last, b.last),
        _all([p for p in (a.predicate, b.predicate) if p is not None]),
        diagonal=min(a.where_diagonal, b.where_diagonal),
        sorted_leaves=a.sorted_leaves | b.sorted_leaves,
    )


def _unite(regions: Sequence[Region]) -> Region:
    """Return the bounding interval, with a predicate that keeps the pairs of any of the regions."""

    def bound(op: str, ends: Sequence[Expr | None]) -> Expr | None:
        return None if any(x is None for x in ends) else reduce(partial(_tighter, op), ends)

    inside = [x.inside for x in regions]
    lo, hi, first, last = zip(*[x.ends for x in regions], strict=True)
    return Region(
        bound("minimum", lo),
        bound("maximum", hi),
        bound("minimum", first),
        bound("maximum", last),
        None if any(x is None for x in inside) else reduce(or_, inside),
        diagonal=max(x.where_diagonal for x in regions),
        sorted_leaves=frozenset().union(*[x.sorted_leaves for x in regions]),
    )


def _window_region(left: Expr | None, right: Expr | None, align: str = "last") -> Region:
    at_row, at_column = (I, J) if align == "first" else (I + OFF, J - OFF)
    return Region(
        lo=None if left is None else _add_number(at_row, -left.args[0]),
        hi=None if right is None else _add_number(at_row, right.args[0] + 1),
        first=None if right is None else _add_number(at_column, -right.args[0]),
        last=None if left is None else _add_number(at_column, left.args[0] + 1),
        diagonal=ALWAYS if align == "last" else SQUARE,
    )


def _prefix_region(n: Expr) -> Region:
    hi, first = apply("maximum", _add_number(I + OFF, 1), n), apply("where", J < n, number(0), J - OFF)
    return Region(hi=hi, first=first, diagonal=ALWAYS)


def _key_range_region(start: Expr, end: Expr) -> Region:
    return Region(
        lo=start,
        hi=end,
        first=apply("where", J < end, number(0), SEQLEN_Q),
        last=apply("where", J < start, number(0), SEQLEN_Q),
    )


def _documents_region(row_start: Expr, row_end: Expr, column_start: Expr, column_end: Expr) -> Region:
    placed = (I + OFF) >= 0  # a query before key 0 belongs to no document
    return Region(
        lo=apply("where", placed, row_start, number(0)),
        hi=apply("where", placed, row_end, number(0)),
        first=column_start - OFF,
        last=column_end - OFF,
        diagonal=ALWAYS,
        sorted_leaves=frozenset(e.args[0][1] for e in (row_start, row_end, column_start, column_end)),
    )


def _predicate_region(predicate: Expr) -> Region:
    return Region(
        predicate=predicate, diagonal=SQUARE if _is_certain(expr.substitute(predicate, {"j": I})) else UNKNOWN
    )


def _is_certain(root: Expr) -> bool:
    """Whether an expression is true whatever its tensors hold: an integer or a bool equals itself; a float may be NaN."""

    def certain(e: Expr, parts: list[bool]) -> bool:
        if e.op in ("and", "or"):
            return all(parts) if e.op == "and" else any(parts)
        return e.op in ("eq", "le", "ge") and expr.same(*e.args) and expr.kind(e.args[0]) != "float"

    return expr.fold(root, certain, lambda e: e.args if e.op in ("and", "or") else ())


def _selected_region(row: Expr, key: Expr) -> Region:
    index = [x.args[0] if x.op == "floordiv" and expr.is_number(x.args[1], 1) else x for x in row.args[1:]]
    return Region(predicate=expr.selected(Expr("lookup", (row.args[0], *index)), key))


_ENDS = ("lo", "hi", "first", "last")
ATOMS: dict[str, Callable[..., Region]] = {
    "causal": lambda: _window_region(None, number(0)),
    "window": _window_region,
    "prefix": _prefix_region,
    "key_range": _key_range_region,
    "documents": _documents_region,
    "intervals": lambda *ends: Region(**dict(zip(_ENDS, ends, strict=True))),
    "covering": lambda *ends: Region(**dict(zip(_ENDS, ends, strict=True)), covers=True),
    "keep": _predicate_region,
    "selected": _selected_region,
}
NAMED = rf"\b(?:{'|'.join(ATOMS)})\("
"""The pattern of what a named mask begins with in the text of several."""
GROUP = "group"
"""The query heads of a key head, in a mask's text before a call has told it (:func:`grouped`). Until then it counts as 1."""


def grouped(text: str, q: torch.Tensor, k: torch.Tensor) -> str:
    """Return a mask's text for a call of ``q`` and ``k``, ``(..., heads, head_dim)``."""
    if GROUP not in text or q.ndim < 2 or k.ndim < 2:
        return text
    heads_q, heads_k = (expr.concrete(x.shape[-2]) for x in (q, k))
    return text.replace(GROUP, f"{heads_q // max(heads_k, 1)}")


@lru_cache(maxsize=4096)
def region(text: str, slots: tuple[int, ...]) -> Region:
    """Return the meaning of a mask's text.

    Args:
        slots: the slot of each of the mask's leaves, in order.
    """
    return _masked(expr.read(text, _Masks(slots))) if text else Region()


_READERS = {
    "key_range": "the tensor of key_lengths or key_range",
    "prefix": "the tensor of prefix",
    "documents": "documents(ids), an id for each key (cu_seqlens are for attention_varlen): a tensor",
    "selected": "the tensor of selected",
}


def readers(text: str, slots: tuple[int, ...]) -> dict[int, str]:
    """Return the names of a mask's tensors in errors, by slot, without those of functions and bool tensors.

    Args:
        slots: as in :func:`region`.
    """
    found = {}
    for part in re.split(f"(?={NAMED})", expr.numbered_through(text, NAMED)):
        if name := _READERS.get(part.partition("(")[0]):
            found |= {slots[int(n)]: name for n in re.findall(r"\b(?:fitted_)?(?:float|int|bool)(\d+)\[", part)}
    return found


class _Masks(expr.Expressions):
    """The meanings of the parts of a mask's text: regions, and expressions within a named one, whose leaves count from 0.

    Unions are gathered first, so that a union of many masks is one predicate without bounds for each pair of masks.
    """

    def __init__(self, slots: tuple[int, ...]):
        super().__init__(self._slot)
        self.slots = slots
        self.base = self.most = 0  # the leaves before the named mask that is being read, and with it
        self.names |= {"None": _UNBOUNDED, "first": "first", GROUP: number(1)}

    def _slot(self, n: int) -> int:
        self.most = max(self.most, self.base + n + 1)
        return self.slots[self.base + n]

    def infix(self, op: str, x: Any, y: Any) -> Any:
        if not isinstance(x, (Region, list)):
            return super().infix(op, x, y)
        if op == "&":
            return _intersect(_masked(x), _masked(y))
        if op != "|":
            raise ValueError(f"not an operation of masks: {op}")
        united = x if isinstance(x, list) else [x]
        united += y if isinstance(y, list) else [_masked(y)]
        return united

    def call(self, name: str, args: list[Any]) -> Any:
        if name == "prepared":
            inner, block, *shape = args
            sizes = tuple(n.args[0] for n in shape)
            return replace(_masked(inner), prepared=Prepared(block.args[0], self.slots[-2], self.slots[-1], sizes))
        if name not in ATOMS:
            return super().call(name, args)
        self.base = self.most
        return ATOMS[name](*[None if x is _UNBOUNDED else x for x in args])


_UNBOUNDED = object()


def _masked(read: Region | list[Region]) -> Region:
    """Return the mask that was read, after uniting the gathered members of a union."""
    if not isinstance(read, (Region, list)):
        raise ValueError(f"not a mask: {read}")
    return _unite(read) if isinstance(read, list) else read
