"""The Hopper backward on one H200: is every kernel right there, and how it stands to cuDNN, FlashAttention-2 and Triton.

    PYTHONPATH=src:. python3 bench/gpu_hopper_backward.py --out DIR [--parts check,time,..] [--minutes 8.5]

As ``bench/gpu_hopper.py`` in all else, and after the same ``make kernels-hopper CANDIDATES=1``. Gradients are judged from the reference's
output, so that a wrong forward does not hide a right backward; a kernel that must repeat is run twice. Lines go to
DIR/gpu_hopper_backward.jsonl; the table that is printed last has each speed beside PREDICTED.
"""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from statistics import geometric_mean

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import tilewise as tw
from bench import cases
from bench.gpu_hopper import (
    DEVICE,
    DONE,
    TIME_LIMIT,
    Kind,
    Results,
    begin,
    bits_of,
    check_calls,
    check_some,
    emit,
    processes,
    small_parts,
)
from bench.measure import host_microseconds, in_turns
from tilewise import accuracy
from tilewise.backends.base import Grads, Output
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward.config import Backward, candidates, shipped, table_of
from tilewise.backends.hopper.host import library
from tilewise.backends.triton import Triton
from tilewise.reference import Reference
from tilewise.testing import Call, call, of_case, poisoned

# TFLOP/s by a resource model of the chip, before anything ran (docs/measured.md): N 512, 1024, .. 16384.
PREDICTED = {
    (64, "full"): (323, 408, 470, 509, 532, 544),
    (64, "causal"): (200, 303, 394, 465, 511, 539),
    (128, "full"): (370, 454, 512, 547, 566, 577),
    (128, "causal"): (244, 346, 439, 506, 549, 573),
    (256, "full"): (361, 455, 514, 550, 570, 580),
    (256, "causal"): (260, 343, 451, 516, 556, 579),
}
PROBES = (
    "backward_bf16_d128_full",
    "backward_bf16_d64_upper",
    "backward_bf16_d256_band",
    "backward_bf16_d128_upper_packed",
)


def config_named(name: str) -> Backward:
    return next(x for x in shipped() + candidates() if x.name == name)


def built() -> list[str]:
    return [x.name for x in shipped() + candidates() if x.name in library.index()]


# -- Right? --------------------------------------------------------------------------------------------------------


def outputs(c: Call) -> Output:
    """The reference's, rounded as a forward rounds them."""
    out = Reference().forward(c.p, c.t)
    return Output(out.o.to(c.p.dtype).contiguous(), out.lse.float())


def check_worker(names: str) -> None:
    """Kernels, comma-separated; what a call's gradients are judged by is made once for all kernels of a kind."""
    for _, kin in groupby(map(config_named, names.split(",")), Kind.of):
        configs = list(kin)
        for label, c in check_calls(configs[0]):
            out, expected = outputs(c), judge_of(c)
            for config in configs:
                row = {"part": "check", "kernel": config.name, "case": label}
                emit(**row, state="begun")  # a hang is known by its case
                state, detail, errors = tried(c, out, expected, config)
                emit(**row, state=state, detail=detail, errors={e.tensor: [e.rms, e.rms_eager] for e in errors})
                if "CUDA" in detail:
                    sys.exit("nothing works in this process any more")
        for config in configs:
            emit(part="check", kernel=config.name, case=DONE, state="ok", bits=bits_of(config.name))


def judge_of(c: Call) -> accuracy.Expected:
    return accuracy.Expected.of(c.p, c.t, c.do, c.dlse)


def tried(c: Call, out: Output, expected: accuracy.Expected, config: Backward) -> tuple[str, str, list[accuracy.Error]]:
    """The error rule for every gradient, NaN left of a poisoned output, the bits of a second run; and the errors."""
    backend = Hopper(backward=config)
    reasons = backend.unsupported(c.p)
    if reasons:
        return "refused", "; ".join(reasons), []
    try:
        with poisoned():
            runs = [backend.backward(c.p, c.t, out, c.do, c.dlse) for _ in range(2)]
        torch.cuda.synchronize()
        return judged(expected, out, runs, config)
    except Exception:
        return "error", traceback.format_exc()[-1200:], []


