"""Attention of JAX arrays on CPUs and NVIDIA GPUs, by the same kernels, with the same keywords, masks and scores as :mod:`tilewise`.

    import tilewise.jax as tw
    o = tw.attention(q, k, v, causal=True, score=tw.alibi(slopes), sink=sink)

Differentiable in reverse mode; inside ``jax.jit``, ``jax.vmap`` and ``jax.shard_map`` too. The functions of masks and scores take arrays
of JAX and NumPy. A function of yours reads an array through :func:`leaf`: ``table = tw.leaf(table)``, then ``table[h, i - j]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial, wraps
from typing import Any, Never, TypeVar, Unpack

import torch
from torch import Tensor

import tilewise as tw
from tilewise import dispatch, words
from tilewise.api import Keywords
from tilewise.jax import gpu
from tilewise.jax.handler import DTYPES, handler, problem
from tilewise.masks.derived import Derived
from tilewise.problem import Problem
from tilewise.spec import Options, assemble, parse_spec

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.lax import pcast
except ImportError as missing:
    raise ImportError("tilewise.jax needs JAX 0.9 or newer: pip install --upgrade jax") from missing

_TARGET = "tilewise"
for _platform, _function in (("cpu", handler), ("CUDA", gpu.target())):  # XLA chooses, by where a call runs
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_function), platform=_platform)

Array = Any  # a JAX or NumPy array
Called = TypeVar("Called", bound=Callable[..., Any])


# -- Arrays as the tensors of masks and scores -------------------------------------------------------------------------


def leaf(x: Array) -> Tensor:
    """Return an array as a tensor that masks and scores can read: it has its shape and dtype, and no memory.

    Args:
        x: an array of JAX, traced or not, or of NumPy. A floating array that a score reads gets its gradient. A torch tensor is a
            constant, with the values that it has now.

    Raises:
        ValueError: it is no such array. NotImplementedError: its sizes are symbols of ``jax.export``.
    """
    if isinstance(x, Tensor) and hasattr(x, "array"):
        return x
    array = _array(x)
    dtype = getattr(torch, array.dtype.name, None)
    if dtype not in DTYPES.values():
        kinds = ((jnp.floating, "float32"), (jnp.integer, "int32"))
        instead = [f"; convert it: x.astype(jnp.{name})" for kind, name in kinds if jnp.issubdtype(array.dtype, kind)]
        raise ValueError(f"attention reads arrays of numbers or truth values, got {array.dtype}{''.join(instead)}")
    if not all(isinstance(size, int) for size in array.shape):
        raise NotImplementedError(
            f"attention needs sizes that are numbers, got {array.shape}: export a program for each shape, without jax.export.symbolic_shape"
        )
    # A mask keeps what it makes of a tensor only where PyTorch counts the tensor's writes.
    with torch.inference_mode(False):
        found = torch.empty(array.shape, dtype=dtype, device="meta")
    found.array = array
    return found


def _array(x: Any) -> Array:
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, Tensor):
        x = _values(x)
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as wrong:
        raise ValueError(f"attention takes arrays of JAX or NumPy, got {type(x).__name__}") from wrong


def _values(t: Tensor) -> np.ndarray:
    """Return a copy of a torch tensor."""
    if t.is_meta:
        raise ValueError(
            "torch cannot compute with tilewise.jax.leaf(x), which has no values: compute with x, and take the leaf of that"
        )
    if t.requires_grad:
        raise ValueError("a torch tensor is a constant here and gets no gradient: pass t.detach(), or an array of JAX")
    t = t.cpu().clone()
    return t.view(torch.int16).numpy().view(jnp.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()


def _read(x: Any) -> Any:
    return leaf(x) if isinstance(x, (jax.Array, np.ndarray, Tensor)) else x


# Errors tell users of PyTorch what to write; this is the same for JAX.
_SPELLINGS = (
    (r"torch\.tensor\((\w+), dtype=torch\.(\w+), device=\w+\.device\)", r"jnp.asarray(\1, jnp.\2)"),
    (r"torch\.tensor\(", "jnp.asarray("),
    (r"\.to\(torch\.(\w+)\)", r".astype(jnp.\1)"),
    (r"\.long\(\)", ".astype(int)"),
    (r"\.bool\(\)", ".astype(bool)"),
    (r"\.float\(\)", ".astype(jnp.float32)"),
    (r"\.unsqueeze\(0\)", "[None]"),
)


@contextmanager
def _errors_for_jax() -> Iterator[None]:
    try:
        yield
    except (NotImplementedError, TypeError, ValueError) as wrong:
        said = text = str(wrong)
        for pattern, ours in _SPELLINGS:
            text = re.sub(pattern, ours, text)
        if text == said or type(wrong) not in (NotImplementedError, TypeError, ValueError):
            raise
        raise type(wrong)(text) from wrong


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"{name} takes numbers that are known while JAX traces: name them in static_argnames of jax.jit, or write a function of a mask or "
        "score, which reads an array by tilewise.jax.leaf(array)"
    )


def _of_numbers(make: Called) -> Called:
    """Return a function of the catalogue that takes numbers alone."""

    @wraps(make)
    def made(*arguments: Any, **more: Any) -> Any:
        if any(isinstance(x, (Tensor, jax.core.Tracer)) for x in (*arguments, *more.values())):
            raise _unknown(make.__name__)
        return make(*arguments, **more)

    return made


def _of_arrays(make: Called) -> Called:
    """Return a function of the catalogue that takes arrays."""

    @wraps(make)
    def made(*arguments: Any, **more: Any) -> Any:
        with _errors_for_jax():
            try:
                return make(*map(_read, arguments), **{name: _read(x) for name, x in more.items()})
            except RuntimeError as wrong:  # PyTorch was asked for the number of a leaf
                if isinstance(wrong, NotImplementedError):
                    raise
                raise _unknown(make.__name__) from wrong

    return made


def _of_function(make: Called) -> Called:
    """Return ``keep`` or ``score`` with errors that say how a traced function reads an array."""

    @wraps(make)
    def made(fn: Any) -> Any:
        try:
            return make(fn)
        except (IndexError, NotImplementedError, TypeError) as wrong:
            raise type(wrong)(
                f"{wrong}\n  In a function of a mask or score, an array is read by tilewise.jax.leaf(array)[h, i, j], and s.tanh() or "
                "torch.where(...) stand where jax.numpy would"
            ) from wrong

    return made


alibi, bias, block_sparse, dense, documents = map(
    _of_arrays, (tw.alibi, tw.bias, tw.block_sparse, tw.dense, tw.documents)
)
key_lengths, key_range, lookup = map(_of_arrays, (tw.key_lengths, tw.key_range, tw.lookup))
prefix, selected = map(_of_arrays, (tw.prefix, tw.selected))
keep, score = map(_of_function, (tw.keep, tw.score))
softcap, window = map(_of_numbers, (tw.softcap, tw.window))
butterfly, local_global, strided = map(_of_numbers, (tw.butterfly, tw.local_global, tw.strided))
causal, offset, Mask, Score = tw.causal, tw.offset, tw.Mask, tw.Score


# -- The public functions ----------------------------------------------------------------------------------------------


def attention(q: Array, k: Array, v: Array, *more: Never, **options: Unpack[Keywords]) -> Array:
    """Compute :func:`tilewise.attention` of JAX arrays.

    Args:
        q, k, v: ``(batch, seqlen, heads, head_dim)``, as there.
        options: the keywords of :func:`tilewise.attention`, but ``parallel``, with arrays where that has tensors. ``dropout_p`` needs a
            ``dropout_seed``: an integer, or an array of one (``jax.random.bits(key)``).

    Returns:
        ``(batch, seqlen_q, heads_q, head_dim_v)``.

    Raises:
        ValueError: the call is wrong; the message has every reason. NotImplementedError: no backend supports the call. Both come while
            JAX traces. Values that are wrong (``cu_seqlens``, entries of ``selected``) are an error of JAX when the call runs.
    """
    return _run("attention", (q, k, v), more, options)[0]


def attention_with_lse(q: Array, k: Array, v: Array, *more: Never, **options: Unpack[Keywords]) -> tuple[Array, Array]:
    """Compute :func:`attention` and its log-sum-exp ``(batch, heads_q, seqlen_q)``: natural, fp32 (fp64 for fp64), differentiable."""
    return _run("attention_with_lse", (q, k, v), more, options)


def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array | None = None, *more: Never,
    **options: Unpack[Keywords],
) -> Array:  # fmt: skip
    """Compute :func:`tilewise.attention_varlen` of JAX arrays. ``cu_seqlens_*`` are integers ``(batch + 1,)``."""
    return attention_varlen_with_lse(q, k, v, cu_seqlens_q, cu_seqlens_k, *more, **options)[0]


def attention_varlen_with_lse(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array | None = None, *more: Never,
    **options: Unpack[Keywords],
) -> tuple[Array, Array]:  # fmt: skip
    """Compute :func:`attention_varlen` and its log-sum-exp ``(heads_q, total_q)``."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return _run("attention_varlen", (q, k, v), more, options, (cu_seqlens_q, cu_seqlens_k))


