"""The Triton backend on one GPU: is it right there, which tiles are fastest, and how it stands to PyTorch's attention.

    PYTHONPATH=src:. python3 bench/gpu_triton.py --out DIR [--parts right,host,tiles,goals,sanitize] [--minutes 8.7]

    right     in as many processes as there are cores, as most of the time is compiling: the contract's cases, seeds of
              dropout, every candidate of the tiles, tests/gpu; FlexAttention is compiled ahead for `goals`
    host      microseconds of host time a call, and how many kernels 100 lengths compile
    tiles     times the candidates of backends/triton/config.py kernel by kernel; the fastest go into DIR/cache, which the
              parts below use
    goals     bench/run.py on the cases of bench/goals.toml, peers in the same process, cases that a goal compares in the same rounds
    sanitize  compute-sanitizer, with what is left of the time

Every job is a process with a time limit. A job that dies is started again and goes on after the item it died in, so that no
item costs others more than its own time. Lines go to DIR/gpu_triton.jsonl as they come, `goals`' to DIR/goals.jsonl, which
``tilewise bench --check`` reads; what a job printed is in DIR/logs; a summary is printed last. ``--device cpu`` rehearses
the parts on small cases through Triton's interpreter (TRITON_INTERPRET=1); ``--device short --parts compile,goals --minutes 1``
compiles the goals' kernels beside cases of the contract, and times what the minute leaves room for.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from bench import cases, compare, peers, records, run
from bench.measure import host_microseconds, in_turns
from tilewise import accuracy
from tilewise.backends.triton import Triton
from tilewise.backends.triton.config import CANDIDATES, Config, Tiles, choose, preceded
from tilewise.backends.triton.host import launch, runtime, tuned
from tilewise.backends.triton.host.plan import Plan
from tilewise.testing import call

ROOT = Path(__file__).resolve().parent.parent
PRODUCTS = {"forward": 2, "dkdv": 4, "dk": 3, "dv": 2, "dq": 3}  # of a tile
WRITES = {"o": "forward", "lse": "forward", "dq": "dq", "dk": "dk", "dv": "dv"}  # tensor -> the pass


@dataclass(frozen=True)
class Setting:
    """What runs on a device: names of cases, rows of ``EXTRA``, head dims and length of the tiles, contestants by case."""

    device: str
    contract: tuple[str, ...]
    extra: int
    seeds: int
    head_dims: tuple[int, ...]
    length: int
    goals: dict[str, tuple[str, ...]]
    tests: tuple[str, ...]
    together: int


def _goals() -> dict[str, tuple[str, ...]]:
    """Contestants by case; those that most goals ask for first."""
    squares = [(d, n, mask) for n in (4096, 2048, 16384, 512) for d in (128, 64, 256) for mask in ("full", "causal")]
    found: dict[str, tuple[str, ...]] = {}
    for d, n, mask in squares:
        flex = ("flex",) if n == 4096 and d < 256 else ()
        found[f"h200-d{d}-n{n}-{mask}"] = ("triton", "fa2", "cudnn", "hopper", *flex)
    found["cuda-one-head-n4096"] = ("triton", "unsplit")
    for name in (
        "softcap-30-n4096",
        "window1024-n32768",
        "documents-n32768",
        "alibi-n4096",
        "bias-n4096",
        "bias-16-n4096",
        "sparse90-n16384",
    ):
        found[f"cuda-{name}"] = ("triton", "flex")
    for name in ("full-n32768", "gqa8-n4096-causal", "packed-16k", "decode-32k"):
        found[f"cuda-{name}"] = ("triton",)
    for name in ("d64-n4096-full", "d64-n4096-causal", "d128-n4096-full", "d128-n4096-causal"):
        found[f"cuda-fp32-{name}"] = ("triton", "sdpa")
    return found


def _short_goals() -> dict[str, tuple[str, ...]]:
    """What goals ask for, in the order of what a minute of each tells: FlexAttention, which takes long to compile, last where its
    compiling was seen to take a minute, and not where it has no tiles that fit (bias)."""
    every = _goals() | dict.fromkeys(("cuda-bias-n4096", "cuda-bias-16-n4096"), ("triton",))
    squares = [n for n in every if n.startswith("h200")]
    first = [n for n in squares if "n4096" in n and "d256" not in n]
    names = ("softcap-30-n4096", "bias-n4096", "bias-16-n4096", "one-head-n4096", "window1024-n32768", "full-n32768", "gqa8-n4096-causal",
             "packed-16k", "decode-32k", "alibi-n4096", "documents-n32768")  # fmt: skip
    fp32 = [n for n in every if "fp32" in n]
    order = [*first, *(f"cuda-{n}" for n in names), *fp32, *squares, "cuda-sparse90-n16384"]
    return {n: every[n] for n in order}


ON_GPU = "triton and not agrees_with_the_oracle and not sanitizers_find or inductor or autocast"
SETTINGS = {
    "cuda": Setting(
        device="cuda",
        contract=tuple(case.name for case in cases.tagged("contract")),
        extra=100,
        seeds=40,
        head_dims=(128, 64, 256, 96),
        length=4096,
        goals=_goals(),
        tests=("tests/gpu/test_triton.py", "tests/gpu/test_gpu.py", "-m", "gpu", "-k", ON_GPU),
        together=15,
    ),
    "cpu": Setting(
        device="cpu",
        contract=("contract-gqa-causal", "contract-d513-full"),
        extra=0,
        seeds=1,
        head_dims=(96,),
        length=64,
        goals={"contract-bfloat16-causal": ("triton", "eager", "flex")},
        tests=("tests/test_state.py",),
        together=1,
    ),
}
SETTINGS["short"] = replace(SETTINGS["cuda"], goals=_short_goals(), contract=())
TESTS_TOGETHER = 4


# -- Jobs: processes with a time limit -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A process: this script as the worker ``name`` ("part" or "part:index/count"), or another command."""

    name: str
    limit: float
    command: tuple[str, ...] = ()


