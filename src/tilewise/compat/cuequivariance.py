"""cuEquivariance 0.13's triangle attention and attention with a pair bias over tilewise's op, also under that package's name.

Layouts are the original's: q ``(B, N, H, Q, D)`` is N rows of Q queries in H heads, and all rows share a bias ``(B, 1, H, Q, K)``. The
bias is never expanded, and its gradient is summed over the rows in order. The differences:

- A row whose keys are all masked is zero and has zero gradients, and its lse and largest score are -inf. The original gives the mean of
  the values.
- Any device, head_dim and floating dtype; v may have another head_dim. lse has a gradient.
- :func:`attention_pair_bias` and :func:`triangle_multiplicative_update` are PyTorch's operators around the attention: nothing is fused.
"""

from __future__ import annotations

import importlib.util
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from tilewise.compat.refusals import refuse
from tilewise.compat.sdpa import pairs_of
from tilewise.compat.stand_in import StandIn, put_module
from tilewise.spec import not_tensors
from tilewise.words import raise_wrong

__version__ = "0.13.0+tilewise"  # whose interface this is


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Compute ``softmax(scale * q kᵀ + bias) v`` in each row, over the keys of its mask; differentiable (Jumper et al. 2021, 13 and 14).

    Args:
        q: ``(B, N, H, Q, D)``. k: ``(B, N, H, K, D)``. v: ``(B, N, H, K, Dv)``. Without B, it is 1.
        bias: ``(B, 1, H, Q, K)``, floating, of any dtype; or without B.
        mask: ``(B, N, 1, 1, K)``, or without B: zero hides a key of a row.
        scale: default ``1 / sqrt(D)``.
        kv_lengths: integers ``(B, N, 1, 1, 1)``, or without B: a row sees its first so many keys.

    Returns:
        o ``(B, N, H, Q, Dv)``; with ``return_aux`` also lse, natural log, and the largest score, fp32 ``(B, N, H, Q)``.

    Raises:
        ValueError: shapes that do not fit, all of them; or a mask and kv_lengths.
        NotImplementedError: a mask that wants a gradient.
    """
    given = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "kv_lengths": kv_lengths}
    raise_wrong("triangle_attention", not_tensors(tuple(given.items()), ("q", "k", "v", "bias")))
    _refuse_gradient("triangle_attention", mask)
    given = {name: x[(None,) * max(0, 5 - x.ndim)] for name, x in given.items() if x is not None}
    _check(given)
    batch, rows = given["q"].shape[:2]
    if batch < 2 or rows == 1:
        calls = [{name: x.flatten(0, 1) for name, x in given.items()}]
    else:  # one call has one bias: read at b // N it would be summed in any order
        parts = zip(*[x.unbind() for x in given.values()], strict=True)
        calls = [dict(zip(given, part, strict=True)) for part in parts]
    found = [_rows(call, scale, return_aux) for call in calls]
    results = [x[0] if len(x) == 1 else torch.cat(x) for x in zip(*found, strict=True)]
    o, *aux = (x.unflatten(0, (batch, rows)) for x in results)
    return (o, *aux) if return_aux else o


def _refuse_gradient(function: str, mask: Tensor | None) -> None:
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{function}\n  mask wants a gradient; it selects keys: pass mask.detach()")


def _check(given: dict[str, Tensor]) -> None:
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    flat = [f"{name} {shape}" for name, shape in shapes.items() if len(shape) != 5]
    if flat:
        raise ValueError(
            f"triangle_attention takes tensors of 5 dimensions, or 4 for a batch of 1; got {', '.join(flat)}"
        )
    batch, rows, heads, queries, head_dim = shapes["q"]
    keys = shapes["k"][3]
    allowed = {
        "k": (batch, rows, heads, keys, head_dim),
        "v": (batch, rows, heads, keys, shapes["v"][4]),
        "bias": (batch, 1, heads, queries, keys),
        "mask": (batch, rows, 1, 1, keys),
        "kv_lengths": (batch, rows, 1, 1, 1),
    }
    wrong = [(name, shapes[name], shape) for name, shape in allowed.items() if shapes.get(name, shape) != shape]
    reasons = [f"{name} is {got}; beside q {shapes['q']} it must be {shape}" for name, got, shape in wrong]
    if not given["bias"].is_floating_point():
        reasons.append(f"bias is {given['bias'].dtype}; it must be floating: hide keys by mask")
    if "mask" in given and "kv_lengths" in given:
        reasons.append("mask and kv_lengths exclude each other; put the lengths into the mask")
    raise_wrong("triangle_attention", reasons)


def _rows(call: dict[str, Tensor], scale: float | None, return_aux: bool) -> tuple[Tensor, ...]:
    """o ``(rows, H, Q, Dv)``, and lse and the largest score ``(rows, H, Q)``, of tensors whose first dimension is rows, for bias 1 too."""
    q, k, v = (call[name].transpose(1, 2) for name in "qkv")
    _, score = pairs_of(call["bias"], (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    mask = tw.dense(call["mask"].bool()) if "mask" in call else None
    mask = tw.key_lengths(call["kv_lengths"].flatten()) if "kv_lengths" in call else mask
    options = {"mask": mask, "score": score, "softmax_scale": scale}
    if not return_aux:
        return (tw.attention(q, k, v, **options).transpose(1, 2),)
    stats = tw.attention_with_stats(q, k, v, **options)
    return stats.o.transpose(1, 2), stats.lse, stats.max_logit


def mask_to_kv_lengths(mask: Tensor) -> Tensor:
    """Return the ``kv_lengths``, int32 ``(B, N, 1, 1, 1)``, of a mask ``(B, N, 1, 1, K)`` of each row's first keys; a host read.

    Raises:
        ValueError: another shape, or a row with a hole.
    """
    mask = mask[(None,) * max(0, 5 - mask.ndim)].bool()
    if mask.ndim != 5 or mask.shape[2:4] != (1, 1):
        raise ValueError(f"mask_to_kv_lengths takes (B, N, 1, 1, K), or without B; got {tuple(mask.shape)}")
    lengths = mask.sum(-1, keepdim=True, dtype=torch.int32)
    if not torch.equal(mask, torch.arange(mask.shape[-1], device=mask.device) < lengths):
        raise ValueError("mask_to_kv_lengths: a row has a masked key before a kept one; pass it as mask=")
    return lengths


# -- Layers around an attention ----------------------------------------------------------------------------------------


# fmt: off
def attention_pair_bias(
    single_repr: Tensor, pair_repr: Tensor, mask: Tensor | None, num_heads: int, w_ln_a: Tensor, b_ln_a: Tensor | None,
    w_proj_q: Tensor, b_proj_q: Tensor | None, w_proj_k: Tensor, w_proj_v: Tensor, w_proj_g: Tensor, w_proj_o: Tensor,
    w_proj_z: Tensor | None = None, b_proj_o: Tensor | None = None, b_proj_z: Tensor | None = None, w_ln_z: Tensor | None = None,
    b_ln_z: Tensor | None = None, inf: float = 1e6, eps: float = 1e-5, attn_scale: float | None = None, return_z_proj: bool = False,
    is_cached_z_proj: bool = False, *, b_proj_k: Tensor | None = None, b_proj_v: Tensor | None = None, w_ln_q: Tensor | None = None,
    b_ln_q: Tensor | None = None, w_ln_k: Tensor | None = None, b_ln_k: Tensor | None = None, b_proj_g: Tensor | None = None,
    norm_kind: str = "layer_norm",
) -> tuple[Tensor, Tensor | None]:
    # fmt: on
    """Compute attention of tokens with a bias of their pairs (Abramson et al. 2024, algorithm 24), its projections and gate included.

    Args:
        single_repr: ``(B * M, N, C)``, M copies of each batch element in a row. pair_repr: ``(B, N, N, Cz)``, or with
            ``is_cached_z_proj`` the bias ``(B, H, N, N)``. mask: ``(B, N)`` or ``(B * M, N)``; zero hides a key.
        inf: at least 1e4, without effect, since masked keys are left out. norm_kind: "layer_norm" or "rms_norm", which has no bias.
        The weights are those of ``F.linear`` and of the norms.

    Returns:
        ``(B * M, N, C)``; and the bias ``(B, H, N, N)`` with ``return_z_proj``, else None.

    Raises:
        ValueError: a wrong call. NotImplementedError: a mask that wants a gradient.
    """
    _check_layer(locals())
    norm = _Norm(norm_kind, eps)
    a, z = norm(single_repr, w_ln_a, b_ln_a), pair_repr
    q, k, v = (_linear(a, w, b) for w, b in ((w_proj_q, b_proj_q), (w_proj_k, b_proj_k), (w_proj_v, b_proj_v)))
    q = q if w_ln_q is None and b_ln_q is None else norm(q, w_ln_q, b_ln_q)
    k = k if w_ln_k is None and b_ln_k is None else norm(k, w_ln_k, b_ln_k)
    if not is_cached_z_proj:
        z = _linear(norm(z, w_ln_z, b_ln_z), w_proj_z, b_proj_z).movedim(-1, 1)
    copies = (z.shape[0], a.shape[0] // z.shape[0])
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2).unflatten(0, copies) for x in (q, k, v))
    if mask is not None:
        mask = mask.unflatten(0, (z.shape[0], -1)).expand(*copies, -1)[:, :, None, None]
    o = triangle_attention(q, k, v, z.unsqueeze(1), mask, attn_scale)
    o = o.flatten(0, 1).transpose(1, 2).flatten(-2) * _linear(a, w_proj_g, b_proj_g).sigmoid()
    return _linear(o, w_proj_o, b_proj_o), z if return_z_proj else None


def _check_layer(given: dict) -> None:
    single, pair, mask = given["single_repr"], given["pair_repr"], given["mask"]
    reasons = []
    if single.ndim != 3 or pair.ndim != 4 or not pair.shape[0] or single.shape[0] % pair.shape[0]:
        reasons.append(
            f"single_repr (B * M, N, C) and pair_repr of 4 dimensions, B first, got {tuple(single.shape)} and {tuple(pair.shape)}"
        )
    if mask is not None and tuple(mask.shape) not in [(x.shape[0], single.shape[1]) for x in (single, pair)]:
        reasons.append(f"mask is (B, N) or (B * M, N), got {tuple(mask.shape)}")
    if given["w_proj_z"] is None and not given["is_cached_z_proj"]:
        reasons.append("w_proj_z is missing; without it pair_repr must be projected, and is_cached_z_proj=True must say so")
    if given["norm_kind"] not in ("layer_norm", "rms_norm"):
        reasons.append(f'norm_kind takes "layer_norm" or "rms_norm", got {given["norm_kind"]!r}')
    if given["norm_kind"] == "rms_norm":
        reasons += [f"{name}: rms_norm has no bias" for name in _NORM_BIASES if given[name] is not None]
    if given["inf"] < 1e4:
        reasons.append(f"inf {given['inf']} leaves weight on masked keys, which this leaves out; give at least 1e4")
    raise_wrong("attention_pair_bias", reasons)
    _refuse_gradient("attention_pair_bias", mask)


_NORM_BIASES = ("b_ln_a", "b_ln_q", "b_ln_k", "b_ln_z")


class _Norm:
    """A norm over the last dimension, with weight and bias where there are any."""

    def __init__(self, kind: str, eps: float):
        self.kind, self.eps = kind, eps

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        weight, bias = (None if w is None else w.to(x.dtype) for w in (weight, bias))
        if self.kind == "rms_norm":
            return F.rms_norm(x, x.shape[-1:], weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class TriMulPrecision(IntEnum):
    """How a GPU multiplies fp32 matrices, by the original's names."""

    NONE = -1
    DEFAULT = 0
    TF32 = 1
    TF32x3 = 2
    IEEE = 3


