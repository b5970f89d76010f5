"""The three operators, for all backends: their schemas, kernels, fake kernels, autograd and autocast.

tilewise::attention(q, k, v, extras, seed, spec) -> (o, lse)
tilewise::attention_with_stats(q, k, v, extras, seed, spec) -> (o, lse, max_logit)
tilewise::attention_backward(do, dlse, q, k, v, o, lse, extras, seed, spec) -> (dq, dk, dv, dextras)

The last has overloads ``flat0``, ``flat1``, ... for as many dextras, which stand beside dq, dk and dv: PyTorch's ``cpp_wrapper`` compiles
no operator that returns a list. Where a package of AOTInductor calls, an empty list of ``extras`` comes as None, so that each kernel begins
with ``extras or ()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from tilewise import derivatives, dispatch
from tilewise.backends.base import Output, empty_gradients, empty_output
from tilewise.problem import check
from tilewise.spec import parse_spec
from tilewise.untraced import untraced

# The cheapest way through the dispatcher: docs/decisions.md#operator-at-autograd-key.
library = torch.library.Library("tilewise", "DEF")
library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] extras, Tensor? seed, str spec) -> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "attention_with_stats(Tensor q, Tensor k, Tensor v, Tensor[] extras, Tensor? seed, str spec) "
    "-> (Tensor o, Tensor lse, Tensor max_logit)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
FLAT_BACKWARDS = [f"attention_backward.flat{n}" for n in range(derivatives.FLAT)]
for _name, _dextras in (
    ("attention_backward", ["Tensor[] dextras"]),
    *((_name, [f"Tensor dextra{n}" for n in range(count)]) for count, _name in enumerate(FLAT_BACKWARDS)),
):
    library.define(
        f"{_name}(Tensor do, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor[] extras, Tensor? seed, str spec) "
        f"-> ({', '.join(['Tensor dq', 'Tensor dk', 'Tensor dv', *_dextras])})",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
_FORWARDS = ("attention", "attention_with_stats")
without_stats = torch.ops.tilewise.attention.default
with_stats = torch.ops.tilewise.attention_with_stats.default


_LEGACY_VMAP = torch._C._dispatch_key_parse("VmapMode")  # how is_grads_batched maps: the vmap before torch.func's
_AUTOGRAD = torch._C._dispatch_key_parse("AutogradOther")  # excluded together with those of all devices


# -- Kernels -------------------------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None, spec: str):
    extras = extras or ()
    return dispatch.plan(q, k, v, extras, seed, spec).forward(q, k, v, extras, seed)


class _BackwardCall(NamedTuple):
    """The arguments of ``attention_backward``."""

    do: Tensor
    dlse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    extras: Sequence[Tensor]
    seed: Tensor | None
    spec: str

    @property
    def forward(self) -> tuple:
        """The arguments of the forward."""
        return self.q, self.k, self.v, self.extras, self.seed

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self[:7], *self.extras)


def _backward(*arguments):
    do, dlse, q, k, v, o, lse, extras, seed, spec = arguments
    extras = extras or ()
    plan = dispatch.plan(q, k, v, extras, seed, spec)
    dispatch.check_results(plan.problem, do=do, dlse=dlse, o=o, lse=lse)
    return plan.backward(do, dlse, (q, k, v, *extras, seed, *Output.of(o, lse).tensors))


def _fake_forward(q, k, v, extras, seed, spec):
    return empty_output(check(q, k, v, extras, seed, parse_spec(spec)), q, v).tensors


def _fake_backward(*arguments):
    c = _BackwardCall(*arguments)
    return empty_gradients(check(*c.forward, parse_spec(c.spec)), c.q, c.k, c.v, c.extras)


for _name in _FORWARDS:
    library.impl(_name, untraced(_forward), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake_forward, lib=library)


def _flat(kernel: Callable[..., tuple]) -> Callable[..., tuple]:
    """Return a backward kernel for an overload: its list of dextras one by one."""

    def flat(*arguments):
        *found, dextras = kernel(*arguments)
        return *found, *dextras

    return flat


for _name, _run, _shapes in (
    ("attention_backward", _backward, _fake_backward),
    *((_name, _flat(_backward), _flat(_fake_backward)) for _name in FLAT_BACKWARDS),
):
    library.impl(_name, untraced(_run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _shapes, lib=library)


# -- Autograd ------------------------------------------------------------------------------------------------------

_PLAIN = {Tensor, torch.nn.Parameter}


def nobody_watches(*tensors: Tensor) -> bool:
    """Return whether the dispatcher has nothing to do below autograd, so that ``_forward`` or ``_backward`` may be called directly.

    It has with a tracing mode, a tensor subclass, nested tensors, and what it resolves: a view marked as the negative of its memory
    (``z.conj().imag``), and tensors without memory: zeros, or those that outlived their transform
    (docs/decisions.md#operator-at-autograd-key).
    """
    try:
        for x in tensors:
            if type(x) not in _PLAIN or x.is_neg() or x.is_nested or not x.data_ptr():
                return False
    except RuntimeError:  # asked for an address that there is not
        return False
    return not torch._C._len_torch_dispatch_stack()


def nobody_asks() -> bool:
    """Return whether the dispatcher would only call the kernel of autograd, in no mode of this thread: no transform, trace,
    profile, autocast, mode of functions or forward mode, nor below autograd already."""
    recorded = profiler._is_profiler_enabled or torch._C._get_tracing_state() is not None
    changed = torch._C._is_any_autocast_enabled() or torch._C._len_torch_function_stack()
    below = torch.is_grad_enabled() and torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
    return not (_transforming() or recorded or changed or below or forward_ad._current_level >= 0)


def _below_autograd(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None, spec: str):
    if nobody_watches(q, k, v, *extras):
        return _forward(q, k, v, extras, seed, spec)
    with torch._C._AutoDispatchBelowAutograd():
        return derivatives.operator_of(spec)(q, k, v, extras, seed, spec)


def _is_part(v: Tensor, k: Tensor) -> bool:
    """Return whether v, which lies in k's memory, was made of k alone as autograd has it, so that all of its gradient goes there, and no
    hook waits for it."""
    base = k if k._base is None else k._base
    if v._base is not base or v.grad_fn is None or v._backward_hooks or v.retains_grad:
        return False
    (node, number), *others = v.grad_fn.next_functions
    if others or node is None:
        return False
    return getattr(node, "variable", None) is k if k.is_leaf else node is k.grad_fn and number == k.output_nr


def _gradients_are_mapped() -> bool:
    """Return whether a backward runs inside a vmap of either kind, so that its gradients may be batched."""
    mapped = torch._C._dispatch_tls_is_dispatch_key_included(_LEGACY_VMAP)
    return mapped or torch._C._are_functorch_transforms_active()


def _layout(saved: Sequence[Tensor | None]) -> list[tuple | None]:
    """Return what a plan was made for. Hooks of saved tensors may bring back others."""
    return [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in saved]


@untraced
class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, seed, spec, plan, *extras):
        if plan is None:
            outputs = _below_autograd(q, k, v, extras, seed, spec)
        else:
            outputs = plan.forward(q, k, v, extras, seed)
        o, lse, *stats = outputs
        # Of a view of k that nobody holds in the backward nobody can ask for the gradient: dk may have it
        # (docs/decisions.md#hopper-listed-gradients). What is saved must not hold the view.
        ctx.view = weakref.ref(v) if plan is not None and plan.latent and _is_part(v, k) else None
        saved = q, k, v if ctx.view is None else v.detach(), *extras, seed, o, lse
        ctx.save_for_backward(*saved)
        ctx.spec, ctx.plan, ctx.layout = spec, plan, _layout(saved)
        # Here and not in the backward, which compiled autograd traces: it warns of the cached function.
        ctx.grad_slots = parse_spec(spec).grad_slots
        ctx.set_materialize_grads(False)
        if stats:
            ctx.mark_non_differentiable(*stats)
        return outputs

    @staticmethod
    def backward(ctx, do, dlse, *_):
        q, k, v, *extras, seed, o, lse = saved = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * (6 + len(extras))
        do = torch.zeros_like(o) if do is None else do
        # Compiled autograd traces this.
        quiet = not torch.compiler.is_compiling() and not torch.is_grad_enabled() and not _gradients_are_mapped()
        given = (q, k, v, *extras, do, *(() if dlse is None else (dlse,)))
        if quiet and not has_tangent(given) and nobody_watches(*given):
            plan = ctx.plan
            if plan is None or _layout(saved) != ctx.layout:
                plan = dispatch.plan(q, k, v, extras, seed, ctx.spec)
                # Hooks of saved tensors may have brought others than the forward saved.
                dispatch.check_results(plan.problem, do=do, dlse=dlse, o=o, lse=lse)
            elif extras:
                dispatch.check_lengths(plan, extras)
            joint = ctx.view is not None and ctx.view() is None
            dq, dk, dv, dextras = plan.backward(do, dlse, saved, joint)
        else:
            dlse = torch.zeros_like(lse) if dlse is None else dlse
            if ctx.view is not None:  # the one with a graph
                held = ctx.view()
                v = k[..., : v.shape[-1]] if held is None else held
            arguments = do, dlse, q, k, v, o, lse, extras, seed, ctx.spec
            dq, dk, dv, *dextras = derivatives.gradients(*arguments, count=len(ctx.grad_slots))
        if not extras:
            return dq, dk, dv, None, None, None
        by_slot = dict(zip(ctx.grad_slots, dextras, strict=True))
        return dq, dk, dv, None, None, None, *[by_slot.get(n) for n in range(len(extras))]


# What Function.apply does where no transform of torch.func is active, but for taking tensors out of transforms that are over, which
# the dispatcher has done above these kernels.
recorded = super(torch.autograd.Function, _Attention).apply


def _refuse_transforms(name: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"the operator of {name} cannot pass on the levels of torch.func; call {name} there, outside of torch.compile"
        )


def has_tangent(tensors: Sequence[Tensor], dual: bool = False) -> bool:
    """Return whether a tensor is dual. Below autograd its tangent would be dropped, and the derivative would be zero.

    Args:
        dual: as of a Spec.
    """
    opened = dual or forward_ad._current_level >= 0
    return opened and any(forward_ad.unpack_dual(x, level=0).tangent is not None for x in tensors)


def _differentiable(q, k, v, extras, seed, spec, plan):
    """Compute the forward by a plan, or below autograd without one, and make a node of the graph if gradients are wanted."""
    if has_tangent((q, k, v, *extras), parse_spec(spec).dual):
        return derivatives.Attention.apply(q, k, v, seed, spec, *extras)
    if torch.is_grad_enabled() and parse_spec(spec).needs_grad:
        return recorded(q, k, v, seed, spec, plan, *extras)
    return _below_autograd(q, k, v, extras, seed, spec) if plan is None else plan.forward(q, k, v, extras, seed)


def _forward_autograd(q, k, v, extras, seed, spec):
    _refuse_transforms("tilewise.attention")
    extras = extras or ()
    spec = derivatives.wanted(spec, q, k, v, extras) if torch.is_grad_enabled() else spec
    return _differentiable(q, k, v, extras, seed, spec, None)


def _backward_autograd(name: str) -> Callable[..., tuple]:
    """Return the kernel of autograd of ``attention_backward``, or of an overload."""
    overload = name.partition(".")[2] or "default"
    operator = getattr(torch.ops.tilewise.attention_backward, overload)

    def kernel(*arguments):
        c = _BackwardCall(*arguments)
        c = c._replace(extras=c.extras or ())
        recording = torch.is_grad_enabled() and any(t.requires_grad for t in c.tensors)
        if recording or has_tangent(c.tensors, parse_spec(c.spec).dual):
            found = derivatives.AttentionBackward.apply(c.seed, c.spec, *c.tensors)
            return (*found[:3], list(found[3:])) if overload == "default" else found
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*c)

    return kernel


for _name in _FORWARDS:
    library.impl(_name, untraced(_forward_autograd), "Autograd")
for _name in ("attention_backward", *FLAT_BACKWARDS):
    library.impl(_name, untraced(_backward_autograd(_name)), "Autograd")


# -- Autocast ------------------------------------------------------------------------------------------------------


def casts(device_type: str) -> bool:
    """Return whether autocast is on for a type of device that has it."""
    return device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)


def cast(q: Tensor, k: Tensor, v: Tensor, device_type: str, paged: bool, quantised: bool) -> list[Tensor]:
    """Return q, k and v as autocast hands them on."""
    dtype = torch.get_autocast_dtype(device_type)
    if paged:  # a cache keeps its dtype: to cast it would copy all of it
        return [q.to(dtype if quantised else k.dtype), k, v]
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v)]


def _autocast(device_type: str, key: str) -> None:
    """Cast q, k and v to the autocast dtype, or q to that of a cache. Autocast is off inside."""

    def kernel(q, k, v, extras, seed, spec):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            known = parse_spec(spec)
            given = cast(q, k, v, device_type, known.paged, known.quantised)
            return derivatives.operator_of(spec)(*given, extras or (), seed, spec)

    for name in _FORWARDS:
        library.impl(name, untraced(kernel), key)


_autocast("cpu", "AutocastCPU")
_autocast("cuda", "AutocastCUDA")


# -- Calls -----------------------------------------------------------------------------------------------------------


_transforming = torch._C._are_functorch_transforms_active


def attention(
    q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None, spec: str, operator=without_stats
):
    """``(o, lse)`` by the operator, or without the dispatcher where that would do no more than call the kernel of autograd; inside
    torch.func, whose levels an operator cannot pass on, by a function that they take apart.

    With max_logit by the operator ``with_stats``, for a spec that asks for it.
    """
    if not torch.compiler.is_compiling() and nobody_asks() and nobody_watches(q, k, v, *extras):
        return _differentiable(q, k, v, extras, seed, spec, dispatch.plan(q, k, v, extras, seed, spec))
    if not _transforming():
        return operator(q, k, v, extras, seed, spec)
    return _transformed(q, k, v, extras, seed, spec)


@torch._disable_dynamo  # which cannot take these functions apart; torch.compiler.disable would import all of Dynamo here
def _transformed(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None, spec: str):
    if parse_spec(spec).paged:
        raise NotImplementedError(
            "attention over a cache inside torch.vmap, or another of torch.func's transforms: a cache has no gradient, and no dimension to "
            "map over; call it outside, with the examples as sequences of the cache"
        )
    if casts(q.device.type):
        q, k, v = cast(q, k, v, q.device.type, False, False)
    return derivatives.Attention.apply(q, k, v, seed, derivatives.watched(spec, extras), *extras)


def gradients(*arguments, count: int) -> tuple[Tensor, ...]:
    """Return ``(dq, dk, dv, *dextras)`` of the arguments of the backward operator; inside torch.func by a function that it takes apart.

    ``count``: how many extras want a gradient.
    """
    return _transformed_backward(*arguments) if _transforming() else derivatives.gradients(*arguments, count=count)


@torch._disable_dynamo
def _transformed_backward(*arguments) -> tuple[Tensor, ...]:
    c = _BackwardCall(*arguments)
    return derivatives.AttentionBackward.apply(c.seed, c.spec, *c.tensors)
