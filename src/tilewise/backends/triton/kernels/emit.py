"""Masks and scores as Triton source: the expressions of a problem become one small module of JIT functions.

Kernels get the functions of a module as fields of their compile-time facts:

- ``lo, hi, first, last``: the ends of the mask's intervals, of ``(b, h, i, work)`` or ``(b, h, j, work)``;
- ``keep``: the mask's predicate, of ``(b, h, i, j, work)``;
- ``some``, ``every``: whether the predicate may hold somewhere in a tile, and holds in all of it (:func:`emit_mask`);
- ``score``: the score, of ``(s, b, h, i, j, work)`` as all below; ``weights``: 2 to its power, where there is a shorter way to it;
- ``again``: the score as the backward computes it; ``slope``: its derivative with respect to s; ``exponent``: what ``again`` is above
  ``lse2``, in units of log2, where there is a shorter way to it;
- ``moved``, ``moved_slope``: their tangents, of ``(s, ds, b, h, i, j, work)``;
- ``rows``, ``columns``, ``leaves``, ``tile_N``, ``place_N`` and ``start_N``: the gradients of the tensors that the score reads
  (docs/algorithm.md#7-scores-and-their-gradients; :func:`tilewise.leaf_gradients.classify`);
- ``near``: of ``(work)``, the distances i - j at which a tensor's index changes (:mod:`tilewise.distances`).

The ``s`` that they take is the product of q and k: the softmax scale is one of their factors. ``work`` is a ``WorkTile``. Numbers
are run-time arguments (``work.numbers``), so softcap 30 and softcap 50 share a module. Modules are made once per source.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain

import torch

from tilewise import expr
from tilewise.backends.triton.kernels.distant import parts_of, read_at_distance, with_lines
from tilewise.backends.triton.kernels.factors import LOG2E, Factors
from tilewise.backends.triton.kernels.leaf_reads import all_axes, is_wide, leaf_layouts
from tilewise.backends.triton.kernels.writer import Ways, Writer, is_scaled_tanh
from tilewise.backends.triton.reads import near_of_all
from tilewise.distances import reads_by_distance
from tilewise.expr import Expr
from tilewise.leaf_gradients import COLUMNS, DIAGONALS, ROWS, SCATTER, STORE, TILES, Read, classify
from tilewise.masks.facts import conditions, joined
from tilewise.masks.regions import ATOMS, Region
from tilewise.problem import Problem, TensorFacts

SMALL = 1 << 20  # eight positions below it add up to less than 2**24, which fp32 holds exactly
BOUND = 80.0  # up to it bf16 holds every power of 2, and fp32 the sums of a million of them times values up to 2**27
_ENDS = (("lo", "i"), ("hi", "i"), ("first", "j"), ("last", "j"))
_KEEP = "b, h, i, j, work"
_CORNERS = "b, h, i_first, i_last, j_first, j_last, work"
_SCORE = "s, b, h, i, j, work"
_MOVED = "s, ds, b, h, i, j, work"


@dataclass(frozen=True)
class Emitted:
    """The functions of a problem and what their arguments are.

    Attributes:
        functions: by name; a part that the problem does not have is missing.
        numbers: the values of ``work.numbers``.
        slots: the extras that ``work.leaves`` holds, in order.
        reads: how the gradient of each read of a leaf is summed; one by distance may be several (:func:`parts_of`).
        hides: whether the score may be -inf, or its slope not finite, where s is finite.
        binary: whether the score is in units of log2.
        bounded: whether it is binary and at most BOUND, for inputs in bf16.
        lines: int32 tensors that ``work.leaves`` holds behind the extras (:func:`with_lines`).
        corner: whether functions read ``work.corner``.
    """

    functions: dict[str, object]
    numbers: tuple[float, ...]
    slots: tuple[int, ...]
    reads: tuple[Read, ...]
    hides: bool
    binary: bool
    bounded: bool
    lines: tuple[torch.Tensor, ...] = ()
    corner: bool = False


def emit(
    problem: Problem,
    wide: frozenset[int],
    described: int | None = None,
    tangents: Mapping[int, int] | None = None,
    mixed_rows: bool = False,
) -> Emitted:
    """The functions of a problem's mask and score.

    Args:
        wide: the slots whose elements need 64-bit offsets.
        described: the slot whose tile the score finds in ``work.pair`` (:func:`leaf_reads.described_lookup`).
        tangents: the slots of leaves' tangents by those of the leaves; given, there are functions of tangents too, and the gradients of
            leaves are the tangents of these.
        mixed_rows: whether the rows of a tile are several heads' (:mod:`paged`).
    """
    spec, region, numbers = problem.spec, problem.spec.region, []
    # A prepared mask's two tensors say which tiles to visit; no emitted function reads them.
    prepared = () if region.prepared is None else (region.prepared.status_slot, region.prepared.seen_slot)
    slots = tuple(n for n in dict.fromkeys((*spec.mask_slots, *spec.score_slots)) if n not in prepared)
    lookups = expr.lookups(*(x for x in (region.predicate, spec.score) if x is not None))
    small = max(problem.totals) < SMALL
    layouts = leaf_layouts({n: problem.extras[n] for n in slots}, (problem.seqlen_q, problem.seqlen_k), lookups)
    slots += tuple(moved for slot, moved in (tangents or {}).items() if slot in slots)
    # Kernels of tangents, and those whose rows may be several heads', do not know these parts of a WorkTile.
    simple = tangents is None and not mixed_rows
    distances = near_of_all(problem) if simple else None
    score, lines = (spec.score, ()) if distances is None else with_lines(problem, distances)
    score = None if score is None else all_axes(score, problem.extras)
    region = kernel_region(region, problem.extras, far=problem.dtype == torch.float32 and not mixed_rows)
    distant, heads = [] if simple and reads_by_distance(problem) else None, [] if simple else None
    # The tensors of lines lie behind the leaves.
    of_lines = range(len(problem.extras), len(problem.extras) + len(lines))
    position = {slot: n for n, slot in enumerate((*slots, *of_lines))}
    writer = partial(Writer, position, layouts, wide, small)
    source = _mask_functions(region, partial(Writer, position, {}, wide, small), writer, numbers)
    if distances is not None:
        bounds = [expr.abstract(expr.number(n), numbers) for n in distances]
        source.append(_returning(writer(), "near", "work", *bounds))
    parts = [parts_of(problem, read) for read in classify(problem)]
    if tangents is not None:
        # The passes for TILES and DIAGONALS (pair_bias.py, diagonals.py) sum dZ alone. A tangent of it has two terms, and
        # its pairs are scattered.
        how = {TILES: SCATTER, DIAGONALS: SCATTER}
        parts = [(replace(read, how=how.get(read.how, read.how)),) for read in classify(problem)]
    binary = bounded = hides = False
    if score is not None:
        # Positions that count from a tile's corner take registers: up to D 64 the forward's tiles are wide and leave it none.
        corner = heads is not None and max(problem.head_dim, problem.head_dim_v) > 64
        ways = Ways(described=described, distant=distant, heads=heads, corner=corner)
        of_score, binary, bounded = _of_score(problem, score, partial(writer, ways=ways), numbers, parts, tangents)
        source, hides = source + of_score, _hides(score)
    source += [read_at_distance(n, body) for n, body in enumerate(distant or ())]
    if heads:
        source += [f"@triton.jit\ndef at_head_{n}(b, h, work):\n{body}" for n, body in enumerate(heads)]
        results = "".join(f"at_head_{n}(b, h, work), " for n in range(len(heads)))
        source.append(_function("heads", "b, h, work", [f"return ({results})"]))
    functions = _module(tuple(source)) if source else {}
    corner, reads = any("work.corner" in x for x in source), tuple(chain.from_iterable(parts))
    return Emitted(functions, tuple(numbers), slots, reads, hides, binary, bounded, lines, corner)


def _of_score(
    problem: Problem,
    score: Expr,
    writer: Callable[..., Writer],
    numbers: list[float],
    parts: list[tuple[Read, ...]],
    tangents: Mapping[int, int] | None,
) -> tuple[list[str], bool, bool]:
    """The functions of a problem's ``score`` and of its derivatives, and whether it is binary and bounded (:class:`Emitted`).

    The score's numbers are appended to ``numbers``.
    """
    half, score = problem.dtype.itemsize == 2, expr.abstract(score, numbers)
    factors = Factors(numbers, problem.softmax_scale)
    root = factors.collected(score)
    # Where the score has a factor anyway, log2 e becomes a part of it: no multiplication more. fp32 stays in base e
    # (maths.exp).
    binary = half and factors.in_log2(root) is not None
    # Exponents within BOUND need no maximum: the forward subtracts 0 (docs/decisions.md#triton-softcap). Such a tile's power of a tanh
    # depends on the pairs beside it.
    bounded = binary and problem.dtype == torch.bfloat16 and LOG2E * _bound(problem.spec.score) <= BOUND
    bounded = bounded and not problem.spec.everywhere
    root = factors.in_log2(root) if binary else root
    source = [_returning(writer(), "score", _SCORE, root)]
    if bounded and is_scaled_tanh(root):
        source.append(_weights(writer(), root))
    # The backward may take the tanh of one instruction, whose error is below the rounding of dS to 16 bits; tangents
    # keep the exact one.
    ways = replace(writer().ways, rough=half and tangents is None, corner=writer().ways.heads is not None)
    again = partial(writer, ways=ways)
    source += [_returning(again(), "again", _SCORE, root), *_gradients(again, score, parts, factors, tangents)]
    if half and not binary and tangents is None:
        source += _exponent(again(), root, factors)
    if tangents is not None:
        # The score's change along the tangents of s and of its leaves, and the change of its slope
        # (docs/algorithm.md#15-tangents-and-second-derivatives).
        slope = _derivative(score, expr.symbol("s"))
        for name, each in (("moved", score), ("moved_slope", slope)):
            source.append(_returning(again(), name, _MOVED, factors.collected(expr.tangent(each, tangents))))
    return source, binary, bounded


def emit_mask(region: Region, leaves: Sequence[TensorFacts], lengths: tuple[int, int]) -> Emitted:
    """The functions of a mask alone, without a problem: its ends, ``keep``, and ``some`` and ``every``.

    The last two are there where a part of the predicate rises or falls (:func:`tilewise.masks.facts.conditions`), or is of selected
    keys. They are functions of ``(b, h, i_first, i_last, j_first, j_last, work)``, the ends of a tile: where ``some`` is false no
    pair of it is kept, where ``every`` is true all are.

    Args:
        leaves: by slot. lengths: seqlen_q and seqlen_k.
    """
    numbers: list[float] = []
    lookups = expr.lookups(*region.parts)
    slots = tuple(dict.fromkeys(x.args[0][1] for x in lookups))
    position = {slot: n for n, slot in enumerate(slots)}
    wide, small = frozenset(n for n in slots if is_wide(leaves[n])), max(lengths) < SMALL
    layouts, region = leaf_layouts({n: leaves[n] for n in slots}, lengths, lookups), kernel_region(region, leaves)
    of_lines = partial(Writer, position, {}, wide, small)
    source = _mask_functions(region, of_lines, partial(Writer, position, layouts, wide, small), numbers)
    if region.predicate is not None:
        source += _corner_functions(region, of_lines, numbers)
    return Emitted(_module(tuple(source)), tuple(numbers), slots, (), False, False, False)


def kernel_region(region: Region, leaves: Sequence[TensorFacts], far: bool = False) -> Region:
    """The mask as kernels read it, so that many masks share one: its predicate's tensors at all axes (:func:`all_axes`).

    Args:
        far: an open end of rows is one beyond all keys, which a full tile pays for (docs/decisions.md#triton-all-axes).
    """
    if region.predicate is not None:
        region = replace(region, predicate=all_axes(region.predicate, leaves))
    if region.hi is None and far:
        beyond = ATOMS["window"](None, expr.number(expr.LARGEST_NUMBER - 1))
        region = replace(region, hi=beyond.hi, first=beyond.first)
    return region


# -- Functions of a module -----------------------------------------------------------------------------------------


def _mask_functions(
    region: Region, of_lines: Callable[[], Writer], of_pairs: Callable[[], Writer], numbers: list[float]
) -> list[str]:
    """The functions of a mask: its ends, and ``keep``."""
    source = []
    for (name, index), end in zip(_ENDS, region.ends, strict=True):
        if end is not None:
            # Ends are asked for rows and keys past the last one too, the tail of a tile: without layouts every index is
            # clamped.
            source.append(_returning(of_lines(), name, f"b, h, {index}, work", expr.abstract(end, numbers)))
    if region.predicate is not None:
        source.append(_returning(of_pairs(), "keep", _KEEP, expr.abstract(region.predicate, numbers)))
    return source


def _corner_functions(region: Region, writer: Callable[[], Writer], numbers: list[float]) -> list[str]:
    """``some`` and ``every``, line by line as ``&`` and ``|`` join the predicate's parts, and the functions of these parts.

    A condition is asked at a tile's best and at its worst corner, selected keys by their entries. Of any other part a tile tells nothing.
    """
    source, known = [], conditions(region.predicate, region.sorted_leaves)
    lines: dict[str, list[str]] = {"some": [], "every": []}

    def judged(e: Expr, inner: list[int]) -> int:
        n, condition = len(lines["some"]), known.get(id(e))
        if condition is not None:
            source.append(_returning(writer(), f"holds_{n}", _KEEP, expr.abstract(e, numbers)))
        elif e.op == "selected":
            source.extend(_named_functions(n, expr.abstract(e, numbers), writer))
        for which, best in (("some", True), ("every", False)):
            if condition is not None:
                i, j = ("last" if (by > 0) == best else "first" for by in (condition.by_i, condition.by_j))
                text = f"holds_{n}(b, h, i_{i}, j_{j}, work)"
            elif inner:
                text = (" & " if e.op == "and" else " | ").join(f"part_{m}" for m in inner)
            elif e.op == "selected":
                text = f"{which}_named_{n}({_CORNERS})"
            else:
                text = f"tl.full((), {int(best)}, tl.int1)"
            # A line each: Triton's reader calls itself for each operator of a line.
            lines[which].append(f"part_{n} = {text}")
        return n

    last = expr.fold(region.predicate, judged, partial(joined, known))
    if not source:
        return []
    return source + [_function(which, _CORNERS, [*found, f"return part_{last}"]) for which, found in lines.items()]


def _named_functions(n: int, selection: Expr, writer: Callable[[], Writer]) -> list[str]:
    """Whether some query of a tile selected a key of it, and whether all selected all: by the entries of 128 queries at a time."""
    rows, keys = writer(), writer()
    leaf, first, count, stride = rows.row_of(selection)
    source = [_function(f"row_{n}", "b, h, i, work", [*rows.lines, f"return {first}"])]
    source += [_returning(keys, f"entry_{n}", "b, h, j, work", selection.args[-1])]
    for which, join in (("some", "max"), ("every", "min")):
        found = f"maths.{which}_among({leaf}, row_{n}(b, h, i, work), {count}, {stride}, low, high)"
        lines = [
            f"low, high = entry_{n}(b, h, j_first, work), entry_{n}(b, h, j_last, work)",
            f"found = i_first * 0 + {int(which == 'every')}",
            "for row in range(i_first, i_last + 1, 128):",
            "    i = tl.minimum(row + tl.arange(0, 128), i_last)",
            f"    found = tl.{join}imum(found, tl.{join}({found}.to(tl.int32), 0))",
            "return found > 0",
        ]
        source.append(_function(f"{which}_named_{n}", _CORNERS, lines))
    return source


def _function(name: str, arguments: str, lines: list[str]) -> str:
    """The source of a JIT function."""
    return "\n".join(["@triton.jit", f"def {name}({arguments}):", *[f"    {line}" for line in lines]])


def _returning(writer: Writer, name: str, arguments: str, *roots: Expr) -> str:
    """A function that returns an expression, or several."""
    results = ", ".join([writer.value(root) for root in roots])
    return _function(name, arguments, [*writer.lines, f"return {results}"])


def _weights(writer: Writer, root: Expr) -> str:
    """The function ``weights``, for a score ``c tanh(x)``."""
    # root is mul(tanh(x), c): `is_scaled_tanh` saw to that.
    x, c = root.args[0].args[0], root.args[1]
    writer.value(x)
    result = f"maths.power_of_tanh({writer.floating(x)}, {writer.value(c)})"
    return _function("weights", _SCORE, [*writer.lines, f"return {result}"])


def _exponent(writer: Writer, root: Expr, factors: Factors) -> list[str]:
    """The function ``exponent``, for a score that adds to a multiple of s products with a number of each head, as ALiBi does.

    Then log2 e is a part of that number and of s's factor, and each sum of two is one fused multiply-add. No functions for any other score.
    """
    of_s, others = [], []
    for sign, term in _terms(root):
        (of_s if "s" in expr.depends_on(term) else others).append((sign, term))
    by_head = [_head_factor(term) for _, term in others]
    if len(of_s) != 1 or of_s[0][0] < 0 or not any(by_head) or not _is_multiple_of_s(of_s[0][1]):
        return []
    s, c = of_s[0][1].args
    log2e = writer.value(factors.log2e_factor)
    writer.lines.append(f"x = {writer.value(s)} * ({writer.value(c)} * {log2e}) - lse2")
    for (sign, term), found in zip(others, by_head, strict=True):
        head, rest = found or (None, term)
        for each in (rest,) if head is None else (head, rest):
            writer.value(each)
        factor = log2e if head is None else f"({writer.floating(head)} * {log2e})"
        writer.lines.append(f"x = x {'+-'[sign < 0]} {factor} * {writer.floating(rest)}")
    return [_function("exponent", f"s, lse2, {_KEEP}", [*writer.lines, "return x"])]


def _terms(root: Expr) -> list[tuple[int, Expr]]:
    """The terms of a sum, each with its sign."""
    found, stack = [], [(1, root)]
    while stack:
        sign, e = stack.pop()
        if e.op in ("add", "sub"):
            stack += [(-sign if e.op == "sub" else sign, e.args[1]), (sign, e.args[0])]
        elif e.op == "neg":
            stack.append((-sign, e.args[0]))
        elif e.op == "mul" and any(expr.is_number(x, -1) for x in e.args):
            stack.append((-sign, next((x for x in e.args if not expr.is_number(x, -1)), e.args[0])))
        else:
            found.append((sign, e))
    return found


def _head_factor(term: Expr) -> tuple[Expr, Expr] | None:
    """A product's factor that is read at b and h alone, and its other factor; None of any other term."""
    if term.op != "mul":
        return None
    for head, rest in (term.args, term.args[::-1]):
        if head.op == "lookup" and expr.depends_on(head) <= {"b", "h"}:
            return head, rest
    return None


def _is_multiple_of_s(term: Expr) -> bool:
    return term.op == "mul" and term.args[0].op == "symbol" and term.args[1].op == "param"


def _gradients(
    writer: Callable[[], Writer],
    score: Expr,
    parts: list[tuple[Read, ...]],
    factors: Factors,
    tangents: Mapping[int, int] | None,
) -> list[str]:
    """The functions of the backward: ``slope``, and those that sum the gradients of the leaves, or with ``tangents`` their tangents.

    These get ``dz``, a tile of dZ, and ``hit``, whether P is not 0; with tangents ``moved_dz`` and ``ds`` too. ``rows`` returns what a
    tile adds to the sums by rows; the others write: ``columns`` and scattered sums with atomic additions, a leaf with an element for
    each pair with plain stores.
    """
    slope = factors.collected(_derivative(score, expr.symbol("s")))
    source = [] if expr.is_number(slope, 1) else [_returning(writer(), "slope", _SCORE, slope)]
    # `parts` has one entry for each lookup of a wanted leaf, in the order of the lookups.
    wanted = {read.slot for reads in parts for read in reads}
    lookups = [x for x in expr.lookups(score) if x.args[0][1] in wanted]
    plain = [_derivative(score, x) for x in lookups]
    # d(score)/d(leaf) for each lookup, and the change of that derivative along the tangents.
    moved = [None if tangents is None else factors.collected(expr.tangent(x, tangents)) for x in plain]
    slopes = [factors.collected(x) for x in plain]
    given, of_score = ("dz, hit", _SCORE) if tangents is None else ("dz, moved_dz, hit", _MOVED)
    rows, columns, others, sums = writer(), writer(), writer(), []
    each = [(read, *x) for reads, *x in zip(parts, lookups, slopes, moved, strict=True) for read in reads]
    for n, (read, lookup, slope, change) in enumerate(each):
        if read.how in (TILES, DIAGONALS):
            if not expr.is_number(slope, 1):
                source.append(_returning(writer(), f"tile_{n}", _SCORE, slope))
            source.append(_where_summed(n, read, lookup, factors.numbers, writer()))
            continue
        lines = {ROWS: rows, COLUMNS: columns}.get(read.how, others)
        # The change of dz · slope: moved_dz · slope + dz · change.
        value = _times(lines, "dz" if change is None else "moved_dz", slope)
        if change is not None and not expr.is_number(change, 0):
            value = f"{value} + {_times(lines, 'dz', change)}"
        value = value if change is None and _finite(slope) else f"tl.where(hit, {value}, 0.0)"
        if read.how == ROWS:
            # Tiles are (queries, keys) here: the kernel carries this sum, (queries, PARTIAL) in fp32, over its key tiles,
            # and stores the rows' sums of it once.
            sums.append(_row_sums(n, lines, read, factors.numbers, value))
        elif read.how == COLUMNS:
            # Tiles are (keys, queries) here, so that axis 1 is again the one to sum. Nobody reads the sums before the
            # kernel ends.
            lines.lines.append(f"tl.atomic_add(work.grads[{n}] + line, tl.sum({value}, 1), mask=valid, sem='relaxed')")
        else:
            offset = lines.offset(factors.collected(lookup), "grad_extents")
            # `inside` has the pairs of both sequences, so that hidden pairs store their 0. `hit` has those with P above
            # 0: the others add nothing.
            write = f"tl.store(work.grads[{n}] + ({offset}), {value}, mask=inside)"
            scatter = f"tl.atomic_add(work.grads[{n}] + ({offset}), {value}, mask=hit, sem='relaxed')"
            lines.lines.append(write if read.how == STORE else scatter)
    if sums:
        source.append(_function("rows", f"{given}, {of_score}", [*rows.lines, f"return ({', '.join(sums)},)"]))
    if others.lines:
        source.append(_function("leaves", f"{given}, inside, {of_score}", [*others.lines, "return"]))
    if columns.lines:
        source.append(_function("columns", f"{given}, line, valid, {of_score}", [*columns.lines, "return"]))
    return source


def _where_summed(n: int, read: Read, lookup: Expr, numbers: list[float], writer: Writer) -> str:
    """A function for the kernel that sums the n-th read: ``place_N``, where a pair is read, or ``start_N``, the least distance."""
    if read.pairs:
        head = "0" if "h" in read.loops or "h" not in expr.depends_on(*read.expr.args[1:]) else "h"
        return _function(f"place_{n}", _KEEP, [f"return ({head} * work.seqlen_q + i) * work.seqlen_k + j"])
    if read.how == TILES:
        offset = writer.offset(lookup, "grad_extents")
        return _function(f"place_{n}", _KEEP, [*writer.lines, f"return {offset}"])
    return _returning(writer, f"start_{n}", "work", expr.abstract(expr.number(read.distances[0]), numbers))


def _row_sums(n: int, writer: Writer, read: Read, numbers: list[float], value: str) -> str:
    """The sums of a tile's rows of the n-th read: of all pairs, or of those on one side of the distances near the diagonal."""
    start, stop = read.distances
    if start is None and stop is None:
        return f"maths.partial_sums({value})"
    side = "lt" if start is None else "ge"
    bound = expr.abstract(expr.number(stop if start is None else start), numbers)
    counts = writer.value(expr.apply(side, expr.symbol("i") - bound, expr.symbol("j")))
    some = f"maths.partial_sums(tl.where({counts}, x{n}, 0.0))"
    writer.lines.append(f"x{n} = {value}")
    if writer.ways.distant is None:
        return some
    # A tile that is far from the diagonal is on one side as a whole: its pairs are not compared one by one.
    whole = f"work.far[1] - work.far[2] {'<' if start is None else '>='} {writer.value(bound)}"
    writer.lines += [
        "if len(work.far) == 0:",
        f"    r{n} = {some}",
        "elif work.far[0]:",
        f"    r{n} = tl.where({whole}, maths.partial_sums(x{n}), 0.0)",
        "else:",
        f"    r{n} = {some}",
    ]
    return f"r{n}"


def _times(writer: Writer, name: str, slope: Expr) -> str:
    """The product of a value of that name and a slope."""
    if expr.is_number(slope, 1):
        return name
    writer.value(slope)
    return f"{name} * {writer.floating(slope)}"


def _derivative(root: Expr, wrt: Expr) -> Expr:
    """The derivative of an expression, 0 where it does not depend on ``wrt``."""
    slope = expr.derivative(root, wrt)
    return expr.number(0.0) if slope is None else slope


# -- What is known of a score --------------------------------------------------------------------------------------

_WHOLE = ("symbol", "number", "param", "add", "sub", "mul", "neg", "abs", "float", "int")
_BOUNDED = (*_WHOLE, "tanh", "sigmoid", "lookup")


def _finite(slope: Expr) -> bool:
    """Whether a slope is finite everywhere, so that dZ times it, which is 0 where P is 0, need not be selected again."""
    return all(node.op in _WHOLE for node in expr.nodes(slope)) and "s" not in expr.depends_on(slope)


def _hides(score: Expr) -> bool:
    """Whether a score may be -inf where s is finite, or its slope not finite.

    It may not if its operations are bounded and it reads no tensor at i or j, which may hold -inf.
    """
    for node in expr.nodes(score, _derivative(score, expr.symbol("s"))):
        by_number = node.op == "div" and node.args[1].op in ("number", "param")
        by_head = node.op != "lookup" or not {"i", "j"} & expr.depends_on(*node.args[1:])
        # A lookup at b and h alone, a slope of ALiBi, is taken to be finite; a tensor read at i or j may hold -inf to
        # hide pairs.
        if not by_head or (node.op not in _BOUNDED and not by_number):
            return True
    return False


def _bound(root: Expr) -> float:
    """A bound of the size of an expression, whatever s and the tensors are; infinite where it cannot tell."""
    return expr.fold(root, _bound_of)


def _bound_of(e: Expr, inner: list[float]) -> float:
    """:func:`_bound` of a node, from those of its arguments."""
    if e.op == "number":
        return abs(float(e.args[0]))
    if e.op in ("tanh", "sigmoid", "erf", "sin", "cos"):
        return 1.0
    if e.op in ("neg", "abs"):
        return inner[0]
    if e.op in ("add", "sub"):
        return sum(inner)
    return math.prod(inner) if e.op == "mul" else math.inf


# -- A module ------------------------------------------------------------------------------------------------------

_HEADER = "import triton\nimport triton.language as tl\n\nfrom tilewise.backends.triton.kernels import maths\n"


@lru_cache(maxsize=1024)
def _module(source: tuple[str, ...]) -> dict[str, object]:
    """The functions of a module, by name, from their sources.

    It needs no file: Triton reads a function's source through ``linecache``. Each source is a text of its own: Triton's key of a function
    holds its line, which would tell of the functions above it.
    """
    # Here and not above: explain and the choice of tiles import this module on machines without Triton.
    from triton.runtime.jit import KernelInterface

    module = types.ModuleType("tilewise_emitted")
    exec(_HEADER, module.__dict__)
    for text in source:
        filename = f"<tilewise {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        exec(compile(text, filename, "exec"), module.__dict__)
    return {name: f for name, f in vars(module).items() if isinstance(f, KernelInterface)}
