"""Forward mode and second derivatives: are they right on this device, how fast, and what memory they take.

    python -m bench.derivatives --out FILE.jsonl     # the check, then times and memory from N 512 to 16,384

The check comes first, and nothing is timed where it fails. Times are medians over rounds in which forward, backward, forward mode and
second derivative take turns, beside eager attention where that fits. The results are records of the one form (bench/records.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad

import tilewise as tw
from bench import records
from bench.measure import PeakMemory, in_turns
from tilewise import accuracy

CAUSAL = (4096, 16384)  # the sizes at which a causal mask is timed too
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
EAGER, PACKAGE = "eager", "jvp-flash-attention"
PEERS = {
    EAGER: "standard attention in PyTorch, differentiated by it",
    PACKAGE: "JVPAttn.fwd_dual of the package jvp_flash_attention, where it is installed, on (batch, heads, seqlen, head_dim)",
    "cpu": "the cpu backend",
    "portable": "the portable backend",
    "triton": "the triton backend",
}
HEADS = 8
WRONG = 0.05  # of a row's norm: a peer's tangent that is farther from tilewise's is not timed
HALF, SINGLE = torch.bfloat16, torch.float32
# Few, since each compiles kernels of its own: options and dtypes.
CASES = {
    "full": ({}, (SINGLE,)),
    "sink": ({"causal": True, "sink": True}, (HALF,)),
    "softcap": ({"causal": True, "cap": 5.0}, (HALF,)),
    "lengths": ({"keys": 0.8}, (HALF,)),
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


def tilewise_attention(backend: str | None, causal=False, sink=False, cap=None, keys=1.0) -> Callable[..., Tensor]:
    """Attention of q, k, v and a sink by tilewise; ``keys``: the part of them that is seen."""
    score = None if cap is None else tw.softcap(cap)

    def attend(q, k, v, logit):
        mask = None if keys == 1 else tw.key_lengths(torch.tensor([int(keys * k.shape[1])], device=k.device))
        given = {"causal": causal, "mask": mask, "sink": logit if sink else None, "score": score}
        return tw.attention(q, k, v, backend=backend, **given)

    return attend


class _ByStatistics(torch.autograd.Function):
    """``softmax(s) v`` whose backward is FlashAttention's: P from lse, and ``delta = rowsum(dO ∘ O)``; as exact as torch's own, by
    other roundings. v is (batch, seqlen_k, heads, head_dim), s (batch, heads, seqlen_q, seqlen_k or one more for a sink)."""

    @staticmethod
    def forward(ctx, s, v):
        ctx.save_for_backward(s, v)
        p = torch.exp(s - s.logsumexp(-1, keepdim=True))
        return torch.einsum("bhij,bjhd->bihd", p[..., : v.shape[1]], v)

    @staticmethod
    def backward(ctx, do):
        s, v = ctx.saved_tensors
        p = torch.exp(s - s.logsumexp(-1, keepdim=True))
        keys = v.shape[1]
        o = torch.einsum("bhij,bjhd->bihd", p[..., :keys], v)
        dp = torch.einsum("bihd,bjhd->bhij", do, v)
        dp = torch.nn.functional.pad(dp, (0, s.shape[-1] - keys))
        ds = p * (dp - (do * o).sum(-1).transpose(1, 2).unsqueeze(-1))
        return ds, torch.einsum("bhij,bihd->bjhd", p[..., :keys], do)


def eager_attention(causal=False, sink=False, cap=None, keys=1.0, statistics=False) -> Callable[..., Tensor]:
    """The same with the whole score matrix in plain torch; ``statistics``: with FlashAttention's formulas (:class:`_ByStatistics`)."""

    def attend(q, k, v, logit):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        s = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        s = s if cap is None else cap * torch.tanh(s / cap)
        n = q.shape[1]
        if causal:
            s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        s[..., int(keys * n) :] = -torch.inf
        if sink:
            s = torch.cat([s, logit.view(1, -1, 1, 1).expand(1, q.shape[2], n, 1)], -1)
        return _ByStatistics.apply(s, v) if statistics else torch.einsum("bhij,bjhd->bihd", s.softmax(-1)[..., :n], v)

    return attend


# ---- what is measured -------------------------------------------------------------------------------------------------


