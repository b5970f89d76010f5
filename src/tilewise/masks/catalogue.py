"""Masks: which (query, key) pairs are kept.

A :class:`Mask` is text and tensors, so that ``torch.compile`` can build it and an operator can carry it;
:mod:`tilewise.masks.regions` reads the text. ``j`` counts from the first key of the sequence. Query ``i`` sits at key position
``i + off`` with ``off = seqlen_k - seqlen_q``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch

from tilewise import expr
from tilewise.caching import check_forms, edition, form, keep_track
from tilewise.device import Ready
from tilewise.expr import Expr, fitted_lookup, number, symbol, trace
from tilewise.masks.derived import Derived, is_recorded, outside_inference, snapshot
from tilewise.masks.patterns import at_least, is_whole

B, H, I, J, OFF = (symbol(name) for name in ("b", "h", "i", "j", "off"))
Align = Literal["last", "first"]
MaskFunction = Callable[[Any, Any, Any, Any], Any]  # of (b, h, i, j); it is traced, so it may use torch's functions
# Keys: more than any sequence has, yet a position plus this fits the 32 bits of GPU kernels.
_ENDLESS = expr.LARGEST_NUMBER


class Mask:
    """The pairs that are kept; made by the functions of this module, combined by ``&`` and ``|``.

    A call reads the values that the mask's tensors have at that time. Lists of tiles made from them are cached until PyTorch counts a
    write. PyTorch does not count writes by ``t.data``, a NumPy view, your own kernels, or ``torch.distributed`` (``broadcast``,
    ``scatter``, ``recv``, ``all_reduce`` and ``all_to_all_single`` into a tensor that a mask reads), nor the replay of a CUDA graph. Call
    ``torch.autograd.graph.increment_version(t)`` after these. A tensor keeps the shape and the kind of number that the mask was made for.
    """

    def __init__(self, text: str, parts: tuple[torch.Tensor | Derived, ...] = (), traced: bool | None = None):
        compiling = torch.compiler.is_compiling()
        self.text, self.parts, self.derives, self.taken = text, parts, False, False
        self.forms = tuple([form(t) for t in self.sources])
        # Whether a trace made some of the parts; taken: they are what its calls read already.
        self.traced = len(parts) > 0 and compiling if traced is None else traced
        for part in parts:
            if isinstance(part, Derived):
                self.derives = True
            elif not compiling:
                keep_track(part)

    @property
    def copied(self) -> bool:
        """Whether the leaves are copies, as in a trace, unless they are the caller's own tensors."""
        return torch.compiler.is_compiling() and (self.traced or self.derives)

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the text reads, in the order of the text, with their values of now."""
        self._ask()
        if self.taken or not (self.derives or self.traced):
            return self.parts  # type: ignore[return-value]  # none of them derives
        found: list[torch.Tensor] = []
        for part in self.parts:
            found += part.tensors() if isinstance(part, Derived) else [part]
        return tuple([snapshot(t) for t in found]) if self.copied else tuple(found)

    def once(self) -> Mask:
        """Return the mask with the values that its tensors have now, if a compiled graph made them: its layers share what is made of these,
        and later writes do not count. Other masks are returned as they are."""
        mask = self.current()
        if not mask.copied:
            return mask
        found = Mask(mask.text, mask.leaves, traced=True)
        found.taken = True
        return found

    def current(self) -> Mask:
        """Return the mask as a call should read it."""
        return self

    def _ask(self) -> None:
        """Raise ValueError if the sources are other ones than the text was written for, or the parts were made of."""
        check_forms(self.text, self.sources, self.forms)

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        """The caller's tensors: the leaves themselves, or what they are made of."""
        return tuple([part.source if isinstance(part, Derived) else part for part in self.parts])

    def hold(self) -> None:
        """Promise that the sources do not change, so that a CUDA graph may use what was made of them before its capture."""
        for part in self.parts:
            if isinstance(part, Derived):
                part.held = True

    def __and__(self, other: Mask) -> Mask:
        a, b = _unprepared(self), _unprepared(other)
        if not (a.text and b.text):  # one that hides nothing
            return a if a.text else b
        return _joined(f"{a.text} & {b.text}", a, b)

    def __or__(self, other: Mask) -> Mask:
        a, b = _unprepared(self), _unprepared(other)
        return _joined(f"({a.text} | {b.text})", a, b) if a.text and b.text else Mask("")

    def __rand__(self, other: object) -> Mask:
        return _unprepared(other)  # it refuses: another Mask would have arrived through __and__

    __ror__ = __rand__

    def __bool__(self) -> bool:
        raise ValueError("a mask has no truth value; `and`, `or` and `not` would drop one: combine masks with & and |")

    if not TYPE_CHECKING:  # a type checker refuses these operators itself

        def __invert__(self):
            raise ValueError("a mask has no complement; write the pairs that are kept: tw.keep(lambda b, h, i, j: ...)")

        def __add__(self, other):
            raise ValueError("masks are combined with & (kept by both) and | (kept by either)")

    def __repr__(self) -> str:
        return f"Mask({self.text})"

    def prepare(self, q: torch.Tensor, k: torch.Tensor) -> Mask:
        """Compute the list of tiles for the shapes of ``q`` and ``k`` now, to share it between all layers.

        Args:
            q, k: ``(batch, seqlen, heads, head_dim)``; only shapes and device are read.

        A call refuses a prepared mask if its tensors were written since. ``torch.compile`` and the capture of a CUDA graph cannot check
        that in later runs, so they ignore the preparation of a mask with tensors.

        Raises:
            ValueError: a tensor belongs to inference mode or torch.func, so PyTorch does not count its writes.
        """
        if torch.compiler.is_compiling() or not self.text:  # a mask that hides nothing has no lists
            return self
        from tilewise.planning import tiles  # tiles import masks; only this convenience imports tiles

        for t in self.sources:
            if edition(t) is None:
                raise ValueError(
                    f"prepare(q, k): a tensor of shape {tuple(t.shape)} that {self.text} reads is one of torch.inference_mode or "
                    "torch.func, whose writes PyTorch does not count; make it or t.clone() of it outside, or pass the mask without prepare"
                )
        return outside_inference(tiles.prepare, self, q, k)


