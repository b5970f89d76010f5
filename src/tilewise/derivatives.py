"""Forward mode and second derivatives: two more operators, and the functions that PyTorch's transforms call.

tilewise::attention_jvp(inputs, extras, seed, tangents, spec) -> (o's tangent, lse's tangent)
tilewise::attention_backward_jvp(grads, moved, inputs, extras, seed, tangents, spec) -> (the tangents of dq, dk, dv, dextras)

``inputs`` are q, k, v, o and lse; ``tangents`` those of q, k, v and the extras; ``grads`` dO, dlse and their tangents; ``moved`` the
tangents of o and lse. A tangent that is None is zero.

They are enough for every derivative up to the second (docs/algorithm.md, (30) to (34)). The backward is the gradient of
F = <dO, o> + <dlse, lse>, and the second derivatives of F are symmetric. Reverse mode through the backward, for cotangents of dq, dk and
dv, therefore needs tangents along these cotangents only: that of the backward is the gradient of q, k and v, and those of o and lse
are the gradients of dO and dlse. Reverse mode through ``attention_jvp`` needs the same tangent, with the cotangents as dO and dlse, and
the plain backward for the gradients of the tangents.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.backends.base import Directions, Output, OutputGrads, empty_gradients, empty_output
from tilewise.problem import check
from tilewise.spec import parse_spec
from tilewise.untraced import untraced

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(
    "attention_jvp(Tensor[] inputs, Tensor[] extras, Tensor? seed, Tensor?[] tangents, str spec) "
    "-> (Tensor o_tangent, Tensor lse_tangent)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_backward_jvp(Tensor?[] grads, Tensor[] moved, Tensor[] inputs, Tensor[] extras, Tensor? seed, Tensor?[] tangents, "
    "str spec) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dextras)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_jvp = torch.ops.tilewise.attention_jvp.default
_backward_jvp = torch.ops.tilewise.attention_backward_jvp.default
INPUTS = 5  # q, k, v, o, lse
FLAT = 5  # gradients of extras: up to one less, the backward has an overload that returns each beside dq, dk and dv


# -- Kernels -------------------------------------------------------------------------------------------------------------


def _run_jvp(inputs, extras, seed, tangents, spec):
    (q, k, v, o, lse), extras = inputs, extras or ()
    plan = dispatch.plan(q, k, v, extras, seed, spec).forward_mode
    given = dispatch.inputs(plan, q, k, v, extras, seed)
    with torch._C._DisableAutocast():
        along = Directions.of(plan.problem, _in_dtypes_of((q, k, v, *extras), tangents))
        moved = plan.backend.jvp(plan.problem, given, Output.of(o, lse), along)
    return moved.o, moved.lse


def _run_backward_jvp(grads, moved, inputs, extras, seed, tangents, spec):
    (q, k, v, o, lse), extras = inputs, extras or ()
    plan = dispatch.plan(q, k, v, extras, seed, spec).second
    p, given = plan.problem, dispatch.inputs(plan, q, k, v, extras, seed)
    grad = OutputGrads.of(*grads[:2], *_in_dtypes_of(grads[:2], grads[2:]))
    along = Directions.of(p, _in_dtypes_of((q, k, v, *extras), tangents))
    with torch._C._DisableAutocast():
        found = plan.backend.backward_jvp(p, given, Output.of(o, lse), grad, along, Output.of(*moved))
    return found.dq, found.dk, found.dv, found.extras(p, extras)


def _in_dtypes_of(tensors: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the tangents as their tensors' dtypes have them: PyTorch takes those of any dtype."""
    return [None if x is None else x.to(t.dtype) for t, x in zip(tensors, tangents, strict=True)]


def _fake_jvp(inputs, extras, seed, tangents, spec):
    q, k, v, *_ = inputs
    out = empty_output(check(q, k, v, extras, seed, parse_spec(spec)), q, v)
    return out.o, out.lse


def _fake_backward_jvp(grads, moved, inputs, extras, seed, tangents, spec):
    q, k, v, *_ = inputs
    return empty_gradients(check(q, k, v, extras, seed, parse_spec(spec)), q, k, v, extras)


