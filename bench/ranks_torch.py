"""PyTorch's context parallelism as contestants of `bench.ranks`: rings over SDPA's kernels, and FlexAttention over gathered keys.

Rows are dealt by PyTorch's own load balancers. Shared key heads are repeated where a kernel's ring refuses them or is wrong with them.
All of it is experimental there, and runs on GPUs alone; a contestant that fails its check, small and against float64, is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

KERNELS = {"torch-flash": SDPBackend.FLASH_ATTENTION, "torch-cudnn": SDPBackend.CUDNN_ATTENTION}
FLEX = "torch-flex"
NAMES = (*KERNELS, FLEX)
LONGEST_RING = 262144
"""Tokens up to which a step of SDPA's rings ends within a second."""
LONGEST_FLEX = 65536
"""Tokens up to which the table of FlexAttention's blocks is made: from all pairs of a rank's queries and all keys at once."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From q ``(batch, heads_q, rows, dim)`` and k, v ``(batch, heads_k, rows, dim)`` of a rank's rows to o of them."""


def runs(name: str, mask: str, seqlen: int) -> bool:
    """Whether a contestant knows a mask, SDPA's rings causal ones alone, and a sequence is not too long for it."""
    if name in KERNELS:
        return mask == "causal" and seqlen <= LONGEST_RING
    return mask in ("causal", "documents") and seqlen <= LONGEST_FLEX


def described(name: str) -> str:
    """A contestant in words, for records."""
    kernel = "FlexAttention over gathered keys" if name == FLEX else f"a ring over SDPA's {KERNELS[name].name.lower()}"
    return f"torch.distributed.tensor.experimental.context_parallel: {kernel}"


@contextmanager
def entered(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """The context in which SDPA runs over the ranks of a mesh."""
    from torch.distributed.tensor.experimental import context_parallel

    nothing = torch.zeros(1, 1, 2 * mesh.size(), 1, device="cuda")
    with context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[2]):
        yield mesh


def attention_of(name: str, ids: Tensor | None, seqlen: int, mesh: DeviceMesh, repeat: bool) -> tuple[Tensor, Attend]:
    """The positions of this rank's rows, and the attention of them.

    Args:
        ids: int64 ``(seqlen,)``, the document of each position; None: the mask is causal alone.
        repeat: shared key heads are repeated.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers

    size, rank = dist.get_world_size(), dist.get_rank()
    balancer = balancers._HeadTailLoadBalancer(seqlen, size, "cuda")
    if name != FLEX:
        positions = balancer._generate_indices()[0].chunk(size)[rank]
        return positions, partial(_ring, KERNELS[name], repeat)

    def keep(b, h, i, j):
        return (i >= j) & (ids[i] == ids[j]) if ids is not None else i >= j

    torch._dynamo.reset()  # programs of earlier lengths would make this one slow
    cp._compiled_create_block_mask = create_block_mask
    if ids is not None:
        balancer = balancers._PTRRLoadBalancer(create_block_mask(keep, 1, 1, seqlen, seqlen, "cuda"), size)
    blocks = cp._create_cp_block_mask(keep, 1, 1, seqlen, seqlen, mesh, load_balancer=balancer)
    style = cp._ContextParallel(2, cp._ContextParallel.AttentionType.FLEX)
    attend = torch.compile(flex_attention, dynamic=False)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q, k, v), _ = style.flex_input_fn(None, (q, k, v), {}, mesh)
        return attend(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])

    return balancer._generate_indices()[0].chunk(size)[rank], flex


def _ring(kernel: SDPBackend, repeat: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    if repeat and shared > 1:
        k, v, shared = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), 1
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared > 1)


def steps(attend: Attend, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Callable[[], object]]:
    """The forward alone, and the forward with its backward, of tensors ``(batch, rows, heads, dim)``."""
    inputs = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    do = do.transpose(1, 2).contiguous()

    def forward() -> None:
        with torch.no_grad():
            attend(*inputs)

    def both() -> None:
        torch.autograd.grad(attend(*inputs), inputs, do)

    return {"forward": forward, "both": both}


def found(positions: Tensor, attend: Attend, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
    """o, dq, dk and dv of the whole, on every rank, from whole q, k, v and do ``(batch, seqlen, heads, dim)`` on the host."""
    rows = positions.cpu()
    inputs = [x[:, rows].transpose(1, 2).contiguous().cuda().requires_grad_() for x in (q, k, v)]
    o = attend(*inputs)
    grads = torch.autograd.grad(o, inputs, do[:, rows].transpose(1, 2).contiguous().cuda())
    order = _every_rank(positions).argsort()
    parts = zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True)
    return {name: _every_rank(x.transpose(1, 2).contiguous(), 1)[:, order] for name, x in parts}


def _every_rank(x: Tensor, dim: int = 0) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts, dim)
