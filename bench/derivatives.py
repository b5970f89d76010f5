"""Forward mode and second derivatives: are they right on this device, how fast, and what memory they take.

    python -m bench.derivatives --out FILE.json             # the check, then times and memory from N 512 to 16,384
    python -m bench.derivatives --out FILE.json --tiles     # times of a few tiles of each kernel of tangents

The check comes first, and nothing is timed where it fails. Times are medians over rounds in which forward, backward, forward mode and
second derivative take turns, beside eager attention where that fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

import tilewise as tw
from bench.measure import PeakMemory, in_turns, machine
from tilewise import accuracy

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
EAGER_UP_TO = 4096
HEADS = 8
HALF, SINGLE = torch.bfloat16, torch.float32
# Few, since each compiles kernels of its own: options and dtypes.
CASES = {
    "full": ({}, (SINGLE,)),
    "sink": ({"causal": True, "sink": True}, (HALF,)),
    "softcap": ({"causal": True, "cap": 5.0}, (HALF,)),
}


@dataclass
class Inputs:
    """q, k, v and a sink, and a direction for each; weights of o and of the first gradients, for scalar losses."""

    tensors: tuple[Tensor, ...]
    along: tuple[Tensor, ...]
    weight: Tensor

    @classmethod
    def draw(cls, n: int, head_dim: int, dtype: torch.dtype, device: str, heads: tuple[int, int] = (HEADS, HEADS)):
        generator = torch.Generator().manual_seed(n)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        shapes = (1, n, heads[0], head_dim), (1, n, heads[1], head_dim), (1, n, heads[1], head_dim), (heads[0],)
        return cls(tuple(normal(*s) for s in shapes), tuple(normal(*s) for s in shapes), normal(*shapes[0]))

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(
            tuple(x.to(dtype) for x in self.tensors), tuple(x.to(dtype) for x in self.along), self.weight.to(dtype)
        )


def tilewise_attention(backend: str | None, causal=False, sink=False, cap=None) -> Callable[..., Tensor]:
    """Attention of q, k, v and a sink by tilewise."""
    score = None if cap is None else tw.softcap(cap)

    def attend(q, k, v, logit):
        return tw.attention(q, k, v, causal=causal, sink=logit if sink else None, score=score, backend=backend)

    return attend


class _ByStatistics(torch.autograd.Function):
    """``softmax(s) v`` whose backward is FlashAttention's: P from lse, and ``delta = rowsum(dO ∘ O)``; as exact as torch's own, by
    other roundings. v is (batch, seqlen_k, heads, head_dim), s (batch, heads, seqlen_q, seqlen_k or one more for a sink)."""

    @staticmethod
    def forward(ctx, s, v):
        ctx.save_for_backward(s, v)
        return torch.einsum("bhij,bjhd->bihd", torch.exp(s - s.logsumexp(-1, keepdim=True))[..., : v.shape[1]], v)

    @staticmethod
    def backward(ctx, do):
        s, v = ctx.saved_tensors
        p = torch.exp(s - s.logsumexp(-1, keepdim=True))
        keys = v.shape[1]
        o = torch.einsum("bhij,bjhd->bihd", p[..., :keys], v)
        dp = torch.einsum("bihd,bjhd->bhij", do, v)
        dp = torch.nn.functional.pad(dp, (0, s.shape[-1] - keys))
        return p * (dp - (do * o).sum(-1).transpose(1, 2).unsqueeze(-1)), torch.einsum(
            "bhij,bihd->bjhd", p[..., :keys], do
        )


def eager_attention(causal=False, sink=False, cap=None, statistics=False) -> Callable[..., Tensor]:
    """The same with the whole score matrix in plain torch; ``statistics``: with FlashAttention's formulas (:class:`_ByStatistics`)."""

    def attend(q, k, v, logit):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        s = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        s = s if cap is None else cap * torch.tanh(s / cap)
        n = q.shape[1]
        if causal:
            s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        if sink:
            s = torch.cat([s, logit.view(1, -1, 1, 1).expand(1, q.shape[2], n, 1)], -1)
        return _ByStatistics.apply(s, v) if statistics else torch.einsum("bhij,bjhd->bihd", s.softmax(-1)[..., :n], v)

    return attend


# ---- what is measured -------------------------------------------------------------------------------------------------


def jvp(attend: Callable[..., Tensor], x: Inputs) -> Tensor:
    """o's tangent, by dual tensors."""
    with forward_ad.dual_level():
        o = attend(*[forward_ad.make_dual(t, d) for t, d in zip(x.tensors, x.along, strict=True)])
        return forward_ad.unpack_dual(o).tangent


def gradient_graph(attend: Callable[..., Tensor], x: Inputs) -> tuple[Callable[[], tuple], Callable[[], tuple]]:
    """The backward, and the second derivative of a weighted sum of its results, as calls that may be repeated."""
    wanted = [t.detach().requires_grad_() for t in x.tensors]
    o = attend(*wanted)
    weight = x.weight.detach().requires_grad_()
    first = torch.autograd.grad(o, wanted, weight, create_graph=True, allow_unused=True)
    used = [(g, d) for g, d in zip(first, x.along, strict=True) if g is not None]
    grads, along = zip(*used, strict=True)

    def backward() -> tuple:
        return torch.autograd.grad(o, wanted, x.weight, retain_graph=True, allow_unused=True)

    def second() -> tuple:
        return torch.autograd.grad(grads, (*wanted, weight), along, retain_graph=True, allow_unused=True)

    return backward, second