def _run(
    name: str,
    qkv: Sequence[Array],
    more: Sequence[Any],
    options: Mapping[str, Any],
    cu_seqlens: Sequence[Array] = (),
) -> tuple[Array, Array]:
    unknown = [word for word in options if word not in Keywords.__annotations__]
    if unknown or more:
        raise words.refused(name, unknown, more)
    o = Options(**options)
    named = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), (*qkv, *cu_seqlens), strict=False))
    reasons = [
        f"{word} must be known while JAX traces, and is traced; {_STATIC.get(word, 'name it in static_argnames of jax.jit')}"
        for word, x in options.items()
        if word not in ("mask", "score", "sink", "dropout_seed") and isinstance(x, jax.core.Tracer)
    ]
    for word, x in named.items():
        try:
            named[word] = leaf(x)
        except ValueError as wrong:
            reasons.append(f"{word}: {wrong}")
    seed = _seed(o.dropout_seed) if o.dropout_seed is not None else None
    if seed is None and (o.dropout_seed is not None or (not reasons and o.dropout_p)):
        reasons.append(
            "dropout_seed must be an integer of at most 64 bits or an array of one, as jax.random.bits(key) is, got "
            f"{o.dropout_seed}"
        )
    if reasons:
        raise ValueError(f"{name} was called wrongly" + "".join([f"\n  {reason}" for reason in reasons]))
    o.mask, o.score = (of(x) if callable(x) else _read(x) for of, x in ((keep, o.mask), (score, o.score)))
    q, k, v, *cu = named.values()
    o.sink, o.dropout_seed, (o.cu_seqlens_q, o.cu_seqlens_k) = _read(o.sink), 0, cu or (None, None)
    with _errors_for_jax():
        extras, _, spec = assemble(q, k, v, o)
        derived = _derived(o.mask)
        arrays = [derived[id(x)] if id(x) in derived else leaf(x).array for x in (q, k, v, *extras)]
        return _attention(spec, *_varying_alike([*arrays, seed] if o.dropout_p else arrays))


