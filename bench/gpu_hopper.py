"""The Hopper backend on one H200: is every kernel right there, which tiles are fastest, and how it stands to cuDNN.

    OMP_NUM_THREADS=1 PYTHONPATH=src:. python3 bench/gpu_hopper.py --out DIR [--parts check,contract,..] [--minutes 8.5]

Before, on a machine that may lack a GPU: ``make kernels-hopper CANDIDATES=1``. What it leaves in src/tilewise/backends/hopper,
kernels/ and libtilewise_launcher.so, is ignored by git; beside torch nothing else is needed.

Kernels are checked in a process with a time limit, one after the other, and what a process left undone when it ended goes to
another, so that a kernel which hangs loses its own cases alone; only kernels whose cases are all right are timed. One whose
very bits were right before (PROVEN, to which ``--prove RESULTS.jsonl`` adds) is not checked again, unless ``--again`` says so: builds
of one source give the same bytes. Lines go to DIR/gpu_hopper.jsonl as they come; a short table is printed last, each speed
beside PREDICTED.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import torch
import torch.nn.functional as F

import tilewise as tw
from bench import cases, compare, peers, records, run
from bench import check as checks
from bench.measure import host_microseconds, in_turns
from tilewise import accuracy
from tilewise.backends.base import Output, empty_output
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import Config, candidates, shipped
from tilewise.backends.hopper.host import library
from tilewise.backends.hopper.host.forward_call import Plan
from tilewise.backends.triton import Triton
from tilewise.problem import TensorFacts
from tilewise.reference import Reference
from tilewise.testing import Call, call, of_case, poisoned

DEVICE = "cuda"
CHECK_LIMIT, TIME_LIMIT = 400, 100  # seconds of one process
# TFLOP/s of the chosen tiles by a resource model of the chip, before anything ran (docs/measured.md): N 512, 1024, .. 16384.
PREDICTED = {
    (64, "full"): (406, 448, 517, 532, 562, 566),
    (64, "causal"): (247, 314, 430, 479, 532, 550),
    (128, "full"): (508, 586, 637, 667, 697, 706),
    (128, "causal"): (403, 510, 589, 638, 668, 683),
    (256, "full"): (591, 686, 720, 738, 755, 764),
    (256, "causal"): (418, 550, 645, 707, 742, 765),
}
# What a worker of a part is run under.
PREFIX = {
    tool: ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "3")
    for tool in ("memcheck", "racecheck")
}
DONE = "all"  # the case of the row that says that a kernel has been through all others
RESERVE = 170  # seconds that checking leaves for what comes after
PROVEN = Path(tw.__file__).parent / "backends" / "hopper" / "proven.txt"  # bits, how many calls were right, kernel


class Results:
    def __init__(self, folder: Path, minutes: float, name: str, again: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        self.again = again
        self.folder, self.end = folder, time.monotonic() + 60 * minutes
        self.file = (folder / f"{name}.jsonl").open("a", encoding="utf-8")

    def add(self, row: dict) -> dict:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        return row

    def say(self, line: str) -> None:
        self.add({"part": "said", "line": line})
        print(line, flush=True)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def processes(
    results: Results, jobs: list[str], limit: float, together: int, reserve: float = 0, script: str = __file__
) -> Iterator[tuple[str, list[dict], str]]:
    """``(job, rows, how it ended)`` of each job as it ends; rows that it printed before a time-out or a crash count.

    ``reserve``: seconds that are left for what comes after. ``script``: what runs a job.
    """

    def one(job: str) -> tuple[str, list[dict], str]:
        seconds = min(limit, results.left - reserve)
        if seconds < 5:
            return job, [], "out of time"
        path = results.folder / f"worker-{abs(hash(job)) % 10**8}.txt"
        with path.open("w", encoding="utf-8") as file:
            command = [sys.executable, script, "--out", str(results.folder), "--worker", job]
            process = subprocess.Popen([*PREFIX.get(job.partition(":")[0], ()), *command], stdout=file, stderr=file)
            try:
                code = process.wait(timeout=seconds)
                end = "" if code == 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                process.kill()
                end = f"no answer in {seconds:.0f} s"
        text = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return job, rows, end and f"{end}: {text[-900:]}"

    with ThreadPoolExecutor(together) as pool:
        yield from pool.map(one, jobs)


def emit(**row: object) -> None:
    print(json.dumps(row), flush=True)


# -- Right? --------------------------------------------------------------------------------------------------------

FORM_OPTIONS = {
    "full": [{}, {"mask": tw.key_range(37, 170)}],
    "upper": [{"causal": True}, {"mask": tw.window(None, 5)}, {"mask": tw.causal() & tw.key_lengths(150)}],
    "band": [{"mask": tw.window(100, 0)}, {"mask": tw.window(70, 33)}, {"mask": tw.window(20)}],
    "rows": [{"mask": "documents"}, {"mask": "lengths"}, {"mask": "prefix"}],
}
SHAPES = [  # batch, seqlen_q, seqlen_k, heads_q, heads_k: odd lengths, empty rows, more CTAs than tiles and fewer
    (1, 1, 1, 1, 1),
    (2, 63, 129, 2, 1),
    (1, 1000, 1000, 2, 2),
    (2, 300, 700, 4, 2),
    (1, 515, 200, 3, 1),
    (3, 129, 1, 2, 2),
    (1, 1, 3000, 8, 2),
    (4, 192, 640, 40, 8),
    (2, 1, 3000, 16, 2),  # few queries of many heads
    (1, 5, 700, 6, 2),
    (1, 37, 130, 12, 1),
    (1, 1, 20000, 40, 1),
    (1, 1, 20000, 8, 1),  # many keys, for chunks
    (1, 300, 6000, 2, 2),
    (1, 2000, 4096, 1, 1),
]
PACKED = [  # lengths of q and k; rows past the last sequence
    ([(70, 300), (1, 5), (0, 9), (130, 0), (64, 64)], 37),
    ([(1000, 1000), (33, 2000), (515, 200)], 0),
    ([(3, 11)] * 9, 3),
]


class Sizes(NamedTuple):
    """Of the calls that kernels are checked by, and where these are made."""

    shapes: Sequence[tuple[int, ...]] = SHAPES
    packed: Sequence[tuple] = PACKED
    device: str = DEVICE


ON_GPU = Sizes()


class Kind(NamedTuple):
    """What kernels that take the same calls have in common."""

    dims: tuple[int, int]
    dtype: str
    form: str
    softcap: bool
    packed: bool

    @classmethod
    def of(cls, config: Config | Backward) -> "Kind":
        t = config.keys if isinstance(config, Backward) else config.tiles
        return cls((t.width, t.width_v), config.dtype, config.form, config.softcap, config.packed)


def options_of(form: str, shape: tuple[int, ...], device: str = DEVICE) -> list[dict]:
    """Of a form; masks of tensors are made for the shape."""
    batch, _, nk = shape[:3]
    spread = torch.linspace(0, nk, batch, device=device).int()
    rows = {
        "documents": lambda: tw.documents(torch.arange(nk, device=device).expand(batch, -1) // 77),
        "lengths": lambda: tw.key_lengths(spread),
        "prefix": lambda: tw.prefix(spread),
    }
    return [{k: rows[v]() if isinstance(v, str) else v for k, v in options.items()} for options in FORM_OPTIONS[form]]


def check_calls(config: Config | Backward, sizes: Sizes = ON_GPU) -> Iterator[tuple[str, Call]]:
    """Named calls of a kernel's kind: its widths, then smaller ones, strides that need a copy, sinks, large scores."""
    kind = Kind.of(config)
    width, width_v = kind.dims
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind.dtype]
    score = {"score": tw.softcap(3.0)} if kind.softcap else {}
    device = sizes.device
    generator = torch.Generator(device).manual_seed(1)
    new = lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype)  # noqa: E731

    def made(shape, d, dv, **options):
        b, nq, nk, hq, hk = shape
        return call(new(b, nq, hq, d), new(b, nk, hk, d), new(b, nk, hk, dv), **score, **options)

    if kind.packed:
        yield from packed_calls(kind, new, score, sizes)
        return
    for n, shape in enumerate(sizes.shapes):
        for m, options in enumerate(options_of(kind.form, shape, device)):
            if m == n % len(FORM_OPTIONS[kind.form]) or n in (2, 3):
                yield f"{shape}-{m}", made(shape, width, width_v, **options)
    first = lambda *shape: options_of(kind.form, shape, device)[0]  # noqa: E731
    yield "narrow", made((1, 200, 333, 2, 1), width - 24, max(8, width_v - 40), **first(1, 200, 333))
    sink = torch.randn(4, device=device)
    yield "sink", made((2, 200, 333, 4, 2), width, width_v, sink=sink, **first(2, 200, 333))
    yield "large", made((1, 200, 900, 2, 2), width, width_v, softmax_scale=4.0, **first(1, 200, 900))
    lengths = ((200, width), (333, width), (333, width_v))
    q, k, v = (new(1, 2, n, d).transpose(1, 2) for n, d in lengths)
    yield "strided", call(q, k, v, **score, **first(1, 200, 333))
    odd = [torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]] for x in (q, k, v)]
    yield "unaligned", call(*odd, **score, **first(1, 200, 333))