@dataclass
class Run:
    """A folder of results, and the time that is left."""

    folder: Path
    minutes: float
    device: str = "cuda"
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def file(self) -> Path:
        return self.folder / "gpu_triton.jsonl"

    @property
    def left(self) -> float:
        return self.started + 60 * self.minutes - time.monotonic()

    def add(self, **row: object) -> None:
        """One line, written at once: many processes append to the file."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self, job: str = "") -> list[dict]:
        """The lines so far, of one job or of all."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in found if not job or row.get("job") == job]

    def all(self, jobs: Iterable[Job], together: int = 1, reserve: float = 0.0) -> None:
        """Runs jobs, so many at a time; ``reserve``: seconds that are left for what comes after."""
        with ThreadPoolExecutor(together) as pool:
            list(pool.map(partial(self._until_done, reserve=reserve), jobs))

    def _until_done(self, job: Job, reserve: float) -> None:
        """Again and again while it dies, but in other items each time."""
        end, seen = time.monotonic() + min(job.limit, self.left - reserve), -1
        while True:
            how = self._once(job, end)
            self.add(part="job", job=f"job {job.name}", state="ended", detail=how, left=round(self.left))
            begun = len(self.rows(job.name))
            if job.command or how in ("", "out of time") or begun == seen or time.monotonic() > end:
                return
            seen = begun

    def _once(self, job: Job, end: float) -> str:
        """How it ended; empty: well."""
        seconds = end - time.monotonic()
        if seconds < 3:
            return "out of time"
        log = self.folder / "logs" / f"{job.name.replace(':', '-').replace('/', '-')}.txt"
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "TILEWISE_CACHE": str((self.folder / "cache").resolve())}
        own = (__file__, "--out", str(self.folder), "--device", self.device, "--worker", job.name)
        with log.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, *(job.command or own)],
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env=env,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGKILL)  # its children too
                process.wait()
        if code == 0:
            return ""
        said = log.read_text(encoding="utf-8", errors="replace")[-600:]
        return f"no end in {seconds:.0f} s: {said}" if code is None else f"exit code {code}: {said}"