def with_lists(mask: Mask, block: int, shape: tuple[int, ...], status: torch.Tensor, seen: torch.Tensor) -> Mask:
    """Return the mask with the status of its blocks and the seen keys, for ``shape`` (batch, heads_q, seqlen_q, seqlen_k)."""
    sizes = ", ".join([str(int(n)) for n in shape])
    return _Prepared(f"prepared({mask.text}, {block}, {sizes})", mask, (status, seen))


class _Prepared(Mask):
    """A mask with lists of tiles, made from the values that its tensors had then."""

    def __init__(self, text: str, of: Mask, lists: tuple[torch.Tensor, ...]):
        super().__init__(text, (*of.leaves, *lists), of.traced)
        self.of = of
        self._ready = Ready(lists)
        self._editions = [edition(t) for t in of.sources]

    def __reduce__(self) -> tuple:
        # The versions of a copy's tensors count from 0.
        return _Prepared, (self.text, self.of, self.parts[-2:])

    def current(self) -> Mask:
        return self.of if self._editions and is_recorded() else self

    def _ask(self) -> None:
        if torch.compiler.is_compiling():
            return
        for t, known in zip(self.of.sources, self._editions, strict=True):
            if edition(t) != known:
                raise ValueError(
                    f"a tensor of shape {tuple(t.shape)} was written after the mask {self.of.text} was prepared from it, so its "
                    "tiles are out of date; call mask.prepare(q, k) again, or pass the mask without prepare"
                )
        self._ready.await_here()


def _unprepared(mask: object) -> Mask:
    """Return a prepared mask without its lists. The lists of two masks do not give those of their combination."""
    if type(mask) is Mask:
        return mask
    if not isinstance(mask, Mask):
        expr.refuse_unread(mask)
        raise ValueError(
            f"a mask is combined with masks, got {type(mask).__name__}; wrap it: tw.keep(fn), tw.dense(t); a score goes to score="
        )
    return mask.of if isinstance(mask, _Prepared) else mask


def _joined(text: str, a: Mask, b: Mask) -> Mask:
    found = Mask(text, (*a.parts, *b.parts), a.traced or b.traced)
    found.forms = (*a.forms, *b.forms)
    found.taken = (a.taken or len(a.parts) == 0) and (b.taken or len(b.parts) == 0)
    return found