def packed_calls(kind: Kind, new: Callable, score: dict, sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Sequences beside others of NaN, and rows of NaN past the last."""
    (width, width_v), device = kind.dims, sizes.device
    for n, (lengths, rest) in enumerate(sizes.packed):
        cu_q, cu_k = (torch.tensor([0, *x], device=device).cumsum(0).int() for x in zip(*lengths, strict=True))
        q, k, v = (
            new(int(cu[-1]) + rest, heads, d)
            for cu, heads, d in ((cu_q, 4, width), (cu_k, 2, width), (cu_k, 2, width_v))
        )
        q[int(cu_q[-1]) :], k[int(cu_k[-1]) :], v[int(cu_k[-1]) :] = (torch.nan,) * 3
        for m, options in enumerate(FORM_OPTIONS[kind.form]):
            sink = torch.randn(4, device=device) if m % 2 else None
            c = call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sink=sink, **score, **options)
            c.do[int(cu_q[-1]) :] = torch.nan
            yield f"packed-{n}-{m}", c


def forward_only(c: Call) -> Call:
    return replace(c, p=replace(c.p, spec=replace(c.p.spec, needs_grad=False)))


def with_constant_scores(c: Call) -> Call:
    """Where tensors that a score reads want no gradient."""
    spec = c.p.spec
    kept = tuple(n for n in spec.grad_slots if n == spec.sink_slot)
    return replace(c, p=replace(c.p, spec=replace(spec, grad_slots=kept)))


def config_named(name: str) -> Config:
    return next(c for c in shipped() + candidates() if c.name == name)


def check_worker(names: str) -> None:
    """Kernels, comma-separated: of each and each call of its kind the error rule, NaN left of a poisoned output, a second
    run's bits."""
    for _, kin in groupby(map(config_named, names.split(",")), Kind.of):
        configs = list(kin)
        for label, c in check_calls(configs[0]):
            c = forward_only(c)
            expected = accuracy.Expected.of(c.p, c.t)
            for config in configs:
                check_one(config, label, c, expected)
        for config in configs:
            emit(part="check", kernel=config.name, case=DONE, state="ok", bits=bits_of(config.name))


def contract_calls(device: str) -> Iterator[tuple[str, Call]]:
    """The contract's cases in 16 bits that the backend does not refuse; without gradients of a score's tensors, or of anything, where it
    refuses those."""
    backend = Hopper()
    for case in cases.tagged("contract"):
        if case.dtype == "float64":
            continue
        c = of_case(replace(case, dtype="bfloat16") if case.dtype == "float32" else case, device)
        for x in (c, with_constant_scores(c), forward_only(c)):
            if not backend.refused(x.p):
                yield case.name, x
                break


def contract_worker() -> None:
    backend = Hopper()
    for label, c in contract_calls(DEVICE):
        row = {"part": "contract", "case": label, "gradients": c.p.spec.needs_grad}
        emit(**row, state="begun")
        try:
            given = (c.do, c.dlse) if c.p.spec.needs_grad else ()
            with poisoned():
                errors = accuracy.check(backend, c.p, c.t, *given)
            wrong = [str(e) for e in errors if not e.ok]
            emit(**row, state="wrong" if wrong else "ok", detail="; ".join(wrong))
        except Exception:
            emit(**row, state="error", detail=traceback.format_exc()[-800:])


def contract(results: Results) -> None:
    for _, rows, end in processes(results, ["contract"], CHECK_LIMIT, 1):
        done = {row["case"]: results.add(row) for row in rows}
        bad = [row for row in done.values() if row["state"] != "ok"]
        gradients = sum(row["gradients"] for row in done.values())
        results.say(f"contract: {len(done) - len(bad)} of {len(done)} right, {gradients} with gradients; {end[:400]}")
        for row in bad[:12]:
            results.say(f"    {row['case']}: {row['state']} {str(row.get('detail'))[-300:]}")


def check_one(config: Config, label: str, c: Call, expected: accuracy.Expected) -> None:
    row = {"part": "check", "kernel": config.name, "case": label}
    emit(**row, state="begun")  # a hang is known by its case
    backend = Hopper(config)
    try:
        reasons = backend.unsupported(c.p)
        if reasons:
            emit(**row, state="refused", detail=reasons)
            return
        with poisoned():
            out = backend.forward(c.p, c.t)
        torch.cuda.synchronize()
        state, detail = judged(c, out, backend, expected)
        emit(**row, state=state, detail=detail)
    except Exception as error:
        emit(**row, state="error", detail=traceback.format_exc()[-1200:])
        if "CUDA" in str(error):
            raise  # nothing works in this process any more


def judged(c: Call, out: Output, backend: Hopper, expected: accuracy.Expected) -> tuple[str, str]:
    errors = expected.judge(accuracy.tensors(out, None))
    wrong = [str(e) for e in errors if not e.ok]
    if wrong:
        return "wrong", "; ".join([*wrong, _where(c, out)])
    again = backend.forward(c.p, c.t)
    same = torch.equal(out.o, again.o) and torch.equal(out.lse, again.lse)
    return ("ok", "") if same else ("wrong", "a second run gave other bits")


def _where(c: Call, out: Output) -> str:
    """Which rows are wrong first, and how many: whole tiles, a warp's rows and single columns look different."""
    expected = Reference().forward(c.p, c.t).o
    bad = ((out.o.float() - expected.float()).abs() > 0.05 * expected.float().abs().max()) | out.o.isnan()
    first = bad.nonzero()[:4].tolist()
    return f"{bad.sum().item()} of {bad.numel()} elements far off, the first at (b, i, h, d) {first}"


PROBES = (
    "forward_bf16_d128_upper_128", "forward_bf16_d64_full_192", "forward_bf16_d256_band_128",
    "forward_bf16_d128_upper_split", "forward_bf16_d128_full_split_heads8", "forward_bf16_d128_upper_packed",
)  # fmt: skip


def probes() -> list[str]:
    return [next(c.name for c in shipped() if c.name.startswith(probe)) for probe in PROBES]


def check(results: Results) -> set[str]:
    """The kernels of which every case is right; a few first, and if none of those is, no others: time is better spent."""
    built = [c for c in shipped() + candidates() if c.name in library.index()]
    right = check_some(results, [c for c in built if c.name in probes()])
    if right:
        right |= check_some(results, [c for c in built if c.name not in probes()])
    results.say(f"check: {len(right)} of {len(built)} kernels right")
    return right


def bits_of(name: str) -> str:
    """A kernel's file, as a hash."""
    return hashlib.sha256((library.folder() / library.file_name(name)).read_bytes()).hexdigest()[:24]


def proven() -> dict[str, str]:
    """Kernels by their bits."""
    lines = PROVEN.read_text(encoding="utf-8").splitlines() if PROVEN.exists() else []
    return {bits: name for bits, _, name in map(str.split, lines)}


def prove(files: list[Path]) -> None:
    """Adds to PROVEN the kernels that were right in every call of these results."""
    lines = set(PROVEN.read_text(encoding="utf-8").splitlines()) if PROVEN.exists() else set()
    for file in files:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
        calls = {(row["kernel"], row["case"]): row for row in rows if row.get("part") == "check"}
        for (kernel, case), done in calls.items():
            of_kernel = [row["state"] for (name, other), row in calls.items() if name == kernel and other != DONE]
            if case == DONE and "bits" in done and of_kernel and set(of_kernel) == {"ok"}:
                lines.add(f"{done['bits']} {len(of_kernel):3} {kernel}")
    PROVEN.write_text("\n".join(sorted(lines, key=lambda line: line.split()[::-1])) + "\n", encoding="utf-8")
    print(f"{PROVEN}: {len(lines)} kernels")


def check_some(results: Results, configs: list[Config] | list[Backward], script: str = __file__) -> set[str]:
    """The right ones. What a process left undone when it ended goes to another, but for the kernel that it was at.

    One process at a time: several share the GPU by turns. Four did 322 calls in 38 s, one 124 in 13 s, their starts included.
    """
    known = {} if results.again else proven()
    right = {config.name for config in configs if known.get(bits_of(config.name)) == config.name}
    left = [config.name for config in sorted(configs, key=Kind.of) if config.name not in right]
    results.say(f"check: {len(right)} of {len(configs)} kernels have bits that were right before")
    while left and results.left > RESERVE:
        jobs, left = ["check:" + ",".join(left)], []
        for job, rows, end in processes(results, jobs, CHECK_LIMIT, 1, RESERVE, script):
            cases = {(row["kernel"], row["case"]): row for row in rows}
            for row in cases.values():
                results.add(row)
            of_job = job.partition(":")[2].split(",")
            culprit = rows[-1]["kernel"] if rows and end else of_job[0]
            done = [name for name in of_job if (name, DONE) in cases or (end and name == culprit)]
            right |= {name for name in done if told(results, name, cases, end)}
            left += [name for name in of_job if name not in done]
    return right


def told(results: Results, name: str, cases: dict, end: str) -> bool:
    """Whether a kernel is right; says so if it is not."""
    done = [row for (kernel, case), row in cases.items() if kernel == name and case != DONE]
    bad = [row for row in done if row["state"] != "ok"]
    if done and not bad and (name, DONE) in cases:
        return True
    results.say(f"check {name}: {len(done) - len(bad)} of {len(done)} right; {end[:400]}")
    for row in bad[:3]:
        detail = str(row.get("detail", "it ran when the process ended"))[-300:]
        results.say(f"    {row['case']}: {row['state']} {detail}")
    return False


# -- How fast? -----------------------------------------------------------------------------------------------------


def time_worker(head_dim: str, right: str) -> None:
    """One head dim: every kernel that is right beside cuDNN, and a product by cuBLAS, on the rows of the benchmark."""
    d, right = int(head_dim), set(right.split(","))
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    for n in (4096, 16384, 512, 2048, 1024, 8192):  # what decides first
        for mask in (None, "causal"):
            case = cases.named(f"h200-d{d}-n{n}-{mask or 'full'}")
            x = cases.draw(case, DEVICE)
            q, k, v = (t.detach() for t in (x.q, x.k, x.v))
            c = forward_only(call(q, k, v, causal=mask == "causal"))
            chosen = Hopper().config(c.p).name
            backends = {name: Hopper(config_named(name)) for name in kernels_of(d, "upper" if mask else "full")}
            calls = {"cublas": lambda: a @ a, "cudnn": cudnn(q, k, v, mask == "causal")}
            for name in [name for name in backends if name in right]:
                calls[name] = lambda c=c, backend=backends[name]: backend.forward(c.p, c.t)
            times = in_turns(calls, "cuda")
            work = {"cublas": 2 * 8192**3}
            rates = {name: work.get(name, case.flops("forward")) / ms / 1e9 for name, ms in times.items()}
            emit(part="time", case=case.name, d=d, n=n, mask=mask or "full", chosen=chosen, ms=times, tflops=rates)


def kernels_of(d: int, form: str) -> list[str]:
    """Shipped ones and candidates in bf16 of one head dim, without what packed, few and long rows want."""
    about = lambda c: (c.tiles.width, c.tiles.width_v, c.form, c.dtype, c.softcap, c.split, c.packed, c.heads)  # noqa: E731
    return [c.name for c in shipped() + candidates() if about(c) == (d, d, form, "bf16", False, False, False, 1)]


def cudnn(q, k, v, causal: bool) -> Callable[[], object]:
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]

    def run():
        with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal)

    return run


