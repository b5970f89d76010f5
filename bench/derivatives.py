"""Forward mode and second derivatives: are they right on this device, how fast, what memory they take. A part of `bench.calls`.

The check comes first, and a run ends where it fails. Forward, backward, forward mode and second derivative take turns, beside eager
attention where that fits, at N of 512 to 16,384.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.autograd import forward_ad

import tilewise as tw
from bench import peers
from bench.cases import Case, Inputs, draw
from bench.check import share
from bench.measure import PeakMemory, in_turns
from bench.records import MIB, Log
from tilewise import accuracy

CAUSAL = (4096, 16384)  # the sizes at which a causal mask is timed too
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
EAGER, PACKAGE = "eager", "jvp-flash-attention"
WRONG = 0.05  # of a row's norm: a peer's tangent that is farther from tilewise's is not timed
HALF, SINGLE = "bfloat16", "float32"
# Few, since each compiles kernels of its own: options of the checked cases.
CHECKED = {
    "full": {"dtype": SINGLE},
    "sink": {"dtype": HALF, "mask": "causal", "sink": True},
    "softcap": {"dtype": HALF, "mask": "causal", "score": "softcap-2"},
    "lengths": {"dtype": HALF, "mask": "key-lengths", "batch": 2},
}
Attend = Callable[..., Tensor]
"""From q, k, v and, where the case has one, a sink, to o."""


def case_of(name: str, seqlen: int, heads_q: int, heads_k: int, head_dim: int, **options: object) -> Case:
    """A case whose queries and keys are as many."""
    sizes = {"batch": 1, "seqlen_q": seqlen, "seqlen_k": seqlen, "heads_q": heads_q, "heads_k": heads_k}
    return Case(name=name, source="derivatives", head_dim=head_dim, head_dim_v=head_dim, **sizes | options)


@dataclass(frozen=True)
class Place:
    """Where derivatives are taken: the inputs of a case, and a direction for each of q, k, v and the sink."""

    x: Inputs
    toward: Inputs

    @classmethod
    def drawn(cls, case: Case, device: str) -> "Place":
        return cls(draw(case, device), draw(case, device, seed=1))

    def to(self, dtype: torch.dtype) -> "Place":
        return Place(self.x.to(dtype), self.toward.to(dtype))

    @property
    def tensors(self) -> list[Tensor]:
        return [x.detach() for x in self.x.wanted.values()]

    @property
    def along(self) -> list[Tensor]:
        return [x.detach() for x in self.toward.wanted.values()]

    @property
    def shape(self) -> dict:
        """The case as a result carries it."""
        names = ("batch", "heads_q", "heads_k", "head_dim", "mask", "dtype")
        return {"seqlen": self.x.case.seqlen_q} | {name: getattr(self.x.case, name) for name in names}

    def tilewise(self, backend: str | None) -> Attend:
        """Attention by a backend."""
        options = self.x.options()
        return lambda q, k, v, sink=None: tw.attention(q, k, v, **options | {"sink": sink}, backend=backend)

    def eager(self, order: int = 0) -> Attend:
        """The same with the whole score matrix; any ``order`` but 0 is differentiated by FlashAttention's formulas."""
        change = partial(replace, self.x)
        return lambda q, k, v, sink=None: peers.eager_call(change(q=q, k=k, v=v, sink=sink), order=order)()


# ---- what is measured -------------------------------------------------------------------------------------------------


def jvp(attend: Attend, at: Place, moving: int = 4) -> tuple[Tensor, Tensor]:
    """o and its tangent, by dual tensors, along the first ``moving`` of q, k, v and the sink."""
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(t, d) for t, d in zip(at.tensors[:moving], at.along[:moving], strict=True)]
        return tuple(forward_ad.unpack_dual(attend(*dual, *at.tensors[moving:])))


def by_package(at: Place) -> Callable[[], tuple[Tensor, Tensor]] | None:
    """o and its tangent by the package jvp_flash_attention, in its own layout; None where it is not installed, or not on a GPU."""
    if not at.x.q.is_cuda or importlib.util.find_spec("jvp_flash_attention") is None:
        return None
    from jvp_flash_attention.jvp_attention import JVPAttn

    turned = [[t.transpose(1, 2).contiguous() for t in tensors] for tensors in (at.tensors, at.along)]

    def call() -> tuple[Tensor, Tensor]:
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(t, d) for t, d in zip(*turned, strict=True)]
            return tuple(forward_ad.unpack_dual(JVPAttn.fwd_dual(*dual, causal=at.x.case.mask == "causal")))

    return call


def gradient_graph(attend: Attend, at: Place) -> tuple[Callable[[], tuple], Callable[[], tuple]]:
    """The backward, and the second derivative of a weighted sum of its results, as calls that may be repeated."""
    wanted, do = [t.requires_grad_() for t in at.tensors], at.x.do
    o, weight = attend(*wanted), do.detach().requires_grad_()
    first = torch.autograd.grad(o, wanted, weight, create_graph=True)

    def backward() -> tuple:
        return torch.autograd.grad(o, wanted, do, retain_graph=True)

    def second() -> tuple:
        return torch.autograd.grad(first, (*wanted, weight), at.along, retain_graph=True)

    return backward, second


def second_derivatives(attend: Attend, at: Place) -> dict[str, Tensor]:
    found = zip((*at.x.wanted, "ddo"), gradient_graph(attend, at)[1](), strict=True)
    return {f"second {name}": g for name, g in found}


