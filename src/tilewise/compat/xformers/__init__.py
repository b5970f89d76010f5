"""xformers' ``memory_efficient_attention`` and its bias classes over tilewise's op.

Layouts are xformers': ``(batch, seqlen, heads, head_dim)``; ``(batch, seqlen, head_dim)`` for one head; and ``(batch, seqlen, groups,
heads, head_dim)``, whose keys and values are read once if they are expanded over heads and want no gradient. The biases are in
``attn_bias``. Biases with blocks become a packed call without padding. The differences:

- A row that sees no key is zero; the original's is undefined.
- A tensor bias needs no alignment, may broadcast, and has its gradient; a bool tensor selects.
- Keys in slots (padded, gappy) are copied once, only those in use. Paged biases are refused.
- ``op`` chooses among the original's kernels. It is accepted and has no effect.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tilewise as tw
from tilewise.compat.refusals import need_tensors
from tilewise.compat.sdpa import broadcasts, is_repeated, pairs_of
from tilewise.compat.stand_in import StandIn, public, put_module
from tilewise.compat.xformers import attn_bias as biases
from tilewise.compat.xformers.attn_bias import BANDS, AttentionBias, LowerTriangularMask

__version__ = "0.0.35+tilewise"  # whose interface this is


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``dropout(softmax(scale * query keyᵀ + attn_bias), p) value``; differentiable.

    Args:
        query: ``(batch, seqlen_q, heads, head_dim)``, or with one dimension less or more (this module's docstring). key: the
            same with seqlen_k. value: and with head_dim_v.
        attn_bias: a tensor that is added to the scores, ``(batch, heads, seqlen_q, seqlen_k)`` (without heads for 3 dimensions,
            with groups for 5), or a class of :mod:`.attn_bias`, xformers' own too.
        p: probability of dropping a pair. scale: default ``1 / sqrt(head_dim)``. output_dtype: default query's.

    Raises:
        ValueError: a wrong call. NotImplementedError: a bias that this does not know, by its name.
    """
    o, _ = _attend(query, key, value, attn_bias, p, scale)
    return o if output_dtype is None else o.to(output_dtype)


def memory_efficient_attention_forward(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
) -> Tensor:
    """Compute :func:`memory_efficient_attention` without a graph for its gradients."""
    with torch.no_grad():
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, output_dtype=output_dtype)


