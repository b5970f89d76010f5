"""Calls in pieces: of some batch elements, key heads and queries, so that what a piece needs beside its tensors fits in memory.

A piece is a call of its own, with the mask in the places of the whole (:class:`tilewise.piece.Piece`). Its keys are those up to the last
one that its queries may see. Batch elements and heads are told apart by views of the mask's tensors, where these have a row for each; then
nothing is added up. dK and dV of pieces with some of a head's queries are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import expr
from tilewise.backends.base import Grads, Inputs, Output
from tilewise.caching import cached_property
from tilewise.expr import Expr
from tilewise.masks.facts import as_band
from tilewise.masks.regions import Region
from tilewise.piece import Piece, Span, evenly
from tilewise.planning.bit_tiles import LINES
from tilewise.problem import Problem, TensorFacts

Spans = Mapping[int, Span]  # by dimension
Narrowed = TypeVar("Narrowed", Tensor, TensorFacts)


def take(x: Narrowed, spans: Spans) -> Narrowed:
    """Return the part of a tensor within these spans, as a view."""
    if isinstance(x, TensorFacts):
        shape = (stop - start for start, stop in (spans.get(n, (0, size)) for n, size in enumerate(x.shape)))
        return x._replace(shape=tuple(shape))
    for n, (start, stop) in spans.items():
        x = x.narrow(n, start, stop - start)
    return x


class Cut(NamedTuple):
    """A piece of a call: its batch elements, key heads and queries, the query heads of its key heads, and the end of its keys."""

    batch: Span
    heads: Span
    queries: Span
    heads_q: Span
    end: int

    @property
    def of_q(self) -> Spans:
        """Its part of q, o and their gradients."""
        return {0: self.batch, 1: self.queries, 2: self.heads_q}

    @property
    def of_k(self) -> Spans:
        """Its part of k, v and their gradients."""
        return {0: self.batch, 1: (0, self.end), 2: self.heads}

    @property
    def of_rows(self) -> Spans:
        """Its part of lse and its gradient."""
        return {0: self.batch, 1: self.heads_q, 2: self.queries}

    def of_extras(self, p: Problem) -> list[Spans]:
        """Its part of each extra: of sinks, and of tensors that the mask reads by batch element or by head."""
        found: list[dict[int, Span]] = [{} for _ in p.extras]
        for name, span, whole in (("b", self.batch, p.batch), ("h", self.heads_q, p.heads_q)):
            if span != (0, whole):
                for slot, axis, each in axes_of(p.spec.region, name):
                    found[slot][axis] = span[0] // each, span[1] // each
        if p.spec.sink_slot is not None:
            found[p.spec.sink_slot][0] = self.heads_q
        return found


# -- Where a call is cut -------------------------------------------------------------------------------------------


def cuts(p: Problem, least: tuple[bool, bool], fits: Callable[[int, int, int], bool]) -> list[Cut]:
    """Return the pieces of a call, those of the same heads side by side: the largest that fit, which are halves of halves.

    Args:
        least: whether batch elements, and key heads, may be divided. fits: whether so many batch elements, key heads and queries do.
    """
    batch, heads, queries = _sizes(p, least, fits)
    group, lines = p.group, evenly(-(-p.seqlen_q // LINES), queries // LINES)
    found = []
    for b in evenly(p.batch, batch):
        for h in evenly(p.heads_k, heads):
            for first, last in lines:
                rows = first * LINES, min(last * LINES, p.seqlen_q)
                found.append(Cut(b, h, rows, (h[0] * group, h[1] * group), _end(p, rows)))
    return found


def _sizes(p: Problem, least: tuple[bool, bool], fits: Callable[[int, int, int], bool]) -> list[int]:
    sizes = [p.batch, p.heads_k, -(-p.seqlen_q // LINES) * LINES]
    smallest = [*(1 if divided else size for divided, size in zip(least, sizes, strict=False)), LINES]
    for n, (step, most) in enumerate(zip((1, 1, LINES), smallest, strict=True)):
        while sizes[n] > most and not fits(*sizes[:2], min(sizes[2], p.seqlen_q)):
            sizes[n] = -(-sizes[n] // (2 * step)) * step
    return sizes


def _end(p: Problem, rows: Span) -> int:
    """Return one past the last key that these queries may see, by a band of numbers around the mask."""
    (start, stop), interval = rows, _piece(p, rows[0]).region(p.spec.whole_region).interval
    band = as_band(interval, p.seqlen_k - (stop - start), p.seqlen_k)
    return p.seqlen_k if band is None else band.cut(stop - start).stop


def _piece(p: Problem, query: int) -> Piece:
    """Return the place of the piece that begins with a query of the call."""
    (first, key), totals = p.starts, p.totals
    return Piece(first + query, key, *totals)


def room(p: Problem) -> int:
    """Return how many bytes what a piece needs beside its tensors may take: its launches take the host some milliseconds."""
    return devices.of(p.device).memory // 32 or 2 << 30


def problem_of(p: Problem, cut: Cut) -> Problem:
    """Return the call of a piece."""
    extras = tuple(take(x, spans) for x, spans in zip(p.extras, cut.of_extras(p), strict=True))
    q, k, v = take(p.q, cut.of_q), take(p.k, cut.of_k), take(p.v, cut.of_k)
    return replace(p, q=q, k=k, v=v, extras=extras, spec=replace(p.spec, piece=_piece(p, cut.queries[0])))


def described(found: Sequence[Cut]) -> str:
    """Return how a call is cut, for ``explain``."""
    most = [max(stop - start for start, stop in spans) for spans in list(zip(*found, strict=True))[:3]]
    names = zip(most, ("batch element", "key head"), strict=False)
    sizes = ", ".join([f"{n} {name}{'s' * (n > 1)}" for n, name in names])
    return f"{len(found)} of {sizes} and {most[2]} queries"


# -- The call ------------------------------------------------------------------------------------------------------


class PieceCall(Protocol):
    """The call of a piece."""

    problem: Problem

    def forward(self, inputs: Inputs) -> Output: ...

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads: ...


@dataclass(eq=False)
class Piecewise:
    """The call of a problem that runs piece by piece. ``cut``: also by whether it is a backward; ``call_of``: the call of a piece."""

    problem: Problem
    cut: Callable[[Problem, bool], list[Cut]]
    call_of: Callable[[Problem], PieceCall]

    @cached_property
    def pieces(self) -> list[tuple[Cut, PieceCall]]:
        """The pieces of a forward in order, each with its call."""
        return self._pieces(backward=False)

    @cached_property
    def backward_pieces(self) -> list[tuple[Cut, PieceCall]]:
        """Those of a backward."""
        return self._pieces(backward=True)

    def _pieces(self, backward: bool) -> list[tuple[Cut, PieceCall]]:
        return [(cut, self.call_of(problem_of(self.problem, cut))) for cut in self.cut(self.problem, backward)]

    def inputs(self, given: Inputs, cut: Cut, call: PieceCall) -> Inputs:
        """The tensors of a piece."""
        extras = [take(x, spans) for x, spans in zip(given.leaves, cut.of_extras(self.problem), strict=True)]
        q, k, v = take(given.q, cut.of_q), take(given.k, cut.of_k), take(given.v, cut.of_k)
        return Inputs.of(call.problem, q, k, v, extras, None)

    def forward(self, inputs: Inputs) -> Output:
        o, lse = (
            inputs.q.new_empty(shape, dtype=dtype)
            for shape, dtype in zip(
                self.problem.output_shapes, (self.problem.dtype, self.problem.compute_dtype), strict=True
            )
        )
        for cut, call in self.pieces:
            found = call.forward(self.inputs(inputs, cut, call))
            take(o, cut.of_q).copy_(found.o)
            take(lse, cut.of_rows).copy_(found.lse)
        return Output(o, lse)

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        p = self.problem
        dq, dk, dv = (x.new_empty(x.shape) for x in (inputs.q, inputs.k, inputs.v))
        sink = None if inputs.sink is None else torch.zeros_like(inputs.sink, dtype=p.compute_dtype)
        for _, same in groupby(self.backward_pieces, lambda piece: piece[0].heads + piece[0].batch):
            of_heads = list(same)
            whole = of_heads[0][0]._replace(end=p.seqlen_k)
            # Of one piece alone nothing is added up.
            wide = p.compute_dtype if len(of_heads) > 1 else p.dtype
            sums = [torch.zeros_like(take(x, whole.of_k), dtype=wide) for x in (dk, dv)]
            for cut, call in of_heads:
                found = self.gradients(inputs, out, (do, dlse), cut, call)
                take(dq, cut.of_q).copy_(found.dq)
                for total, part in zip(sums, (found.dk, found.dv), strict=True):
                    total[:, : cut.end] += part
                if sink is not None:
                    take(sink, cut.of_extras(p)[p.spec.sink_slot]).add_(found.sink)
            for x, total in zip((dk, dv), sums, strict=True):
                take(x, whole.of_k).copy_(total)
        return Grads(dq, dk, dv, None if sink is None else sink.to(inputs.sink.dtype), {})

    def gradients(self, inputs: Inputs, out: Output, given: tuple[Tensor, Tensor], cut: Cut, call: PieceCall) -> Grads:
        """The gradients of a piece; ``given``: those of o and lse."""
        do, dlse = given
        own = Output.of(take(out.o, cut.of_q), take(out.lse, cut.of_rows))
        rows = take(dlse, cut.of_rows).contiguous()
        return call.backward(self.inputs(inputs, cut, call), own, take(do, cut.of_q), rows)


# -- What tells batch elements and heads apart ---------------------------------------------------------------------


def divides(p: Problem, name: str) -> bool:
    """Return whether batch elements, or key heads, are told apart by views of the mask's tensors."""
    found, count = axes_of(p.spec.region, name), p.batch if name == "b" else p.heads_q
    alike = p.spec.sink_slot in p.spec.mask_slots  # a sink is read by head, and whole by the mask perhaps
    sizes = (p.group % each == 0 and p.extras[n].shape[axis] * each == count for n, axis, each in found or ())
    return bool(found) and not alike and all(sizes)


