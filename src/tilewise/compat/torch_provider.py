"""tilewise as PyTorch's flash attention, by the registry of ``torch.nn.attention`` (PyTorch 2.10 and later).

    import tilewise.compat.torch_provider  # registers the name and changes nothing yet
    torch.nn.attention.activate_flash_attention_impl("tilewise")
    torch.nn.attention.restore_flash_attention_impl()

While it is active, ATen's operators of flash attention are these functions: on the CPU those behind ``scaled_dot_product_attention``, on
CUDA those behind it and ``torch.nn.attention.varlen.varlen_attn``, which then also runs on the CPU. The operators that PyTorch chooses for
other calls stay its own (docs/switching.md#pytorchs-provider); :func:`tilewise.compat.sdpa.patch` reaches those too.

Each function has the arguments of its operator. Results have the strides of PyTorch's meta kernels, which compiled code relies on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import register_flash_attention_impl

import tilewise as tw
from tilewise.compat.refusals import refuse
from tilewise.compat.sdpa import pairs_of
from tilewise.dropout import new_seed
from tilewise.untraced import untraced

NAME = "tilewise"


def register() -> None:
    """Make ``"tilewise"`` a name of ``torch.nn.attention.activate_flash_attention_impl``. The import does so too."""
    register_flash_attention_impl(NAME, register_fn=_Active)


class _Active:
    """The kernels in place of PyTorch's, until :meth:`remove`."""

    def __init__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        # PyTorch warns of kernels that take another's place, which is what was asked for.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for key, kernels in (("CPU", _OF_CPU | _OF_CUDA), ("CUDA", _OF_CUDA)):
                for name, kernel in kernels.items():
                    self.library.impl(name, kernel, key, allow_override=True)

    def remove(self) -> None:
        self.library._destroy()


def _kernel(function: Callable) -> Callable:
    """Wrap a function for the dispatcher: without a graph, without autocast, and unseen by Dynamo."""

    @wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad(), torch._C._DisableAutocast():
            return function(*arguments, **keywords)

    return untraced(run)


def _swapped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``(batch, heads, seqlen, head_dim)`` as ``(batch, seqlen, heads, head_dim)``, or the reverse."""
    return tuple([x.transpose(1, 2) for x in tensors])


def _heads_last(*tensors: Tensor, masked: bool = False) -> tuple[Sequence[Tensor], Callable[[Tensor], Tensor]]:
    """Return query, key, value and others, ``(batch, heads, seqlen, head_dim)``, as ``(batch, seqlen, heads, head_dim)``, and what gives
    results laid out so their order back.

    Where heads lie before rows and share no keys, each is a sequence of one head: so results have query's strides without a copy. Not
    where they are ``masked`` by a tensor, which has batch elements and heads of its own.
    """
    heads = tensors[0].shape[1]
    if masked or not all(x.shape[1] == heads and x.is_contiguous() for x in tensors[:3]):
        return _swapped(*tensors), lambda x: x.transpose(1, 2)
    return [x.flatten(0, 1).unsqueeze(2) for x in tensors], lambda x: x.squeeze(2).unflatten(0, (-1, heads))


def _in_strides_of(like: Tensor, x: Tensor) -> Tensor:
    """Return ``x``, or a copy, in the strides of ``torch.empty_like(like)``, which has its shape."""
    return x if x.stride() == torch.empty_like(like, device="meta").stride() else torch.empty_like(like).copy_(x)


def _like(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple([_in_strides_of(x, grad) for x, grad in zip(inputs, grads, strict=True)])


# -- The CPU -------------------------------------------------------------------------------------------------------


def _cpu_options(query: Tensor, key: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None) -> dict:
    """Return the keywords of :func:`tilewise.attention`; here ``is_causal`` counts from the first query and key."""
    mask, score = (None, None) if attn_mask is None else pairs_of(attn_mask, (*query.shape[:3], key.shape[2]))
    if is_causal:
        first = tw.causal(align="first")
        mask = first if mask is None else mask & first
    return {"mask": mask, "score": score, "softmax_scale": scale}


def _refuse_on_cpu(query: Tensor, value: Tensor, dropout_p: float) -> None:
    other = value.shape[-1] if value.shape[-1] != query.shape[-1] else None
    refuse(
        "the CPU's flash attention",
        {"dropout_p": dropout_p, "value": other},
        {
            "dropout_p": "its backward is told no seed; tilewise.compat.sdpa.patch() has dropout",
            "value": f"its head_dim is {other}, query's {query.shape[-1]}; call tw.attention",
        },
    )


@_kernel
def _scaled_dot_product_flash_attention_for_cpu(
    query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
) -> tuple[Tensor, Tensor]:
    """Return ``(o, lse)``: o in query's strides, lse ``(batch, heads, seqlen_q)`` with heads last in memory."""
    _refuse_on_cpu(query, value, dropout_p)
    options = _cpu_options(query, key, is_causal, attn_mask, scale)
    qkv, back = _heads_last(query, key, value, masked=attn_mask is not None)
    o, lse = tw.attention_with_lse(*qkv, **options)
    return _in_strides_of(query, back(o)), *_swapped(lse.view(query.shape[:3]).transpose(1, 2).contiguous())


