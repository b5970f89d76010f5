"""An attention backend of diffusers: ``register()``, then ``model.set_attention_backend("tilewise")``.

Layout and meaning are those of diffusers' native backend: ``(batch, seqlen, heads, head_dim)``, a causal mask aligned at the first query
and key. Differences are those of :mod:`tilewise.compat.sdpa`.

A model's processors ask diffusers' dispatcher for the backend, or call ``scaled_dot_product_attention`` themselves, as those of DiT, SD3,
PixArt, Lumina 2 and the UNets do. ``set_attention_backend("tilewise")`` warns of these by name (:func:`never_ask`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import warnings

import torch
from diffusers import ModelMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

import tilewise as tw
from tilewise.compat.padding import padding
from tilewise.compat.refusals import refuse
from tilewise.compat.sdpa import read

NAME = "tilewise"
OLDEST = (0, 42)


def register() -> None:
    """Register the backend "tilewise" with diffusers. A second call changes nothing.

    Raises:
        ImportError: diffusers is older than 0.42.
    """
    version = importlib.metadata.version("diffusers")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"tilewise.compat.diffusers needs diffusers >= 0.42, here is {version}: pip install --upgrade diffusers"
        )
    if NAME in _AttentionBackendRegistry._backends:
        return
    _AttentionBackendRegistry.register(_member())(attention)
    ModelMixin.set_attention_backend = _telling(ModelMixin.set_attention_backend)


def _member() -> AttentionBackendName:
    """Add a member to diffusers' enumeration of backends, as the class statement would have stored it."""
    member = str.__new__(AttentionBackendName, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    AttentionBackendName._member_names_.append(member._name_)
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[NAME] = member
    type.__setattr__(AttentionBackendName, member._name_, member)
    return member


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``softmax(scale * query keyᵀ + mask) value``, by the names of diffusers' dispatcher.

    Args:
        query: ``(batch, seqlen_q, heads, head_dim)``. key, value: ``(batch, seqlen_k, heads_k, head_dim)``.
        attn_mask: ``(batch, seqlen_k)``, or broadcastable to ``(batch, heads, seqlen_q, seqlen_k)``: bool, True takes part; or
            floating, added to the scores, differentiable. On a CPU, keys in one run are an interval.
        is_causal: query i sees keys ``j <= i``. enable_gqa: heads may be a multiple of heads_k.

    Returns:
        ``(batch, seqlen_q, heads, head_dim)``; with ``return_lse`` also lse, natural log, fp32 ``(batch, heads, seqlen_q)``.

    Raises:
        ValueError: a wrong call. NotImplementedError: what cannot be honoured, by name.
    """
    other_mask = None if isinstance(attn_mask, Tensor) else attn_mask
    refuse("tilewise.compat.diffusers", {"attn_mask": other_mask, "_parallel_config": _parallel_config}, REFUSED)
    batch, keys = query.shape[0], key.shape[1]
    if attn_mask is not None and tuple(attn_mask.shape) == (batch, keys):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    call = read(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _of_keys(attn_mask):
        call.options["mask"] = padding(attn_mask[:, 0, 0].expand(batch, keys), 0, keys)
    attend = tw.attention_with_lse if return_lse else tw.attention
    return attend(call.q, call.k, call.v, **call.options)


REFUSED = {
    "attn_mask": "it is no tensor; tilewise.compat.flex_attention.flex_attention takes a BlockMask",
    "_parallel_config": "diffusers' own context parallelism; tw.attention takes parallel=tw.context_parallel(group)",
}


def _of_keys(attn_mask: Tensor | None) -> bool:
    """Return whether a mask hides whole keys of each sequence, and can be read without a wait of the device or a graph break."""
    if attn_mask is None or attn_mask.dtype != torch.bool or attn_mask.ndim != 4 or attn_mask.device.type != "cpu":
        return False
    return attn_mask.shape[1:3] == (1, 1) and not torch.compiler.is_compiling()


# -- Models that never ask ---------------------------------------------------------------------------------------------


def never_ask(model: torch.nn.Module) -> list[str]:
    """Return the classes in a model, processors and modules, that call PyTorch's attention themselves, whatever backend is set."""
    found = set()
    for module in model.modules():
        processor = getattr(module, "processor", None)
        owner, method = (type(module), "forward") if processor is None else (type(processor), "__call__")
        code = getattr(inspect.unwrap(getattr(owner, method)), "__code__", None)
        names = () if code is None else code.co_names
        if "scaled_dot_product_attention" in names and "dispatch_attention_fn" not in names:
            found.add(owner.__name__)
    return sorted(found)


def _telling(set_attention_backend):
    """Wrap diffusers' own method to warn if a part of the model stays as it is."""

    @functools.wraps(set_attention_backend)
    def tell(self, backend: str) -> None:
        set_attention_backend(self, backend)
        names = never_ask(self) if backend.lower() == NAME else []
        if names:
            warnings.warn(
                f'{type(self).__name__}: set_attention_backend("{NAME}") does not reach {", ".join(names)}: nothing there asks '
                "diffusers' dispatcher; run the model inside `with tilewise.compat.sdpa.patch():`",
                stacklevel=2,
            )

    return tell


__all__ = ["attention", "never_ask", "register"]