# -- The catalogue -------------------------------------------------------------------------------------------------


def causal(*, align: Align = "last") -> Mask:
    """Query ``i`` sees keys ``j <= i + off``: the last query sees the last key.

    ``causal()`` of 3 queries and 5 keys::

        1 1 1 . .
        1 1 1 1 .
        1 1 1 1 1

    ``causal(align="first")`` of 3 queries and 5 keys::

        1 . . . .
        1 1 . . .
        1 1 1 . .

    Args:
        align: "last"; or "first": query ``i`` sees keys ``j <= i``, as with ``is_causal`` of PyTorch.
    """
    return Mask("causal()") if align == "last" else window(right=0, align=align)


def window(left: int | None = None, right: int | None = None, *, align: Align = "last") -> Mask:
    """Query ``i`` sees keys ``i + off - left <= j <= i + off + right``; ``None`` is unbounded.

    ``window(1, 0)`` of 5 queries and keys::

        1 . . . .
        1 1 . . .
        . 1 1 . .
        . . 1 1 .
        . . . 1 1

    Args:
        left, right: numbers of keys.
        align: "last"; or "first": query ``i`` sees keys ``i - left <= j <= i + right``, as in FlexAttention's mods.

    Raises:
        ValueError: a bound is negative (flash-attention's -1 is ``None`` here).
    """
    left, right = (None if bound is None else _integer("window", bound) for bound in (left, right))
    left, right = (None if bound is not None and bound >= _ENDLESS else bound for bound in (left, right))
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and bound < 0:
            raise ValueError(f"window({name}={bound}): a bound is a number of keys >= 0, or None for unbounded")
    if align not in ("last", "first"):
        raise ValueError(f'align={align!r}: it is "last" or "first", the query and the key that meet')
    return Mask(f"window({left}, {right}{', first' if align == 'first' else ''})")


def prefix(n: int | torch.Tensor) -> Mask:
    """Every query sees the first ``n`` keys and the keys that ``causal`` keeps (prefix-LM).

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
    """Every query sees the keys ``start <= j < end``, for padding on either side. Positions do not change.

    Args:
        start, end: ints, or integer tensors of shape ``()``, ``(batch,)`` or ``(batch, heads_q)``.
    """
    return _atom("key_range", _per_batch("key_range", start), _per_batch("key_range", end))


def key_lengths(n: int | torch.Tensor) -> Mask:
    """``key_range(0, n)``: the first ``n`` keys; with a tensor ``(batch,)``, right padding."""
    if type(n) is torch.Tensor and n.ndim <= 2 and n.dtype in _COUNTS and not torch.compiler.is_compiling():
        expr.refuse_unread(n)
        return Mask(_text_of_lengths(n.dtype, tuple([size == 1 for size in n.shape])), (n,))
    return _atom("key_range", number(0), _per_batch("key_lengths", n))


_COUNTS = torch.int32, torch.int64


@lru_cache(maxsize=16)
def _text_of_lengths(dtype: torch.dtype, alone: tuple[bool, ...]) -> str:
    """The text of :func:`key_lengths`, which batches of other lengths share; ``alone``: the dimensions of size 1."""
    like = torch.empty([1 if one else 2 for one in alone], dtype=dtype, device="meta")
    return _atom("key_range", number(0), _per_batch("key_lengths", like)).text


def documents(ids: torch.Tensor) -> Mask:
    """Query ``i`` sees the keys of its own document: the run of equal ids around key position ``i + off``.

    Args:
        ids: integers ``(seqlen_k,)`` or ``(batch, seqlen_k)``. A document is a maximal run of equal ids: an id that
            returns after another one starts a new document. A query before key 0 sees nothing.
    """
    if not isinstance(ids, torch.Tensor) or ids.ndim not in (1, 2) or ids.dtype.is_floating_point:
        found, instead = type(ids).__name__, "; make it one: torch.tensor(ids)"
        if isinstance(ids, torch.Tensor):
            found = f"{ids.dtype} {tuple(ids.shape)}"
            instead = "; convert it: ids.long()" if ids.dtype.is_floating_point else ""
        raise ValueError(
            f"documents(ids) takes an integer tensor (seqlen_k,) or (batch, seqlen_k), got {found}{instead}"
        )
    expr.refuse_unread(ids)
    # Written out as text: building it from expressions takes longer than all launches here.
    batch = "b, " if ids.ndim == 2 else ""
    ends = [f"fitted_int{slot}[{batch}{at}]" for at in ("i + off", "j") for slot in (0, 1)]
    return Mask(f"documents({', '.join(ends)})", (Derived(ids, _ends_of_documents),))


def _ends_of_documents(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key of each key's document, and one past the last: int32, in the shape of ``ids``."""
    from tilewise.planning import planner  # which imports masks

    if (kernels := planner.of_plain(ids)) is not None:
        start, end = kernels.runs((ids.shape, ids.stride(), ids.dtype), ids.device)((ids,), ids.device).unbind()
        return start, end
    # The document's number at each position, from 0 or 1 on, because the first id is compared with 0.
    before = torch.nn.functional.pad(ids, (1, 0))[..., :-1]
    document = (ids != before).cumsum(-1, dtype=torch.int32)
    start, end = (torch.searchsorted(document, document, right=right, out_int32=True) for right in (False, True))
    return start, end


