"""``torch.vmap`` over an attention: the mapped dimension is folded into the batch, and every operator runs once for all examples.

Each rule gets the operator's arguments and the place of the mapped dimension in each; None means that all examples share the tensor.
Tensors with a batch get x B elements instead of B. A leaf of a mask or score gets the mapped dimension in front if it, or its
gradient, differs between examples; the expressions are rewritten to read it there (:class:`tilewise.mapped.Mapped`). What cannot be
folded runs once for each example.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tilewise import autograd, derivatives, expr, state
from tilewise.mapped import Mapped
from tilewise.spec import parse_spec
from tilewise.untraced import untraced

Dims = Sequence[int | None]


class Fold:
    """A mapped call in terms of a call with a larger batch.

    Args:
        size: the number of examples.
        spec: of the call as one example sees it.
        q: its queries.
        dim: the mapped dimension in q.
    """

    def __init__(self, size: int, spec: str, q: Tensor, dim: int | None):
        self.size, self.spec = size, parse_spec(spec)
        self.sink_slot = self.spec.sink_slot
        self.batch = q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]

    def rows(self, x: Tensor | None, dim: int | None) -> Tensor | None:
        """Return a tensor that begins with the batch, with the batch of all examples."""
        return None if x is None else self.in_front(x, dim).flatten(0, 1)

    def all_rows(self, tensors: Iterable[Tensor | None], dims: Iterable[int | None]) -> list[Tensor | None]:
        return [self.rows(x, dim) for x, dim in zip(tensors, dims, strict=True)]

    def in_front(self, x: Tensor, dim: int | None) -> Tensor:
        """Return a tensor with the mapped dimension first: always a view, even if all examples share it."""
        return x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)

    def examples(self, x: Tensor) -> Tensor:
        """Split the batch of a result into (examples, batch)."""
        return x.unflatten(0, (self.size, self.batch))

    def extras(self, extras: Sequence[Tensor], dims: Dims, slots: set[int]) -> list[Tensor]:
        """Return the extras, with the mapped dimension in front of those of ``slots``."""
        return [self.in_front(x, dim) if n in slots else x for n, (x, dim) in enumerate(zip(extras, dims, strict=True))]

    def leave_sink_out(self) -> None:
        """Take the sink out of the folded call. What it adds follows from the row statistics, for each example by itself."""
        wanted = tuple(n for n in self.spec.grad_slots if n in self.spec.score_slots)
        self.spec = replace(self.spec, sink_slot=None, grad_slots=wanted)

    def by_head(self, x: Tensor, dim: int | None, dtype: torch.dtype) -> Tensor:
        """Return a sink, or its tangent, as (examples, 1, heads, 1), to broadcast with a statistic of the examples' rows."""
        return self.in_front(x, dim).to(dtype)[:, None, :, None]

    def text(self, slots: set[int]) -> str:
        """Return the spec of the folded call; the extras of ``slots`` differ from example to example."""
        spec = self.spec
        region, score = spec.whole_region, spec.whole_score
        reads_b = "b" in expr.depends_on(*region.parts, *(() if score is None else (score,)))
        if slots or reads_b:
            spec = replace(spec, mapped=(*spec.mapped, Mapped(self.batch, tuple(sorted(slots)))))
        return spec.text()

    def differing(self, extras: Dims, tangents: Dims = ()) -> set[int]:
        """Return the extras that differ from example to example, in values or in tangents."""
        return {n for n, dim in enumerate(extras) if dim is not None} | {
            n for n, dim in enumerate(tangents) if dim is not None
        }


def _unfoldable(spec: str) -> str | None:
    """Return why a call's examples are not elements of one batch, or None."""
    read = parse_spec(spec)
    if read.packed:
        return "packed sequences have no batch"
    if read.dropout_p:
        return "dropout is drawn by the batch index"
    if read.piece is not None or read.whole_region.prepared is not None:
        return "a prepared mask, or a piece of an attention, is made for one batch"
    return None


def _or_one_by_one(operator: Callable[..., Any], rule: Callable[..., tuple]) -> Callable[..., tuple]:
    """Return an operator's rule if it folds, else run the operator for one example after the other."""

    def run(info: Any, in_dims: Any, *arguments: Any) -> tuple:
        reason = _unfoldable(arguments[-1])
        if reason is None:
            return rule(info, in_dims, *arguments)
        warnings.warn(f"torch.vmap calls this attention once for each example: {reason}", stacklevel=2)
        size = info.batch_size
        found = [operator(*tree_map(partial(_example, n), arguments, in_dims)) for n in range(max(size, 1))]
        results = tree_map(lambda *each: torch.stack(each)[:size], *found)
        return results, tree_map(lambda _: 0, results)

    return run


def _example(n: int, x: Any, dim: int | None) -> Any:
    """Return example ``n`` of an argument. If there is none, one of zeros, which tells the shape of their results."""
    if dim is None:
        return x
    return x.select(dim, n) if x.shape[dim] else x.new_zeros(x.shape[:dim] + x.shape[dim + 1 :])