def memory_efficient_attention_forward_requires_grad(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`memory_efficient_attention_forward` and its lse, natural log: ``(batch, heads, seqlen_q)``, for blocks of total_q."""
    with torch.no_grad():
        o, lse = _attend(query, key, value, attn_bias, p, scale)
    return (o if output_dtype is None else o.to(output_dtype)), lse


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: object, p: float, scale: float | None):
    need_tensors("memory_efficient_attention", query=query, key=key, value=value)
    shapes = [tuple(x.shape) for x in (query, key, value)]
    ndim = query.ndim
    if ndim not in (3, 4, 5) or not key.ndim == value.ndim == ndim:
        raise ValueError(f"query, key and value have 3, 4 or 5 dimensions, all alike; got {shapes}")
    groups = shapes[0][2:4] if ndim == 5 else None
    if groups and not {shape[2:4] for shape in shapes} <= {groups, (groups[0], 1)}:
        raise ValueError(f"key and value have the groups of query, and its heads or one; got {shapes}")
    q, k, v = _heads(query, key, value)
    options = {"softmax_scale": scale, "dropout_p": p}
    if hasattr(bias, "q_seqinfo"):
        o, lse = _of_blocks(q, k, v, bias, options)
    else:
        o, lse = _of_one(q, k, v, bias, groups, options)
    if ndim == 3:
        return o.squeeze(2), lse.squeeze(1)
    return (o, lse) if ndim == 4 else (o.unflatten(2, query.shape[2:4]), lse.unflatten(1, query.shape[2:4]))


def _heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views ``(batch, seqlen, heads, head_dim)``; keys and values that the heads of a group share have one."""
    if query.ndim == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    if query.ndim == 4:
        return query, key, value
    if all(x.shape[3] == 1 or is_repeated(x, 3) for x in (key, value)):
        return query.flatten(2, 3), key[:, :, :, 0], value[:, :, :, 0]
    key, value = (x.expand(-1, -1, -1, query.shape[3], -1) for x in (key, value))
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _of_one(
    q: Tensor, k: Tensor, v: Tensor, bias: object, groups: tuple[int, ...] | None, options: dict
) -> tuple[Tensor, Tensor]:
    """Attention under a bias over the whole matrix, a tensor, or none. groups: how many, and the heads of each, of 5 dimensions."""
    # Some of the classes are tensors too.
    is_class = bias is not None and (not isinstance(bias, Tensor) or type(bias).__name__ in BANDS)
    mask, score, matrix = None, None, biases.dense_part(bias) if is_class else bias
    if matrix is not None:
        mask, score = pairs_of(_of_heads(matrix, groups), (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    if is_class:
        kept = _band(bias).mask(q.shape[1] == k.shape[1])
        mask = kept if mask is None else mask & kept
    return tw.attention_with_lse(q, k, v, mask=mask, score=score, **options)


def _of_heads(matrix: Tensor, groups: tuple[int, ...] | None) -> Tensor:
    """Return a tensor bias as ``(batch, heads, seqlen_q, seqlen_k)``; it is copied if it broadcasts over groups or their heads alone."""
    if matrix.ndim != 5:
        return matrix.unsqueeze(1) if matrix.ndim == 3 else matrix
    given = tuple(matrix.shape[1:3])
    if groups is None or not all(broadcasts(n, most) for n, most in zip(given, groups, strict=True)):
        raise ValueError(
            f"attn_bias of 5 dimensions is for a query of 5, and has its groups and heads, {groups}, or 1; got {tuple(matrix.shape)}"
        )
    return (matrix if given == (1, 1) else matrix.expand(-1, *groups, -1, -1)).flatten(1, 2)


def _of_blocks(q: Tensor, k: Tensor, v: Tensor, bias: object, options: dict) -> tuple[Tensor, Tensor]:
    """Compute attention of sequences in a batch of one, by a packed call."""
    band, spans = _band(bias), [bias.q_seqinfo.intervals(), bias.k_seqinfo.intervals()]
    spans = [list(x) for x in spans]
    ends = bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1]
    if q.shape[0] != 1 or (q.shape[1], k.shape[1]) != ends:
        raise ValueError(
            f"{type(bias).__name__} is of {ends[0]} queries and {ends[1]} keys in a batch of 1; got {q.shape[0]} batches of "
            f"{q.shape[1]} queries and {k.shape[1]} keys"
        )
    cu_q, cu_k = bias.q_seqinfo.seqstart.to(q.device), bias.k_seqinfo.seqstart.to(q.device)
    lengths = [[end - start for start, end in x] for x in spans]
    k, v = k[0], v[0]
    if hasattr(bias.k_seqinfo, "seqlen"):  # slots: the keys in use, one sequence after another
        rows = torch.cat([torch.arange(*span, device=k.device) for span in spans[1]])
        k, v = k.index_select(0, rows), v.index_select(0, rows)
        cu_k = torch.tensor([0, *lengths[1]], device=q.device).cumsum(0, dtype=torch.int32)
    mask = band.mask(lengths[0] == lengths[1])
    o, lse = tw.attention_varlen(q[0], k, v, cu_q, cu_k, mask=mask, return_lse=True, **options)
    return o[None], lse[None]


def _band(bias: object) -> biases.Band:
    name = type(bias).__name__
    if name in BANDS:
        return BANDS[name](bias)
    if name.startswith("Paged"):
        raise NotImplementedError(
            f"attn_bias {name}: pages are not read by this function; tw.attention_paged attends to a tw.paged cache"
        )
    raise NotImplementedError(
        f"attn_bias {name} is not known; known are tensors and {', '.join(BANDS)}. Say it by mask= and score= of tw.attention"
    )


_STAND_IN = StandIn("xformers", "xformers", __version__)


def install_as_xformers() -> None:
    """Make ``import xformers.ops`` give this module's functions and classes; nothing else of xformers is there.

    Call it before the libraries that import xformers. ``importlib.metadata`` finds a distribution of that name.

    Raises:
        ValueError: the real xformers is installed, or was already imported.
    """
    if _STAND_IN.stands:
        return
    _STAND_IN.refuse_the_real_one("install_as_xformers", "tilewise.compat.xformers")
    functions, classes = {f.__name__: f for f in _FUNCTIONS}, public(biases)
    put_module("xformers", {"__version__": __version__}, package=True)
    put_module("xformers.ops", functions | classes, package=True)
    put_module("xformers.ops.fmha", functions | classes, package=True)
    put_module("xformers.ops.fmha.attn_bias", classes | {"_SeqLenInfo": biases._SeqLenInfo})
    _STAND_IN.announce()


_FUNCTIONS = (
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

__all__ = [
    "AttentionBias",
    "LowerTriangularMask",
    "install_as_xformers",
    *[f.__name__ for f in _FUNCTIONS],
]