for _name, _kernel, _fake in (
    ("attention_jvp", _run_jvp, _fake_jvp),
    ("attention_backward_jvp", _run_backward_jvp, _fake_backward_jvp),
):
    _library.impl(_name, untraced(_kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=_library)


def operator_of(spec: str):
    """Return the operator of a spec's forward. A result more needs a schema of its own."""
    stats = parse_spec(spec).max_logit
    return (torch.ops.tilewise.attention_with_stats if stats else torch.ops.tilewise.attention).default


def gradients(*arguments: Any, count: int | None = None) -> tuple[Tensor, ...]:
    """Return ``(dq, dk, dv, *dextras)`` from the backward operator. If few extras want a gradient, it returns no list.

    ``count``: how many do. None: as the spec says, whose cached reader makes Dynamo warn.
    """
    operator = torch.ops.tilewise.attention_backward
    count = len(parse_spec(arguments[-1]).grad_slots) if count is None else count
    if count < FLAT:
        return getattr(operator, f"flat{count}")(*arguments)
    *found, dextras = operator.default(*arguments)
    return *found, *dextras


# -- Functions that PyTorch's transforms can take apart ------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _wanting(spec: str, slots: tuple[int, ...]) -> str:
    """Return the spec for a call with a backward that gives gradients of the sink and the score's tensors among ``slots``."""
    read = parse_spec(spec)
    may = {*read.score_slots, *([] if read.sink_slot is None else [read.sink_slot])}
    return replace(read, needs_grad=True, grad_slots=tuple(n for n in slots if n in may)).text()


def watched(spec: str, extras: Sequence[Tensor]) -> str:
    """Return the spec with every gradient, for calls whose differentiation ``requires_grad`` does not show."""
    return _wanting(spec, tuple(n for n, x in enumerate(extras) if x.is_floating_point()))


def wanted(spec: str, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor]) -> str:
    """Return the spec with each gradient that autograd would record now. A graph of export, make_fx or jit.trace holds the spec of its
    trace, whose inputs may have wanted fewer."""
    slots, known = [n for n, x in enumerate(extras) if x.requires_grad], parse_spec(spec)
    recorded = q.requires_grad or k.requires_grad or v.requires_grad or bool(slots)
    if known.needs_grad >= recorded and not {*slots}.difference(known.grad_slots):
        return spec
    return _wanting(spec, (*known.grad_slots, *slots))


def _by_also(spec: str, wanted: Sequence[bool]) -> str:
    """Return the spec with the gradients of the extras that are ``wanted`` too. A call names those that it returns; a derivative of these
    may be wanted by others (docs/derivatives.md#gradients-without-autograd)."""
    known, more = parse_spec(spec).grad_slots, [n for n, x in enumerate(wanted) if x]
    return spec if {*more} <= {*known} else _wanting(spec, tuple(sorted({*known, *more})))


def _by_slot(spec: str, dextras: Sequence[Tensor], extras: int) -> list[Tensor | None]:
    """Return a gradient for every extra; None if the spec wants none."""
    found = dict(zip(parse_spec(spec).grad_slots, dextras, strict=True))
    return [found.get(n) for n in range(extras)]


def _zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    """Keep tensors for reverse and for forward mode. Tensors that are not given have the gradient None."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


@untraced
class Attention(torch.autograd.Function):
    """The attention inside torch.func and of dual tensors: ``(o, lse)`` and, if the spec asks for it, max_logit."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, seed, spec, *extras):
        with torch._C._AutoDispatchBelowAutograd():
            return operator_of(spec)(q, k, v, extras, seed, spec)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, seed, ctx.spec, *extras = inputs
        o, lse, *stats = output
        _save(ctx, q, k, v, o, lse, seed, *extras)
        if stats:
            ctx.mark_non_differentiable(*stats)

    @staticmethod
    def backward(ctx, do, dlse, *_):
        q, k, v, o, lse, seed, *extras = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * (5 + len(extras))
        do, dlse = _zeros(do, o), _zeros(dlse, lse)
        dq, dk, dv, *dextras = AttentionBackward.apply(seed, ctx.spec, do, dlse, q, k, v, o, lse, *extras)
        return dq, dk, dv, None, None, *_by_slot(ctx.spec, dextras, len(extras))

    @staticmethod
    def jvp(ctx, dq, dk, dv, _seed, _spec, *dextras):
        q, k, v, o, lse, seed, *extras = ctx.saved_tensors
        moved = AttentionJvp.apply(seed, ctx.spec, len(extras), q, k, v, o, lse, *extras, dq, dk, dv, *dextras)
        return (*moved, None) if parse_spec(ctx.spec).max_logit else moved