def judged(
    expected: accuracy.Expected, out: Output, runs: list[Grads], config: Backward
) -> tuple[str, str, list[accuracy.Error]]:
    one, two = (named(out, grads) for grads in runs)
    errors = expected.judge(one)
    wrong = [f"{e}; {_where(one[e.tensor], expected.oracle[e.tensor])}" for e in errors if not e.ok]
    if wrong:
        return "wrong", "; ".join(wrong), errors
    exact = [n for n in one if n != "dq" or config.keys.ordered or not config.keys.summed]
    other = [n for n in exact if not torch.equal(one[n], two[n])]
    return ("wrong", f"a second run gave other bits of {', '.join(other)}", errors) if other else ("ok", "", errors)


def named(out: Output, grads: Grads) -> dict[str, Tensor]:
    return {n: x for n, x in accuracy.tensors(out, grads).items() if n.startswith("d")}


def _where(x: Tensor, oracle: Tensor) -> str:
    """Which elements are far off first, and how many: whole tiles, a warp's rows and single columns look different."""
    bad = ((x.float() - oracle.float()).abs() > 0.05 * oracle.float().abs().max()) | x.isnan()
    return f"{bad.sum().item()} of {bad.numel()} far off, the first at {bad.nonzero()[:3].tolist()}"


def check(results: Results) -> set[str]:
    right = check_some(results, [config_named(name) for name in built()], __file__)
    results.say(f"check: {len(right)} of {len(built())} kernels right")
    return right


# -- How fast? -----------------------------------------------------------------------------------------------------


def through_sdpa(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, backend: SDPBackend
) -> Callable[[], object]:
    """The backward of torch's attention by one of its backends."""
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(o, (q, k, v), do.transpose(1, 2), retain_graph=True)


def time_worker(head_dim: str, right: str) -> None:
    """One head dim: every kernel that is right beside its peers, on the rows of the benchmark."""
    d, right = int(head_dim), set(right.split(","))
    for n in (4096, 16384, 512, 2048, 1024, 8192):  # what decides first
        for mask in (None, "causal"):
            case = cases.named(f"h200-d{d}-n{n}-{mask or 'full'}")
            x = cases.draw(case, DEVICE)
            c = call(*(t.detach() for t in (x.q, x.k, x.v)), causal=mask == "causal")
            triton = Triton()
            out = triton.forward(c.p, c.t)
            peers = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
            calls = {}
            for name, backend in peers.items():
                try:
                    calls[name] = through_sdpa(c.t.q, c.t.k, c.t.v, c.do, mask == "causal", backend)
                    calls[name]()
                except RuntimeError as error:  # FlashAttention-2 ends below some head dim
                    calls.pop(name, None)
                    emit(part="time", case=case.name, refused=name, detail=str(error)[:200])
            backends = {"triton": triton} | {
                n: Hopper(backward=config_named(n)) for n in kernels_of(d, mask) if n in right
            }
            for name, backend in backends.items():
                calls[name] = lambda c=c, out=out, backend=backend: backend.backward(c.p, c.t, out, c.do, c.dlse)
            times = in_turns(calls, DEVICE)
            rates = {name: case.flops("backward") / ms / 1e9 for name, ms in times.items()}
            chosen = Hopper().backward_config(c.p).name
            emit(part="time", case=case.name, d=d, n=n, mask=mask or "full", chosen=chosen, ms=times, tflops=rates)


def kernels_of(d: int, mask: str | None) -> list[str]:
    """In bf16 of one head dim, those that sum dQ first."""
    form = "upper" if mask else "full"
    wanted = [
        x
        for x in shipped() + candidates()
        if (x.keys.width, x.keys.width_v, x.form, x.dtype, x.softcap, x.packed) == (d, d, form, "bf16", False, False)
    ]
    return [x.name for x in sorted(wanted, key=lambda x: not x.keys.summed)]


