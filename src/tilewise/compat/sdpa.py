"""``torch.nn.functional.scaled_dot_product_attention`` over tilewise's op, and :func:`patch` for a whole model.

Signature and layout are torch's, ``(..., heads, seqlen, head_dim)``. The causal mask is torch's **top-left** one: query i sees keys
``j <= i``, even if the lengths differ (``tw.causal(align="first")``). Nothing is expanded: a mask of shape
``(batch, 1, 1, seqlen_k)`` stays one bit per key, and an additive mask is read in place and gets its gradient.

A row without visible keys is zero and has zero gradients, as in torch. A NaN in a key that every query masks does not reach the
output, unlike in torch. Dropout draws other random numbers than torch's.

Use -inf or a bool mask instead of a huge negative number such as ``torch.finfo(dtype).min``: gradients through a row that has this
number at every key are too large (docs/algorithm.md#14-numerics).
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.transformer import _detect_is_causal_mask, _get_seq_len  # noqa: F401  for _patched_encoder in TorchScript

import tilewise as tw
from tilewise.compat.encoder import offsets_of_rows, over_packed_rows, would_pack
from tilewise.compat.probabilities import probabilities
from tilewise.compat.refusals import need_tensors
from tilewise.dropout import new_seed


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``softmax(scale * query keyᵀ + mask) value``.

    Args:
        query: ``(..., heads, seqlen_q, head_dim)``, at least 2 dimensions; leading ones broadcast. All three may be nested in
            the jagged layout, ``(batch, heads, j, head_dim)``.
        key: ``(..., heads_k, seqlen_k, head_dim)``. value: ``(..., heads_k, seqlen_k, head_dim_v)``.
        attn_mask: broadcastable to ``(..., heads, seqlen_q, seqlen_k)``: bool, True takes part; floating, added to the
            scores, differentiable; or a ``torch.nn.attention.bias.CausalBias``.
        is_causal: query i sees keys ``j <= i``.
        scale: default ``1 / sqrt(head_dim)``. A tensor without dimensions is read on the host, outside of ``torch.compile``.
        enable_gqa: heads is a multiple of heads_k, and consecutive query heads share one.

    Returns:
        ``(..., heads, seqlen_q, head_dim_v)``, a view of ``(..., seqlen_q, heads, head_dim_v)``.

    Raises:
        ValueError: a wrong call. NotImplementedError: what torch runs and this does not, with every reason.
    """
    if isinstance(scale, Tensor) and not (scale.ndim or torch.compiler.is_compiling() or _has_derivative(scale)):
        scale = float(scale)  # as torch does
    need_tensors("scaled_dot_product_attention", query=query, key=key, value=value)
    if any(x.is_nested and x.layout == torch.jagged for x in (query, key, value)):
        return _of_nested((query, key, value), attn_mask, dropout_p, is_causal, scale, enable_gqa)
    call = read(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return call.shaped(tw.attention(call.q, call.k, call.v, **call.options).transpose(1, 2))


def _has_derivative(scale: Tensor) -> bool:
    """Return whether a number may have a derivative; of a tensor inside torch.func only the innermost transform can be asked."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(scale)
    return wrapped or scale.requires_grad or forward_ad.unpack_dual(scale).tangent is not None


def _of_nested(qkv: tuple[Tensor, Tensor, Tensor], attn_mask, dropout_p, is_causal, scale, enable_gqa) -> Tensor:
    """Compute attention of jagged tensors ``(batch, heads, j, head_dim)``, each sequence by itself, by a packed call."""
    if attn_mask is not None:
        raise NotImplementedError(
            "scaled_dot_product_attention\n  attn_mask beside nested tensors; tw.attention takes a mask= of (b, h, i, j)"
        )
    wrong = [
        n for n, x in zip(("query", "key", "value"), qkv, strict=True) if x.is_nested and x._ragged_idx != x.ndim - 2
    ]
    if wrong:
        raise ValueError(f"{wrong[0]} is not (batch, heads, j, head_dim), j the ragged dimension; transpose it")
    q, k, v = (x.transpose(1, 2) for x in qkv)
    if not enable_gqa and not q.shape[2] == k.shape[2] == v.shape[2]:
        counts = ", ".join(str(x.shape[2]) for x in (q, k, v))
        raise ValueError(f"query, key and value have {counts} heads; {HEADS_DIFFER}")
    mask = None
    if is_causal:
        # With equal lengths both are the same, and Hopper's packed kernels have "last".
        mask = tw.causal(align="last" if q.is_nested and k.is_nested and _are_as_long(q, k) else "first")
    return tw.attention(q, k, v, mask=mask, softmax_scale=scale, dropout_p=dropout_p).transpose(1, 2)


def _are_as_long(q: Tensor, k: Tensor) -> bool:
    """Return whether the sequences of two nested tensors are known to have the same lengths. A compiled graph knows no values."""
    a, b = q.offsets(), k.offsets()
    return a is b or (not torch.compiler.is_compiling() and torch.equal(a, b))


@dataclass(frozen=True)
class Call:
    """A call in tilewise's terms.

    Attributes:
        q, k, v: ``(batch, seqlen, heads, head_dim)``. options: the keywords of :func:`tilewise.attention`.
        lead: the dimensions before heads, broadcast; None where the tensors have no heads either.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict
    lead: tuple[int, ...] | None

    def shaped(self, x: Tensor) -> Tensor:
        """Return ``(batch, heads, ...)`` with the caller's leading dimensions."""
        if self.lead is None:
            return x[0, 0]
        return x.unflatten(0, self.lead) if len(self.lead) > 1 else x if self.lead else x[0]

    def probabilities(self) -> Tensor:
        """Return the probabilities ``(..., heads, seqlen_q, seqlen_k)``, after dropout; :attr:`options` must hold its seed."""
        return self.shaped(probabilities(self.q, self.k, **self.options))


def read(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> Call:
    """Return the arguments of :func:`scaled_dot_product_attention`, checked and put into tilewise's layout."""
    variant = getattr(getattr(attn_mask, "variant", None), "name", None)  # CausalBias: importing it to ask costs 2 s
    reasons = _refusals(query, key, value, dropout_p, scale, enable_gqa)
    if reasons:
        raise NotImplementedError("scaled_dot_product_attention" + "".join(f"\n  {reason}" for reason in reasons))
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal exclude each other; put the causal mask into attn_mask")
    if variant is not None and (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"attn_mask is a CausalBias of {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys; "
            f"query and key have {query.shape[-2]} and {key.shape[-2]}"
        )
    lead = _leading(query, key, value)
    q, k, v = _heads_last(query, key, value, lead, enable_gqa)
    mask, score = None, None
    if is_causal or variant == "UPPER_LEFT":
        mask = tw.causal(align="first")
    elif variant == "LOWER_RIGHT":
        mask = tw.causal()
    elif attn_mask is not None:
        need_tensors("scaled_dot_product_attention", attn_mask=attn_mask)
        mask, score = pairs_of(attn_mask, (*lead, q.shape[2], q.shape[1], k.shape[1]))
    options = {"mask": mask, "score": score, "softmax_scale": scale, "dropout_p": dropout_p}
    headless = query.ndim == key.ndim == value.ndim == 2
    return Call(q, k, v, options, None if headless else lead)


def _refusals(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None, enable_gqa: bool
) -> list[str]:
    """Why a call that torch runs cannot run here."""
    reasons = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            reasons.append(
                f"{name} is nested in another layout; make all three torch.jagged, or pack and call tw.attention_varlen"
            )
        elif x.layout != torch.strided:
            reasons.append(f"{name} is sparse; make it dense: {name}.to_dense()")
        elif not x.is_floating_point():
            reasons.append(f"{name} is {x.dtype}; floating types alone are built")
    if dropout_p == 1.0:
        reasons.append("dropout_p 1.0 drops everything: the output is zeros, no attention is needed")
    if isinstance(scale, Tensor):
        reasons.append(
            "scale is a tensor that has dimensions or a tangent, wants a gradient, is inside torch.func or is compiled; "
            "give float(scale), or multiply query by it"
        )
    if not reasons and enable_gqa and min(key.ndim, value.ndim) > 2 and key.shape[-3] != value.shape[-3]:
        reasons.append(f"key has {key.shape[-3]} heads and value {value.shape[-3]}; repeat the fewer ones")
    return reasons


def _leading(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return the dimensions before heads, broadcast."""
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if min(len(shape) for shape in shapes) < 2:
        raise ValueError(
            f"query, key and value need 2 dimensions or more, got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    try:
        return tuple(torch.broadcast_shapes(*[shape[:-3] for shape in shapes]))
    except RuntimeError:
        raise ValueError(
            f"the leading dimensions of query {shapes[0]}, key {shapes[1]} and value {shapes[2]} do not broadcast"
        ) from None


def _heads_last(query: Tensor, key: Tensor, value: Tensor, lead: tuple[int, ...], gqa: bool) -> tuple[Tensor, ...]:
    """Views ``(batch, seqlen, heads, head_dim)``; a head count of 1 is broadcast, for key and value as one shared head."""
    qkv = [x[(None,) * max(0, 3 - x.ndim)] for x in (query, key, value)]
    heads = [x.shape[-3] for x in qkv]
    if not gqa:
        most = max(heads)
        if not all(broadcasts(n, most) for n in heads):
            counts = ", ".join([str(n) for n in heads])
            raise ValueError(f"query, key and value have {counts} heads; {HEADS_DIFFER}")
        heads = [most, 1, 1] if heads[1] == heads[2] == 1 else [most] * 3
    flat = [x.expand(*lead, n, *x.shape[-2:]) for x, n in zip(qkv, heads, strict=True)]
    flat = [x.flatten(0, -4) if len(lead) > 1 else x if lead else x[None] for x in flat]
    return tuple([x.transpose(1, 2) for x in flat])


HEADS_DIFFER = (
    "grouped ones need enable_gqa=True; the layout is (batch, heads, seqlen, head_dim): x.transpose(1, 2) of one with "
    "seqlen before heads"
)


def pairs_of(attn_mask: Tensor, shape: tuple[int, ...]) -> tuple[tw.Mask | None, tw.Score | None]:
    """Return a tensor that broadcasts to ``shape``, (..., heads, seqlen_q, seqlen_k), as a mask or a score; it is not expanded."""
    sizes, lead = tuple(attn_mask.shape), shape[:-3]
    fits = len(sizes) <= len(shape) and all(broadcasts(n, m) for n, m in zip(sizes[::-1], shape[::-1], strict=False))
    if not fits or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        padding = len(shape) == 4 and sizes == (shape[0], shape[3])
        hint = "; one of kept keys, (batch, seqlen_k), is attn_mask[:, None, None]" if padding else ""
        raise ValueError(
            f"attn_mask must be bool or floating and broadcast to {shape}; got {attn_mask.dtype} {sizes}{hint}"
        )
    for axis in range(attn_mask.ndim):
        if is_repeated(attn_mask, axis):
            attn_mask = attn_mask.narrow(axis, 0, 1)
    if len(lead) > 1 and attn_mask.ndim > 3:
        attn_mask = attn_mask[(None,) * (len(shape) - attn_mask.ndim)]
        if not all(n == 1 for n in attn_mask.shape[:-3]) and tuple(attn_mask.shape[:-3]) != lead:
            return _of_some_leading(attn_mask, lead)
        attn_mask = attn_mask.flatten(0, -4)
    return (tw.dense(attn_mask), None) if attn_mask.dtype == torch.bool else (None, tw.bias(attn_mask))


def broadcasts(size: int, to: int) -> bool:
    """Return whether a size broadcasts to another. ``size in (1, to)`` is False in Dynamo of a number and a symbol that equals it."""
    return size == 1 or size == to


def is_repeated(x: Tensor, axis: int) -> bool:
    """Return whether one element may be read for all along an axis: a tensor is expanded there, and none wants its own gradient."""
    if x.stride(axis) != 0 or x.shape[axis] < 2:
        return False
    if not x.is_floating_point():
        return True
    # Of a tensor that a transform holds requires_grad says nothing. Dynamo cannot ask which tensors these are.
    compiling = torch.compiler.is_compiling()
    held = (
        torch._C._are_functorch_transforms_active() if compiling else torch._C._functorch.is_functorch_wrapped_tensor(x)
    )
    return not (held or (torch.is_grad_enabled() and x.requires_grad))


def _of_some_leading(attn_mask: Tensor, lead: tuple[int, ...]) -> tuple[tw.Mask | None, tw.Score | None]:
    """Some leading dimensions broadcast and others not: each is read at its own digit of the flattened batch index."""

    def read(b, h, i, j):
        index = [h, i, j]
        for size in lead[::-1]:
            index.insert(0, b % size)
            b = b // size
        return tw.lookup(attn_mask, *[0 if n == 1 else x for n, x in zip(attn_mask.shape, index, strict=True)])

    if attn_mask.dtype == torch.bool:
        return tw.keep(read), None
    return None, tw.score(lambda s, b, h, i, j: s + read(b, h, i, j))


# -- A whole model ---------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_active: list[_Patch] = []
_saved: dict[str, object] = {}


class _Patch(ContextDecorator):
    """The context manager that :func:`patch` returns. It may be entered again while it is active.

    Attributes:
        calls: how many calls arrived since it was entered, without those of compiled code.
        compiled: whether compiled code called. It is not counted, since torch.compile would compile again for each number.
    """

    def __init__(self, unsupported: str):
        self.unsupported = unsupported
        self.calls, self.compiled = 0, False

    def __enter__(self) -> _Patch:
        with _lock:
            if self not in _active:
                self.calls, self.compiled = 0, False
            if not _active:
                _saved["fastpath"] = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
                for owner, name, ours in _REPLACED:
                    _saved[name] = getattr(owner, name)
                    setattr(owner, name, ours)
            _active.append(self)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with _lock:
            last = len(_active) - 1 - _active[::-1].index(self)
            del _active[last]
            if not _active:
                torch.backends.mha.set_fastpath_enabled(_saved["fastpath"])
                for owner, name, ours in _REPLACED:
                    if getattr(owner, name) is ours:  # else someone else has replaced it since: theirs stays
                        setattr(owner, name, _saved[name])
            unused = self not in _active and not (self.calls or self.compiled or error)
        if unused:
            warnings.warn(
                "no call of scaled_dot_product_attention arrived inside patch(): the model has another attention, by matrix products "
                "of its own, by a function that it imported by name, or by a library (docs/switching.md#sdpa)",
                RuntimeWarning,
                stacklevel=2,
            )


def patch(unsupported: str = "raise") -> _Patch:
    """Replace ``torch.nn.functional.scaled_dot_product_attention`` by this module's, as a context or decorator.

    ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` use it too: their fused inference path is off inside. Where
    ``nn.TransformerEncoder`` packs rows without their padding (in eval mode, with ``src_key_padding_mask``), it does so inside too. With
    ``need_weights=True`` the matrix of probabilities is computed as well, and a warning says so. ``torch.jit.script`` works inside: its
    result calls back to Python, follows the patch in and out, and cannot be saved.

    ``with patch() as p`` counts in ``p.calls`` the calls that arrive (``p.compiled``: compiled code called), and warns at the end if
    there was none.

    Args:
        unsupported: the treatment of unsupported calls. "raise": raise the error. "warn": give a RuntimeWarning with the reason and run
            torch's own function, which may take O(seqlen_q * seqlen_k) memory. A call that is wrong for torch too raises.

    The patch is process-wide: all threads' calls come here while any thread is inside, and the latest ``unsupported`` decides.
    Entries may nest and overlap; the originals are back when the last one is left, even by an exception. Run the backward inside too if
    activation checkpoints call the function again. A name that was imported before the patch (``from torch.nn.functional import
    scaled_dot_product_attention``) is not replaced. ``torch.compile`` works inside and outside: it compiles again when the function has
    changed.
    """
    if unsupported not in ("raise", "warn"):
        raise ValueError(f'patch(unsupported=...) takes "raise" or "warn", got {unsupported!r}')
    return _Patch(unsupported)


# TorchScript compiles what it finds under torch's names, and takes no variable arguments: the replacements have torch's signatures
# and hand over, in torch's order, to functions that stay Python.


def _scriptable(like: Callable) -> Callable[[Callable], Callable]:
    """Make a function of ``*args`` one that TorchScript calls back, with the arguments of ``like``."""

    def made(function: Callable) -> Callable:
        function.__signature__ = inspect.signature(like, eval_str=True)
        return torch.jit.ignore(function)

    return made


# fmt: off
def _patched_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:
    # fmt: on
    return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _patched_multi_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    # fmt: off
    return _multi_head(
        query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn,
        dropout_p, out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights, attn_mask,
        use_separate_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v, average_attn_weights,
        is_causal,
    )
    # fmt: on


def _say(reason: str) -> None:
    """Raise ``reason``, or warn of it, as the latest patch wants."""
    if _active and _active[-1].unsupported == "raise":
        raise NotImplementedError(f'{reason}\n  patch(unsupported="warn") would run torch\'s own function')
    warnings.warn(f"torch's own function runs, with up to O(N²) memory: {reason}", RuntimeWarning, stacklevel=4)


def _count() -> None:
    """Note a call with every active patch."""
    if torch.compiler.is_compiling():
        for active in _active:
            active.compiled = True
        return
    with _lock:
        for active in set(_active):
            active.calls += 1


def _ours(arguments: tuple) -> Tensor:
    """Compute attention of the arguments of :func:`_patched_attention`, and the probabilities for a waiting multi-head module."""
    offsets = offsets_of_rows()
    if offsets is not None:
        q, k, v = (x[0].transpose(0, 1) for x in arguments[:3])
        return tw.attention_varlen(q, k, v, offsets).transpose(0, 1)[None]
    if not getattr(_waiting, "modules", None):
        *positional, scale, enable_gqa = arguments
        return scaled_dot_product_attention(*positional, scale=scale, enable_gqa=enable_gqa)
    call = read(*arguments)
    if call.options["dropout_p"]:  # the same pairs in both
        call.options["dropout_seed"] = new_seed(call.q.device)
    _waiting.modules[-1].append(call.probabilities())
    return call.shaped(tw.attention(call.q, call.k, call.v, **call.options).transpose(1, 2))


@_scriptable(_patched_attention)
def _attend(*arguments) -> Tensor:
    def original() -> Tensor:
        *positional, scale, enable_gqa = arguments
        return _saved["scaled_dot_product_attention"](*positional, scale=scale, enable_gqa=enable_gqa)

    if not _active:
        return original()
    _count()
    try:
        return _ours(arguments)
    except NotImplementedError as reason:
        _say(str(reason))
    except ValueError as wrong:
        if _active and _active[-1].unsupported == "raise":
            raise
        try:
            o = original()
        except Exception:  # torch finds it wrong too: our error says more
            raise wrong from None
        _say(str(wrong))
        return o
    return original()


_waiting = threading.local()
"""``modules``: for each multi-head call of this thread that wants probabilities, a list for them; innermost last."""

_NAMES = list(inspect.signature(_patched_multi_head).parameters)


@_scriptable(_patched_multi_head)
def _multi_head(*arguments) -> tuple[Tensor, Tensor | None]:
    original, given = _saved["multi_head_attention_forward"], dict(zip(_NAMES, arguments, strict=True))
    if not (_active and given["need_weights"]):
        return original(**given)
    if not hasattr(_waiting, "modules"):
        _waiting.modules = []
    _waiting.modules.append([])
    try:
        # Then attn_mask, which both have, is read.
        o, _ = original(**given | {"need_weights": False, "is_causal": False})
    finally:
        found = _waiting.modules.pop()
    if not found:  # this attention cannot run here, and a warning has said so
        return original(**given)
    weights = found[0].mean(1) if given["average_attn_weights"] else found[0]
    warnings.warn(
        f"need_weights=True: the probabilities are computed besides, {tuple(weights.shape)}, in O(N²) memory; pass "
        "need_weights=False where they are not read",
        stacklevel=4,
    )
    return o, weights if given["query"].ndim == 3 else weights[0]


@wraps(nn.TransformerEncoder.forward)  # TorchScript, which looks for the source behind this, compiles torch's
def _patched_encoder(encoder, src, mask=None, src_key_padding_mask=None, is_causal=None) -> Tensor:
    if _active and _saved["fastpath"] and would_pack(encoder, src, mask, src_key_padding_mask):
        found = over_packed_rows(encoder, src, src_key_padding_mask)
        if found is not None:
            return found
    return _saved["forward"](encoder, src, mask, src_key_padding_mask, is_causal)


_REPLACED: list[tuple[object, str, Callable]] = [
    (F, "scaled_dot_product_attention", _patched_attention),
    (F, "multi_head_attention_forward", _patched_multi_head),
    (nn.TransformerEncoder, "forward", _patched_encoder),
]
