"""Reads of a score's tensors at the distance of a pair: how a module reads them; and the sums that make the gradients of all reads."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise import expr
from tilewise.distances import by_distance, indices, near
from tilewise.expr import Expr
from tilewise.leaf_gradients import DIAGONALS, ROWS, SCATTER, TILES, Read
from tilewise.problem import Problem

PAIRS_MEMORY = 1 << 26  # bytes of the sums of pairs; adding them to a leaf sorts them, which takes more
# An index of these operations alone is computed for every pair; any other is looked up.
_SHORT = ("symbol", "number", "add", "sub", "neg", "mul", "abs", "maximum", "minimum", "clamp_min", "clamp_max")


def parts_of(problem: Problem, read: Read) -> tuple[Read, ...]:
    """The sums that make one read's gradient.

    By distance near the diagonal, by rows on either side, where an index by distance is constant. What would be scattered for each batch
    element, though its index is the same in all, as in a table read through a tensor of pairs, is summed over the batch first.
    """
    if read.how == SCATTER:
        return (_over_batch(problem, read),)
    if read.how != DIAGONALS:
        return (read,)
    found = near(problem, read.expr)
    # The three lie side by side: each pair counts in one of them, and all add to the same tensor.
    parts = (replace(read, distances=(found.start, found.stop)),) if found.start < found.stop else ()
    parts += (replace(read, how=ROWS, distances=(None, found.start)),) if found.below else ()
    parts += (replace(read, how=ROWS, distances=(found.stop, None)),) if found.above else ()
    return parts or (replace(read, how=ROWS, distances=(None, found.start)),)  # no pair is kept: a sum of none


def _over_batch(problem: Problem, read: Read) -> Read:
    """A scattered read summed over the batch, and over heads where its index does not depend on h; itself where it cannot be, or the
    sums would take more than PAIRS_MEMORY."""
    used = expr.depends_on(*read.expr.args[1:])
    heads = problem.heads_q if "h" in used else 1
    if problem.packed or used & {"b", "s"} or 4 * heads * problem.seqlen_q * problem.seqlen_k > PAIRS_MEMORY:
        return read
    sizes = {"b": problem.batch, "h": problem.heads_q // heads}
    return replace(read, how=TILES, loops=tuple(name for name, size in sizes.items() if size > 1), pairs=True)


def read_at_distance(n: int, body: str) -> str:
    """The function that reads a tile's elements of a tensor, or the one element of a tile that is far from the diagonal."""
    # A whole tile far from the diagonal costs one load of 4 bytes, (tile_m, tile_n) the same fp32 number. The branch is of run time;
    # where `work.far` is empty, in kernels that never ask and where each distance has an element of its own, Triton drops one side.
    lines = [
        "if len(work.far) == 0:",
        f"    return element_{n}(b, h, i, j, work)",
        "else:",
        "    if work.far[0]:",
        f"        value = tl.broadcast_to(element_{n}(b, h, work.far[1], work.far[2], work), (i + j).shape)",
        "    else:",
        f"        value = element_{n}(b, h, i, j, work)",
        "    return value",
    ]
    reading = "\n".join(f"    {line}" for line in lines)
    heads = [f"@triton.jit\ndef {name}_{n}(b, h, i, j, work):\n" for name in ("element", "at_distance")]
    return f"{heads[0]}{body}\n\n{heads[1]}{reading}"


def with_lines(problem: Problem, distances: tuple[int, int]) -> tuple[Expr, tuple[torch.Tensor, ...]]:
    """A problem's score with long indices by distance replaced by reads of *lines*, and these: int32, an index for each distance.

    T5's buckets take a logarithm, which every pair of a tile near the diagonal would compute. A line begins at the last
    distance below ``distances``, and its border stands for all beyond, as an index out of range is clamped.
    """
    start, stop = distances
    # Where the line's first element is read: the writer clamps this index into [0, stop - start + 1].
    away = expr.symbol("i") - expr.symbol("j") - (start - 1)
    lines: list[torch.Tensor] = []
    new: dict[int, Expr] = {}
    for e in expr.nodes(problem.spec.score):
        args = tuple(new.get(id(x), x) for x in e.args) if e.op not in ("number", "symbol", "param") else e.args
        if e.op == "lookup" and by_distance(*e.args[1:]) and any(x.op not in _SHORT for x in expr.nodes(*e.args[1:])):
            args = list(e.args)
            # Every read by distance is known here: there would be no distances beyond where one is not.
            for axis, line in (indices(problem, e, start - 1, stop + 1) or {}).items():
                args[axis + 1] = Expr("lookup", (("int", len(problem.extras) + len(lines)), away))
                lines.append(line.int().contiguous())
        new[id(e)] = Expr(e.op, tuple(args)) if any(x is not y for x, y in zip(args, e.args, strict=True)) else e
    return new[id(problem.spec.score)], tuple(lines)