def innermost(error: BaseException) -> str:
    """The last words of the first cause: Triton wraps a compiler's error once per function."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[-600:]


@dataclass
class Worker:
    """A process that works through items and says of each that it began, and how it ended."""

    run: Run
    job: str

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.run.device]

    @property
    def part(self) -> str:
        return self.job.partition(":")[0]

    def share(self, items: list) -> list:
        """Of ``part:index/count``."""
        index, _, count = self.job.partition(":")[2].partition("/")
        return items[int(index) :: int(count)] if count else items

    def emit(self, **row: object) -> None:
        self.run.add(part=self.part, job=self.job, **row)

    def each(self, items: dict[str, Callable[[], dict]]) -> None:
        """Those that no earlier process of this job began. A GPU that an error left unusable ends the process."""
        begun = {row["item"] for row in self.run.rows(self.job) if "item" in row}
        for name, work in items.items():
            if name in begun:
                continue
            self.emit(item=name, state="begun")
            started = time.monotonic()
            try:
                row = work()
            except Exception as error:
                row = {"state": "error", "detail": innermost(error)}
            self.emit(item=name, seconds=round(time.monotonic() - started, 2), **row)
            if row["state"] == "error" and self.setting.device == "cuda":
                torch.cuda.synchronize()


# -- Right? --------------------------------------------------------------------------------------------------------

EXTRA = [
    ("bf16-n1000-d64", (2, 1000, 1000, 4, 2, 64, 64), "bfloat16", "causal", None),
    ("bf16-n1000-d128", (1, 1000, 1000, 4, 4, 128, 128), "bfloat16", "causal", None),
    ("fp16-d256", (1, 515, 700, 2, 2, 256, 256), "float16", "causal", None),
    ("bf16-d512", (1, 200, 300, 2, 2, 512, 512), "bfloat16", "causal", None),
    ("bf16-d72", (1, 515, 515, 2, 2, 72, 72), "bfloat16", "causal", None),
    ("bf16-d80", (1, 515, 515, 2, 2, 80, 80), "bfloat16", "causal", None),
    ("bf16-d96", (2, 515, 600, 4, 2, 96, 96), "bfloat16", "causal", None),
    ("fp16-d160", (1, 515, 515, 2, 2, 160, 160), "float16", None, None),
    ("bf16-d192", (1, 515, 515, 2, 1, 192, 192), "bfloat16", "causal", None),
    ("bf16-d192-dv128", (1, 515, 515, 2, 2, 192, 128), "bfloat16", "causal", None),
    ("fp32-d96", (1, 260, 260, 2, 2, 96, 96), "float32", "causal", None),
    ("bf16-d8", (1, 515, 515, 2, 2, 8, 8), "bfloat16", None, None),
    ("fp32-d128", (1, 515, 515, 2, 2, 128, 128), "float32", "causal", None),
    ("fp32-d256", (1, 260, 260, 2, 2, 256, 256), "float32", None, None),
    ("bf16-window", (1, 3000, 3000, 2, 1, 64, 64), "bfloat16", "window-512", "softcap-30"),
    ("bf16-documents", (2, 1500, 1500, 2, 2, 128, 128), "bfloat16", "documents", "alibi"),
    ("bf16-sparse", (1, 2000, 2000, 2, 2, 128, 128), "bfloat16", "sparse-90", "bias"),
    ("bf16-decode", (2, 1, 8000, 8, 2, 128, 128), "bfloat16", "causal", None),
    ("bf16-one-head", (1, 4096, 4096, 1, 1, 128, 128), "bfloat16", None, None),
    ("bf16-decode-32k", (2, 1, 32768, 16, 2, 128, 128), "bfloat16", "causal", None),
    ("bf16-decode-d64", (3, 1, 5000, 8, 1, 64, 64), "bfloat16", None, None),
    ("bf16-decode-d96", (3, 1, 5000, 8, 1, 96, 96), "bfloat16", None, None),
    ("bf16-d256-bias", (1, 515, 515, 2, 2, 256, 256), "bfloat16", "causal", "bias"),
    ("bf16-softcap", (2, 515, 515, 4, 2, 128, 128), "bfloat16", "causal", "softcap-30"),
    ("fp16-softcap", (2, 515, 600, 4, 2, 64, 64), "float16", "causal", "softcap-2"),
    ("bf16-bias", (2, 500, 504, 4, 2, 128, 128), "bfloat16", "causal", "bias"),  # rows of whole 16 bytes: by descriptor
    ("bf16-bias-odd", (2, 515, 515, 4, 2, 128, 128), "bfloat16", "causal", "bias"),
    ("bf16-d256-gqa", (2, 700, 700, 4, 1, 256, 256), "bfloat16", "causal", "softcap-30"),
]  # fmt: skip


def contract_worker(worker: Worker) -> None:
    """Every case of the contract and EXTRA."""
    extra = [
        cases.Case(
            name=f"extra-{name}", source="GPU", dtype=dtype, mask=mask, score=score, **cases.Shape(*shape)._asdict()
        )
        for name, shape, dtype, mask, score in EXTRA[: worker.setting.extra]
    ]
    every = [*extra, *map(cases.named, worker.setting.contract)]
    backend = Triton()
    worker.each({c.name: partial(judged, backend, c, worker.setting.device) for c in worker.share(every)})


def of_case(case: cases.Case, device: str):
    """The case as a checked call."""
    x = cases.draw(case, device)
    x = replace(x, leaves={name: t.detach().to(device).requires_grad_(t.requires_grad) for name, t in x.leaves.items()})
    options = {
        "mask": cases.MASKS[case.mask].build(x) if case.mask else None,
        "score": cases.SCORES[case.score].build(x) if case.score else None,
        "sink": x.sink,
        "dropout_p": case.dropout_p,
        "dropout_seed": x.dropout_seed,
    }
    if case.lengths:
        options |= {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
    return call(x.q, x.k, x.v, x.do, **options)


def judged(backend: Triton, case: cases.Case, device: str) -> dict:
    c = of_case(case, device)
    reasons = backend.unsupported(c.p)
    if reasons:
        return {"state": "refused", "detail": "; ".join(reasons)}
    runs = []
    for _ in range(3):  # from the second on straight to the compiled kernels that the first kept
        out = backend.forward(c.p, c.t)
        runs.append(accuracy.tensors(out, backend.backward(c.p, c.t, out, c.do, c.dlse)))
    errors = [e for e in accuracy.Expected.of(c.p, c.t, c.do, c.dlse).judge(runs[0]) if not e.ok]
    ordered = [name for name in runs[0] if not name.startswith("dleaf")]  # a leaf's gradient may be scattered
    others = [name for name in ordered for run in runs[1:] if not torch.equal(run[name], runs[0][name])]
    if others:
        return {"state": "wrong", "detail": f"a later run gave other bits of {', '.join(others)}"}
    return {"state": "wrong", "detail": "; ".join(map(str, errors))} if errors else {"state": "ok"}


def dropout_worker(worker: Worker) -> None:
    """contract-dropout with many seeds, whose dv once had one element too wrong: errors as parts of what is allowed."""
    case, backend = cases.named("contract-dropout"), Triton()

    def of_seed(seed: int) -> dict:
        x = cases.draw(case, worker.setting.device, seed)
        c = call(x.q, x.k, x.v, x.do, dropout_p=case.dropout_p, dropout_seed=x.dropout_seed)
        expected = accuracy.Expected.of(c.p, c.t, c.do, c.dlse)
        out = backend.forward(c.p, c.t)
        found = accuracy.tensors(out, backend.backward(c.p, c.t, out, c.do, c.dlse))
        errors = expected.judge(found)
        dv = (found["dv"].double() - expected.oracle["dv"]).abs()
        worst = torch.unravel_index(dv.argmax(), dv.shape)
        return {
            "state": "ok" if all(e.ok for e in errors) else "wrong",
            "ratios": {e.tensor: (e.rms / e.rms_allowed, e.max / e.max_allowed) for e in errors},
            "at": [int(n) for n in worst],
            "value": float(expected.oracle["dv"][worst]),
            "lse": float((out.lse.double() - expected.oracle["lse"]).abs().max()),
        }

    worker.each({f"seed {seed}": partial(of_seed, seed) for seed in range(worker.setting.seeds)})


def rows_of(kernel: str, head_dim: int) -> tuple[Tiles, ...]:
    by_width = CANDIDATES["sm90"][kernel]
    return by_width[min(limit for limit in by_width if limit >= head_dim)]


def candidates_worker(worker: Worker) -> None:
    """The n-th candidate of every pass at once on a small problem, dK and dV in one pass and in two: all are compiled so,
    and a wrong one is not timed."""
    items = {}
    for d in worker.setting.head_dims:
        for n in range(max(len(rows_of(kernel, d)) for kernel in PRODUCTS)):
            for mask in (None, "causal"):
                for over_keys in (("dkdv",), ("dk", "dv")):
                    passes = {
                        name: rows_of(name, d)[n % len(rows_of(name, d))] for name in ("forward", "dq", *over_keys)
                    }
                    items[f"d{d} {n} {mask or 'full'} {'+'.join(over_keys)}"] = partial(tried, worker, d, mask, passes)
    worker.each(dict(worker.share(list(items.items()))))


def tried(worker: Worker, head_dim: int, mask: str | None, passes: dict[str, Tiles]) -> dict:
    g = torch.Generator().manual_seed(0)
    n = 300 if worker.setting.device == "cuda" else 70
    q = torch.randn(1, n, 2, head_dim, generator=g).to(worker.setting.device, torch.bfloat16)
    c = call(q, q.flip(1), q.flip(2), causal=mask == "causal")
    errors = [e for e in accuracy.check(Triton(Config.of(passes)), c.p, c.t, c.do, c.dlse) if not e.ok]
    if not errors:
        return {"state": "ok"}
    wrong = {name if name in passes else "dkdv" for name in (WRITES[e.tensor] for e in errors)}
    described = [[name, head_dim, passes[name].describe()] for name in sorted(wrong)]
    return {"state": "wrong", "wrong": described, "detail": "; ".join(map(str, errors))}


def compile_worker(worker: Worker) -> None:
    """Compiles a case's kernels, and its FlexAttention where that is timed, into the disk's caches."""
    name = worker.job.partition(":")[2]

    def compiled(contestant: str) -> dict:
        x = cases.draw(cases.named(name), worker.setting.device)
        o = peers.all_contestants()[contestant].prepare(x)()
        if x.case.backward:
            torch.autograd.grad(o, list(x.wanted.values()), x.do)
        return {"state": "ok"}

    wanted = [n for n in worker.setting.goals[name] if n in ("triton", "flex")]
    worker.each({f"{name} {n}": partial(compiled, n) for n in wanted})


# -- The host ------------------------------------------------------------------------------------------------------


def host_worker(worker: Worker) -> None:
    """Microseconds of host time a call, and how many kernels 100 lengths compile."""
    import tilewise as tw

    backend, calls = Triton(), {}
    for dtype, name in ((torch.bfloat16, ""), (torch.float32, ", float32")):
        q = torch.randn(1, 64, 2, 64, device="cuda", dtype=dtype)
        c, x = call(q, q.clone(), q.clone(), causal=True), q.clone().requires_grad_()
        attention = partial(tw.attention, causal=True, backend="triton")
        calls |= {
            f"backend.forward{name}": partial(backend.forward, c.p, c.t),
            f"backend.backward{name}": partial(backend.backward, c.p, c.t, backend.forward(c.p, c.t), c.do, c.dlse),
            f"tw.attention{name}": partial(attention, q, q, q),
            f"tw.attention with gradients{name}": partial(attention, x, x, x),
            f"sdpa{name}": partial(torch.nn.functional.scaled_dot_product_attention, *[q.transpose(1, 2)] * 3),
        }
    timed = lambda fn: {"state": "ok", "us": round(host_microseconds(fn), 1)}  # noqa: E731
    worker.each({name: partial(timed, fn) for name, fn in calls.items()} | {"100 lengths": lambda: lengths(backend)})


def lengths(backend: Triton) -> dict:
    compiled = lambda: sum(len(cache[0]) for cache in runtime.kernels().forward.device_caches.values())  # noqa: E731
    before = None
    for n in range(1, 101):
        x = torch.randn(1, 7 * n, 2, 64, device="cuda", dtype=torch.bfloat16)
        c = call(x, x.clone(), x.clone(), causal=True)
        backend.forward(c.p, c.t)
        before = compiled() if before is None else before
    more = compiled() - before
    return {"state": "ok" if more == 0 else "wrong", "detail": f"{more} kernels more than the first"}


# -- Tiles ---------------------------------------------------------------------------------------------------------


def launches(kernel: str, c, tiles: Tiles) -> Callable[[], object]:
    """The launch of one kernel with these tiles, as a call."""
    partner = {"dk": "dv", "dv": "dk"}.get(kernel)
    config = Config.of(preceded(choose(c.p).passes, {kernel: tiles} | ({partner: tiles} if partner else {})))
    found: dict[str, tuple] = {}

    def record(fn, grid, tiles, *args):
        name = runtime.pass_name(fn, args[-1])
        found[name] = (fn, grid, tiles, args)
        if name == "delta":
            runtime.run(fn, grid, tiles, *args)

    plan = Plan(c.p, config, record)
    out = Triton().forward(c.p, c.t)
    if kernel == "forward":
        launch.forward(plan, c.t)
    else:
        launch.backward(plan, c.t, out, c.do, c.dlse)
    return lambda: runtime.run(*found[kernel][:3], *found[kernel][3])


def tiles_worker(worker: Worker) -> None:
    setting = worker.setting
    wrong = [tuple(named) for row in worker.run.rows() for named in row.get("wrong", [])]
    for d in setting.head_dims:
        for mask in (None, "causal") if d in (64, 128, 256) else ("causal",):
            c, items = problem(d, setting.length, mask, setting.device), {}
            for kernel in PRODUCTS:
                right = [t for t in rows_of(kernel, d) if (kernel, d, t.describe()) not in wrong]
                items[f"d{d} {mask or 'full'} {kernel}"] = partial(ranked, worker, kernel, c, right)
            worker.each(items | {f"d{d} {mask or 'full'} kept": partial(kept, worker, c)})


def problem(head_dim: int, length: int, mask: str | None, device: str):
    """16,384 tokens of 16 heads of 128 or as many numbers."""
    shape = (16384 // length if device == "cuda" else 1, length, 2048 // head_dim if device == "cuda" else 1, head_dim)
    q = torch.randn(shape, device=device).to(torch.bfloat16)
    return call(q, torch.randn_like(q), torch.randn_like(q), causal=mask == "causal")


def ranked(worker: Worker, kernel: str, c, candidates: list[Tiles]) -> dict:
    """Milliseconds of the candidates of one kernel, in turns."""
    calls, failed, device = {}, {}, worker.setting.device
    for tiles in candidates:
        try:
            fn = launches(kernel, c, tiles)
            fn()
            if device == "cuda":
                torch.cuda.synchronize()
            calls[tiles.describe()] = fn
        except Exception as error:
            failed[tiles.describe()] = innermost(error)
    flops = PRODUCTS[kernel] * 2 * c.p.batch * c.p.heads_q * c.p.seqlen_q * c.p.seqlen_k * c.p.head_dim
    flops //= 1 if c.p.spec.region.everything else 2
    ms = in_turns(calls, device, rounds=3)
    rates = {name: round(flops / x / 1e9) for name, x in ms.items()}
    fields = {"kernel": kernel, "head_dim": c.p.head_dim, "ms": ms, "tflops": rates, "failed": failed}
    return {"state": "ok" if calls else "error", "detail": "; ".join(failed.values())} | fields


def kept(worker: Worker, c) -> dict:
    """The fastest tiles of a head dim go into the file that the backend reads; full counts as much as causal."""
    total: dict[str, dict[str, float]] = {}
    for row in worker.run.rows(worker.job):
        if row.get("head_dim") == c.p.head_dim:
            times = {name: ms * (1 if " full " in row["item"] else 2) for name, ms in row["ms"].items()}
            before = total.get(row["kernel"], dict.fromkeys(times, 0.0))
            total[row["kernel"]] = {name: before[name] + ms for name, ms in times.items() if name in before}
    best = {kernel: min(times, key=times.get) for kernel, times in total.items() if times}
    two = {"dk", "dv"} <= set(best) and (
        "dkdv" not in best or total["dk"][best["dk"]] + total["dv"][best["dv"]] < total["dkdv"][best["dkdv"]]
    )
    names = [n for n in ("forward", "dq", *(("dk", "dv") if two else ("dkdv",))) if n in best]
    found = {n: next(t for t in rows_of(n, c.p.head_dim) if t.describe() == best[n]) for n in names}
    tuned.store([tuned.Row.of(c.p, n, tiles, total[n][best[n]]) for n, tiles in found.items()])
    return {"state": "ok", "kept": {n: tiles.describe() for n, tiles in found.items()}}


# -- Goals ---------------------------------------------------------------------------------------------------------


def goals_worker(worker: Worker) -> None:
    setting, path = worker.setting, worker.run.folder / "goals.jsonl"
    plan = run.Plan(setting.device, budget=0.8, min_rounds=5, max_rounds=15)
    records.append([run.run_record(plan, peers.all_contestants().values())], path)
    known = peers.all_contestants() | {"unsplit": replayed(False)}

    def lineup(name: str) -> run.Lineup:
        case, names = cases.named(name), setting.goals[name]
        if "unsplit" not in names:
            return run.Lineup(case, [known[n] for n in names])
        return run.Lineup(replace(case, backward=False), [replayed(n == "triton") for n in names])

    def measured(group: list[str]) -> dict:
        found_records = records.append(run.run_group([lineup(name) for name in group], plan), path)
        if setting.device == "cuda":
            torch.cuda.empty_cache()
        failed = [
            f"{r['case']} {r['contestant']}: {r.get('why')}" for r in found_records if r["status"] in ("red", "failed")
        ]
        speeds: dict[str, dict] = {"forward": {}, "backward": {}}
        for r in found_records:
            for direction in speeds.keys() & r.keys():
                found = speeds[direction].setdefault(r["case"], {})
                found[r["contestant"]] = [r[direction]["median_ms"], r[direction]["gflops"]]
        bad = any(r["status"] != "green" for r in found_records if r["contestant"] == "triton")
        return {"state": "wrong" if bad else "ok", "detail": "; ".join(failed)[:600]} | speeds

    worker.each({group[0]: partial(measured, group) for group in timed_together(setting.goals)})


def timed_together(names: Iterable[str]) -> list[list[str]]:
    """Names of cases in their order, those that a goal compares as one group: a GPU's pace falls by an eighth under load."""
    group_of = {name: group for group in compare.compared(compare.load_goals()) for name in group}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of.get(name, [name])[0], []).append(name)
    return list(groups.values())


