"""A contiguous piece of a larger attention, as a rank, a page or a chunk of a prompt holds it.

Masks and scores are written in the indices of the whole. A piece's kernels count queries and keys from the piece's own first
ones, so :class:`Piece` rewrites the expressions once: no kernel knows that there is a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise import expr
from tilewise.expr import Expr, apply, number, symbol
from tilewise.masks import Region

I, J = symbol("i"), symbol("j")
Span = tuple[int, int]  # [start, stop)


@dataclass(frozen=True)
class Piece:
    """The place of a call in the whole attention: from query ``q_start`` of ``total_q`` and from key ``k_start`` of ``total_k`` on.

    How many queries and keys the piece has is in its tensors. ``off`` is that of the whole, ``total_k - total_q``.
    """

    q_start: int
    k_start: int
    total_q: int
    total_k: int

    def reasons(self, seqlen_q: int, seqlen_k: int) -> list[str]:
        """Why tensors of these lengths cannot lie there."""
        places = (("queries", self.q_start, seqlen_q, self.total_q), ("keys", self.k_start, seqlen_k, self.total_k))
        return [
            f"the piece holds {name} {start} to {start + length} of {total}"
            for name, start, length, total in places
            if not 0 <= start <= start + length <= total
        ]

    def score(self, whole: Expr) -> Expr:
        """Return an expression about the whole in the piece's own i and j."""
        values = {"i": I + self.q_start, "j": J + self.k_start, "off": number(self.total_k - self.total_q)}
        values |= {"seqlen_q": number(self.total_q), "seqlen_k": number(self.total_k)}
        return _folded(expr.substitute(whole, values))

    def region(self, whole: Region) -> Region:
        """Return the whole's mask on the piece's pairs. Ends count from the piece's first query or key, and are clamped when read."""

        def end(e: Expr | None, start: int) -> Expr | None:
            return None if e is None else _less(self.score(e), start)

        predicate = None if whole.predicate is None else self.score(whole.predicate)
        keys, queries = ([end(e, start) for e in ends] for ends, start in
                         ((whole.ends[:2], self.k_start), (whole.ends[2:], self.q_start)))  # fmt: skip
        return Region(*keys, *queries, predicate, sorted_leaves=whole.sorted_leaves)


def _less(root: Expr, n: int) -> Expr:
    """Return ``root - n``, subtracted inside maximum, minimum and where, so that the ends of bands stay as they are written."""

    def less(e: Expr, parts: list[Expr]) -> Expr:
        condition = e.args[:1] if e.op == "where" else ()
        return apply(e.op, *condition, *parts) if parts else _folded(e - number(n))

    return expr.fold(root, less, _branches)


def _branches(e: Expr) -> tuple[Expr, ...]:
    """Return the arguments of which the value of an end is one; none of any other expression."""
    return e.args if e.op in ("maximum", "minimum") else e.args[1:] if e.op == "where" else ()


def _folded(root: Expr) -> Expr:
    """Return the tree with sums of whole numbers added up: ``(i + 5) + 3`` is ``i + 8``.

    What is folded depends on the tree's form alone, so all pieces of an attention share their kernels; but for a piece that begins with a
    block: ``(i + 128) // 64`` is ``i // 64 + 2``, whose blocks are known.
    """
    new: dict[int, Expr] = {}
    for e in expr.nodes(root):
        inner = [new[id(a)] for a in expr.children(e)]
        head = e.args[: len(e.args) - len(inner)]
        if e.op in ("add", "sub"):
            new[id(e)] = _sum(e.op, *inner)
        elif e.op == "floordiv" and _begins_with_block(*inner):
            (i, start), size = inner[0].args, inner[1]
            new[id(e)] = apply("floordiv", i, size) + number(start.args[0] // size.args[0])
        else:
            new[id(e)] = Expr(e.op, (*head, *inner)) if inner else e
    return new[id(root)]


def _begins_with_block(i: Expr, size: Expr) -> bool:
    """Whether ``i`` is a sum with a multiple of ``size``, a number."""
    moved = i.op == "add" and expr.kind(i) == "int" and _is_whole(i.args[1])
    return moved and _is_whole(size) and size.args[0] > 0 and i.args[1].args[0] % size.args[0] == 0


def _sum(op: str, a: Expr, b: Expr) -> Expr:
    """``a + b`` or ``a - b``, with the numbers of both in one."""
    if op == "add" and _is_whole(a):
        a, b = b, a
    if not _is_whole(b) or expr.kind(a) != "int":
        return apply(op, a, b)
    n = b.args[0] if op == "add" else -b.args[0]
    if _is_whole(a):
        return number(a.args[0] + n)
    if a.op == "add" and _is_whole(a.args[1]):
        return a.args[0] + number(a.args[1].args[0] + n)
    return a + number(n)


def _is_whole(e: Expr) -> bool:
    return e.op == "number" and type(e.args[0]) is int


def evenly(count: int, most: int) -> list[Span]:
    """The spans of at most ``most`` into which so many are cut, as equal as may be."""
    parts = -(-count // most)
    ends = [count * n // parts for n in range(parts + 1)]
    return [(ends[n], ends[n + 1]) for n in range(parts)]
