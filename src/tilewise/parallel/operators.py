"""Attention over ranks as a function with a gradient, and as operators that ``torch.compile`` keeps whole in its graph.

tilewise::attention_over_ranks(q, k, v, extras, seed, spec, ranks, with_lse) -> (outputs, saved)
tilewise::attention_over_ranks_backward(do, dlse, rows, saved, extras, seed, spec, ranks, shapes, with_lse) -> (dq, dk, dv, dextras)

``ranks`` is the name of the group of ranks. ``outputs`` are o and, if wanted, lse and max_logit. ``rows`` are q, k, v, o and lse if the
scheme's backward reads them. A fake kernel is the real one with an :class:`exchange.Silent`, which moves nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tilewise.autograd import library
from tilewise.parallel import calls, gathered, heads
from tilewise.parallel.agreement import Turn
from tilewise.parallel.calls import Call
from tilewise.parallel.exchange import Gradients
from tilewise.spec import parse_spec
from tilewise.untraced import untraced

if TYPE_CHECKING:
    from tilewise.parallel.context import ContextParallel

_groups: weakref.WeakValueDictionary[str, ContextParallel] = weakref.WeakValueDictionary()
_count = itertools.count()


def named(group: ContextParallel) -> str:
    """Return a name by which the operators find a group of ranks while it lives."""
    name = f"ranks{next(_count)}"
    _groups[name] = group
    return name


def scheme_of(call: Call) -> Any:
    """Return the module of a call's scheme: ``forward`` gives ``(outputs, saved)``, ``backward`` ``(dq, dk, dv, dextras)``."""
    return heads if isinstance(call, heads.Heads) else gathered


def given(turn: Turn, of: Gradients, q: Sequence[int], v: Sequence[int], like: Tensor) -> Gradients:
    """Return do and dlse, with zeros for one that only another rank has. Ranks may use different outputs in their losses.

    Args:
        q, v: shapes of this rank's.
        like: a tensor of q's dtype.
    """
    do, dlse = of
    with_do, with_dlse = map(any, zip(*turn.numbers(do is not None, dlse is not None), strict=True))
    if do is None and with_do:
        do = like.new_zeros((*q[:-1], v[-1]))
    if dlse is None and with_dlse:
        dlse = like.new_zeros((*q[:-3], q[-2], q[-3]), dtype=gathered.compute_dtype(like))
    return do, dlse


