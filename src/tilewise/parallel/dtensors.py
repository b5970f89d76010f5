"""Attention of DTensors. If the sequence is sharded, the call runs over the ranks of that mesh dimension.

One mesh dimension may shard the sequence. Others may shard the batch or the heads, or replicate; that is a plain call on each rank, so
masks and scores may not depend on the sharded index.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise import autograd, expr
from tilewise.dropout import new_seed
from tilewise.parallel.context import ContextParallel, compiled, context_parallel
from tilewise.spec import Options, assemble, parse_spec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

_contexts: dict[Any, tuple[ProcessGroup, ContextParallel]] = {}  # by mesh and dimension


def attention(q: DTensor, k: DTensor, v: DTensor, options: Options, with_lse: bool) -> tuple[Any, ...]:
    """Return ``(o, lse)`` as DTensors with q's sharding. Without ``with_lse``, lse is ``None``.

    Raises:
        ValueError: the tensors are not sharded alike on one mesh.
        NotImplementedError: placements, or a mask or score under them, are not built.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(q, DTensor):
        raise ValueError(
            "attention was called wrongly\n  k or v is a DTensor and q is not; distribute q alike, or pass x.to_local()"
        )
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, DTensor) or x.device_mesh != q.device_mesh or x.placements != q.placements:
            raise ValueError(
                f"attention was called wrongly\n  q is a DTensor, {q.placements} on {q.device_mesh}; {name} must be one alike"
            )
    packed = options.cu_seqlens_q is not None
    axes = {0: "sequence", 1: "heads"} if packed else {0: "batch", 1: "sequence", 2: "heads"}
    cut = {n: _what(p, axes) for n, p in enumerate(q.placements) if not p.is_replicate()}
    heads = next(dim for dim, what in axes.items() if what == "heads")
    _refuse_heads(q.shape[heads], k.shape[heads], [q.device_mesh.size(n) for n in cut if cut[n] == "heads"])
    options = _seeded(q, options)
    local_q, local_k, local_v = (x.to_local() for x in (q, k, v))
    call = assemble(local_q, local_k, local_v, options)
    _refuse(cut, *call)
    sequence = [n for n, what in cut.items() if what == "sequence" and q.device_mesh.size(n) > 1]
    batches = _chunks(q.shape[0], [q.device_mesh.size(n) for n in cut if cut[n] == "batch"])
    if sequence and any(start == end for start, end in batches):
        raise NotImplementedError(
            f"a batch of {q.shape[0]} leaves ranks without elements, which a sharded sequence needs"
        )
    if sequence and torch.compiler.is_compiling():
        ranks = _name(q.device_mesh, sequence[0])
        o, lse, *_ = compiled(ranks, local_q, local_k, local_v, options, with_lse)
    elif sequence:
        parallel = _context(q.device_mesh, sequence[0])
        o, lse, *_ = parallel.attention(local_q, local_k, local_v, options, with_lse)
    else:
        o, lse = autograd.attention(local_q, local_k, local_v, *call)

    def whole(x: Any, shape: tuple[int, ...], dims: dict[str, int]) -> DTensor:
        placements = [Shard(dims[cut[n]]) if n in cut else p for n, p in enumerate(q.placements)]
        strides = x.new_empty(shape, device="meta").stride()
        return DTensor.from_local(
            x, q.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
        )

    dims = {what: dim for dim, what in axes.items()}
    o = whole(o, (*q.shape[:-1], v.shape[-1]), dims)
    if not with_lse:
        return o, None
    dims |= {"heads": dims["sequence"], "sequence": dims["heads"]}
    return o, whole(lse, (*q.shape[:-3], q.shape[-2], q.shape[-3]), dims)