def timing(results: Results, right: set[str]) -> None:
    ratios = []
    for job, rows, end in processes(
        results, [f"time:{d}:{','.join(sorted(right))}" for d in (128, 64, 256)], TIME_LIMIT, 1
    ):
        for row in rows:
            results.add(row)
            ours, rates = row["chosen"], row["tflops"]
            predicted = PREDICTED[row["d"], row["mask"]][(row["n"] // 512).bit_length() - 1]
            if ours in rates:
                ratios.append(rates[ours] / rates["cudnn"])
            rest = sorted(((v, k) for k, v in rates.items() if k.startswith("forward")), reverse=True)
            listed = "  ".join(f"{k.rpartition('_d')[2]} {v:.0f}" for v, k in rest)
            peers = f"cudnn {rates['cudnn']:.0f} cublas {rates['cublas']:.0f}"
            results.say(f"{row['case']:24} {ours.rpartition('_d')[2]} predicted {predicted} {peers} | {listed}")
        if end:
            results.say(f"{job[:8]}: {end[:500]}")
    if ratios:
        results.say(
            f"time: chosen kernels over cuDNN, geometric mean of {len(ratios)} rows: {geometric_mean(ratios):.3f}"
        )


# -- What no grid of squares shows ---------------------------------------------------------------------------------

NAMED = (
    "cuda-one-head-n4096", "cuda-four-heads-n4096", "cuda-decode-32k", "cuda-packed-16k", "h200-d128-n2048-causal",
    "cuda-gqa8-n4096-causal", "h200-d128-n4096-causal", "cuda-window1024-n32768", "cuda-full-n32768",
    "cuda-d96-n4096-full", "cuda-d192-n4096-full", "cuda-fp16-d128-n4096-full", "cuda-fp16-d128-n4096-causal",
)  # fmt: skip


def plain(c: Config) -> Config:
    """The first kernel shipped for the same calls that neither splits keys nor shares tiles."""
    about = lambda x: (x.tiles.width, x.tiles.width_v, x.dtype, x.form, x.softcap, x.packed)  # noqa: E731
    return next(x for x in shipped() if not x.split and x.heads == 1 and about(x) == about(c))


def cases_worker(right: str) -> None:
    """Named cases: what is chosen, the same without splitting keys or sharing tiles, Triton, and cuDNN where it can."""
    right = set(right.split(","))
    for name in NAMED:
        case = cases.named(name)
        c = forward_only(of_case(case, DEVICE))
        chosen = Hopper().config(c.p)
        contestants = {"chosen": chosen, "plain": plain(chosen)}
        backends = {label: Hopper(x) for label, x in contestants.items() if x.name in right}
        calls = {label: lambda c=c, b=b: b.forward(c.p, c.t) for label, b in backends.items()}
        calls["triton"] = lambda c=c: Triton().forward(c.p, c.t)
        if not c.p.packed and case.mask in (None, "causal") and c.p.group == 1:
            calls["cudnn"] = cudnn(c.t.q, c.t.k, c.t.v, case.mask == "causal")
        emit(part="cases", case=name, kernel=chosen.name, ms=in_turns(calls, "cuda"))


def goals_worker(folder: str) -> None:
    """The goals of this backend, but for those of a backward alone: `tilewise bench --check FOLDER/goals.jsonl` judges them.

    Cases whose point is to split keys are timed as graphs: what a call costs the host, elsewhere behind the kernels, would hide them.
    """
    checks.PAIRS_CHECKED["cuda"] = 1 << 24  # every kernel has been checked by itself
    goals = [g for g in compare.load_goals() if g.contestant == "hopper" and g.case and g.direction == "forward"]
    wanted = {name for g in goals for name in (g.case, g.peer_case or g.case)}
    contestants, path = run.pick(["hopper", "cudnn"]), Path(folder) / "goals.jsonl"
    plan = run.Plan(DEVICE, budget=0.2, min_rounds=5, max_rounds=15)
    records.append([run.run_record(plan, contestants)], path)
    for case in (c for c in cases.CASES.values() if c.name in wanted):
        who = [peers.replayed(x) for x in contestants] if "split" in case.tags else contestants
        case = replace(case, backward=False)
        entries = records.append(run.run_case(run.Lineup(case, who), plan), path)
        emit(part="goals", case=case.name, ms={r["contestant"]: r["forward"]["median_ms"] for r in entries if "forward" in r},
             states={r["contestant"]: r["status"] for r in entries})  # fmt: skip
        torch.cuda.empty_cache()


# -- The host, and many launches -----------------------------------------------------------------------------------


def host_worker() -> None:
    """Microseconds of host time of backend.forward and of its parts, and of a whole public call."""
    q = torch.randn(1, 64, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    c, backend = forward_only(call(q, q.clone(), q.clone(), causal=True)), Hopper()
    plan, out, watched = Plan(c.p, backend.config(c.p)), backend.forward(c.p, c.t), q.detach().requires_grad_()
    tensors = (c.t.q, c.t.k, c.t.v, out.o, out.lse, out.lse.as_strided((2,), (1,)))
    for name, fn in {
        "backend.forward": lambda: backend.forward(c.p, c.t),
        "its outputs": lambda: empty_output(c.p, c.t.q, c.t.v),
        "its launch": lambda: plan.launch(tensors, lambda: (*tensors, plan.numbers)),
        "tw.attention": lambda: tw.attention(q, q, q, causal=True, backend="hopper"),
        "tw.attention with gradients": lambda: tw.attention(watched, q, q, causal=True, backend="hopper"),
        "sdpa": lambda: F.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, is_causal=True),
    }.items():
        emit(part="host", call=name, us=host_microseconds(fn))
    graph, o = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        o = backend.forward(c.p, c.t)
    graph.replay()
    torch.cuda.synchronize()
    emit(part="host", call="graph replay equals eager", us=float(torch.equal(o.o, backend.forward(c.p, c.t).o)))


def stress_worker(seconds: str) -> None:
    """Random calls on two streams, LAUNCHES or as many as there is time for: no hang, the same bits every time, and, for one call of
    COMPARED as long as half of the time is left for others, no further from Triton in fp32 than the rule allows, with Triton in 16
    bits for eager attention: its kernels have to be compiled."""
    chance, backend, count, compared, comparing = random.Random(7), Hopper(), 0, 0, 0.0
    streams, began, limit = [torch.cuda.Stream() for _ in range(2)], time.monotonic(), float(seconds)
    while count < LAUNCHES and time.monotonic() < began + limit:
        c = forward_only(random_call(chance))
        if backend.unsupported(c.p):
            continue
        outs = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outs += [backend.forward(c.p, c.t) for _ in range(5)]
        torch.cuda.synchronize()
        count += len(outs)
        bits = [(x.o.view(torch.int16), x.lse.view(torch.int32)) for x in outs]
        differing = sum((x != first).sum() for other in bits[1:] for x, first in zip(other, bits[0], strict=True))
        if differing.item():
            emit(part="stress", launches=count, wrong=c.p.describe(), detail=f"{differing.item()} other bits again")
        if count // len(outs) % COMPARED == 1 and comparing < limit / 2:
            compared, comparing = compared + 1, comparing - time.monotonic()
            for wrong in against_triton(c, outs[0]):
                emit(part="stress", launches=count, wrong=c.p.describe(), detail=wrong)
            comparing += time.monotonic()
    took = time.monotonic() - began
    emit(part="stress", launches=count, compared=compared, seconds=round(took, 1), comparing=round(comparing, 1))


LAUNCHES, COMPARED = 10_000, 40


def random_call(chance: random.Random) -> Call:
    """Of any lengths, groups, head dims and masks of numbers; sometimes a single query, sometimes packed."""
    d, group, heads = chance.choice((64, 96, 128, 192, 256)), chance.choice((1, 2, 4, 8)), chance.randrange(1, 6)
    window = tw.window(chance.randrange(500), chance.randrange(50))
    options = chance.choice(({}, {"causal": True}, {"mask": window}))
    new = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
    length = lambda: chance.choice((0, 1, 17, 128, chance.randrange(1, 1500)))  # noqa: E731
    if chance.random() < 0.3:
        lengths = [(length(), length()) for _ in range(chance.randrange(1, 50))] + [(1, 1)]
        cu_q, cu_k = (torch.tensor([0, *x], device=DEVICE).cumsum(0).int() for x in zip(*lengths, strict=True))
        q, k, v = (new(int(cu[-1]), h, d) for cu, h in ((cu_q, heads * group), (cu_k, heads), (cu_k, heads)))
        return call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    batch, nq = chance.choice((1, 2)), chance.choice((1, 5, 128, chance.randrange(1, 3000)))
    nk = chance.choice((1, 128, chance.randrange(1, 3000), 20000 if nq < 6 else 700))
    return call(*(new(batch, n, h, d) for n, h in ((nq, heads * group), (nk, heads), (nk, heads))), **options)


def against_triton(c: Call, out: Output) -> list[str]:
    """What is wrong with o by the rule: Triton in fp32 is the oracle, in 16 bits what eager attention is to it."""
    exact = replace(c.t, **{name: getattr(c.t, name).float() for name in "qkv"})
    facts = {name: TensorFacts.of(getattr(exact, name)) for name in "qkv"}
    coarse, fine = Triton().forward(c.p, c.t), Triton().forward(replace(c.p, **facts), exact)
    error = accuracy.judge("o", out.o, fine.o, [coarse.o])
    same = torch.equal(out.lse.isinf(), fine.lse.isinf())
    return ([] if error.ok else [str(error)]) + ([] if same else ["other rows see no key"])


def sanitized_worker(name: str) -> None:
    """A few small calls, for compute-sanitizer to look at."""
    config = config_named(name)
    backend = Hopper(config)
    for label, c in islice(check_calls(config), 3):
        c = forward_only(c)
        backend.forward(c.p, c.t)
        torch.cuda.synchronize()
        emit(part="sanitized", kernel=name, case=label)


def small_parts(results: Results, jobs: list[str], limit: float, script: str = __file__) -> None:
    for job, rows, end in processes(results, jobs, limit, 1, script=script):
        for row in rows:
            results.say(json.dumps(results.add(row)))
        if end:
            results.say(f"{job[:80]}: {end[:1000]}")


WORKERS = {
    "check": check_worker,
    "contract": contract_worker,
    "time": time_worker,
    "host": host_worker,
    "cases": cases_worker,
    "goals": goals_worker,
    "stress": stress_worker,
    "memcheck": sanitized_worker,
    "racecheck": sanitized_worker,
}


def begin(workers: dict[str, Callable], parts: str, name: str) -> tuple[Results, list[str]]:
    """Results and parts as the command line has them, the machine noted; as a worker, does its work and ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="a folder for results")
    parser.add_argument("--parts", default=parts)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--again", action="store_true", help="check kernels whose bits were right before, too")
    parser.add_argument("--prove", type=Path, nargs="+", help="no run: remember what was right in these results")
    parser.add_argument("--worker", help="used by the script itself")
    arguments = parser.parse_args()
    if arguments.worker:
        part, *rest = arguments.worker.split(":")
        workers[part](*rest)
        sys.exit()
    if arguments.prove:
        prove(arguments.prove)
        sys.exit()
    results = Results(Path(arguments.out), arguments.minutes, name, arguments.again)
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    results.add({"part": "machine", **machine, "sources": library.source_hash()})
    return results, arguments.parts.split(",")


def main() -> None:
    results, parts = begin(WORKERS, "check,contract,host,time,cases,stress,memcheck", "gpu_hopper")
    right = check(results) if "check" in parts else {c.name for c in shipped() + candidates()}
    if "contract" in parts:
        contract(results)
    if "host" in parts:
        small_parts(results, ["host"], 60)
    if "time" in parts:
        timing(results, right)
    if "cases" in parts and results.left > 60:
        small_parts(results, [f"cases:{','.join(sorted(right))}"], TIME_LIMIT)
    if "goals" in parts:
        small_parts(results, [f"goals:{results.folder}"], results.left)
    if "stress" in parts and results.left > 30:
        small_parts(results, [f"stress:{min(90.0, results.left - 25):.0f}"], results.left)
    for tool in PREFIX:
        if tool in parts and results.left > 30:
            small_parts(results, [f"{tool}:{name}" for name in probes() if name in right], results.left)


if __name__ == "__main__":
    main()