@_kernel
def _scaled_dot_product_flash_attention_for_cpu_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
) -> tuple[Tensor, ...]:
    """Return ``(grad_query, grad_key, grad_value)``, each with heads behind rows in memory."""
    _refuse_on_cpu(query, value, dropout_p)
    options = _cpu_options(query, key, is_causal, attn_mask, scale)
    do, q, k, v, o = _swapped(grad_out, query, key, value, out)
    return _swapped(*tw.attention_backward(do, q, k, v, o, logsumexp, **options))


# -- CUDA, and varlen_attn on the CPU ------------------------------------------------------------------------------

_REFUSED = {
    "return_debug_mask": "no backend forms the probabilities; tw.dropout_mask shows what dropout keeps",
    "alibi_slopes": "the operator's backward is not told of them; call tw.attention(..., score=tw.alibi(slopes))",
    "dropout_p": "over a cache (seqused_k, block_table) there is no dropout",
}


class _Keys(NamedTuple):
    """The place of the keys, if they do not lie one after another."""

    cum_seq_k: Tensor | None
    max_k: int
    seqused_k: Tensor | None
    block_table: Tensor | None

    @property
    def in_cache(self) -> bool:
        return self.seqused_k is not None or self.block_table is not None

    def cache(self, key: Tensor, value: Tensor) -> tw.PagedCache:
        """Return the keys in use as a cache, on whose lengths no host waits."""
        if self.seqused_k is None and self.cum_seq_k is None:
            raise ValueError("a block_table needs seqused_k or cum_seq_k, how many keys of each sequence are in use")
        lengths = self.cum_seq_k.diff() if self.seqused_k is None else self.seqused_k
        if self.block_table is not None:
            return tw.paged(key, value, self.block_table, lengths.int())
        if self.cum_seq_k is None:
            return tw.dense_cache(key, value, lengths.int())
        slots = self.cum_seq_k[:-1, None] + torch.arange(self.max_k, device=key.device)  # pages of one key
        table = slots.clamp(max=max(key.shape[0] - 1, 0)).int()
        return tw.paged(key.unsqueeze(1), value.unsqueeze(1), table, lengths.int())


def _options(dropout_p: float, is_causal: bool, scale: float | None, window: Sequence[int | None]) -> dict:
    """Return the keywords of :func:`tilewise.attention`; here masks count from the last query and key, and -1 is unbounded."""
    left, right = [None if n is None or n < 0 else n for n in window]
    right = 0 if is_causal else right
    bounded = left is not None or right not in (None, 0)
    mask = tw.window(left, right) if bounded else tw.causal() if right == 0 else None
    return {"mask": mask, "softmax_scale": scale, "dropout_p": dropout_p}