def jvp(attend: Callable[..., Tensor], x: Inputs, moving: int = 4) -> tuple[Tensor, Tensor]:
    """o and its tangent, by dual tensors, along the first ``moving`` of q, k, v and the sink."""
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(t, d) for t, d in zip(x.tensors[:moving], x.along[:moving], strict=True)]
        o = attend(*dual, *x.tensors[moving:])
        return tuple(forward_ad.unpack_dual(o))


def by_package(x: Inputs, causal: bool) -> Callable[[], tuple[Tensor, Tensor]] | None:
    """o and its tangent by the package jvp_flash_attention, in its own layout; None where it is not installed, or not on a GPU."""
    if not x.weight.is_cuda or importlib.util.find_spec("jvp_flash_attention") is None:
        return None
    from jvp_flash_attention.jvp_attention import JVPAttn

    turned = [[t.transpose(1, 2).contiguous() for t in tensors[:3]] for tensors in (x.tensors, x.along)]

    def call() -> tuple[Tensor, Tensor]:
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(t, d) for t, d in zip(*turned, strict=True)]
            return tuple(forward_ad.unpack_dual(JVPAttn.fwd_dual(*dual, causal=causal)))

    return call


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
    return {"o tangent": jvp(attend, x)[1]} | second_derivatives(attend, x)


# ---- the parts of a run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The record of a run, the backend that is asked for (None: the first that can), and the device."""

    name: str
    backend: str | None
    device: str

    def result(self, what: str, who: str, metric: str, value: object, **more: object) -> dict:
        """A result; ``what`` begins with what is differentiated how."""
        direction = "backward" if what.startswith(("backward", "second")) else "forward"
        return records.result(self.name, f"derivatives-{what}", who, direction, metric, value, **more)

    @property
    def who(self) -> str:
        """The backend of the tangents."""
        q = Inputs.draw(16, 64, self.dtype, self.device).tensors[0]
        return tw.explain(q, q, q, backend=self.backend).tangents

    @property
    def dtype(self) -> torch.dtype:
        return SINGLE if self.device == "cpu" else HALF


def check(run: Run, n: int) -> Iterator[dict]:
    """Errors of each case and dtype as parts of what is allowed, beside eager's, against eager's in float64."""
    for name, (options, dtypes) in CASES.items():
        for dtype in dtypes:
            x = Inputs.draw(n, 64, dtype, run.device, (4, 2))
            attend, eager = tilewise_attention(run.backend, **options), eager_attention(**options)
            got, exact = derivatives(attend, x), derivatives(eager, x.to(torch.float64))
            orders = [derivatives(eager, x), second_derivatives(eager_attention(**options, statistics=True), x)]
            shape = {"seqlen": n, "heads_q": 4, "heads_k": 2, "head_dim": 64, "case": name}
            shape |= {"dtype": str(dtype).removeprefix("torch.")}
            for tensor, value in got.items():
                error = accuracy.judge(tensor, value, exact[tensor], [e[tensor] for e in orders if tensor in e])
                share = max(error.rms / error.rms_allowed, error.max / error.max_allowed)
                what = f"{tensor.replace(' ', '-')}-{name}-{shape['dtype']}"
                numbers = {"rms": error.rms, "rms_eager": error.rms_eager, "status": "green" if error.ok else "red"}
                yield run.result(what, run.who, "error", share, shape=shape | {"tensor": tensor}, **numbers)


WHAT = ("forward", "jvp", "jvp of q", "backward", "second")


def calls(attend: Callable[..., Tensor], x: Inputs) -> dict[str, Callable[[], object]]:
    """The calls that are timed, by name, o always among it in forward mode; those of the backward and after it keep their graph."""
    forward, along = partial(attend, *x.tensors), partial(jvp, attend, x)
    return dict(zip(WHAT, (forward, along, partial(along, moving=1), *gradient_graph(attend, x)), strict=True))


