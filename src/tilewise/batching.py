"""``torch.vmap`` over an attention: the mapped dimension is folded into the batch, and every operator runs once for all examples.

Each rule gets the operator's arguments, and the place of the mapped dimension in each, None where all examples share a tensor.
Tensors with a batch get x B elements in place of B. A tensor that a mask or score reads and that differs from example to example,
or whose gradient does, gets the mapped dimension in front, and the expressions are rewritten to read it there
(:class:`tilewise.mapped.Mapped`). What has no batch to fold into is refused in words.
"""

from __future__ import annotations

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
        size: the examples.
        spec: of the call as one example sees it.
        q: its queries. dim: where the mapped dimension is in them.
    """

    def __init__(self, size: int, spec: str, q: Tensor, dim: int | None):
        self.size, self.spec = size, parse_spec(spec)
        self.batch = q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]

    def rows(self, x: Tensor | None, dim: int | None) -> Tensor | None:
        """A tensor that begins with the batch, with the batch of all examples."""
        return None if x is None else self.in_front(x, dim).flatten(0, 1)

    def all_rows(self, tensors: Iterable[Tensor | None], dims: Iterable[int | None]) -> list[Tensor | None]:
        return [self.rows(x, dim) for x, dim in zip(tensors, dims, strict=True)]

    def in_front(self, x: Tensor, dim: int | None) -> Tensor:
        """A tensor with the mapped dimension first; a view also where all examples share it."""
        return x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)

    def examples(self, x: Tensor) -> Tensor:
        """A result that begins with the batch of all examples, as one that begins with the examples."""
        return x.unflatten(0, (self.size, self.batch))

    def extras(self, extras: Sequence[Tensor], dims: Dims, slots: set[int]) -> list[Tensor]:
        """The extras, those of ``slots`` with the mapped dimension in front."""
        return [self.in_front(x, dim) if n in slots else x for n, (x, dim) in enumerate(zip(extras, dims, strict=True))]

    def text(self, slots: set[int]) -> str:
        """The spec of the folded call, in which the extras of ``slots`` differ from example to example."""
        spec = self.spec
        region, score = spec.whole_region, spec.whole_score
        reads_b = "b" in expr.depends_on(*region.parts, *(() if score is None else (score,)))
        if slots or reads_b:
            spec = replace(spec, mapped=(*spec.mapped, Mapped(self.batch, tuple(sorted(slots)))))
        return spec.text()

    def differing(self, extras: Dims, tangents: Dims = ()) -> set[int]:
        """The extras that differ from example to example, or whose tangents do.

        Raises:
            NotImplementedError: what cannot be folded, with every reason.
        """
        found = {n for n, dim in enumerate(extras) if dim is not None}
        found |= {n for n, dim in enumerate(tangents) if dim is not None}
        spec, reasons = self.spec, []
        if spec.packed or spec.paged:
            reasons.append(
                "packed sequences and pages have no batch to fold into: they hold sequences of any lengths as they are"
            )
        if spec.dropout_p:
            reasons.append("dropout is drawn by the batch index, so no example's pairs would be those of its own call")
        if spec.piece is not None or spec.whole_region.prepared is not None:
            reasons.append("a prepared mask, or a piece of an attention, is made for one batch")
        if spec.sink_slot in found:
            reasons.append("a sink is one logit for each head, the same for all examples")
        if reasons:
            raise NotImplementedError(
                "attention inside torch.vmap: the mapped dimension cannot be folded into the batch; make it a part of the batch "
                "yourself, or loop over the examples" + "".join(f"\n  {reason}" for reason in reasons)
            )
        return found


# -- The rules -----------------------------------------------------------------------------------------------------------


def _forward(info, in_dims, q, k, v, extras, seed, spec):
    fold = Fold(info.batch_size, spec, q, in_dims[0])
    slots = fold.differing(in_dims[3])
    qkv, extras = fold.all_rows((q, k, v), in_dims[:3]), fold.extras(extras, in_dims[3], slots)
    out = derivatives.operator_of(spec)(*qkv, extras, seed, fold.text(slots))
    return tuple(fold.examples(x) for x in out), (0,) * len(out)


def _backward(info, in_dims, *arguments):
    *tensors, extras, seed, spec = arguments
    fold = Fold(info.batch_size, spec, tensors[2], in_dims[2])
    read, sink_slot, wanted = fold.spec.score_slots, fold.spec.sink_slot, fold.spec.grad_slots
    # Each example's gradient of a tensor is a sum over its own elements. The sink's follows from the rows' statistics alone.
    fold.spec = replace(fold.spec, sink_slot=None, grad_slots=tuple(n for n in wanted if n in read))
    slots = fold.differing(in_dims[7]) | set(fold.spec.grad_slots)
    rows = fold.all_rows(tensors, in_dims[:7])
    given = *rows, fold.extras(extras, in_dims[7], slots), seed, fold.text(slots)
    dq, dk, dv, dextras = torch.ops.tilewise.attention_backward.default(*given)
    found = dict(zip(fold.spec.grad_slots, dextras, strict=True))
    if sink_slot in wanted:
        do, dlse, *_, o, lse = rows
        sink = fold.in_front(extras[sink_slot], in_dims[7][sink_slot]).to(lse.dtype)[:, None, :, None]
        delta = (do.to(lse.dtype) * o).sum(-1).transpose(1, 2) - dlse
        by_row = state.sink_gradient(sink, *[fold.examples(x) for x in (lse, delta)])
        total = by_row.sum((1, 3)).to(extras[sink_slot].dtype)
        found[sink_slot] = total + found[sink_slot] if sink_slot in found else total
    results = *[fold.examples(x) for x in (dq, dk, dv)], [found[n] for n in wanted]
    return results, (0, 0, 0, [0] * len(wanted))


def _jvp(info, in_dims, inputs, extras, seed, tangents, spec):
    fold = Fold(info.batch_size, spec, inputs[0], in_dims[0][0])
    slots = fold.differing(in_dims[1], in_dims[3][3:])
    along = _tangents(fold, tangents, in_dims[3], slots)
    rows, extras = fold.all_rows(inputs, in_dims[0]), fold.extras(extras, in_dims[1], slots)
    moved = torch.ops.tilewise.attention_jvp.default(rows, extras, seed, along, fold.text(slots))
    return tuple(fold.examples(x) for x in moved), (0, 0)


def _backward_jvp(info, in_dims, *arguments):
    grads, moved, inputs, extras, seed, tangents, spec = arguments
    fold = Fold(info.batch_size, spec, inputs[0], in_dims[2][0])
    slots = fold.differing(in_dims[3], in_dims[5][3:]) | set(fold.spec.grad_slots)
    if fold.spec.sink_slot in slots:
        raise NotImplementedError(
            "attention inside torch.vmap: second derivatives of each example's sink are not built; loop over the examples"
        )
    along = _tangents(fold, tangents, in_dims[5], slots)
    rows = [fold.all_rows(*x) for x in ((grads, in_dims[0]), (moved, in_dims[1]), (inputs, in_dims[2]))]
    extras = fold.extras(extras, in_dims[3], slots)
    found = torch.ops.tilewise.attention_backward_jvp.default(*rows, extras, seed, along, fold.text(slots))
    *results, dextras = found
    return (*[fold.examples(x) for x in results], dextras), (0, 0, 0, [0] * len(dextras))


def _tangents(fold: Fold, tangents: Sequence[Tensor | None], dims: Dims, slots: set[int]) -> list[Tensor | None]:
    """The tangents of q, k, v and the extras, in the shapes that these get."""
    of_extras = [
        fold.in_front(x, dim) if x is not None and n in slots else x
        for n, (x, dim) in enumerate(zip(tangents[3:], dims[3:], strict=True))
    ]
    return [*fold.all_rows(tangents[:3], dims[:3]), *of_extras]


_LEGACY_BATCHED = torch._C._dispatch_key_parse("Batched")


class _Examples(NamedTuple):
    """The facts that a rule asks about the mapped dimension, as torch.func's rules get it."""

    batch_size: int