_STATIC = {"softmax_scale": "multiply q by it, and pass softmax_scale=1.0"}


def _seed(seed: Any) -> Array | None:
    """Return dropout's seed as an array of one integer, or of the two halves of a number: JAX may have no integers of 64 bits. None if it
    is no seed."""
    if not isinstance(seed, (int, jax.Array)):  # of JAX, which may drop the upper half of a number
        seed = np.asarray(seed)
        seed = seed.item() if seed.size == 1 else None
    if isinstance(seed, jax.Array):
        return seed if seed.size == 1 and jnp.issubdtype(seed.dtype, jnp.integer) else None
    if type(seed) is not int or not -(2**63) <= seed < 2**64:
        return None
    return jnp.asarray(np.asarray([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32))


def _derived(mask: Any) -> dict[int, Array]:
    """Return the arrays that masks make of their sources, by the ids of the tensors that stand for them."""
    found = {}
    for part in mask.parts if isinstance(mask, tw.Mask) else ():
        if isinstance(part, Derived) and hasattr(part.source, "array"):
            made, source = part.tensors(), part.source.array
            call = f"derived {source.ndim} {part._make.__name__}"
            arrays = _call(call, [(tuple(x.shape), _name(x.dtype)) for x in made], [source])
            found |= {id(x): array for x, array in zip(made, arrays, strict=True)}
    return found


# -- The operator ------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(spec: str, *arrays: Array) -> tuple[Array, Array]:
    """Compute ``(o, lse)`` of q, k, v, the extras of the spec, and the seed if there is dropout."""
    p = _problem(spec, _device(arrays), *[(x.shape, x.dtype.name) for x in arrays])
    shapes = zip(p.output_shapes, (p.dtype, p.compute_dtype), strict=True)
    call = f"forward {len(p.q.shape)} {spec}"
    return _call(call, [(shape, _name(dtype)) for shape, dtype in shapes], arrays)


def _forward(spec: str, *primals: Any) -> tuple[tuple[Array, Array], tuple]:
    read = parse_spec(spec)
    may = {*read.score_slots, read.sink_slot}
    slots = [
        n for n, x in enumerate(primals[3:]) if n in may and x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating)
    ]
    spec = replace(read, needs_grad=True, grad_slots=tuple(slots)).text()
    arrays = [x.value for x in primals]
    out = _attention(spec, *arrays)
    return out, (arrays, out, {spec: ()})  # the keys of a dictionary are static