def intervals(ends: Sequence[torch.Tensor], covers: bool) -> Mask:
    """Query ``i`` sees the keys ``lo[i] <= j < hi[i]``. By columns, that is ``first[j] <= i < last[j]``.

    Args:
        ends: int32 lo and hi ``(seqlen_q,)``, first and last ``(seqlen_k,)``; none of them ever decreases.
        covers: every key is seen.
    """
    return _atom(
        "covering" if covers else "intervals", *[fitted_lookup(t, x) for t, x in zip(ends, (I, I, J, J), strict=True)]
    )


def keep(fn: MaskFunction) -> Mask:
    """The pairs for which ``fn(b, h, i, j)`` is true: FlexAttention's ``mask_mod``.

    Args:
        fn: elementwise in its four integer scalars; may index tensors with them (``allowed[b, i, j]``) and use
            comparisons, arithmetic, ``&``, ``|``, ``~`` and ``torch.where``. It is called once. Whole numbers of 8 and 16 bits do not wrap:
            with uint8, ``u[i] - u[j]`` may be negative.

    Raises:
        NotImplementedError: an operation cannot be traced; the message names it.
    """
    if isinstance(fn, torch.Tensor):
        raise ValueError("a function of (b, h, i, j) is needed, got Tensor; a bool tensor is tw.dense(t)")
    return _kept(trace(fn, ("b", "h", "i", "j")))


def keep_wrapping(fn: MaskFunction) -> Mask:
    """Return :func:`keep` of a function whose whole numbers of 8 and 16 bits wrap around, as in torch's tensors."""
    return _kept(expr.wrapping(trace(fn, ("b", "h", "i", "j"))))


def _kept(predicate: Expr) -> Mask:
    if expr.kind(predicate) != "bool":
        raise ValueError(
            f"keep(fn): fn must return a truth value, it returned {expr.kind(predicate)}: {predicate}; compare it with a number, "
            "or use tw.score(fn) to change scores"
        )
    return _atom("keep", predicate)


def dense(allowed: torch.Tensor) -> Mask:
    """The pairs that are True in a bool tensor, broadcastable to ``(batch, heads_q, seqlen_q, seqlen_k)``."""
    expr.refuse_unread(allowed)
    if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool:
        found = allowed.dtype if isinstance(allowed, torch.Tensor) else type(allowed).__name__
        instead = "convert zeros and ones: t.bool(), and for additive values use score=tw.bias(t)"
        instead = "a function of (b, h, i, j) is tw.keep(fn)" if callable(allowed) else instead
        raise ValueError(f"dense(allowed) takes a bool tensor, got {found}; {instead}")
    if allowed.ndim > 4:
        raise ValueError(
            f"dense(allowed) takes at most (batch, heads_q, seqlen_q, seqlen_k), got shape {tuple(allowed.shape)}"
        )
    # The text of broadcast_lookup(allowed, (B, H, I, J)): a call may bring a new mask each time, and printing it takes 60 us.
    names = "bhij"[4 - allowed.ndim :]
    index = ", ".join(["0" if size == 1 else name for size, name in zip(allowed.shape, names, strict=True)])
    return Mask(f"keep(fitted_bool0[{index or '()'}])", (allowed,))