def derivatives(attend: Attend, at: Place) -> dict[str, Tensor]:
    """o's tangent and all second derivatives, by name."""
    return {"o tangent": jvp(attend, at)[1]} | second_derivatives(attend, at)


# ---- the parts of a run ----------------------------------------------------------------------------------------------


def backend(device: str) -> str | None:
    """The backend that is asked for; None: the first that can."""
    return "triton" if device == "cuda" else None


def ours(device: str) -> str:
    """The backend that has the tangents then."""
    q = torch.empty(1, 16, 8, 64, device=device, dtype=getattr(torch, SINGLE if device == "cpu" else HALF))
    return tw.explain(q, q, q, backend=backend(device)).tangents


def contestants(device: str) -> dict[str, str]:
    """Who takes part, tilewise's backend first."""
    return {
        ours(device): "tilewise, by this backend",
        EAGER: "standard attention in PyTorch, differentiated by it",
        PACKAGE: "JVPAttn.fwd_dual of jvp_flash_attention, where it is installed, on (batch, heads, seqlen, head_dim)",
    }


def add(log: Log, what: str, who: str, metric: str, value: float | None, **more: object) -> None:
    """Keep a result; ``what`` begins with what is differentiated how."""
    direction = "backward" if what.startswith(("backward", "second")) else "forward"
    log.add(f"derivatives-{what.replace(' ', '-')}", who, direction, metric, value, **more)


def check(name: str, log: Log) -> None:
    """Keep the errors of a case as parts of what is allowed, beside eager's, against float64. Raises SystemExit if one is wrong."""
    right = True
    at = Place.drawn(case_of(name, 24 if log.device == "cpu" else 300, 4, 2, 64, **CHECKED[name]), log.device)
    exact = derivatives(at.to(torch.float64).eager(), at.to(torch.float64))
    orders = [derivatives(at.eager(), at), second_derivatives(at.eager(order=1), at)]
    for tensor, value in derivatives(at.tilewise(backend(log.device)), at).items():
        error = accuracy.judge(tensor, value, exact[tensor], [e[tensor] for e in orders if tensor in e])
        numbers = {"rms": error.rms, "rms_eager": error.rms_eager, "status": "green" if error.ok else "red"}
        shape = at.shape | {"case": name, "tensor": tensor}
        add(log, f"{tensor}-{name}-{shape['dtype']}", ours(log.device), "error", share(error), shape=shape, **numbers)
        right &= error.ok
    if not right:
        raise SystemExit(f"{name}: a derivative is wrong")


WHAT = ("forward", "jvp", "jvp of q", "backward", "second")


def calls(attend: Attend, at: Place) -> dict[str, Callable[[], object]]:
    """The calls that are timed, by name, o always among it in forward mode; those of the backward and after it keep their graph."""
    forward, along = partial(attend, *at.tensors), partial(jvp, attend, at)
    return dict(zip(WHAT, (forward, along, partial(along, moving=1), *gradient_graph(attend, at)), strict=True))


def time(n: int, head_dim: int, mask: str | None, log: Log) -> None:
    """Keep milliseconds, and peak MiB beyond the inputs and beyond inputs and outputs, of each derivative at one size."""
    cpu, who = log.device == "cpu", ours(log.device)
    name = f"n{n}-d{head_dim}" + (f"-{mask}" if mask else "")
    at = Place.drawn(case_of(name, n, 8, 8, head_dim, mask=mask, dtype=SINGLE if cpu else HALF), log.device)

    def keep(what: str, who: str, metric: str, value: float | None, **more: object) -> None:
        add(log, f"{what}-{name}", who, metric, value, shape=at.shape | {"what": what}, **more)

    found = {who: calls(at.tilewise(backend(log.device)), at)}
    if package := by_package(at):
        try:
            error = accuracy.error_norms(package()[1].transpose(1, 2), found[who]["jvp"]()[1])[0]
            if not error < WRONG:
                raise ArithmeticError(f"its tangent differs from tilewise's by {error:.2g} of a row's norm")
            found[PACKAGE] = {"jvp": package}
        except Exception as error:  # it refuses, does not compile, or is wrong
            keep("jvp", PACKAGE, "time", None, why=[str(error)[-300:]])
    try:
        found[EAGER] = calls(at.eager(), at)
        found[EAGER]["second"]()
    except (torch.OutOfMemoryError, RuntimeError) as error:  # a CPU's allocator raises the latter
        found.pop(EAGER, None)
        for what in WHAT:
            keep(what, EAGER, "time", None, why=[str(error).partition("\n")[0]])
    every = {(who, what): call for who, each in found.items() for what, call in each.items()}
    for (who, what), value in in_turns(every, log.device, 3 if cpu else 5).items():
        with PeakMemory(log.device) as peak:
            result = found[who][what]()
        outputs = {x.data_ptr(): x.nbytes for x in (result if isinstance(result, tuple) else (result,))}
        keep(what, who, "time", value)
        beyond = max(0, peak.bytes - sum(outputs.values()))
        keep(what, who, "memory", round(beyond / MIB, 2), peak=round(peak.bytes / MIB, 2))
        del result


def rows(device: str) -> Iterator[tuple[str, Callable[[Log], None]]]:
    """The checks, then every size."""
    for name in CHECKED:
        yield f"check-{name}", partial(check, name)
    for n, head_dim in product(SIZES, (64, 128)):
        for mask in (None, "causal") if n in CAUSAL and device != "cpu" else (None,):
            yield f"n{n}-d{head_dim}" + (f"-{mask}" if mask else ""), partial(time, n, head_dim, mask)