def _forward(qkv: tuple[Tensor, ...], cum_seq_q: Tensor | None, keys: _Keys, options: dict) -> tuple[Tensor, ...]:
    """``(o, lse, rng_state)``. rng_state holds the seed of :func:`tilewise.dropout_mask`."""
    q, k, v = qkv
    seed = torch.zeros(1, dtype=torch.int64, device=q.device)
    if options["dropout_p"]:
        seed = options["dropout_seed"] = new_seed(q.device)
    if keys.in_cache:
        options = {name: x for name, x in options.items() if name != "dropout_p"}
        o, lse = tw.attention_paged_with_lse(q, keys.cache(k, v), cum_seq_q, **options)
    elif cum_seq_q is None:
        o, lse = tw.attention_with_lse(q, k, v, **options)
    else:
        o, lse = tw.attention_varlen_with_lse(q, k, v, cum_seq_q, keys.cum_seq_k, **options)
    return o, lse, torch.cat([seed, torch.zeros_like(seed)]).view(torch.uint64)


def _backward(tensors: tuple[Tensor, ...], cum: tuple, options: dict, rng_state: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v; ``tensors``: do, q, k, v, o, lse."""
    if options["dropout_p"]:
        options["dropout_seed"] = rng_state.view(torch.int64)[:1]
    return tw.attention_backward(*tensors, cu_seqlens_q=cum[0], cu_seqlens_k=cum[1], **options)


@_kernel
def _flash_attention_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return ``(o, lse, rng_state, unused, debug_mask)`` of dense or packed tensors, heads behind rows."""
    keys = _Keys(cum_seq_k, max_k, seqused_k, block_table)
    given = {"return_debug_mask": return_debug_mask, "alibi_slopes": alibi_slopes}
    refuse("_flash_attention_forward", given | {"dropout_p": dropout_p if keys.in_cache else None}, _REFUSED)
    options = _options(dropout_p, is_causal, scale, (window_size_left, window_size_right))
    # What its caller wants of it: results without batch-mates.
    options["deterministic"] = True if num_splits == 1 else None
    o, lse, rng_state = _forward((query, key, value), cum_seq_q, keys, options)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return _in_strides_of(query, o), lse, rng_state, unused, query.new_empty(0)


@_kernel
def _flash_attention_forward_no_dropout_inplace(out, *arguments, **keywords) -> Tensor:
    """lse; o is written into ``out``. The arguments behind it are those of :func:`_flash_attention_forward`."""
    o, lse, *_ = _flash_attention_forward(*arguments, **keywords)
    out.copy_(o)
    return lse


@_kernel
def _flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``(grad_query, grad_key, grad_value)`` in the strides of query, key and value."""
    options = _options(dropout_p, is_causal, scale, (window_size_left, window_size_right))
    tensors = grad_out, query, key, value, out, logsumexp
    return _like((query, key, value), _backward(tensors, (cum_seq_q, cum_seq_k), options, rng_state))


@_kernel
def _scaled_dot_product_flash_attention(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
) -> tuple:
    """Return ``(o, lse, cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, debug_mask)`` of ``(batch, heads, seqlen, head_dim)``."""
    qkv, back = _heads_last(query, key, value)
    lengths = query.shape[2], key.shape[2]
    o, *found = _flash_attention_forward(
        *qkv, None, None, *lengths, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    lse, *rest = found
    return _in_strides_of(query, back(o)), lse.view(query.shape[:3]), None, None, *lengths, *rest


@_kernel
def _scaled_dot_product_flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
    philox_offset, *, scale=None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``(grad_query, grad_key, grad_value)`` in the strides of query, key and value."""
    options = _options(dropout_p, is_causal, scale, (None, None))
    (q, k, v, do, o), back = _heads_last(query, key, value, grad_out, out)
    lse = logsumexp.reshape(q.shape[0], q.shape[2], q.shape[1])
    grads = _backward((do, q, k, v, o, lse), (None, None), options, philox_seed)
    return _like((query, key, value), [back(x) for x in grads])


_OF_CPU, _OF_CUDA = (
    {function.__name__: function for function in functions}
    for functions in (
        (_scaled_dot_product_flash_attention_for_cpu, _scaled_dot_product_flash_attention_for_cpu_backward),
        (
            _flash_attention_forward,
            _flash_attention_forward_no_dropout_inplace,
            _flash_attention_backward,
            _scaled_dot_product_flash_attention,
            _scaled_dot_product_flash_attention_backward,
        ),
    )
)
register()