def replayed(split: bool) -> peers.Contestant:
    """The Triton backend's forward as a CUDA graph, which leaves the host's time for its launches out, with or without splitting
    keys."""

    def prepare(x: cases.Inputs) -> peers.Call:
        c = call(*(t.detach() for t in (x.q, x.k, x.v)))
        backend = Triton() if split else Triton(replace(choose(c.p), split=None))
        backend.forward(c.p, c.t)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.forward(c.p, c.t)

        def again() -> torch.Tensor:
            graph.replay()
            return out.o

        return again

    return peers.Contestant("triton" if split else "unsplit", lambda case, device: [], prepare, "checkout", ours=True)


# -- All parts -----------------------------------------------------------------------------------------------------

WORKERS = {
    "contract": contract_worker,
    "dropout": dropout_worker,
    "candidates": candidates_worker,
    "compile": compile_worker,
    "host": host_worker,
    "tiles": tiles_worker,
    "goals": goals_worker,
}


def pytest_job(r: Run, name: str, limit: float, together: int, *arguments: str) -> Job:
    """Tests, each with a line of its own in the results."""
    options = ["-p", "tests.gpu.lines", "--lines", str(r.file.resolve()), "--lines-job", name, "-p", "no:cacheprovider"]
    options += ["-n", str(together)] if together > 1 else []
    return Job(name, limit, ("-m", "pytest", *options, *arguments))


