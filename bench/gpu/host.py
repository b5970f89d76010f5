"""The host's cost of a call.

host      microseconds of the backend alone, of the public call, and of the call with its gradients, beside SDPA
autograd  milliseconds of a call and its gradients through autograd, and of its kernels alone
lengths   how many kernels a hundred lengths compile
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from bench import cases, records
from bench.gpu.jobs import Item, Job, Run, Worker
from bench.gpu.subject import Subject
from bench.gpu.time import drawn, results_of
from bench.measure import host_microseconds, in_turns
from tilewise.backends.base import empty_output
from tilewise.testing import call

PARTS = ("host", "autograd", "lengths")
SHAPE = (1, 64, 2, 64)  # batch, seqlen, heads, head_dim: a GPU has done with it before the host is
__all__ = ["PARTS", "WORKERS", "phase", "results_of"]


def host_worker(worker: Worker, subject: Subject) -> None:
    def timed(dtype: torch.dtype, who: str, direction: str, step: Callable[[], object]) -> dict:
        often = {} if subject.device == "cuda" else {"calls": 1, "repeats": 2}
        us = round(host_microseconds(step, subject.device, **often), 1)
        shape = dict(zip(("batch", "seqlen", "heads", "head_dim"), SHAPE, strict=True)) | {"mask": "causal"}
        case, short = f"host-{str(dtype).removeprefix('torch.')}", "host"
        return {"state": "ok", "us": us, "results": [records.result("", case, who, direction, short, us, shape=shape)]}

    for dtype in (torch.bfloat16, torch.float32):
        steps = steps_of(subject, dtype)
        worker.each(Item(f"{dtype} {who} {d}", partial(timed, dtype, who, d, s)) for (who, d), s in steps.items())


def steps_of(subject: Subject, dtype: torch.dtype) -> dict[tuple[str, str], Callable[[], object]]:
    """The calls by contestant and direction; empty where the backend does not take the dtype."""
    q = torch.randn(SHAPE, device=subject.device, dtype=dtype)
    c, backend = call(q, q.clone(), q.clone(), causal=True), subject.backend()
    if backend.unsupported(c.p):
        return {}
    alone = c.forward_only()
    watched = [q.clone().requires_grad_() for _ in range(3)]
    attention = partial(tw.attention, causal=True, backend=subject.name)
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)

    def both(step: Callable[..., Tensor], do: Tensor, leaves: list[Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(step(*leaves), leaves, do)

    turned = [x.detach().transpose(1, 2).requires_grad_() for x in watched]
    return {
        ("backend", "forward"): partial(backend.forward, alone.p, alone.t),
        ("backend", "backward"): partial(backend.backward, c.p, c.t, backend.forward(c.p, c.t), c.do, c.dlse),
        ("outputs", "forward"): partial(empty_output, alone.p, alone.t.q, alone.t.v),
        ("tilewise", "forward"): partial(attention, q, q, q),
        ("tilewise-grad", "forward"): partial(attention, *watched),
        ("tilewise", "both"): both(attention, c.do, watched),
        ("sdpa", "forward"): partial(sdpa, *[q.transpose(1, 2)] * 3),
        ("sdpa", "both"): both(sdpa, c.do.transpose(1, 2), turned),
    }


def autograd_worker(worker: Worker, subject: Subject) -> None:
    def compared(name: str) -> dict:
        x, c = drawn(cases.named(name), subject.device)
        backend, leaves = subject.backend(), list(x.wanted.values())

        def through_autograd() -> object:
            return torch.autograd.grad(tw.attention(x.q, x.k, x.v, **x.options(), backend=subject.name), leaves, x.do)

        def kernels() -> object:
            return backend.backward(c.p, c.t, backend.forward(c.p, c.t), c.do, c.dlse)

        ms = in_turns({"autograd": through_autograd, "kernels": kernels}, subject.device, queued=False)
        return {"state": "ok", "results": [records.result("", name, n, "both", "time", t) for n, t in ms.items()]}

    worker.each(Item(name, partial(compared, name)) for name in subject.scale.squares[::4])


def lengths_worker(worker: Worker, subject: Subject) -> None:
    def compiled() -> dict:
        if subject.compiled() is None:
            return {"state": "skipped", "detail": "its kernels are compiled before they are called"}
        before = None
        for n in range(1, 101 if subject.device == "cuda" else 4):
            q = torch.randn(1, 7 * n, 2, 64, device=subject.device, dtype=torch.bfloat16)
            c = call(q, q.clone(), q.clone(), causal=True)
            subject.backend().forward(c.p, c.t)
            before = subject.compiled() if before is None else before
        more = subject.compiled() - before
        return {"state": "wrong" if more else "ok", "detail": f"{more} kernels more than the first"}

    worker.each([Item("100 lengths", compiled)])


WORKERS = {"host": host_worker, "autograd": autograd_worker, "lengths": lengths_worker}


def phase(run: Run, subject: Subject, part: str) -> None:
    run.all([Job(part, 120)], reserve=min(30.0, run.left / 8))