# -- The rules -----------------------------------------------------------------------------------------------------------


def _forward(info, in_dims, q, k, v, extras, seed, spec):
    fold = Fold(info.batch_size, spec, q, in_dims[0])
    given, own_sinks = extras, fold.sink_slot is not None and in_dims[3][fold.sink_slot] is not None
    if own_sinks:
        fold.leave_sink_out()
    slots = fold.differing(in_dims[3])
    qkv, extras = fold.all_rows((q, k, v), in_dims[:3]), fold.extras(extras, in_dims[3], slots)
    out = derivatives.operator_of(spec)(*qkv, extras, seed, fold.text(slots))
    o, lse, *stats = [fold.examples(x) for x in out]
    if own_sinks:
        sink = fold.by_head(given[fold.sink_slot], in_dims[3][fold.sink_slot], lse.dtype)
        whole, lse = state.add_sink(o.to(lse.dtype).transpose(2, 3), lse, sink)
        o = whole.transpose(2, 3).to(o.dtype)
    return (o, lse, *stats), (0,) * len(out)


def _backward(info, in_dims, *arguments):
    *tensors, extras, seed, spec = arguments
    fold = Fold(info.batch_size, spec, tensors[2], in_dims[2])
    wanted = fold.spec.grad_slots
    # Each example's gradient of a tensor is a sum over its own elements.
    fold.leave_sink_out()
    slots = fold.differing(in_dims[7]) | set(fold.spec.grad_slots)
    rows = fold.all_rows(tensors, in_dims[:7])
    given = *rows, fold.extras(extras, in_dims[7], slots), seed, fold.text(slots)
    dq, dk, dv, dextras = torch.ops.tilewise.attention_backward.default(*given)
    found = dict(zip(fold.spec.grad_slots, dextras, strict=True))
    if fold.sink_slot in wanted:
        do, dlse, *_, o, lse = rows
        sink = fold.by_head(extras[fold.sink_slot], in_dims[7][fold.sink_slot], lse.dtype)
        by_row = state.sink_gradient(sink, *[fold.examples(x) for x in (lse, _delta(do, o, lse.dtype) - dlse)])
        _add_sink_gradient(found, fold.sink_slot, by_row, extras)
    results = *[fold.examples(x) for x in (dq, dk, dv)], [found[n] for n in wanted]
    return results, (0, 0, 0, [0] * len(wanted))