def _legacy(rule: Callable[..., tuple]) -> Callable[..., Any]:
    """The rule for tensors of the vmap before torch.func's, by which ``is_grads_batched`` and ``jacobian(vectorize=True)`` still map."""

    def kernel(*arguments: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        flat, tree = tree_flatten(arguments)
        batched = [isinstance(x, Tensor) and torch._C._dispatch_keys(x).has(_LEGACY_BATCHED) for x in flat]
        given = [torch._remove_batch_dim(x, level, 1, 0) if yes else x for x, yes in zip(flat, batched, strict=True)]
        size = next(x.shape[0] for x, yes in zip(given, batched, strict=True) if yes)
        dims = tree_unflatten([0 if yes else None for yes in batched], tree)
        results, _ = rule(_Examples(size), dims, *tree_unflatten(given, tree))
        return tree_map(partial(torch._add_batch_dim, batch_dim=0, level=level), results)

    return kernel


def _flat(rule: Callable[..., tuple]) -> Callable[..., tuple]:
    """The rule of a backward for an overload, whose dextras come one by one."""

    def flat(*arguments: Any) -> tuple:
        (*found, dextras), (*dims, of_dextras) = rule(*arguments)
        return (*found, *dextras), (*dims, *of_dextras)

    return flat


for _name, _rule in {
    "attention": _forward,
    "attention_with_stats": _forward,
    "attention_backward": _backward,
    **dict.fromkeys(autograd.FLAT_BACKWARDS, _flat(_backward)),
    "attention_jvp": _jvp,
    "attention_backward_jvp": _backward_jvp,
}.items():
    torch.library.register_vmap(f"tilewise::{_name}", untraced(_rule), lib=autograd.library)
    autograd.library.impl(_name, untraced(_legacy(_rule)), "Batched")