# fmt: off
def triangle_multiplicative_update(
    x: Tensor, direction: str = "outgoing", mask: Tensor | None = None, norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None, p_in_weight: Tensor | None = None, p_in_bias: Tensor | None = None,
    g_in_weight: Tensor | None = None, g_in_bias: Tensor | None = None, norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None, p_out_weight: Tensor | None = None, p_out_bias: Tensor | None = None,
    g_out_weight: Tensor | None = None, g_out_bias: Tensor | None = None, eps: float = 1e-5, precision: TriMulPrecision | None = None,
) -> Tensor:
    # fmt: on
    """Compute algorithms 11 and 12 of Jumper et al. 2021 in PyTorch's operators. Models turn these on by the same option as attention.

    Args:
        x: ``(..., N, N, C)``. mask: ``(..., N, N)``, multiplies. direction: "outgoing" or "incoming".
        precision: None or DEFAULT; ``torch.set_float32_matmul_precision`` chooses.

    Returns:
        The update, ``(..., N, N, C)``, in x's dtype.

    Raises:
        ValueError: a wrong call. NotImplementedError: another precision.
    """
    weights = {
        "p_in_weight": p_in_weight,
        "g_in_weight": g_in_weight,
        "p_out_weight": p_out_weight,
        "g_out_weight": g_out_weight,
    }
    reasons = [f"{name} is missing" for name, w in weights.items() if w is None]
    if direction not in ("outgoing", "incoming"):
        reasons.append(f'direction takes "outgoing" or "incoming", got {direction!r}')
    raise_wrong("triangle_multiplicative_update", reasons)
    instead = {"precision": "leave it out and call torch.set_float32_matmul_precision"}
    refuse(
        "triangle_multiplicative_update",
        {"precision": None if precision == TriMulPrecision.NONE else precision},
        instead,
    )
    norm = _Norm("layer_norm", eps)
    x = norm(x, norm_in_weight, norm_in_bias)
    edges = _linear(x, p_in_weight, p_in_bias) * _linear(x, g_in_weight, g_in_bias).sigmoid()
    edges = edges if mask is None else edges * mask.unsqueeze(-1).to(x.dtype)
    a, b = edges.chunk(2, -1)
    product = torch.einsum("...ikd,...jkd->...ijd" if direction == "outgoing" else "...kid,...kjd->...ijd", a, b)
    update = _linear(norm(product, norm_out_weight, norm_out_bias), p_out_weight, p_out_bias)
    return update * _linear(x, g_out_weight, g_out_bias).sigmoid()