def phase(r: Run, part: str) -> None:
    """The jobs of a part; what comes after keeps its time."""
    setting = SETTINGS[r.device]
    if part == "compile":
        n = setting.together
        jobs = [Job(f"compile:{name}", 60) for name in setting.goals]
        contract = [Job(f"contract:{k}/{n}", 20) for k in range(n if setting.contract else 0)]
        r.all([*jobs, *contract], 2 * n, reserve=r.left / 2)
    elif part == "candidates":
        n = setting.together
        r.all([Job(f"candidates:{k}/{n}", 150) for k in range(n)], n)
    elif part == "right":
        n = setting.together
        flex = [Job(f"compile:{name}", 120) for name, names in setting.goals.items() if "flex" in names]
        contract = [Job(f"contract:{k}/{n}", 200) for k in range(n)]
        candidates = [Job(f"candidates:{k}/{n // 2 + 1}", 200) for k in range(n // 2 + 1)]
        tests = pytest_job(r, "tests", 200, min(n, TESTS_TOGETHER), *setting.tests)
        r.all([tests, *contract, Job("dropout", 100), *candidates, *flex], n + 1, reserve=min(270, r.left / 2))
    elif part == "sanitize":
        options = ("tests/gpu/test_triton.py", "-m", "gpu", "-k", "sanitizers_find", "--timeout", "170")
        r.all([pytest_job(r, "sanitize", 180, 8, *options)], reserve=3)
    else:
        r.all(
            [Job(part, {"host": 45, "tiles": 110, "goals": 400}[part])],
            reserve=min({"host": 150, "tiles": 120, "goals": 45}[part], r.left / 8),
        )


def summary(r: Run) -> list[str]:
    """Counts of every part, and what is not right; an item that began and did not end crashed or ran out of time."""
    last = {(row["job"], row["item"]): row for row in r.rows() if "item" in row}
    parts = sorted({row["part"] for row in last.values()})
    lines = []
    for part in parts:
        rows = [row for row in last.values() if row["part"] == part]
        lines.append(
            f"{part}: {dict(Counter(row['state'] for row in rows))}, {sum(row.get('seconds', 0) for row in rows):.0f} s"
        )
        for row in rows:
            if row["state"] not in ("ok", "refused", "skipped"):
                lines.append(f"  {row['item']}: {row['state']} {row.get('detail', '')[-300:]}")
            elif "us" in row:
                lines.append(f"  {row['item']}: {row['us']} us")
            elif "kept" in row or "tflops" in row:
                lines.append(f"  {row['item']}: {row.get('kept') or row['tflops']}")
            for direction in ("forward", "backward"):
                for case, found in row.get(direction, {}).items():
                    speeds = "  ".join(f"{n} {x[0]:.3f} ms {x[1] / 1e3:.0f}" for n, x in found.items())
                    lines.append(f"  {direction:9}{case:26}{speeds}")
    seeds = [row["ratios"] for row in last.values() if "ratios" in row]
    for name in seeds[0] if seeds else ():
        rms, largest = (max(ratios[name][n] for ratios in seeds) for n in (0, 1))
        lines.append(
            f"dropout {name}: worst of {len(seeds)} seeds, of what is allowed: rms {rms:.2f}, max {largest:.2f}"
        )
    return [*lines, *verdicts(r.folder / "goals.jsonl")]


def verdicts(path: Path) -> list[str]:
    """Of the goals that name a Triton contestant."""
    try:
        wanted = [g for g in compare.load_goals() if g.contestant == "triton"]
        found = compare.judge(wanted, compare.read_results(path))
    except (compare.Refused, ValueError) as error:
        return [f"goals: {error}"]
    measured = [v for v in found if v.says != "not measured"]
    shown = [
        f"  {v.says:13}{v.goal.name} {v.measured or 0:.2f} of {v.goal.ratio} {v.goal.peer} {v.why}" for v in measured
    ]
    return [f"goals: {dict(Counter(v.says for v in found))}", *shown]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--parts", default="right,host,tiles,goals,sanitize")
    parser.add_argument("--minutes", type=float, default=8.7)
    parser.add_argument("--device", default="cuda", choices=SETTINGS, help="short: a GPU for a minute")
    parser.add_argument("--worker", default=None, help="used by the script itself")
    arguments = parser.parse_args()
    r = Run(arguments.out, arguments.minutes, arguments.device)
    if arguments.worker:
        return WORKERS[arguments.worker.partition(":")[0]](Worker(r, arguments.worker))
    r.add(part="machine", **run.run_record(run.Plan(SETTINGS[arguments.device].device), []))
    for part in arguments.parts.split(","):
        started = time.monotonic()
        try:
            phase(r, part)
        except Exception as error:
            r.add(part="job", job=part, state="error", detail=innermost(error))
        r.add(part="job", job=part, state="ended", seconds=round(time.monotonic() - started))
        print(f"{part}: {time.monotonic() - started:.0f} s, {r.left:.0f} left", flush=True)
    print("\n".join(summary(r)), flush=True)
    return None


if __name__ == "__main__":
    main()