@untraced
class AttentionBackward(torch.autograd.Function):
    """The backward, ``(dq, dk, dv, *dextras)``. Its derivatives with respect to q, k and v are total: they include the
    contributions through o and lse."""

    generate_vmap_rule = True

    @staticmethod
    def forward(seed, spec, do, dlse, *tensors):
        inputs, extras = tensors[:INPUTS], tensors[INPUTS:]
        with torch._C._AutoDispatchBelowAutograd():
            return gradients(do, dlse, *inputs, extras, seed, spec)

    @staticmethod
    def setup_context(ctx, inputs, output):
        seed, ctx.spec, *tensors = inputs
        _save(ctx, seed, *tensors)

    @staticmethod
    def backward(ctx, dq, dk, dv, *dextras):
        seed, do, dlse, *tensors = ctx.saved_tensors
        count = len(tensors) - INPUTS
        along = (dq, dk, dv, *_by_slot(ctx.spec, dextras, count))
        moved = AttentionJvp.apply(seed, ctx.spec, count, *tensors, *along)
        spec = _by_also(ctx.spec, ctx.needs_input_grad[4 + INPUTS :])
        grads = _backward_tangents(seed, spec, count, (do, dlse, None, None), moved, tensors, along)
        return None, None, *moved, *grads[:3], None, None, *_by_slot(spec, grads[3:], count)

    @staticmethod
    def jvp(ctx, _seed, _spec, do_tangent, dlse_tangent, *tangents):
        seed, do, dlse, *tensors = ctx.saved_tensors
        count = len(tensors) - INPUTS
        along = (*tangents[:3], *tangents[INPUTS:])
        moved = AttentionJvp.apply(seed, ctx.spec, count, *tensors, *along)
        grads = do, dlse, do_tangent, dlse_tangent
        return _backward_tangents(seed, ctx.spec, count, grads, moved, tensors, along)


@untraced
class AttentionJvp(torch.autograd.Function):
    """The tangents of o and lse. ``tensors`` are q, k, v, o, lse, then ``count`` extras, then the tangents of q, k, v and the extras."""

    generate_vmap_rule = True

    @staticmethod
    def forward(seed, spec, count, *tensors):
        inputs, extras, along = _parted(tensors, count)
        with torch._C._AutoDispatchBelowAutograd():
            return _jvp(inputs, extras, seed, along, spec)

    @staticmethod
    def setup_context(ctx, inputs, output):
        seed, spec, ctx.count, *tensors = inputs
        ctx.spec = watched(spec, _parted(tensors, ctx.count)[1])
        _save(ctx, seed, *output, *tensors)

    @staticmethod
    def backward(ctx, do, dlse):
        seed, o_tangent, lse_tangent, *tensors = ctx.saved_tensors
        inputs, extras, along = _parted(tensors, ctx.count)
        if do is None and dlse is None:
            return (None,) * (3 + len(tensors))
        do, dlse = _zeros(do, o_tangent), _zeros(dlse, lse_tangent)
        moved, grads = (o_tangent, lse_tangent), (do, dlse, None, None)
        grads = _backward_tangents(seed, ctx.spec, ctx.count, grads, moved, (*inputs, *extras), along)
        of_inputs = *grads[:3], None, None, *_by_slot(ctx.spec, grads[3:], ctx.count)
        of_tangents = [None] * len(along)
        if any(ctx.needs_input_grad[-len(along) :]):
            dq, dk, dv, *dextras = AttentionBackward.apply(seed, ctx.spec, do, dlse, *inputs, *extras)
            of_tangents = dq, dk, dv, *_by_slot(ctx.spec, dextras, ctx.count)
        found = None, None, None, *of_inputs, *of_tangents
        return tuple(x if wanted else None for x, wanted in zip(found, ctx.needs_input_grad, strict=True))

    @staticmethod
    def jvp(ctx, *_):
        raise _third("forward mode inside forward mode", "; jacfwd(jacrev(f)) is jacfwd(jacfwd(f))")