def time(run: Run, n: int, head_dim: int, causal: bool = False) -> Iterator[dict]:
    """Milliseconds, and peak MiB beyond the inputs and beyond inputs and outputs, of each derivative at one size."""
    x = Inputs.draw(n, head_dim, run.dtype, run.device)
    found = {run.who: calls(tilewise_attention(run.backend, causal=causal), x)}
    shape = {"batch": 1, "heads_q": HEADS, "heads_k": HEADS, "seqlen": n, "head_dim": head_dim}
    shape |= {"mask": "causal" if causal else None, "dtype": str(x.weight.dtype).removeprefix("torch.")}
    name = f"n{n}-d{head_dim}" + ("-causal" if causal else "")
    package = by_package(x, causal)
    if package is not None:
        try:
            result = package()[1].transpose(1, 2)
            error = accuracy.error_norms(result, found[run.who]["jvp"]()[1])[0]
            if not error < WRONG:
                raise ArithmeticError(f"its tangent differs from tilewise's by {error:.2g} of a row's norm")
            found[PACKAGE] = {"jvp": package}
        except Exception as error:  # it refuses, does not compile, or is wrong
            why = [str(error)[-300:]]
            yield run.result(f"jvp-{name}", PACKAGE, "time", None, shape=shape | {"what": "jvp"}, why=why)
    try:
        found[EAGER] = calls(eager_attention(causal=causal), x)
        found[EAGER]["second"]()
    except (torch.OutOfMemoryError, RuntimeError) as error:  # a CPU's allocator raises the latter
        found.pop(EAGER, None)
        for what in WHAT:
            why = [str(error).partition("\n")[0]]
            case = f"{what.replace(' ', '-')}-{name}"
            yield run.result(case, EAGER, "time", None, shape=shape | {"what": what}, why=why)
    rounds = 3 if run.device == "cpu" else 5
    ms = in_turns({(who, what): call for who, each in found.items() for what, call in each.items()}, run.device, rounds)
    for (who, what), value in ms.items():
        with PeakMemory(run.device) as peak:
            result = found[who][what]()
        outputs = {
            x.data_ptr(): x.nbytes for x in (result if isinstance(result, tuple) else (result,)) if x is not None
        }
        beyond = {"shape": shape | {"what": what}}
        case = f"{what.replace(' ', '-')}-{name}"
        yield run.result(case, who, "time", round(value, 5), **beyond)
        mib = [round(n / records.MIB, 2) for n in (max(0, peak.bytes - sum(outputs.values())), peak.bytes)]
        yield run.result(case, who, "memory", mib[0], peak=mib[1], **beyond)
        del result


def results(run: Run, part: str, sizes: Sequence[int], head_dims: Sequence[int]) -> Iterator[dict]:
    """The results of one part of a run."""
    if part == "check":
        yield from check(run, 24 if run.device == "cpu" else 300)
        return
    for n in sizes:
        for head_dim in head_dims:
            yield from time(run, n, head_dim, False)
            if n in CAUSAL and run.device != "cpu":
                yield from time(run, n, head_dim, True)


def shown(r: dict) -> str:
    """A line about a result."""
    more = f"  rms {r['rms']:.2e}, eager's {r['rms_eager']:.2e}" if "rms" in r else ""
    more = f"  {r['peak']:.1f} beyond the inputs" if "peak" in r else more
    value = r["why"][0] if r["value"] is None else f"{r['value']:10.4f} {r['unit']}{more}"
    return f"{r['case']:48} {r['contestant']:44} {value}"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1: a derivative is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", help="default: triton on CUDA, else the first that can")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--head-dims", type=int, nargs="*", default=(64, 128), choices=(64, 128))
    parser.add_argument("--parts", nargs="*", default=["check", "time"], choices=("check", "time"))
    parser.add_argument("--out", type=Path, default=Path("out/derivatives.jsonl"))
    options = parser.parse_args(arguments)
    backend = options.backend or ("triton" if options.device == "cuda" else None)
    run = Run("", backend, options.device)
    command = (
        f"python -m bench.derivatives --parts {' '.join(options.parts)} --sizes {' '.join(map(str, options.sizes))}"
    )
    head = records.run(command, options.device, {who: PEERS[who] for who in (run.who, EAGER, PACKAGE)})
    records.append([head], options.out)
    run = Run(head["run"], backend, options.device)
    for part in options.parts:
        wrong = 0
        for r in results(run, part, options.sizes, options.head_dims):
            records.append([r], options.out)
            print(shown(r), flush=True)
            wrong += r.get("status") == "red"
        if wrong:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
