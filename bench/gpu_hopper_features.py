"""Gradients on Hopper of masks whose ends are tensors, predicates, scores and dropout, on one H200: right, repeatable, how fast?

    PYTHONPATH=src:. python3 bench/gpu_hopper_features.py --build    (on any machine with the DSL: the kernels that are not shipped)
    PYTHONPATH=src:. python3 bench/gpu_hopper_features.py --out DIR [--parts check,time] [--minutes 3]

Forward and backward are judged by the error rule, two backward runs by their bits. Times are of both beside Triton's and, as
``plain``, beside Hopper's own of the same sizes without the feature, the backward in two passes; PREDICTED is what share of the plain
backward's rate, pair for pair that is kept, is left.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import tilewise as tw
from bench.gpu_hopper import DEVICE, Results, begin, contract_calls, emit, processes
from bench.gpu_hopper_backward import named, two_passes
from bench.measure import in_turns
from tests.backends.contract import HIDING, Call, call, poisoned, qkv
from tilewise import accuracy
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.config import PLAIN
from tilewise.backends.hopper.host import aot, library
from tilewise.backends.triton import Triton

SHAPE, LONG = (2, 700, 900, 4, 2), (2, 4096, 4096, 8, 8)  # batch, seqlen_q, seqlen_k, heads_q, heads_k
DIMS = (128, 64, 256)
FEW = (
    "lengths",
    "dropout-causal",
    "dropout-lengths",
    "alibi-softcap",
    "relative",
    "sparse-bias-dropout",
)  # where not all at 64 and 256
LIMIT = 100  # seconds of a process
DROPOUT = {"dropout_p": 0.2, "dropout_seed": 2**40 + 7}
# The options of a call of that shape, made on the device.
FEATURES: dict[str, Callable[[tuple[int, ...], str], dict]] = {
    "lengths": lambda n, device: {"mask": tw.key_lengths(torch.tensor([n[2] // 2, n[2] - 5], device=device))},
    "documents": lambda n, device: {
        "mask": tw.documents(torch.arange(n[2], device=device) // (n[2] // 4)) & tw.causal()
    },
    "prefix": lambda n, device: {"mask": tw.prefix(n[2] // 3)},
    "ranges": lambda n, device: {"mask": tw.key_range(torch.arange(n[3], device=device)[None] * 70, n[2] - 9)},
    "dropout": lambda n, device: DROPOUT,
    "dropout-causal": lambda n, device: DROPOUT | {"causal": True},
    "dropout-lengths": lambda n, device: DROPOUT | FEATURES["lengths"](n, device),
    "alibi": lambda n, device: {"score": tw.alibi(torch.rand(n[3], device=device)), "causal": True},
    "alibi-softcap": lambda n, device: {"score": tw.alibi(torch.rand(n[3], device=device)) >> tw.softcap(5.0)},
    "bias": lambda n, device: {"score": tw.bias(torch.randn(1, n[3], n[1], n[2], device=device, dtype=torch.bfloat16))},
    "relative": lambda n, device: {"score": relative(torch.randn(n[3], 65, device=device))},
    "dense": lambda n, device: {"mask": torch.rand(n[1], n[2], device=device) > 0.5},
    "sparse": lambda n, device: {
        "mask": tw.block_sparse(tw.local_global(-(-n[1] // 128), -(-n[2] // 128), 1, 1), 128, 128)
    },
    "sparse-bias-dropout": lambda n, device: DROPOUT | FEATURES["sparse"](n, device) | FEATURES["bias"](n, device),
}
PREDICTED = {
    "lengths": 0.95,
    "documents": 0.85,
    "dropout": 0.55,
    "alibi": 0.75,
    "bias": 0.5,
    "sparse": 0.7,
    "relative": 0.5,
    "dense": 0.55,
}


def relative(table: torch.Tensor) -> Callable:
    return lambda s, b, h, i, j: s + table[h, (i - j).clamp(-32, 32) + 32]


def made(name: str, shape: tuple[int, ...], d: int, device: str, **more: object) -> Call:
    generator = torch.Generator(device).manual_seed(d)
    batch, nq, nk, hq, hk = shape
    new = lambda n, h: torch.randn((batch, n, h, d), generator=generator, device=device).bfloat16()  # noqa: E731
    options = FEATURES[name](shape, device) if name else {}
    return call(new(nq, hq), new(nk, hk), new(nk, hk), **options, **more)


def calls(device: str) -> Iterator[tuple[str, Call]]:
    for d in DIMS:
        for name in FEATURES if d == DIMS[0] else FEW:
            yield f"{name}-{d}", made(name, SHAPE, d, device)


def build() -> int:
    """What neither the package nor its folder of kernels has, for this and for tests/gpu; forwards that split keys too: a GPU has more
    cores to fill."""
    backend, needed = Hopper(), {}
    every = [c for _, c in (*calls("cpu"), *contract_calls("cpu"))]
    every += [made(name, LONG, DIMS[0], "cpu") for name in PREDICTED]
    every += [call(*(x.bfloat16() for x in qkv()), mask=mask()) for mask in HIDING.values()]
    for c in every:
        for problem in (c.p, replace(c.p, spec=replace(c.p.spec, deterministic=True))):
            forward, *rest = backend._configs(problem)
            own = forward.traced != PLAIN or forward.dropout
            split = [replace(forward, split=True)] if own and forward.of_numbers and not forward.packed else []
            needed |= {x.name: x for x in (forward, *split, *rest) if not library.built(x)}
    rows = aot.build_all(list(needed.values()), library.folder(), 1)
    return sum(bool(rows[name]["faults"]) for name in needed)


def check_worker(_: str) -> None:
    backend = Hopper()
    for label, c in calls(DEVICE):
        emit(part="check", case=label, state="begun")
        try:
            with poisoned():
                out = backend.forward(c.p, c.t)
                one, two = (named(out, backend.backward(c.p, c.t, out, c.do, c.dlse)) for _ in range(2))
            errors = accuracy.Expected.of(c.p, c.t, c.do, c.dlse).judge(accuracy.tensors(out, None) | one)
            wrong = [str(e) for e in errors if not e.ok]
            summed = backend.backward_config(c.p).keys.summed
            wrong += [
                f"other bits of {n}" for n in one if not torch.equal(one[n], two[n]) and not (summed and n == "dq")
            ]
            emit(part="check", case=label, state="wrong" if wrong else "ok", detail="; ".join(wrong))
        except Exception as error:
            emit(part="check", case=label, state="error", detail=traceback.format_exc()[-600:])
            if "CUDA" in str(error):
                sys.exit("nothing works in this process any more")


def time_worker(d: str) -> None:
    """Milliseconds of each feature's forward and backward."""
    for name in PREDICTED:
        c = made(name, LONG, int(d), DEVICE)
        plain = made("", LONG, int(d), DEVICE, causal=name in ("documents", "alibi"))
        rows = {"hopper": (Hopper(), c), "triton": (Triton(), c), "plain": (Hopper(backward=two_passes(plain)), plain)}
        forward, backward = {}, {}
        for label, (backend, x) in rows.items():
            out = backend.forward(x.p, x.t)
            forward[label] = lambda b=backend, x=x: b.forward(x.p, x.t)
            backward[label] = lambda b=backend, x=x, out=out: b.backward(x.p, x.t, out, x.do, x.dlse)
        emit(part="time", case=f"{name}-{d} forward", ms=in_turns(forward, DEVICE))
        emit(part="time", case=f"{name}-{d} backward", ms=in_turns(backward, DEVICE), predicted=PREDICTED[name])


WORKERS = {"check": check_worker, "time": time_worker}


def main() -> int:
    if "--build" in sys.argv:
        return build()
    results, parts = begin(WORKERS, "check,time", "gpu_hopper_features")
    jobs = [f"{part}:{DIMS[0]}" for part in ("check", "time") if part in parts]
    for job, rows, end in processes(results, jobs, LIMIT, 1, script=__file__):
        done = {row["case"]: results.add(row) for row in rows}
        bad = [row for row in done.values() if row.get("state", "ok") != "ok"]
        tell(results, job, list(done.values()), bad, end)
    return 0


def tell(results: Results, job: str, rows: list[dict], bad: list[dict], end: str) -> None:
    results.say(f"{job}: {len(rows) - len(bad)} of {len(rows)} right; {end[:400]}")
    for row in bad[:12]:
        results.say(f"    {row['case']}: {row['state']} {str(row.get('detail'))[-300:]}")
    for row in rows:
        if "ms" in row:
            ms = row["ms"]
            listed = "  ".join(f"{k} {v:.3f}" for k, v in ms.items())
            results.say(f"{row['case']:24} ms: {listed}  over triton {ms['triton'] / ms['hopper']:.2f}")


if __name__ == "__main__":
    sys.exit(main())