@lru_cache(maxsize=1024)
def axes_of(region: Region, name: str) -> tuple[tuple[int, int, int], ...]:
    """Return the axes of a mask's tensors that ``b``, or ``h`` over a number of heads, is the index of: ``(slot, axis, number)`` each; none
    where the mask does not read all of these tensors so, or depends on the symbol otherwise."""
    read: dict[tuple[int, int], set[int]] = {}
    for e in expr.lookups(*region.parts):
        for axis, index in enumerate(expr.indices(e)):
            read.setdefault((e.args[0][1], axis), set()).add(_number_of(index, name))
    axes = {place: found for place, found in read.items() if found != {0}}
    if any(len(found) > 1 for found in axes.values()) or any(_loose(e, name) for e in region.parts):
        return ()
    return tuple((*place, *found) for place, found in axes.items())


def _number_of(index: Expr, name: str) -> int:
    """Return n of an index ``name // n``, 1 of the symbol itself, and 0 of any other."""
    of, n = (index.args[0], index.args[1].args[0]) if _is_quotient(index) else (index, 1)
    return n if of.op == "symbol" and of.args[0] == name else 0


def _is_quotient(e: Expr) -> bool:
    return e.op == "floordiv" and e.args[1].op == "number" and type(e.args[1].args[0]) is int and e.args[1].args[0] > 0


def _loose(root: Expr, name: str) -> bool:
    """Return whether an expression depends on a symbol but by :func:`_number_of` an index."""

    def loose(e: Expr, inner: list[bool]) -> bool:
        if e.op == "symbol":
            return e.args[0] == name
        own = expr.indices(e) if e.op in expr.READS else ()
        plain = [n < len(own) and _number_of(own[n], name) > 0 for n in range(len(inner))]
        return any(x and not known for x, known in zip(inner, plain, strict=True))

    return expr.fold(root, loose)
