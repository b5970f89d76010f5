"""One attention over ranks as tests call it: what every rank computes, put together, beside the whole on one device."""

from __future__ import annotations

import torch
from torch import Tensor

import tilewise as tw
from bench.testing import call, normal, qkv
from tests.pieces import IDS, OPTIONS, TOTAL_K, TOTAL_Q
from tilewise.parallel.context import ContextParallel
from tilewise.spec import Options, assemble

SINK = "sink"
CALLS = OPTIONS | {SINK: lambda: {"causal": True, "sink": normal(4).requires_grad_()}}
# An interval that no tensor tells, beside a mask that reads some.
CALLS |= {
    "causal-dense": lambda: {"mask": tw.causal() & tw.dense(normal(TOTAL_Q, TOTAL_K) > -0.5)},
    "causal-blocks": lambda: {"causal": True, "mask": tw.block_sparse(normal(2, 4, 5, 7) > 0, 8, 8)},
    "causal-ids": lambda: {"causal": True, "mask": tw.keep(lambda b, h, i, j: IDS[i + 13] == IDS[j])},
    "window-table": lambda: {"mask": tw.window(20, 5) & tw.keep(lambda b, h, i, j: j < normal(TOTAL_Q)[i] * 9 + 25)},
    "range-either": lambda: {"mask": tw.key_range(2, 44) & (tw.window(9) | tw.dense(normal(2, 1, 1, TOTAL_K) > 0))},
}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v, do and dlse of the whole."""
    q, k, v = qkv(nq=TOTAL_Q, nk=TOTAL_K, dtype=dtype)
    return q, k, v, normal(*q.shape, dtype=dtype, seed=5), normal(2, 4, TOTAL_Q, seed=6)


def on_this_rank(parallel: ContextParallel, name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What one rank has: its rows of o, lse, dq, dk and dv, and the gradients of leaves by the slots that one device gives them."""
    options = CALLS[name]()
    q, k, v, do, dlse = inputs(dtype)
    local = [parallel.shard(x).detach().requires_grad_() for x in (q, k, v)]
    o, lse = tw.attention_with_lse(*local, parallel=parallel, **options)
    extras = assemble(*local, Options(**options))[0]
    leaves = {n: x for n, x in enumerate(extras) if x.requires_grad}
    do, dlse = parallel.shard(do), parallel.shard(dlse, 2).to(lse.dtype)
    finite = torch.where(lse == -torch.inf, 0.0, lse)  # an empty row's -inf times its dlse would be no number
    grads = torch.autograd.grad((o * do).sum() + (finite * dlse).sum(), [*local, *leaves.values()])
    found = dict(zip(("dq", "dk", "dv"), grads, strict=False))
    for slot, grad in zip(leaves, grads[3:], strict=True):
        found["dsink" if name == SINK else f"dleaf{slot}"] = grad
    return {"o": o.detach(), "lse": lse.detach()} | found


def together(parallel: ContextParallel, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole's tensors from those of all ranks; what every rank has whole is the first rank's."""
    queries, keys = parallel.layout_of(TOTAL_Q), parallel.layout_of(TOTAL_K)
    axes = {"o": (queries, 1), "lse": (queries, 2), "dq": (queries, 1), "dk": (keys, 1), "dv": (keys, 1)}
    found = {}
    for name in parts[0]:
        each = [part[name] for part in parts]
        layout, dim = axes.get(name, (None, 0))
        found[name] = layout.unshard(each, dim) if layout else each[0]
    return found


def wrong(found: dict[str, Tensor], name: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """What of it is beyond the error rule of one device."""
    q, k, v, do, dlse = inputs(dtype)
    c = call(q, k, v, do, **CALLS[name]())
    c.dlse = dlse
    return [str(e) for e in c.expected().judge(found) if not e.ok]