def block_sparse(pattern: torch.Tensor, block_q: int, block_k: int) -> Mask:
    """The pairs whose block ``(i // block_q, j // block_k)`` is set in ``pattern``.

    Args:
        pattern: bool, broadcastable to ``(batch, heads_q, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k))``. Its
            blocks need not match any kernel's tiles. ``butterfly``, ``strided`` and ``local_global`` make patterns.
    """
    if not isinstance(pattern, torch.Tensor) or pattern.dtype != torch.bool:
        found = pattern.dtype if isinstance(pattern, torch.Tensor) else type(pattern).__name__
        instead = "pattern.bool()" if isinstance(pattern, torch.Tensor) else "torch.tensor(pattern, dtype=torch.bool)"
        raise ValueError(f"block_sparse(pattern, ...) takes a bool tensor, got {found}; convert it: {instead}")
    at_least(1, "block_sparse", block_q=block_q, block_k=block_k)
    block_q, block_k = min(block_q, _ENDLESS), min(block_k, _ENDLESS)
    return _atom("keep", broadcast_lookup(pattern, (B, H, I // block_q, J // block_k), "block_sparse(pattern)"))


def selected(indices: torch.Tensor, block: int = 1, block_q: int = 1) -> Mask:
    """Each query sees the keys in its row of entries: entry ``n`` keeps keys ``n * block`` to ``n * block + block - 1``.

    ``selected(torch.tensor([[[[0, 3], [1, -1], [2, 2], [-1, -1]]]]))`` of 4 queries and 5 keys::

        1 . . 1 .
        . 1 . . .
        . . 1 . .
        . . . . .

    ``selected(torch.tensor([[[[0, -1], [2, 0]]]]), block=2, block_q=2)`` of 4 queries and 5 keys::

        1 1 . . .
        1 1 . . .
        1 1 . . 1
        1 1 . . 1

    Args:
        indices: int32 or int64 ``(batch or 1, heads_k or 1, ceil(seqlen_q / block_q), k)``. Row ``i // block_q`` is for query ``i`` of all
            query heads of the key head, in any order. -1 keeps no key, an entry that appears twice counts once, and a block may end past
            the last key. Packed sequences have as many rows as the longest needs, each counting its own queries and keys from 0.
        block, block_q: keys of an entry, queries of a row.

    Calls on the CPU refuse an entry below -1 or without keys. Calls on a GPU ignore it, unless ``TILEWISE_CHECK=1`` is set.
    Memory and the search for tiles grow with the number of entries. ``show_mask`` counts key heads instead of query heads.

    Raises:
        ValueError: ``indices`` or a block size is not of this form.
    """
    if not isinstance(indices, torch.Tensor) or indices.ndim != 4 or indices.dtype not in (torch.int32, torch.int64):
        found = (
            f"{indices.dtype} {tuple(indices.shape)}" if isinstance(indices, torch.Tensor) else type(indices).__name__
        )
        raise ValueError(
            "selected(indices) takes an int32 or int64 tensor (batch or 1, heads_k or 1, rows, k), a row for each block of "
            f"block_q queries, got {found}"
        )
    expr.refuse_unread(indices)
    at_least(1, "selected", block=block, block_q=block_q)
    block, block_q = (_integer("selected", n) for n in (block, block_q))
    # Written out as text, as in documents.
    b, h = (name if size != 1 else "0" for name, size in zip(("b", "h // group"), indices.shape, strict=False))
    i, j = (name if size == 1 else f"{name} // {size}" for name, size in (("i", block_q), ("j", block)))
    return Mask(f"selected(fitted_int0[{b}, {h}, {i}], {j})", (Derived(indices, _sorted_rows),))


def _sorted_rows(indices: torch.Tensor) -> tuple[torch.Tensor]:
    """Return the entries as int32 rows that never decrease, at least one a row. -1 becomes NO_ENTRY, and what is below it WRONG_ENTRY."""
    if indices.shape[-1] == 0:
        indices = indices.new_full((*indices.shape[:-1], 1), -1)
    from tilewise.planning import planner  # which imports masks

    kernels = planner.of_plain(indices) if indices.shape[-1] <= planner.MOST_ENTRIES else None
    if kernels is not None:
        making = kernels.sorted_entries((indices.shape, indices.stride(), indices.dtype), indices.device)
        return (making((indices,), indices.device),)
    # Without their sign, -1 and -2 are the largest numbers.
    entries = indices.clamp(-2, expr.WRONG_ENTRY - 1).int() & expr.NO_ENTRY
    return (entries.sort(-1).values,)


def as_mask(mask: Mask | torch.Tensor | MaskFunction | None, causal_too: bool = False) -> Mask:
    """Return the Mask of an argument of ``mask=``: a Mask, a bool tensor (``dense``) or a function (``keep``)."""
    if isinstance(mask, torch.Tensor):
        mask = dense(mask)
    elif mask is not None and not isinstance(mask, Mask):
        if not callable(mask):
            hint = "; give its .mask_mod" if hasattr(mask, "mask_mod") else ""  # FlexAttention's BlockMask
            hint += "; a mask by name is causal=True or mask=tw.causal()" if isinstance(mask, str) else ""
            hint += "; it goes to score=" if hasattr(mask, "text") else ""
            hint += "; combine masks with & and |" if isinstance(mask, list) else ""
            hint += "; make it a tensor: torch.from_numpy(mask)" if type(mask).__name__ == "ndarray" else ""
            hint += (
                "; a window is mask=tw.window(left, right), with None for unbounded" if isinstance(mask, tuple) else ""
            )
            raise ValueError(
                f"mask= takes a Mask, a bool tensor or a function of (b, h, i, j), got {type(mask).__name__}{hint}"
            )
        mask = keep(mask)
    if mask is None:
        return causal() if causal_too else Mask("")
    return mask & causal() if causal_too else mask.current()


# -- Building text -------------------------------------------------------------------------------------------------


def _atom(name: str, *args: Expr) -> Mask:
    """Return a named mask of expressions. Its leaves are numbered from 0."""
    leaves: list[torch.Tensor] = []
    texts = [expr.to_text(a, leaves)[0] for a in args]
    return Mask(f"{name}({', '.join(texts)})", tuple(leaves))


def _per_batch(who: str, n: int | torch.Tensor) -> Expr:
    if expr.is_symbol(n):
        n = torch.full((), n)
    if isinstance(n, torch.Tensor):
        if n.ndim > 2 or n.dtype.is_floating_point or n.dtype == torch.bool:
            hint = "; the lengths of a mask of kept keys are mask.sum(-1)" if n.dtype == torch.bool else ""
            hint += "; convert: x.long()" if n.dtype.is_floating_point else ""
            raise ValueError(
                f"{who} takes ints or integer tensors (), (batch,) or (batch, heads_q), got {n.dtype} {tuple(n.shape)}{hint}"
            )
        return broadcast_lookup(n, (B, H)[: n.ndim], who)
    if isinstance(n, (list, tuple)) or bool(getattr(n, "ndim", 0)):  # of NumPy
        each = n if isinstance(n, (list, tuple)) else n.tolist()  # type: ignore[attr-defined]
        raise ValueError(
            f"{who} takes ints or integer tensors, got {n!r}; one for each batch element is torch.tensor({list(each)})"
        )
    return number(_integer(who, n))


def _integer(who: str, n: object) -> int:
    """Return ``n`` as an int, clamped to ±_ENDLESS."""
    if isinstance(n, (bool, torch.Tensor)) or not is_whole(n):
        hint = f"; its bounds are two arguments: {who}{n!r}" if isinstance(n, tuple) else ""
        raise ValueError(f"{who} takes whole numbers of keys, got {n!r}{hint}")
    return min(max(int(expr.concrete(n)), -_ENDLESS), _ENDLESS)


def broadcast_lookup(tensor: torch.Tensor, index: Sequence[Expr], who: str) -> Expr:
    """Return ``tensor`` read at the last ``tensor.ndim`` of ``index``.

    Dimensions of size 1 are read at 0. The others must have their index's size.
    """
    if tensor.ndim > len(index):
        raise ValueError(f"{who} takes at most {len(index)} dimensions, got shape {tuple(tensor.shape)}")
    index = index[len(index) - tensor.ndim :]
    return fitted_lookup(tensor, *[number(0) if size == 1 else x for size, x in zip(tensor.shape, index, strict=True)])