def timing(results: Results, right: set[str]) -> None:
    ratios = []
    jobs = [f"time:{d}:{','.join(sorted(right))}" for d in (128, 64, 256)]
    for job, rows, end in processes(results, jobs, TIME_LIMIT, 1, script=__file__):
        for row in (results.add(row) for row in rows):
            if "tflops" not in row:
                continue
            rates, ours = row["tflops"], row["chosen"]
            predicted = PREDICTED[row["d"], row["mask"]][(row["n"] // 512).bit_length() - 1]
            if ours in rates and "cudnn" in rates:
                ratios.append(rates[ours] / rates["cudnn"])
            listed = "  ".join(f"{k.removeprefix('backward_bf16_')} {v:.0f}" for k, v in rates.items())
            results.say(f"{row['case']:24} predicted {predicted} | {listed}")
        if end:
            results.say(f"{job[:8]}: {end[:500]}")
    if ratios:
        results.say(
            f"time: chosen kernels over cuDNN, geometric mean of {len(ratios)} rows: {geometric_mean(ratios):.3f}"
        )


def packed_worker(d: str) -> None:
    """Sequences that differ, the same ones that are equally long as one batch and packed: each kernel beside Triton."""
    equal = cases.named(f"h200-d{d}-n2048-causal")
    dense = of_case(equal, DEVICE)
    q, k, v, do = (x.flatten(0, 1) for x in (dense.t.q, dense.t.k, dense.t.v, dense.do))
    cu = torch.arange(0, len(q) + 1, 2048, device=DEVICE, dtype=torch.int32)
    packed = replace(call(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True), do=do)
    calls = {f"{equal.name} packed": packed, equal.name: dense}
    if d == "128":
        calls["cuda-packed-16k"] = of_case(cases.named("cuda-packed-16k"), DEVICE)
    for name, c in calls.items():
        out = Triton().forward(c.p, c.t)
        kinds = [Hopper(), *(Hopper(backward=x) for x in (two_passes(c),)), Triton()]
        backward = lambda b, c=c, out=out: lambda: b.backward(c.p, c.t, out, c.do, c.dlse)  # noqa: E731
        times = in_turns(dict(zip(("chosen", "two passes", "triton"), map(backward, kinds), strict=True)), DEVICE)
        emit(part="packed", case=name, ms=times)


def two_passes(c: Call) -> Backward:
    """What is chosen, with a pass of its own for dQ."""
    x = Hopper().backward_config(c.p)
    keys, queries = table_of(x.form, x.softcap, x.traced, x.dropout)[x.keys.width, x.keys.width_v]
    return replace(x, keys=keys, queries=queries)


# -- Where the time goes -------------------------------------------------------------------------------------------


def profile_worker(head_dim: str, right: str) -> None:
    """Microseconds of each kernel of a backward, at one length."""
    d, right, steps = int(head_dim), set(right.split(",")), 5
    for mask in (None, "causal"):
        case = cases.named(f"h200-d{d}-n4096-{mask or 'full'}")
        x = cases.draw(case, DEVICE)
        c = call(*(t.detach() for t in (x.q, x.k, x.v)), causal=mask == "causal")
        out = Triton().forward(c.p, c.t)
        for name in [n for n in kernels_of(d, mask) if n in right]:
            run = partial(Hopper(backward=config_named(name)).backward, c.p, c.t, out, c.do, c.dlse)
            run()
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                for _ in range(steps):
                    run()
                torch.cuda.synchronize()
            spent = {e.key[:90]: round(e.device_time_total / steps, 1) for e in found.key_averages()}
            emit(part="profile", case=case.name, kernel=name, us={k: v for k, v in spent.items() if v > 0.5})


def host_worker() -> None:
    """Microseconds of the host's time for a backward, and for a whole call with gradients, beside torch's."""
    q, k, v = (torch.randn(1, 64, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    c, backend = call(q.detach(), k.detach(), v.detach(), causal=True), Hopper()
    out = backend.forward(c.p, c.t)

    def both(attention: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(), (q, k, v), c.do)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    for name, fn in {
        "backend.backward": lambda: backend.backward(c.p, c.t, out, c.do, c.dlse),
        "tw.attention and gradients": both(lambda: tw.attention(q, k, v, causal=True, backend="hopper")),
        "triton and gradients": both(lambda: tw.attention(q, k, v, causal=True, backend="triton")),
        "sdpa and gradients": both(sdpa),
    }.items():
        emit(part="host", call=name, us=host_microseconds(fn))


def autograd_worker() -> None:
    """Milliseconds of a public call and its gradients through autograd, and of its kernels alone."""
    backend = Hopper()
    for case in (cases.named(f"h200-d{d}-n{n}-full") for n in (1024, 4096, 16384) for d in (64, 128, 256)):
        x = cases.draw(case, DEVICE)
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        c = call(*(t.detach() for t in leaves))
        c = replace(c, do=x.do, dlse=torch.zeros_like(c.dlse))

        def through_autograd(leaves=leaves, do=x.do) -> object:
            return torch.autograd.grad(tw.attention(*leaves, backend="hopper"), leaves, do)

        def kernels(c=c) -> object:
            return backend.backward(c.p, c.t, backend.forward(c.p, c.t), c.do, c.dlse)

        times = in_turns({"autograd": through_autograd, "kernels": kernels, "kernels again": kernels}, DEVICE)
        emit(part="autograd", case=case.name, ms=times, more=round(times["autograd"] / times["kernels"] - 1, 4))


# -- Many launches -------------------------------------------------------------------------------------------------


def stress_worker(seconds: str) -> None:
    """Random shapes on two streams until the time is over: no hang, and of what must repeat the same bits."""
    import random

    chance, backend, count = random.Random(7), Hopper(), 0
    streams, end = [torch.cuda.Stream() for _ in range(2)], time.monotonic() + float(seconds)
    while time.monotonic() < end:
        d, group, heads = chance.choice((64, 96, 128, 192, 256)), chance.choice((1, 2, 4)), chance.randrange(1, 5)
        nq, nk = (chance.choice((1, 17, 128, chance.randrange(1, 2000))) for _ in range(2))
        sizes = (nq, heads * group), (nk, heads), (nk, heads)
        q, k, v = (torch.randn(1, n, h, d, device=DEVICE, dtype=torch.bfloat16) for n, h in sizes)
        c = call(q, k, v, causal=chance.random() < 0.5, deterministic=True)
        c = replace(c, dlse=torch.zeros_like(c.dlse))
        out, found = Triton().forward(c.p, c.t), []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found += [backend.backward(c.p, c.t, out, c.do, c.dlse) for _ in range(4)]
        torch.cuda.synchronize()
        count += len(found)
        same = all(torch.equal(getattr(found[0], n), getattr(x, n)) for x in found[1:] for n in ("dq", "dk", "dv"))
        if not same:
            emit(part="stress", launches=count, wrong=str((tuple(q.shape), tuple(k.shape), str(c.p.spec))))
    emit(part="stress", launches=count)


def memcheck_worker(name: str) -> None:
    """A few small calls, for compute-sanitizer to look at."""
    config = config_named(name)
    for label, c in list(check_calls(config))[:3]:
        Hopper(backward=config).backward(c.p, c.t, outputs(c), c.do, c.dlse)
        torch.cuda.synchronize()
        emit(part="memcheck", kernel=name, case=label)


WORKERS = {
    "check": check_worker,
    "time": time_worker,
    "packed": packed_worker,
    "profile": profile_worker,
    "host": host_worker,
    "autograd": autograd_worker,
    "stress": stress_worker,
    "memcheck": memcheck_worker,
}


def main() -> None:
    results, parts = begin(WORKERS, ",".join(WORKERS), "gpu_hopper_backward")
    right = check(results) if "check" in parts else set(built())
    if "time" in parts:
        timing(results, right)
    for part, jobs in {
        "profile": [f"profile:{d}:{','.join(sorted(right))}" for d in (128, 64, 256)],
        "packed": [f"packed:{d}" for d in (128, 64)],
        "host": ["host"],
        "autograd": ["autograd"],
        "stress": [f"stress:{min(45.0, results.left - 25):.0f}"],
        "memcheck": [f"memcheck:{n}" for n in sorted(right) if n.startswith(PROBES)],
    }.items():
        if part in parts and results.left > 30:
            small_parts(results, jobs, results.left, __file__)


if __name__ == "__main__":
    sys.exit(main())