@untraced
class AttentionBackwardJvp(torch.autograd.Function):
    """The tangents of dq, dk, dv and the extras' gradients.

    ``tensors`` are dO, dlse and their tangents, the tangents of o and lse, then those of :class:`AttentionJvp`. They are linear in the
    tangents and are differentiated with respect to the tangents alone, as `torch.autograd.functional.hvp` needs. The second
    derivatives of F are symmetric, so these gradients are the same tangents along the cotangents. They include the contributions through
    the tangents of o and lse.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(seed, spec, count, *tensors):
        inputs, extras, along = _parted(tensors[6:], count)
        with torch._C._AutoDispatchBelowAutograd():
            *grads, dextras = _backward_jvp(tensors[:4], tensors[4:6], inputs, extras, seed, along, spec)
        return *grads, *dextras

    @staticmethod
    def setup_context(ctx, inputs, output):
        seed, ctx.spec, ctx.count, *tensors = inputs
        _save(ctx, seed, *tensors[:2], *tensors[6 : 6 + INPUTS + ctx.count])

    @staticmethod
    def backward(ctx, dq, dk, dv, *dextras):
        seed, do, dlse, *tensors = ctx.saved_tensors
        along = (dq, dk, dv, *_by_slot(ctx.spec, dextras, ctx.count))
        moved = AttentionJvp.apply(seed, ctx.spec, ctx.count, *tensors, *along)
        spec = _by_also(ctx.spec, ctx.needs_input_grad[len(ctx.needs_input_grad) - ctx.count :])
        grads = _backward_tangents(seed, spec, ctx.count, (do, dlse, None, None), moved, tensors, along)
        of_tangents = *grads[:3], *_by_slot(spec, grads[3:], ctx.count)
        found = *(None,) * 5, *moved, None, None, *(None,) * len(tensors), *of_tangents
        return tuple(x if wanted else None for x, wanted in zip(found, ctx.needs_input_grad, strict=True))

    @staticmethod
    def jvp(ctx, *_):
        raise _third("a third derivative, or a second one inside forward_ad.dual_level(), which has to end first,")


@untraced
class _Fixed(torch.autograd.Function):
    """Return the tensors unchanged, and refuse to differentiate a second derivative with respect to them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors):
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise _third("a third derivative")

    jvp = AttentionBackwardJvp.jvp


def _backward_tangents(
    seed: Tensor | None,
    spec: str,
    count: int,
    grads: Sequence[Tensor | None],
    moved: Sequence[Tensor],
    tensors: Sequence[Tensor],
    along: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """:class:`AttentionBackwardJvp`, differentiable with respect to the tangents alone. ``tensors``: dO, dlse and their tangents, the
    tangents of o and lse, the inputs and extras, and their tangents."""
    do, dlse, *tensors = _Fixed.apply(*grads[:2], *tensors)
    return AttentionBackwardJvp.apply(seed, spec, count, do, dlse, *grads[2:], *moved, *tensors, *along)


for _function in (Attention, AttentionBackward, AttentionJvp, AttentionBackwardJvp, _Fixed):
    # PyTorch asks for this signature at every call; inspect would compute it anew each time.
    _function.forward.__signature__ = inspect.signature(_function.forward)  # type: ignore[attr-defined]


def _parted(tensors: Sequence[Tensor | None], count: int) -> tuple[Sequence[Tensor | None], ...]:
    """Split tensors into inputs, extras and tangents, in this order."""
    return tensors[:INPUTS], tensors[INPUTS : INPUTS + count], tensors[INPUTS + count :]


def _third(what: str, instead: str = "") -> NotImplementedError:
    return NotImplementedError(
        f"{what} of attention is not built; tilewise computes first derivatives in both modes, and second ones by reverse mode over "
        f"either or forward mode over reverse mode{instead}. Compute this attention in plain torch where a further one is needed"
    )
