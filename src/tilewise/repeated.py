"""Calls that come again: their plan, found by their words and the sizes of their tensors.

Between the other operations of a model little of a call lies in the processor's caches, so that each operation of PyTorch and each function
takes several times what it takes in a loop. A call that was seen before makes no other operation than those that allocate its results,
and passes few functions (docs/decisions.md#repeated-calls).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise import autograd, dispatch, settings
from tilewise.masks import Mask
from tilewise.spec import Options, Words, assemble, brief, texts_of

Beside = tuple[Tensor | None, ...]
"""sink, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, k_scale and v_scale, in the order in which :func:`spec.assemble` takes them."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, words: Words, lse: bool, heads_first: bool = False, beside: Beside = ()
) -> tuple | None:
    """Return ``(o, lse)`` of a call without tensors in its score, and without gradients but those of q, k and v; None if there is more to
    look at.

    Args:
        q, k, v: ``(batch, seqlen, heads, head_dim)``, or ``(batch, heads, seqlen, head_dim)`` with ``heads_first``.
            o is ``(batch, seqlen_q, heads_q, head_dim_v)`` either way.
        lse: whether it is read; if not, None may stand in its place.
        beside: the call's other tensors, those of mask and score excepted; then q, k and v are as that call takes them.

    Raises:
        ValueError, NotImplementedError: as :func:`tilewise.attention`.
    """
    grads = torch.is_grad_enabled() and _some_wants_grad(q, k, v)
    if grads and heads_first:
        return None
    said, extras = texts_of(words), tuple([x for x in beside if x is not None])
    _, mask, score, *_ = words
    if said is None or (score is not None and score.parts):
        return None
    of_mask, forms = (), ()
    if mask is not None and mask.parts:
        if type(mask) is not Mask:  # a prepared one
            return None
        of_mask, forms = (mask.leaves, ()) if mask.derives else (mask.parts, mask.forms)
        extras += of_mask
    if not (autograd.nobody_asks() and autograd.nobody_watches(q, k, v, *extras)):
        return None
    if extras and torch.is_grad_enabled() and any(x.requires_grad for x in extras):
        return None
    # fmt: off
    key = (said, heads_first, grads, q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
           v.shape, v.stride(), v.dtype, v.device)
    # fmt: on
    given, checked = (), False
    if extras:
        # Tensors of one shape may hold v in the memory of k, or not (:func:`tilewise.pages.is_latent`).
        given = *[x is None for x in beside], k.data_ptr() == v.data_ptr()
        key = (*key, *given, *forms, *[(x.shape, x.stride(), x.dtype, x.device) for x in extras])
        checked = settings.checks_values(q.device)
    plan = dispatch.of_calls.get(key)
    if plan is None or (checked and type(plan) is _Sized):
        like, sizes = None, ()
        if not (of_mask or checked):  # what is kept of a mask is kept with a Problem, by which values are checked too
            like, sizes = _structure_and_sizes((said, grads, *given), q, k, v, extras, heads_first)
        plan = None if like is None else _of_structure(like, sizes, key, grads)
        if plan is None:
            plan = _known(*(_heads_last(q, k, v) if heads_first else (q, k, v)), words, extras, beside, key, like)
        if plan is None:
            return None
    if checked:
        dispatch.check_lengths(plan, extras)
    if grads:
        return autograd.recorded(q, k, v, None, plan.spec, plan, *extras)
    found = None if plan.direct is None else plan.direct(q, k, v, extras, lse)
    if found is not None:
        return found
    return plan.forward(*(_heads_last(q, k, v) if heads_first else (q, k, v)), extras, None)


def over(q: Tensor, k: Tensor, v: Tensor, o: Options, lse: bool = True) -> tuple:
    """Return ``(o, lse)`` of a call by its options, with one that has tensors beside q, k and v as a call that may come again.

    Args:
        lse: whether it is read; if not, None may stand in its place.
    """
    beside = o.sink, o.cu_seqlens_q, o.cu_seqlens_k, o.block_table, o.seqlens_k, o.k_scale, o.v_scale
    if o.cu_seqlens_k is o.cu_seqlens_q:  # the same tensor is the operator's once
        beside = *beside[:2], None, *beside[3:]
    others = o.dropout_seed is not None or o.piece is not None or o.wrt is not None or o.max_logit
    plain = type(o.dropout_p) is float and o.dropout_p == 0.0 and not others and not torch.compiler.is_compiling()
    if plain and [1 for x in beside if x is not None]:
        words = o.causal, o.mask, o.score, o.softmax_scale, o.deterministic, o.backend, o.max_logit
        found = attend(q, k, v, words, lse, beside=beside)
        if found is not None:
            return found
    return autograd.attention(q, k, v, *assemble(q, k, v, o))