def _delta(do: Tensor, o: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``rowsum(dO ∘ O)``, in lse's shape."""
    return (do.to(dtype) * o).sum(-1).transpose(1, 2)


def _add_sink_gradient(found: dict[int, Tensor], slot: int, by_row: Tensor, extras: Sequence[Tensor]) -> None:
    """Add the gradient of each example's sink to the gradients, from parts (examples, batch, heads, rows)."""
    total = by_row.sum((1, 3)).to(extras[slot].dtype)
    found[slot] = total + found[slot] if slot in found else total


def _jvp(info, in_dims, inputs, extras, seed, tangents, spec):
    fold = Fold(info.batch_size, spec, inputs[0], in_dims[0][0])
    slot, moved_sink = fold.sink_slot, None
    if slot is not None and (in_dims[1][slot] is not None or in_dims[3][3 + slot] is not None):
        fold.leave_sink_out()
        moved_sink = tangents[3 + slot]
    slots = fold.differing(in_dims[1], in_dims[3][3:])
    along = _tangents(fold, tangents, in_dims[3], slots)
    rows, given = fold.all_rows(inputs, in_dims[0]), fold.extras(extras, in_dims[1], slots)
    moved = torch.ops.tilewise.attention_jvp.default(rows, given, seed, along, fold.text(slots))
    moved_o, moved_lse = (fold.examples(x) for x in moved)
    if moved_sink is not None:
        o, lse = (fold.examples(x) for x in rows[3:])
        sink = fold.by_head(extras[slot], in_dims[1][slot], lse.dtype)
        by = -state.sink_gradient(sink, lse, fold.by_head(moved_sink, in_dims[3][3 + slot], lse.dtype))
        moved_o = (moved_o - by.transpose(2, 3).unsqueeze(-1) * o).to(o.dtype)
        moved_lse = moved_lse + by
    return (moved_o, moved_lse), (0, 0)


def _backward_jvp(info, in_dims, *arguments):
    grads, moved, inputs, extras, seed, tangents, spec = arguments
    fold = Fold(info.batch_size, spec, inputs[0], in_dims[2][0])
    slot, wanted = fold.sink_slot, fold.spec.grad_slots
    fold.leave_sink_out()
    slots = fold.differing(in_dims[3], in_dims[5][3:]) | set(fold.spec.grad_slots)
    along = _tangents(fold, tangents, in_dims[5], slots)
    rows = [fold.all_rows(*x) for x in ((grads, in_dims[0]), (moved, in_dims[1]), (inputs, in_dims[2]))]
    given = fold.extras(extras, in_dims[3], slots)
    *results, dextras = torch.ops.tilewise.attention_backward_jvp.default(*rows, given, seed, along, fold.text(slots))
    found = dict(zip(fold.spec.grad_slots, dextras, strict=True))
    if slot in wanted:
        (do, dlse, do_tangent, dlse_tangent), (moved_o, moved_lse), (*_, o, lse) = rows
        moved_delta = _delta(do, moved_o, lse.dtype)
        moved_delta = moved_delta if do_tangent is None else moved_delta + _delta(do_tangent, o, lse.dtype)
        moved_delta = moved_delta if dlse_tangent is None else moved_delta - dlse_tangent
        sink, by = fold.by_head(extras[slot], in_dims[3][slot], lse.dtype), -fold.examples(moved_lse)
        if tangents[3 + slot] is not None:
            by = by + fold.by_head(tangents[3 + slot], in_dims[5][3 + slot], lse.dtype)
        delta, moved_delta = (fold.examples(x) for x in (_delta(do, o, lse.dtype) - dlse, moved_delta))
        by_row = state.sink_gradient(sink, fold.examples(lse), by * delta + moved_delta)
        _add_sink_gradient(found, slot, by_row, extras)
    return (*[fold.examples(x) for x in results], [found[n] for n in wanted]), (0, 0, 0, [0] * len(wanted))


def _tangents(fold: Fold, tangents: Sequence[Tensor | None], dims: Dims, slots: set[int]) -> list[Tensor | None]:
    """Return the tangents of q, k, v and the extras in the shapes of the folded call."""
    of_extras = [
        fold.in_front(x, dim) if x is not None and n in slots else x
        for n, (x, dim) in enumerate(zip(tangents[3:], dims[3:], strict=True))
    ]
    return [*fold.all_rows(tangents[:3], dims[:3]), *of_extras]


_LEGACY_BATCHED = torch._C._dispatch_key_parse("Batched")


class _Examples(NamedTuple):
    """What a rule asks about the mapped dimension, in the form that torch.func's rules get."""

    batch_size: int


def _is_batched(x: object) -> bool:
    """Return whether a vmap older than torch.func's maps ``x``."""
    return isinstance(x, Tensor) and torch._C._dispatch_keys(x).has(_LEGACY_BATCHED)


def _has_level(x: Tensor, level: int) -> bool:
    """Return whether the map of this level maps ``x``. Of another map, PyTorch would accept any size for the dimension."""
    one, two = (torch._remove_batch_dim(x, level, size, 0).shape[0] for size in (1, 2))
    return one == two


def _innermost(x: Tensor) -> int:
    """Return the level of the innermost map over a tensor. The thread cannot tell: a GPU's backward runs in a thread without maps."""
    level = 0
    while _is_batched(x):
        level += 1
        x = torch._remove_batch_dim(x, level, 1, 0) if _has_level(x, level) else x
    return level


def _legacy(rule: Callable[..., tuple]) -> Callable[..., Any]:
    """Return the rule for tensors of the older vmap, which ``is_grads_batched`` and ``jacobian(vectorize=True)`` still use."""

    def kernel(*arguments: Any) -> Any:
        flat, tree = tree_flatten(arguments)
        level = max(_innermost(x) for x in flat)
        mapped = [_is_batched(x) and _has_level(x, level) for x in flat]
        given = [torch._remove_batch_dim(x, level, 1, 0) if yes else x for x, yes in zip(flat, mapped, strict=True)]
        size = next(x.shape[0] for x, yes in zip(given, mapped, strict=True) if yes)
        dims = tree_unflatten([0 if yes else None for yes in mapped], tree)
        results, _ = rule(_Examples(size), dims, *tree_unflatten(given, tree))
        return tree_map(partial(torch._add_batch_dim, batch_dim=0, level=level), results)

    return kernel


def _flat(rule: Callable[..., tuple]) -> Callable[..., tuple]:
    """Return the rule of a backward for an overload that returns dextras one by one."""

    def flat(*arguments: Any) -> tuple:
        (*found, dextras), (*dims, of_dextras) = rule(*arguments)
        return (*found, *dextras), (*dims, *of_dextras)

    return flat


def _register(name: str, rule: Callable[..., tuple]) -> None:
    torch.library.register_vmap(f"tilewise::{name}", untraced(rule), lib=autograd.library)
    autograd.library.impl(name, untraced(_legacy(rule)), "Batched")


for _name, _rule in {
    "attention": _forward,
    "attention_with_stats": _forward,
    "attention_backward": _backward,
    "attention_jvp": _jvp,
    "attention_backward_jvp": _backward_jvp,
}.items():
    _rule = _or_one_by_one(getattr(torch.ops.tilewise, _name).default, _rule)
    _register(_name, _rule)
    if _name == "attention_backward":
        for _flat_name in autograd.FLAT_BACKWARDS:
            _register(_flat_name, _flat(_rule))