def attention(
    turn: Turn, call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return ``(o, lse)`` of the rank's queries, differentiable, and max_logit if wanted; lse is None if a scheme leaves it out.

    All ranks must run calls and their backwards in the same order.
    """
    return _Attention.apply(turn, call, _Origin.apply(q, k, v, *extras), q, k, v, seed, *extras)


@untraced
class _Origin(torch.autograd.Function):
    """Return an empty tensor that depends on others in the graph and keeps none of their memory."""

    @staticmethod
    def forward(ctx, q, *tensors):
        ctx.count = 1 + len(tensors)
        ctx.set_materialize_grads(False)
        return q.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return (None,) * ctx.count


@untraced
class _Once(torch.autograd.Function):
    """Gradients unchanged, tied to their inputs, which refuse to be differentiated again.

    PyTorch's ``once_differentiable`` ties them to nothing, so that ``torch.autograd.grad`` of a sum would leave out their part.
    """

    @staticmethod
    def forward(ctx, origin, do, dlse, *grads):
        return tuple(grads)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "second derivatives of an attention over ranks are not built; without parallel= tilewise computes them"
        )


@untraced
class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, turn: Turn, call: Call, origin, q, k, v, seed, *extras):
        outputs, saved = scheme_of(call).forward(call, q, k, v, extras, seed)
        rows = () if isinstance(call, heads.Heads) else (q, k, v, *outputs[:2])
        ctx.turn, ctx.call, ctx.extras, ctx.shapes = turn, call, len(extras), (q.shape, v.shape)
        ctx.save_for_backward(origin, seed, *extras, *rows, *saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[2:])
        return tuple(outputs) if len(outputs) > 1 else (outputs[0], None)

    @staticmethod
    def backward(ctx, do, dlse=None, *_):
        origin, seed, *saved = ctx.saved_tensors
        extras, rows = saved[: ctx.extras], saved[ctx.extras :]
        do, dlse = given(ctx.turn, (do, dlse), *ctx.shapes, rows[0])
        if do is None and dlse is None:
            return (None,) * (7 + ctx.extras)
        with torch.no_grad():
            dq, dk, dv, dextras = scheme_of(ctx.call).backward(ctx.call, (do, dlse), rows, extras, seed)
        if torch.is_grad_enabled():
            dq, dk, dv, *dextras = _Once.apply(origin, do, dlse, dq, dk, dv, *dextras)
        return None, None, None, dq, dk, dv, None, *dextras


# -- Inside a compiled graph ---------------------------------------------------------------------------------------

library.define(
    "attention_over_ranks(Tensor q, Tensor k, Tensor v, Tensor[] extras, Tensor? seed, str spec, str ranks, bool with_lse) "
    "-> (Tensor[] outputs, Tensor[] saved)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "attention_over_ranks_backward(Tensor? do, Tensor? dlse, Tensor[] saved, Tensor[] extras, Tensor? seed, str spec, str ranks, "
    "SymInt[] shapes, bool with_lse) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dextras)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
over_ranks = torch.ops.tilewise.attention_over_ranks.default
_over_ranks_backward = torch.ops.tilewise.attention_over_ranks_backward.default


def _kernel(q, k, v, extras, seed, spec, ranks, with_lse):
    extras = extras or []  # AOTInductor hands an empty list over as None
    agreed, call = calls.agreed_call(_group(ranks), q, k, v, lambda: (extras, seed, spec), with_lse, True)
    outputs, saved = scheme_of(call).forward(call, q, k, v, extras, agreed.seed)
    return outputs, saved if agreed.seed is None else [agreed.seed.clone(), *saved]


def _fake(q, k, v, extras, seed, spec, ranks, with_lse):
    call = calls.compiled_call(_group(ranks), q, k, v, extras, seed, spec, with_lse)
    outputs, saved = scheme_of(call).forward(call, q, k, v, extras, seed)
    return outputs, saved if seed is None else [torch.empty_like(seed), *saved]


def _backward_kernel(do, dlse, saved, extras, seed, *call):
    spec, ranks, shapes, with_lse = call
    extras, dims = extras or [], len(shapes) // 3
    # Tensors with the shapes and dtype of the rank's q, k and v, but no memory of their own.
    q, k, v = (saved[0].new_empty((1,) * dims).expand(shapes[n : n + dims]) for n in range(0, 3 * dims, dims))
    part = calls.compiled_call(_group(ranks), q, k, v, extras, seed, spec, with_lse)
    if not isinstance(q, FakeTensor):
        do, dlse = given(Turn(_group(ranks).exchange, 0), (do, dlse), q.shape, v.shape, q)
    dq, dk, dv, dextras = scheme_of(part).backward(part, (do, dlse), saved, extras, seed)
    return dq, dk, dv, [dextras[slot] for slot in part.grad_slots]


@untraced
class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, ranks, with_lse, q, k, v, seed, *extras):
        with torch._C._AutoDispatchBelowAutograd():
            outputs, saved = over_ranks(q, k, v, extras, seed, spec, ranks, with_lse)
        if seed is not None:
            seed, *saved = saved
        # A scheme that saves nothing reads the rank's rows. Anything else that it kept would have shapes that only tensors tell.
        rows = () if saved else (q, k, v, *outputs[:2])
        ctx.spec, ctx.ranks, ctx.with_lse, ctx.extras = spec, ranks, with_lse, len(extras)
        ctx.shapes = [n for x in (q, k, v) for n in x.shape]
        ctx.save_for_backward(seed, *extras, *rows, *saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[2:])
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlse=None, *_):
        seed, *saved = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * (7 + ctx.extras)
        extras = saved[: ctx.extras]
        call = (extras, seed, ctx.spec, ctx.ranks, ctx.shapes, ctx.with_lse)
        dq, dk, dv, dextras = _over_ranks_backward(do, dlse, saved[ctx.extras :], *call)
        by_slot = dict(zip(parse_spec(ctx.spec).grad_slots, dextras, strict=True))
        return None, None, None, dq, dk, dv, None, *[by_slot.get(n) for n in range(ctx.extras)]


def _autograd(q, k, v, extras, seed, spec, ranks, with_lse):
    extras = extras or []
    if torch.is_grad_enabled() and parse_spec(spec).needs_grad:
        return list(_Compiled.apply(spec, ranks, with_lse, q, k, v, seed, *extras)), []
    with torch._C._AutoDispatchBelowAutograd():
        return over_ranks(q, k, v, extras, seed, spec, ranks, with_lse)


for _name, _run, _shapes in (
    ("attention_over_ranks", _kernel, _fake),
    ("attention_over_ranks_backward", _backward_kernel, _backward_kernel),
):
    library.impl(_name, untraced(_run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _shapes, lib=library)
library.impl("attention_over_ranks", untraced(_autograd), "Autograd")


def _group(name: str) -> ContextParallel:
    if name not in _groups:
        raise ValueError(
            f"{name}, a group of ranks in a compiled function, is gone: keep what context_parallel returned"
        )
    return _groups[name]