def _some_wants_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    found = False
    for x in (q, k, v):
        found = found or getattr(x, "requires_grad", False) is True  # of a trace it is no truth value
    return found


def _heads_last(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


class _Sized:
    """A call of a structure that was decided for other sizes, without a Problem until it reads more than memory."""

    __slots__ = ("direct", "direct_backward", "spec")
    reads_lengths = False  # where their values are checked, none of these is made
    latent = False  # no backward by memory takes values in the memory of keys

    def __init__(self, direct: dispatch.DirectCall, direct_backward: dispatch.DirectBackward | None, spec: str):
        self.direct, self.direct_backward, self.spec = direct, direct_backward, spec

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None) -> tuple:
        found = self.direct(q, k, v, extras, True)
        return (
            dispatch.decide(q, k, v, extras, seed, self.spec).forward(q, k, v, extras, seed) if found is None else found
        )

    def backward(self, do: Tensor, dlse: Tensor | None, saved: dispatch.Saved, joint: bool = False) -> tuple:
        found = self.direct_backward(do, dlse, saved)
        if found is not None:
            return *found, []
        q, k, v, *extras, seed, _, _ = saved
        return dispatch.decide(q, k, v, extras, seed, self.spec).backward(do, dlse, saved, joint)


def _structure_and_sizes(
    said: tuple, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], heads_first: bool
) -> tuple[tuple | None, tuple]:
    """Return what a call says without its sizes, and these as :attr:`tilewise.signature.Structured.sizes` has them; None: another rank."""
    # Over pages causal says nothing of one row (:func:`tilewise.spec.assemble`), which is another text.
    found, sizes = [said, bool(extras) and q.shape[-3] == 1], []
    for x in (q, k, v):
        shape, stride = x.shape, x.stride()
        if len(shape) != 4 if heads_first else len(shape) < 3:
            return None, ()
        if heads_first:
            shape, stride = ((n[0], n[2], n[1], n[3]) for n in (shape, stride))
        *outer, heads, head_dim = shape
        found += (len(outer), heads, head_dim, x.dtype, x.device)
        sizes += (*outer, *stride)
    for x in extras:
        found += (x.ndim, x.dtype, x.device)
        sizes += (*x.shape, *x.stride())
    return tuple(found), tuple(sizes)


def _of_structure(like: tuple, sizes: tuple[int, ...], key: tuple, grads: bool) -> _Sized | None:
    """Return a call of a known structure and remember it; None if it has to be decided."""
    structure = dispatch.of_structures.get(like)
    direct = None if structure is None else dispatch.direct(structure, sizes, grads)
    if direct is None:
        return None
    _make_room()
    found = dispatch.of_calls[key] = _Sized(*direct, structure[0])
    return found


def _make_room() -> None:
    if len(dispatch.of_calls) >= dispatch.PLANS_LIMIT:
        dispatch.of_calls.clear()


def _known(
    q: Tensor, k: Tensor, v: Tensor, words: Words, extras: tuple[Tensor, ...], beside: Beside, key: tuple, like: tuple | None
) -> dispatch.Plan | None:  # fmt: skip
    """Return the plan of a call and remember it, and its structure where ``like`` says what calls of it share; None for a call that
    :func:`attend` leaves to others."""
    if beside:
        tensors, _, text = assemble(q, k, v, _options(words, beside))
    else:
        found = brief(q, k, v, words)
        if found is None:
            return None
        tensors, text = found
    if len(tensors) != len(extras):  # a tensor that stands twice is one of the operator's
        return None
    _make_room()
    plan = dispatch.of_calls[key] = dispatch.decide(q, k, v, tensors, None, text)
    if like is not None:
        dispatch.of_structures[like] = plan.problem.structure
    return plan


def _options(words: Words, beside: Beside) -> Options:
    causal, mask, score, softmax_scale, deterministic, backend, max_logit = words
    o = Options(causal, mask, score, softmax_scale, deterministic=deterministic, backend=backend, max_logit=max_logit)
    o.sink, o.cu_seqlens_q, o.cu_seqlens_k, o.block_table, o.seqlens_k, o.k_scale, o.v_scale = beside
    return o
