"""Masks: which (query, key) pairs are kept.

A :class:`Mask` is text and tensors, so that it can be built inside ``torch.compile`` and travel through an operator;
:func:`region` reads it as *interval and predicate*: one half-open key interval per row, ``lo(i) <= j < hi(i)``, both
ends never decreasing in ``i``, the same set by columns, ``first(j) <= i < last(j)``, and a predicate for what is no
interval. ``&`` of two masks is the maximum of the starts, the minimum of the ends and both predicates; ``|`` is the
bounding interval with a predicate. In both, ``j`` counts from the sequence's first key and query ``i`` sits at key
position ``i + off``, ``off = seqlen_k - seqlen_q``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tilewise import expr
from tilewise.expr import Expr, apply, lookup, number, symbol, trace

B, H, I, J = (symbol(name) for name in "bhij")
OFF, SEQLEN_Q, SEQLEN_K = (symbol(name) for name in ("off", "seqlen_q", "seqlen_k"))
_ENDLESS = 1 << 48  # keys; beyond every sequence, and far from where int64 would wrap


class Mask:
    """The pairs that are kept; made by the functions of this module, combined by ``&`` and ``|``."""

    def __init__(self, text: str, leaves: tuple[torch.Tensor, ...] = ()):
        self.text = text
        self.leaves = leaves

    def __and__(self, other: Mask) -> Mask:
        a, b = _unprepared(self), _unprepared(other)
        return Mask(f"{a.text} & {b.text}", (*a.leaves, *b.leaves))

    def __or__(self, other: Mask) -> Mask:
        a, b = _unprepared(self), _unprepared(other)
        return Mask(f"({a.text} | {b.text})", (*a.leaves, *b.leaves))

    def __rand__(self, other: object) -> Mask:
        return _unprepared(other)  # which refuses it: only another Mask would have come by __and__

    __ror__ = __rand__

    def __bool__(self) -> bool:
        raise ValueError("a mask has no truth value; `and`, `or` and `not` would drop one: combine masks with & and |")

    def __repr__(self) -> str:
        return f"Mask({self.text})"

    def prepare(self, q: torch.Tensor, k: torch.Tensor) -> Mask:
        """The same mask with its list of tiles computed for the shapes of ``q`` and ``k``, to be shared by all layers.

        Args:
            q, k: ``(batch, seqlen, heads, head_dim)``; only shapes and device are read.
        """
        from tilewise import tiles  # tiles read masks; only this convenience looks the other way

        status, seen = tiles.prepare(self, q, k)
        shape = ", ".join([str(int(n)) for n in (q.shape[0], q.shape[2], q.shape[1], k.shape[1])])
        return Mask(f"prepared({self.text}, {tiles.PREPARED_BLOCK}, {shape})", (*self.leaves, status, seen))


def _unprepared(mask: Mask) -> Mask:
    """A prepared mask as it was before: its lists are those of no combination."""
    if not isinstance(mask, Mask):
        raise ValueError(f"a mask is combined with masks, got {type(mask).__name__}; wrap it: tw.keep(fn), tw.dense(t)")
    if not mask.text.startswith("prepared("):
        return mask
    return Mask(mask.text[len("prepared(") :].rsplit(", ", 5)[0], mask.leaves[:-2])


# -- The catalogue -------------------------------------------------------------------------------------------------


def causal() -> Mask:
    """Query ``i`` sees keys ``j <= i + off``: the last query sees the last key.

    ``causal()`` of 3 queries and 5 keys::

        1 1 1 . .
        1 1 1 1 .
        1 1 1 1 1
    """
    return Mask("causal()")


def window(left: int | None = None, right: int | None = None) -> Mask:
    """Query ``i`` sees keys ``i + off - left <= j <= i + off + right``; ``None`` is unbounded.

    ``window(1, 0)`` of 5 queries and keys::

        1 . . . .
        1 1 . . .
        . 1 1 . .
        . . 1 1 .
        . . . 1 1

    Raises:
        ValueError: a negative bound (flash-attention's -1 is ``None`` here).
    """
    left, right = (None if bound is None else _integer("window", bound) for bound in (left, right))
    left, right = (None if bound is not None and bound >= _ENDLESS else bound for bound in (left, right))
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and bound < 0:
            raise ValueError(f"window({name}={bound}): a bound is a number of keys >= 0, or None for unbounded")
    return Mask(f"window({left}, {right})")


def prefix(n: int | torch.Tensor) -> Mask:
    """Causal, and the first ``n`` keys for every query (prefix-LM).

    ``prefix(3)`` of 5 queries and keys::

        1 1 1 . .
        1 1 1 . .
        1 1 1 . .
        1 1 1 1 .
        1 1 1 1 1

    Args:
        n: an int, or an integer tensor of shape ``()``, ``(batch,)`` or ``(batch, heads_q)``.
    """
    return _atom("prefix", _per_batch("prefix", n))


def key_range(start: int | torch.Tensor, end: int | torch.Tensor) -> Mask:
    """Only keys ``start <= j < end`` are seen: padding on either side. It hides keys and moves nothing else.

    Args:
        start, end: ints, or integer tensors of shape ``()``, ``(batch,)`` or ``(batch, heads_q)``.
    """
    return _atom("key_range", _per_batch("key_range", start), _per_batch("key_range", end))


def key_lengths(n: int | torch.Tensor) -> Mask:
    """``key_range(0, n)``: the first ``n`` keys; with a tensor ``(batch,)``, right padding."""
    return _atom("key_range", number(0), _per_batch("key_lengths", n))


def documents(ids: torch.Tensor) -> Mask:
    """Query ``i`` sees the keys of its own document: the run of equal ids around key position ``i + off``.

    Args:
        ids: integers ``(seqlen_k,)`` or ``(batch, seqlen_k)``. A document is a maximal run of equal ids: an id that
            comes again after another one starts a new document. A query that sits before key 0 sees nothing.
    """
    if not isinstance(ids, torch.Tensor) or ids.ndim not in (1, 2) or ids.dtype.is_floating_point:
        raise ValueError("documents(ids) takes an integer tensor (seqlen_k,) or (batch, seqlen_k)")
    seqlen = ids.shape[-1]
    position = torch.arange(seqlen, device=ids.device).expand(ids.shape)
    change = ids[..., 1:] != ids[..., :-1]
    edge = torch.ones_like(ids[..., :1], dtype=torch.bool)
    start, end = position, position
    if seqlen:  # cummax knows no empty dimension
        start = torch.where(torch.cat([edge, change], -1), position, 0).cummax(-1).values
        end = torch.where(torch.cat([change, edge], -1), position + 1, seqlen).flip(-1).cummin(-1).values.flip(-1)
    index = (lambda x: (x,)) if ids.ndim == 1 else (lambda x: (B, x))
    return _atom("documents", *[lookup(t.int(), *index(x)) for x in (I + OFF, J) for t in (start, end)])


def keep(fn: Callable[[Expr, Expr, Expr, Expr], Expr]) -> Mask:
    """The pairs for which ``fn(b, h, i, j)`` is true: FlexAttention's ``mask_mod``.

    Args:
        fn: elementwise in its four integer scalars; may index tensors with them (``allowed[b, i, j]``) and use
            comparisons, arithmetic, ``&``, ``|``, ``~`` and ``torch.where``: FlexAttention's ``mask_mod``. It is called once.

    Raises:
        NotImplementedError: for what cannot be traced, by name.
    """
    predicate = trace(fn, ("b", "h", "i", "j"))
    if expr.kind(predicate) != "bool":
        raise ValueError(f"keep(fn): fn must return a truth value, it returned {expr.kind(predicate)}: {predicate}")
    return _atom("keep", predicate)


def dense(allowed: torch.Tensor) -> Mask:
    """The pairs that a bool tensor, broadcastable to ``(batch, heads_q, seqlen_q, seqlen_k)``, allows (True = kept)."""
    if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool:
        found = allowed.dtype if isinstance(allowed, torch.Tensor) else type(allowed).__name__
        raise ValueError(
            f"dense(allowed) takes a bool tensor, got {found}; convert zeros and ones: t.bool(), "
            "and for additive values use score=tw.bias(t)"
        )
    return _atom("keep", broadcast_lookup(allowed, (B, H, I, J), "dense(allowed)"))


def block_sparse(pattern: torch.Tensor, block_q: int, block_k: int) -> Mask:
    """The pairs whose block ``(i // block_q, j // block_k)`` is set in ``pattern``.

    Args:
        pattern: bool, broadcastable to ``(batch, heads_q, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k))``. Its
            blocks need not match any kernel's tiles. ``butterfly``, ``strided`` and ``local_global`` make patterns.
    """
    if not isinstance(pattern, torch.Tensor) or pattern.dtype != torch.bool:
        raise ValueError("block_sparse(pattern, ...) takes a bool tensor")
    _at_least(1, "block_sparse", block_q=block_q, block_k=block_k)
    return _atom("keep", broadcast_lookup(pattern, (B, H, I // block_q, J // block_k), "block_sparse(pattern)"))


def butterfly(blocks: int, device=None) -> torch.Tensor:
    """``(blocks, blocks)``: block row r keeps r and the blocks whose number differs from it in one bit (FlashAttention §3.3)."""
    _at_least(0, "butterfly", blocks=blocks)
    r = torch.arange(blocks, device=device)
    differ = r[:, None] ^ r[None, :]
    return (differ & (differ - 1)) == 0


def strided(blocks_q: int, blocks_k: int, stride: int, local: int = 1, device=None) -> torch.Tensor:
    """``(blocks_q, blocks_k)``: the ``local`` blocks up to the diagonal, and every ``stride``-th column (Child et al. 2019)."""
    _at_least(0, "strided", blocks_q=blocks_q, blocks_k=blocks_k, local=local)
    _at_least(1, "strided", stride=stride)
    r = torch.arange(blocks_q, device=device)[:, None] + blocks_k - blocks_q
    c = torch.arange(blocks_k, device=device)[None, :]
    return ((r - c >= 0) & (r - c < local)) | (c % stride == stride - 1)


def local_global(blocks_q: int, blocks_k: int, local: int = 1, globals_: int = 1, device=None) -> torch.Tensor:
    """``(blocks_q, blocks_k)``: ``local`` blocks on either side of the diagonal, and the first ``globals_`` rows and columns."""
    _at_least(0, "local_global", blocks_q=blocks_q, blocks_k=blocks_k, local=local, globals_=globals_)
    r = torch.arange(blocks_q, device=device)[:, None]
    c = torch.arange(blocks_k, device=device)[None, :]
    return ((r + blocks_k - blocks_q - c).abs() <= local) | (c < globals_) | (r < globals_)


def as_mask(mask: Mask | torch.Tensor | Callable | None, causal_too: bool = False) -> Mask:
    """What the ``mask=`` keyword takes, as a Mask: a Mask, a bool tensor (``dense``) or a function (``keep``)."""
    if isinstance(mask, torch.Tensor):
        mask = dense(mask)
    elif mask is not None and not isinstance(mask, Mask):
        if not callable(mask):
            hint = "; give its .mask_mod" if hasattr(mask, "mask_mod") else ""  # FlexAttention's BlockMask
            raise ValueError(
                f"mask= takes a Mask, a bool tensor or a function of (b, h, i, j), got {type(mask).__name__}{hint}"
            )
        mask = keep(mask)
    if mask is None:
        return causal() if causal_too else Mask("")
    return mask & causal() if causal_too else mask


# -- Building text -------------------------------------------------------------------------------------------------


def _atom(name: str, *args: Expr) -> Mask:
    """One named mask of expressions; its leaves are numbered from 0 within it."""
    leaves: list[torch.Tensor] = []
    texts = [expr.to_text(a, leaves)[0] for a in args]
    return Mask(f"{name}({', '.join(texts)})", tuple(leaves))


def _per_batch(who: str, n: int | torch.Tensor) -> Expr:
    if isinstance(n, torch.Tensor):
        if n.ndim > 2 or n.dtype.is_floating_point or n.dtype == torch.bool:
            raise ValueError(
                f"{who} takes ints or integer tensors (), (batch,) or (batch, heads_q), got {n.dtype} {tuple(n.shape)}"
            )
        return broadcast_lookup(n, (B, H)[: n.ndim], who)
    return number(_integer(who, n))


def _integer(who: str, n: object) -> int:
    """``n`` as an int; of a length that torch.compile holds as a symbol, int() makes a number of the text."""
    if isinstance(n, (bool, torch.Tensor)) or not (isinstance(n, int) or hasattr(n, "__index__")):
        raise ValueError(f"{who} takes whole numbers of keys, got {n!r}")
    return int(n)


def _at_least(least: int, who: str, **sizes: object) -> None:
    for name, n in sizes.items():
        if not hasattr(n, "__index__") or n < least:
            raise ValueError(f"{who}: {name} must be a whole number >= {least}, got {n!r}")


def broadcast_lookup(tensor: torch.Tensor, index: Sequence[Expr], who: str) -> Expr:
    """``tensor`` read at the last ``tensor.ndim`` of ``index``, dimensions of size 1 at 0."""
    if tensor.ndim > len(index):
        raise ValueError(f"{who} takes at most {len(index)} dimensions, got shape {tuple(tensor.shape)}")
    index = index[len(index) - tensor.ndim :]
    return lookup(tensor, *[number(0) if size == 1 else x for size, x in zip(tensor.shape, index, strict=True)])


# -- Reading text --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """Status on blocks of ``block`` x ``block`` and seen keys, in slots, for ``shape`` (batch, heads_q, seqlen_q, seqlen_k)."""

    block: int
    status_slot: int
    seen_slot: int
    shape: tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Region:
    """A mask as kernels read it. An end that is ``None`` is unbounded; a predicate that is ``None`` keeps all.

    Attributes:
        lo, hi: key interval of row ``i``: expressions of ``b, h, i`` and the lengths.
        first, last: query interval of column ``j``: expressions of ``b, h, j`` and the lengths.
        predicate: bool expression of ``b, h, i, j``.
        prepared: what ``Mask.prepare`` made, and for which shapes.
        diagonal: for certain, whatever the mask's tensors hold, every query sees the key at its own position ``i + off``.
    """

    lo: Expr | None = None
    hi: Expr | None = None
    first: Expr | None = None
    last: Expr | None = None
    predicate: Expr | None = None
    prepared: Prepared | None = None
    diagonal: bool = False

    @property
    def everything(self) -> bool:
        return not self.parts

    @property
    def keeps_diagonal(self) -> bool:
        return self.diagonal or self.everything

    @property
    def ends(self) -> tuple[Expr | None, ...]:
        return self.lo, self.hi, self.first, self.last

    @property
    def parts(self) -> tuple[Expr, ...]:
        return tuple(e for e in (*self.ends, self.predicate) if e is not None)

    def inside(self) -> Expr | None:
        """The interval, by rows, and the predicate as one bool expression."""
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
    """maximum or minimum of two ends, either of them possibly unbounded; equal ends with two numbers are folded."""
    if a is None or b is None:
        return b if a is None else a
    (x, m), (y, n) = _plus_number(a), _plus_number(b)
    if str(x) == str(y) and all(e.op != "number" for e in expr.nodes(x)):  # a fold must not depend on numbers
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
        diagonal=a.keeps_diagonal and b.keeps_diagonal,
    )


def _unite(a: Region, b: Region) -> Region:
    """The bounding interval, and the pairs of either as a predicate."""
    bound = lambda op, x, y: None if x is None or y is None else _tighter(op, x, y)  # noqa: E731
    inside = a.inside(), b.inside()
    return Region(
        bound("minimum", a.lo, b.lo),
        bound("maximum", a.hi, b.hi),
        bound("minimum", a.first, b.first),
        bound("maximum", a.last, b.last),
        None if inside[0] is None or inside[1] is None else inside[0] | inside[1],
        diagonal=a.keeps_diagonal or b.keeps_diagonal,
    )


def _window_region(left: Expr | None, right: Expr | None) -> Region:
    at_row, at_column = I + OFF, J - OFF
    return Region(
        lo=None if left is None else _add_number(at_row, -left.args[0]),
        hi=None if right is None else _add_number(at_row, right.args[0] + 1),
        first=None if right is None else _add_number(at_column, -right.args[0]),
        last=None if left is None else _add_number(at_column, left.args[0] + 1),
        diagonal=True,
    )


def _prefix_region(n: Expr) -> Region:
    hi, first = apply("maximum", _add_number(I + OFF, 1), n), apply("where", J < n, number(0), J - OFF)
    return Region(hi=hi, first=first, diagonal=True)


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
        diagonal=True,
    )


ATOMS: dict[str, Callable[..., Region]] = {
    "causal": lambda: _window_region(None, number(0)),
    "window": _window_region,
    "prefix": _prefix_region,
    "key_range": _key_range_region,
    "documents": _documents_region,
    "keep": lambda predicate: Region(predicate=predicate),
}


@lru_cache(maxsize=4096)
def region(text: str, slots: tuple[int, ...]) -> Region:
    """The meaning of a mask's text.

    Args:
        slots: for each of the mask's leaves, in order, the slot of the tensor that holds it.
    """
    if not text:
        return Region()
    return _Reader(slots).read(ast.parse(text, mode="eval").body)


class _Reader:
    """Reads atoms from left to right; each numbers its leaves from 0, so a running base places them."""

    def __init__(self, slots: tuple[int, ...]):
        self.slots = slots
        self.base = 0

    def read(self, node: ast.AST) -> Region:
        match node:
            case ast.BinOp(left=a, op=ast.BitAnd(), right=b):
                return _intersect(self.read(a), self.read(b))
            case ast.BinOp(left=a, op=ast.BitOr(), right=b):
                return _unite(self.read(a), self.read(b))
            case ast.Call(func=ast.Name(id="prepared"), args=[inner, block, *shape]):
                kept = self.read(inner)
                prepared = Prepared(block.value, self.slots[-2], self.slots[-1], tuple(n.value for n in shape))
                return replace(kept, prepared=prepared)
            case ast.Call(func=ast.Name(id=name), args=args):
                return ATOMS[name](*self._arguments(args))
        raise ValueError(f"not a mask: {ast.unparse(node)}")

    def _arguments(self, args: Sequence[ast.expr]) -> list[Expr | None]:
        highest = -1

        def slot(n: int) -> int:
            nonlocal highest
            highest = max(highest, n)
            return self.slots[self.base + n]

        names: dict[str, Expr] = {}
        none = lambda a: isinstance(a, ast.Constant) and a.value is None  # noqa: E731
        values = [None if none(a) else expr.from_ast(a, slot, names) for a in args]
        self.base += highest + 1
        return values
