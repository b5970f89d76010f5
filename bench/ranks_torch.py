"""PyTorch's context parallelism as contestants of `bench.ranks`: rings over SDPA's kernels.

Rows are dealt by PyTorch's own load balancer. Shared key heads are repeated where a kernel's ring refuses them or is wrong with them.
All of it is experimental there, and runs on GPUs alone; a contestant that fails its check, small and against float64, is not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {"torch-flash": SDPBackend.FLASH_ATTENTION, "torch-cudnn": SDPBackend.CUDNN_ATTENTION}
DESCRIBED = {
    name: f"torch.distributed.tensor.experimental.context_parallel: a ring over SDPA's {kernel.name.lower()}"
    for name, kernel in KERNELS.items()
}
LONGEST = 262144
"""Tokens up to which a step of the rings ends within a second."""


@contextmanager
def entered(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """The context in which SDPA runs over the ranks of a mesh."""
    from torch.distributed.tensor.experimental import context_parallel

    nothing = torch.zeros(1, 1, 2 * mesh.size(), 1, device="cuda")
    with context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[2]):
        yield mesh


def positions_of(seqlen: int) -> Tensor:
    """The positions of this rank's rows."""
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers

    balancer = balancers._HeadTailLoadBalancer(seqlen, dist.get_world_size(), "cuda")
    return balancer._generate_indices()[0].chunk(dist.get_world_size())[dist.get_rank()]


def attend(name: str, repeat: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """o of this rank's rows, ``(batch, heads, rows, dim)`` as its q, k and v. repeat: shared key heads are repeated."""
    shared = q.shape[1] // k.shape[1]
    if repeat and shared > 1:
        k, v, shared = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), 1
    with sdpa_kernel(KERNELS[name]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared > 1)


def found(name: str, repeat: bool, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
    """o, dq, dk and dv of the whole, on every rank, from whole q, k, v and do ``(batch, seqlen, heads, dim)`` on the host."""
    positions = positions_of(q.shape[1])
    *inputs, do = (heads_first(x[:, positions.cpu()]).cuda().requires_grad_() for x in (q, k, v, do))
    o = attend(name, repeat, *inputs)
    grads = torch.autograd.grad(o, inputs, do)
    order = _every_rank(positions).argsort()
    parts = zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True)
    return {name: _every_rank(heads_first(x), 1)[:, order] for name, x in parts}


def heads_first(x: Tensor) -> Tensor:
    """``(batch, rows, heads, dim)`` as ``(batch, heads, rows, dim)``, or the other way round."""
    return x.transpose(1, 2).contiguous()


def _every_rank(x: Tensor, dim: int = 0) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts, dim)