def second_derivatives(attend: Callable[..., Tensor], x: Inputs) -> dict[str, Tensor]:
    found = zip(("dq", "dk", "dv", "dsink", "ddo"), gradient_graph(attend, x)[1](), strict=True)
    return {f"second {name}": g for name, g in found if g is not None}


def derivatives(attend: Callable[..., Tensor], x: Inputs) -> dict[str, Tensor]:
    """o's tangent and all second derivatives, by name."""
    return {"o tangent": jvp(attend, x)} | second_derivatives(attend, x)


def check(backend: str | None, device: str, n: int) -> list[dict]:
    """Errors of each case and dtype beside eager's, against eager's in float64."""
    rows = []
    for name, (options, dtypes) in CASES.items():
        for dtype in dtypes:
            x = Inputs.draw(n, 64, dtype, device, (4, 2))
            attend, eager = tilewise_attention(backend, **options), eager_attention(**options)
            got, exact = derivatives(attend, x), derivatives(eager, x.to(torch.float64))
            orders = [derivatives(eager, x), second_derivatives(eager_attention(**options, statistics=True), x)]
            for tensor, value in got.items():
                error = accuracy.judge(tensor, value, exact[tensor], [e[tensor] for e in orders if tensor in e])
                rows.append({"case": name, "dtype": str(dtype), "ok": error.ok} | error.__dict__)
    return rows


def timed(backend: str | None, device: str, n: int, head_dim: int) -> dict:
    """Milliseconds and peak bytes beside the inputs of each derivative at one size, and eager's."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    x = Inputs.draw(n, head_dim, dtype, device)
    calls: dict[str, Callable[[], object]] = {}
    for who, attend in (("", tilewise_attention(backend)), ("eager ", eager_attention())):
        if who and n > EAGER_UP_TO:
            continue
        backward, second = gradient_graph(attend, x)
        calls |= {f"{who}backward": backward, f"{who}second derivative": second}
        calls |= {f"{who}forward": lambda a=attend: a(*x.tensors), f"{who}jvp": lambda a=attend: jvp(a, x)}
    row = {"n": n, "head_dim": head_dim, "dtype": str(dtype), "ms": in_turns(calls, device, rounds=5), "peak_mib": {}}
    for name, call in calls.items():
        with PeakMemory(device) as peak:
            call()
        row["peak_mib"][name] = round(peak.bytes / 2**20, 1)
    return row


# ---- tiles -----------------------------------------------------------------------------------------------------------

TILES = {
    "tangent": ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 4, 2), (64, 64, 4, 1)),
    "dq_tangent": ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 2)),
    "dkdv_tangent": ((64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (32, 128, 8, 2)),
}


def timed_tiles(device: str, n: int, head_dim: int) -> list[dict]:
    """Milliseconds of the forward's and the backward's tangents with other tiles of one kernel."""
    from tilewise.backends.triton.host import tangent
    from tilewise.backends.triton.tiles import Tiles
    from tilewise.dispatch import backend

    x, rows, chosen = Inputs.draw(n, head_dim, torch.bfloat16, device), [], tangent.tangent_tiles
    for kernel, choices in TILES.items():
        for tiles in choices:
            backend.cache_clear()
            tw.dispatch._plans.clear()
            tangent.tangent_tiles = lambda p, name, *rest, k=kernel, t=tiles: (
                Tiles(*t) if name == k else chosen(p, name)
            )
            attend = tilewise_attention("triton")
            row = {"kernel": kernel, "tiles": tiles, "n": n, "head_dim": head_dim}
            try:
                call = (lambda a=attend: jvp(a, x)) if kernel == "tangent" else gradient_graph(attend, x)[1]
                row["ms"] = in_turns({"ms": call}, device)["ms"]
            except Exception as error:  # too much shared memory, say
                row["error"] = str(error)[-200:]
            rows.append(row)
            print(json.dumps(row), flush=True)
    tangent.tangent_tiles = chosen
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="default: triton on CUDA, else the first that can")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--tiles", action="store_true", help="times of a few tiles of each kernel instead")
    parser.add_argument("--out", help="a file for the results as JSON")
    options = parser.parse_args(arguments)
    backend = options.backend or ("triton" if options.device.startswith("cuda") else None)
    found: dict = {"machine": machine(options.device), "backend": backend}
    if options.tiles:
        found["tiles"] = [row for d in (64, 128) for row in timed_tiles(options.device, 4096, d)]
    else:
        found["check"] = check(backend, options.device, 300 if options.device != "cpu" else 24)
        wrong = [row for row in found["check"] if not row["ok"]]
        print(f"{len(found['check'])} derivatives checked, {len(wrong)} wrong")
        for row in wrong:
            print(json.dumps(row))
        found["times"] = []
        for n in () if wrong else options.sizes:
            for head_dim in (64, 128):
                found["times"].append(timed(backend, options.device, n, head_dim))
                print(json.dumps(found["times"][-1]), flush=True)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    return 1 if [row for row in found.get("check", ()) if not row["ok"]] else 0


if __name__ == "__main__":
    sys.exit(main())
