"""Calls in pieces: where the bits of a mask would take more memory than they may at a time, those of a piece are made, read and freed; or a
piece gathers its queries by the blocks that they select (:mod:`tilewise.backends.blockwise`), and has no bits.

A piece is a call of its own, of some batch elements, key heads and queries, with the mask in the places of the whole
(:class:`tilewise.piece.Piece`). Its keys are those up to the last one that its queries may see. Batch elements and heads are told apart by
views of the mask's tensors, where these have a row for each; then nothing is added up. dK and dV of pieces with some of a head's queries
are. Nothing here imports the DSL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from torch import Tensor

from tilewise import expr
from tilewise.amounts import in_bytes
from tilewise.backends.blockwise import blocks_of, gathered_bytes
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import Formed, bytes_of_bits
from tilewise.expr import Expr
from tilewise.masks.facts import as_band
from tilewise.masks.regions import Region
from tilewise.piece import Piece, Span, evenly
from tilewise.planning.bit_tiles import BUDGET, LINES
from tilewise.problem import Problem, TensorFacts

LEAST_BLOCK = 256  # keys; by bytes and products, bringing a query to smaller ones takes several times its work there
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


def in_pieces(p: Problem, config: Formed) -> bool:
    """Whether the kernels of this config compute a problem piece by piece."""
    return config.form == "bits" and not config.score and bytes_of_bits(p, *_read_by(config)) > BUDGET


def _read_by(config: Formed) -> tuple[int, bool]:
    """How kernels read bits: the crossing lines of a tile, and whether by columns."""
    return (config.keys.tile_m, True) if isinstance(config, Backward) else (config.tiles.tile_n, False)


def gathers(p: Problem, config: Formed) -> bool:
    """Whether the pieces of a problem gather the queries of each block that they select, and read no bits."""
    blocks = blocks_of(p) if in_pieces(p, config) else None
    return blocks is not None and blocks.block >= LEAST_BLOCK and blocks.block_q < LINES


def cuts(p: Problem, config: Formed) -> list[Cut]:
    """Return the pieces of a call, those of the same heads side by side: the largest whose bits, or gathered rows, fit, which are halves of
    halves."""
    batch, heads, queries = _sizes(p, config)
    group, lines = p.group, evenly(-(-p.seqlen_q // LINES), queries // LINES)
    found = []
    for b in evenly(p.batch, batch):
        for h in evenly(p.heads_k, heads):
            for first, last in lines:
                rows = first * LINES, min(last * LINES, p.seqlen_q)
                found.append(Cut(b, h, rows, (h[0] * group, h[1] * group), _end(p, rows)))
    return found


def _sizes(p: Problem, config: Formed) -> list[int]:
    """Return the most batch elements, key heads and queries of a piece. Of bits, only those are divided that are told apart."""
    sizes, whole, gather = [p.batch, p.heads_k, -(-p.seqlen_q // LINES) * LINES], p.seqlen_q, gathers(p, config)
    least = [1 if gather or _divides(p, "b") else p.batch, 1 if gather or _divides(p, "h") else p.heads_k, LINES]

    def fits() -> bool:
        batch, heads, queries = sizes
        q = p.q._replace(shape=(batch, min(queries, whole), heads * p.group, p.head_dim))
        if gather:
            return gathered_bytes(p, batch * heads * min(queries, whole)) <= BUDGET
        return bytes_of_bits(replace(p, q=q), *_read_by(config)) <= BUDGET

    for n, (step, most) in enumerate(zip((1, 1, LINES), least, strict=True)):
        while sizes[n] > most and not fits():
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


def problem_of(p: Problem, cut: Cut) -> Problem:
    """Return the call of a piece."""
    extras = tuple(take(x, spans) for x, spans in zip(p.extras, cut.of_extras(p), strict=True))
    q, k, v = take(p.q, cut.of_q), take(p.k, cut.of_k), take(p.v, cut.of_k)
    return replace(p, q=q, k=k, v=v, extras=extras, spec=replace(p.spec, piece=_piece(p, cut.queries[0])))


def described(p: Problem, configs: Sequence[Formed]) -> str:
    """Return how the kernels of these configs, a forward's first, cut a call, for ``explain``: the last one that does; else nothing."""
    config = next((config for config in reversed(configs) if in_pieces(p, config)), None)
    if config is None:
        return ""
    each = cuts(p, config)
    most = [max(stop - start for start, stop in spans) for spans in list(zip(*each, strict=True))[:3]]
    names = zip(most, ("batch element", "key head"), strict=False)
    sizes = ", ".join([f"{n} {name}{'s' * (n > 1)}" for n, name in names])
    size, found = in_bytes(bytes_of_bits(p, *_read_by(config))), f"{len(each)} of {sizes} and {most[2]} queries"
    found += f", as a bit for each pair may take {size}, above {in_bytes(BUDGET)}"
    return found + "; a block of keys and the queries that selected it are a packed sequence" * gathers(p, config)


# -- What tells batch elements and heads apart ---------------------------------------------------------------------


def _divides(p: Problem, name: str) -> bool:
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