def _seeded(q: DTensor, options: Options) -> Options:
    """Return the options with a new seed for dropout that is the same on all ranks which hold replicas, if there are such ranks."""
    replicas = [n for n, p in enumerate(q.placements) if p.is_replicate() and q.device_mesh.size(n) > 1]
    if not (replicas and options.dropout_p and options.dropout_seed is None):
        return options
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "dropout of replicated DTensors inside torch.compile needs dropout_seed=, the same on all ranks"
        )
    seed = new_seed(q.device)
    for n in replicas:
        torch.distributed.broadcast(seed, group=q.device_mesh.get_group(n), group_src=0)
    return replace(options, dropout_seed=seed)


def _what(placement: Any, axes: dict[int, str]) -> str:
    """Return the name of the dimension that a placement shards."""
    return axes.get(placement.dim, "head_dim") if placement.is_shard() else str(placement)


def _refuse_heads(query_heads: int, key_heads: int, sizes: list[int]) -> None:
    """Refuse query heads on other ranks than their key heads, and ranks without heads, on all ranks alike.

    Args:
        sizes: of the mesh dimensions that shard the heads, in order.
    """
    dealt = list(zip(_chunks(query_heads, sizes), _chunks(key_heads, sizes), strict=True))
    if any(end * key_heads != end_k * query_heads or start_k == end_k for (_, end), (start_k, end_k) in dealt):
        parts = ", ".join(f"{end - start} / {end_k - start_k}" for (start, end), (start_k, end_k) in dealt)
        raise NotImplementedError(
            "unsupported head sharding\n  each rank must hold whole groups: a key head with all of its query heads; "
            f"{query_heads} query and {key_heads} key heads are sharded as {parts}\n"
            "  Shard the heads over a number of ranks that divides the key heads."
        )


def _chunks(count: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Return the elements ``[start, stop)`` of each rank, if mesh dimensions of these sizes shard them one after the other."""
    found = [(0, count)]
    for size in sizes:
        each = [(a, b, -(-(b - a) // size)) for a, b in found]
        found = [(min(a + n * step, b), min(a + (n + 1) * step, b)) for a, b, step in each for n in range(size)]
    return found


def _refuse(cut: dict[int, str], extras: list[Tensor], seed: Tensor | None, text: str) -> None:
    """Refuse parts of a call that depend on a sharded index, and placements other than shards or replicas of rows."""
    reads = _reads(text)
    found = (
        ["a mask, score or sink tensor is a DTensor; pass its full_tensor()"]
        if any(hasattr(x, "device_mesh") for x in extras)
        else []
    )
    if list(cut.values()).count("sequence") > 1:
        found.append("the sequence is sharded over several mesh dimensions; flatten them into one")
    for what in cut.values():
        if what not in ("sequence", "batch", "heads"):
            found.append(f"placement {what}; redistribute q, k and v")
        elif what != "sequence" and (what[0] in reads or seed is not None or (what == "heads" and "sink" in reads)):
            found.append(f"the {what} are sharded, and the mask, score, sink or dropout depends on them")
    if found:
        raise NotImplementedError("attention cannot run on these DTensors" + "".join(f"\n  {x}" for x in found))


@torch.compiler.assume_constant_result  # Dynamo calls this, because it cannot read the text itself
def _reads(text: str) -> list[str]:
    """Return the indices on which a spec's mask or score depends, and "sink" if it has one."""
    spec = parse_spec(text)
    roots = [*spec.whole_region.parts, *(() if spec.whole_score is None else (spec.whole_score,))]
    return [*sorted(expr.depends_on(*roots)), *(() if spec.sink_slot is None else ("sink",))]


@torch.compiler.assume_constant_result  # as above
def _name(mesh: Any, dim: int) -> str:
    """Return the name of a mesh dimension's ranks in a compiled graph."""
    return _context(mesh, dim).name


def _context(mesh: Any, dim: int) -> ContextParallel:
    """Return the ranks of a mesh dimension, made once per group. After another ``init_process_group``, an equal mesh has other groups."""
    group, found = mesh.get_group(dim), _contexts.get((mesh, dim))
    if found is None or found[0] is not group:
        found = _contexts[mesh, dim] = group, context_parallel(group, layout="chunks")
    return found[1]