def _backward(_: str, saved: tuple, cotangents: Sequence[Any]) -> tuple:
    (q, k, v, *extras), out, known = saved
    (spec,) = known
    grads = [
        jnp.zeros_like(x) if isinstance(g, jax.custom_derivatives.SymbolicZero) else g
        for g, x in zip(cotangents, out, strict=True)
    ]
    slots = parse_spec(spec).grad_slots
    like = [(x.shape, x.dtype.name) for x in (q, k, v, *[extras[n] for n in slots])]
    call = f"backward {q.ndim} {spec}"
    dq, dk, dv, *found = _call(call, like, [*grads, q, k, v, *out, *extras])
    by_slot = dict(zip(slots, found, strict=True))
    return dq, dk, dv, *[by_slot.get(n) for n in range(len(extras))]


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


@lru_cache(maxsize=256)
def _problem(spec: str, device: torch.device, *arrays: tuple[tuple[int, ...], str]) -> Problem:
    """Check a call by the shapes and dtypes of its arrays, on the device where it is expected to run.

    Raises:
        ValueError: a wrong call. NotImplementedError: no backend runs it.
    """
    p = problem(spec, device, *[(shape, getattr(torch, name)) for shape, name in arrays])
    dispatch.select(p)
    return p


def _device(arrays: Sequence[Array]) -> torch.device:
    """Return where a call will run: where its arrays are, or, while JAX traces it, on JAX's default device."""
    there = (x.devices() for x in arrays if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
    device = next((device for found in there for device in found), jax.config.jax_default_device)
    platform = getattr(device, "platform", device) or jax.default_backend()
    if platform not in ("gpu", "cuda"):
        return torch.device("cpu")
    gpu.check()
    return torch.device("cuda", 0)


def _call(call: str, results: Sequence[tuple[Sequence[int], str]], arrays: Sequence[Array]) -> Sequence[Array]:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    found = jax.ffi.ffi_call(_TARGET, shapes, vmap_method="expand_dims")(*arrays, call=call)
    return tuple(pcast(x, tuple(_varying(arrays)), to="varying") for x in found)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _varying(arrays: Sequence[Array]) -> frozenset[str]:
    """Return the axes of a mesh over which some of the arrays vary, inside ``jax.shard_map``."""
    kinds = [jax.typeof(x) for x in arrays]
    return frozenset().union(*[x.vma if hasattr(x, "vma") else x.manual_axis_type.varying for x in kinds])


def _varying_alike(arrays: Sequence[Array]) -> list[Array]:
    """Let all arrays vary over the same axes, as a custom call needs it. JAX sums the gradients of those that did not."""
    axes = _varying(arrays)
    return [pcast(x, tuple(axes - _varying([x])), to="varying") for x in arrays]