# -- Under the package's name ------------------------------------------------------------------------------------------

_STAND_IN = StandIn("cuequivariance_torch", "cuequivariance-torch", __version__)
_ATTENTION = {f.__name__: f for f in (triangle_attention, attention_pair_bias)}
_PUBLIC = _ATTENTION | {f.__name__: f for f in (mask_to_kv_lengths, triangle_multiplicative_update, TriMulPrecision)}


def install_as_cuequivariance() -> None:
    """Make ``from cuequivariance_torch import triangle_attention`` and ``attention_pair_bias`` give this module's.

    Where the real package is installed, these two are replaced in it and the rest stays its own. Elsewhere, ``cuequivariance_torch`` and
    its ``primitives.triangle`` have this module's functions and nothing else of the package is there. Call it before the libraries that
    import the names.
    """
    if _STAND_IN.stands:
        return
    if importlib.util.find_spec("cuequivariance_torch") is not None:
        import cuequivariance_torch
        from cuequivariance_torch.primitives import triangle

        for module in (cuequivariance_torch, triangle):
            vars(module).update(_ATTENTION)
        return
    put_module("cuequivariance_torch", _PUBLIC | {"__version__": __version__}, package=True)
    put_module("cuequivariance_torch.primitives", {}, package=True)
    put_module("cuequivariance_torch.primitives.triangle", _PUBLIC)
    if importlib.util.find_spec("cuequivariance_ops_torch") is None:
        operators = put_module("cuequivariance_ops_torch", {"__version__": __version__}, package=True)
        # OpenFold 3 keeps shorter sequences to itself.
        put_module("cuequivariance_ops_torch.triangle_attention", _PUBLIC | {"CUEQ_TRIATTN_FALLBACK_THRESHOLD": 0})
        vars(operators).update(_PUBLIC)  # the function of a name that is its module's too
    _STAND_IN.announce()


__all__ = [*_PUBLIC, "install_as_cuequivariance"]
