"""The Triton backend on one GPU: is it right there, which tiles are fastest, and how it stands to PyTorch's attention.

    PYTHONPATH=src:. python3 bench/gpu_triton.py --out DIR [--parts contract,dropout,host,tiles,features,peers] [--minutes 9]

The candidates are those of backends/triton/config.py. Writes DIR/gpu_triton.jsonl, a line a result, and prints a short
table last. A case or a configuration that fails is a line with its error and stops nothing. Peers are timed in the same
process, in turns with ours.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from bench import cases, peers
from bench.measure import host_microseconds, in_turns
from tests.backends.contract import call
from tilewise import accuracy
from tilewise.backends.triton import Triton, launch
from tilewise.backends.triton.config import CANDIDATES, Config, Tiles, choose, preceded

DEVICE = "cuda"
PRODUCTS = {"forward": 2, "dkdv": 4, "dk": 3, "dv": 2, "dq": 3}  # of a tile


class Results:
    def __init__(self, folder: Path, minutes: float):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.file = (folder / "gpu_triton.jsonl").open("a", encoding="utf-8")
        self.end = time.monotonic() + 60 * minutes
        self.table: list[str] = []
        self.times: dict[tuple[str, int], dict[tuple, float]] = {}

    def add(self, **row: object) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def say(self, line: str) -> None:
        self.table.append(line)
        print(line, flush=True)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.end


def _innermost(error: BaseException) -> str:
    """The last words of the first cause: Triton wraps a compiler's error once per function."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[-600:]


# -- Right? --------------------------------------------------------------------------------------------------------

EXTRA = [
    ("bf16-n1000-d64", (2, 1000, 1000, 4, 2, 64, 64), "bfloat16", "causal", None),
    ("bf16-n1000-d128", (1, 1000, 1000, 4, 4, 128, 128), "bfloat16", "causal", None),
    ("fp16-d256", (1, 515, 700, 2, 2, 256, 256), "float16", "causal", None),
    ("bf16-d512", (1, 200, 300, 2, 2, 512, 512), "bfloat16", "causal", None),
    ("bf16-d80", (1, 515, 515, 2, 2, 80, 80), "bfloat16", "causal", None),
    ("bf16-d192-dv128", (1, 515, 515, 2, 2, 192, 128), "bfloat16", "causal", None),
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
    ("bf16-d256-bias", (1, 515, 515, 2, 2, 256, 256), "bfloat16", "causal", "bias"),
    ("bf16-d256-gqa", (2, 700, 700, 4, 1, 256, 256), "bfloat16", "causal", "softcap-30"),
]  # fmt: skip


def contract(results: Results) -> None:
    """Every case of the contract and EXTRA, in processes that share the GPU: most of the time is compiling."""
    counts: dict[str, int] = {}
    for row in workers(results, "contract"):
        counts[row["state"]] = counts.get(row["state"], 0) + 1
        results.add(part="contract", **row)
        if row["state"] in ("wrong", "error"):
            results.say(f"contract {row['case']}: {row['state']} {row['detail'][-400:]}")
    results.say(f"contract: {counts}")


def contract_share(index: int, of: int) -> None:
    extra = [
        cases.Case(
            name=f"extra-{name}", source="GPU", dtype=dtype, mask=mask, score=score, **cases.Shape(*shape)._asdict()
        )
        for name, shape, dtype, mask, score in EXTRA
    ]
    backend = Triton()
    for case in [*extra, *cases.tagged("contract")][index::of]:
        try:
            state, detail = _judge(backend, case)
        except Exception as error:
            state, detail = "error", traceback.format_exc()[-1500:] + _innermost(error)
        print(json.dumps({"case": case.name, "state": state, "detail": detail}), flush=True)


def _of_case(case: cases.Case, prepared: bool = False):
    """The case as a checked call on the GPU; ``prepared``: a mask's tiles are listed beforehand."""
    x = cases.draw(case, DEVICE)
    x = replace(x, leaves={name: t.detach().to(DEVICE).requires_grad_(t.requires_grad) for name, t in x.leaves.items()})
    mask = cases.MASKS[case.mask].build(x) if case.mask else None
    options = {
        "mask": mask.prepare(x.q, x.k) if prepared and mask is not None else mask,
        "score": cases.SCORES[case.score].build(x) if case.score else None,
        "sink": x.sink,
        "dropout_p": case.dropout_p,
        "dropout_seed": x.dropout_seed,
    }
    if case.lengths:
        options |= {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
    return x, call(x.q, x.k, x.v, x.do, **options)


def _judge(backend: Triton, case: cases.Case) -> tuple[str, str]:
    _, c = _of_case(case)
    reasons = backend.unsupported(c.p)
    if reasons:
        return "refused", "; ".join(reasons)
    errors = [e for e in accuracy.check(backend, c.p, c.t, c.do, c.dlse) if not e.ok]
    first, again = (backend.forward(c.p, c.t) for _ in range(2))  # now through the compiled kernels that were kept
    grads = [backend.backward(c.p, c.t, first, c.do, c.dlse) for _ in range(2)]
    pairs = [(first.o, again.o), (first.lse, again.lse)]
    pairs += [(getattr(grads[0], name), getattr(grads[1], name)) for name in ("dq", "dk", "dv")]
    if not all(torch.equal(a, b) for a, b in pairs):
        return "wrong", "a second run gave other bits"
    return ("wrong", "; ".join(str(e) for e in errors)) if errors else ("ok", "")


# -- fp32 dropout, whose dv once had one element too wrong ---------------------------------------------------------


def dropout(results: Results, seeds: int = 40) -> None:
    """contract-dropout with many seeds: its largest errors as parts of what is allowed, and where the worst one lies."""
    case, backend, ratios = cases.named("contract-dropout"), Triton(), []
    for seed in range(seeds):
        x = cases.draw(case, DEVICE, seed)
        c = call(x.q, x.k, x.v, x.do, dropout_p=case.dropout_p, dropout_seed=x.dropout_seed)
        expected = accuracy.Expected.of(c.p, c.t, c.do, c.dlse)
        out = backend.forward(c.p, c.t)
        found = accuracy.tensors(out, backend.backward(c.p, c.t, out, c.do, c.dlse))
        errors = {e.tensor: e for e in expected.judge(found)}
        dv = (found["dv"].double() - expected.oracle["dv"]).abs()
        worst = torch.unravel_index(dv.argmax(), dv.shape)
        lse = (out.lse.double() - expected.oracle["lse"]).abs()
        row = {name: (e.rms / e.rms_allowed, e.max / e.max_allowed) for name, e in errors.items()}
        where = {"at": [int(n) for n in worst], "value": float(expected.oracle["dv"][worst]), "lse": float(lse.max())}
        ratios.append(row)
        results.add(part="dropout", seed=seed, ratios=row, **where)
    for name in ("o", "lse", "dq", "dk", "dv"):
        rms, largest = (max(row[name][n] for row in ratios) for n in (0, 1))
        results.say(f"dropout {name}: worst of {seeds} seeds, of what is allowed: rms {rms:.2f}, max {largest:.2f}")


# -- The host ------------------------------------------------------------------------------------------------------


def host(results: Results) -> None:
    """Microseconds of host time a call, and how many kernels 100 lengths compile."""
    import tilewise as tw

    q = torch.randn(1, 64, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    c, backend = call(q, q.clone(), q.clone(), causal=True), Triton()
    direct = lambda: backend.forward(c.p, c.t)  # noqa: E731
    calls = {
        "backend.forward": direct,
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3),
    }
    out = direct()
    calls["backend.backward"] = lambda: backend.backward(c.p, c.t, out, c.do, c.dlse)
    if "triton" in [row.name for row in __import__("tilewise.dispatch").dispatch.BACKENDS]:
        calls["tw.attention"] = lambda: tw.attention(q, q, q, causal=True, backend="triton")
    for name, fn in calls.items():
        each = host_microseconds(fn)
        results.add(part="host", call=name, us=each)
        results.say(f"host {name}: {each:.1f} us")
    from tilewise.backends.triton.forward import forward_kernel

    compiled = lambda: sum(len(cache[0]) for cache in forward_kernel.device_caches.values())  # noqa: E731
    before = None
    for n in range(1, 101):
        x = torch.randn(1, 7 * n, 2, 64, device=DEVICE, dtype=torch.bfloat16)
        c = call(x, x.clone(), x.clone(), causal=True)
        backend.forward(c.p, c.t)
        before = compiled() if before is None else before
    results.say(f"host: 100 lengths compile {compiled() - before} kernels more than the first")


# -- Tiles ---------------------------------------------------------------------------------------------------------


def _case(head_dim: int, n: int, mask: str | None) -> cases.Case:
    return cases.named(f"h200-d{head_dim}-n{n}-{mask or 'full'}")


def _problem(head_dim: int, n: int, mask: str | None):
    case = _case(head_dim, n, mask)
    x = cases.draw(case, DEVICE)
    return case, x, call(x.q.detach(), x.k.detach(), x.v.detach(), x.do.detach(), causal=mask == "causal")


def _launches(kernel: str, c, tiles: Tiles) -> Callable[[], object]:
    """The launch of one kernel with these tiles, as a call."""
    partner = {"dk": "dv", "dv": "dk"}.get(kernel)
    config = Config.of(preceded(choose(c.p).passes, {kernel: tiles} | ({partner: tiles} if partner else {})))
    found: dict[str, tuple] = {}

    def record(fn, grid, tiles, *args):
        name = launch.name_of(fn, args[-1])
        found[name] = (fn, grid, tiles, args)
        if name == "delta":
            launch.run(fn, grid, tiles, *args)

    plan = launch.Plan(c.p, config, record)
    out = Triton().forward(c.p, c.t)
    if kernel == "forward":
        launch.forward(plan, c.t)
    else:
        launch.backward(plan, c.t, out, c.do, c.dlse)
    return lambda: launch.run(*found[kernel][:3], *found[kernel][3])


def warm_share(index: int, of: int) -> None:
    """Compiles a share of the candidates by running them on a small problem, so that the disk cache holds them."""
    jobs = [
        (kernel, d, t, m)
        for kernel, by in CANDIDATES["sm90"].items()
        for d, rows in by.items()
        for t in rows
        for m in (None, "causal")
    ]
    for kernel, d, tiles, mask in jobs[index::of]:
        q = torch.randn(1, 256, 2, d, device=DEVICE, dtype=torch.bfloat16)
        try:
            _launches(kernel, call(q, q.clone(), q.clone(), causal=mask == "causal"), tiles)()
            torch.cuda.synchronize()
        except Exception as error:
            print(json.dumps({"warm": [kernel, d, tiles.describe(), mask], "error": _innermost(error)}), flush=True)


def workers(results: Results, part: str, count: int = 15) -> list[dict]:
    """Runs shares of a part in processes; the JSON lines that they printed."""
    command = [sys.executable, __file__, "--out", str(results.folder)]
    files = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(count)]  # noqa: SIM115 - read below, gone with the process
    pool = [
        subprocess.Popen([*command, "--worker", f"{part}:{k}/{count}"], stdout=f, stderr=f) for k, f in enumerate(files)
    ]
    deadline = time.monotonic() + 200
    for process in pool:
        try:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    rows = []
    for file in files:
        file.seek(0)
        rows += [json.loads(line) for line in file if line.startswith("{")]
    return rows


def tiles(results: Results, n: int = 4096) -> None:
    started = time.monotonic()
    for row in workers(results, "warm"):
        results.add(part="warm", **row)
    results.say(f"tiles: candidates compiled in {time.monotonic() - started:.0f} s")
    for head_dim in (64, 128, 256):
        for mask in (None, "causal"):
            case, _, c = _problem(head_dim, n, mask)
            for kernel in PRODUCTS:
                if not results.late:
                    _rank(results, kernel, case, c)


def _rank(results: Results, kernel: str, case: cases.Case, c) -> None:
    """Times the candidates of one kernel on one problem."""
    calls = {}
    for row in CANDIDATES["sm90"][kernel][case.head_dim]:
        try:
            fn = _launches(kernel, c, row)
            fn()
            torch.cuda.synchronize()
            calls[row] = fn
        except Exception as error:
            results.add(part="tiles", kernel=kernel, case=case.name, tiles=list(_short(row)), error=_innermost(error))
    flops = case.flops("forward") / 2 * PRODUCTS[kernel]
    times = in_turns(calls, "cuda", rounds=3)
    best = results.times.setdefault((kernel, case.head_dim), {})
    for row, ms in times.items():
        best[row] = best.get(row, 0.0) + ms * (2 if case.mask else 1)  # full and causal weigh the same
    ranked = sorted(times.items(), key=lambda pair: pair[1])
    for row, ms in ranked:
        results.add(
            part="tiles", kernel=kernel, case=case.name, tiles=list(_short(row)), ms=ms, tflops=flops / ms / 1e9
        )
    results.say(
        f"{kernel:8}{case.name:24}"
        + "  ".join(f"{'x'.join(map(str, _short(row)))} {flops / ms / 1e9:.0f}" for row, ms in ranked)
    )


# -- Peers ---------------------------------------------------------------------------------------------------------


def fastest(results: Results, head_dim: int) -> Triton:
    """With the tiles that this run found fastest, or the configured ones."""
    best = {
        kernel: min(((ms, row) for row, ms in times.items()), key=lambda pair: pair[0])
        for (kernel, d), times in results.times.items()
        if d == head_dim and times
    }
    if set(best) != set(PRODUCTS):
        return Triton()
    two = best["dk"][0] + best["dv"][0] < best["dkdv"][0]
    return Triton(
        Config.of({kernel: best[kernel][1] for kernel in ("forward", "dq", *(("dk", "dv") if two else ("dkdv",)))})
    )


def _short(tiles: Tiles) -> tuple[int, ...]:
    return tiles.tile_m, tiles.tile_n, tiles.num_warps, tiles.num_stages, int(tiles.tma)


def against(results: Results, grid: list[tuple[int, int, str | None]], names: tuple[str, ...]) -> None:
    for head_dim, n, mask in grid:
        backend = fastest(results, head_dim)
        if results.late:
            results.say("out of time")
            return
        case, x, c = _problem(head_dim, n, mask)
        forward, backward = {"triton": lambda c=c, backend=backend: backend.forward(c.p, c.t)}, {}
        try:
            out = backend.forward(c.p, c.t)
            backward["triton"] = lambda c=c, out=out, backend=backend: backend.backward(c.p, c.t, out, c.do, c.dlse)
        except Exception as error:
            results.say(f"{case.name}: {error!r}"[:300])
            continue
        contestants = peers.all_contestants()
        for name in names:
            try:
                fwd, bwd = _peer(contestants[name], x)
                fwd(), bwd()
                torch.cuda.synchronize()
                forward[name], backward[name] = fwd, bwd
            except Exception as error:
                results.add(part="peers", case=case.name, peer=name, error=_innermost(error))
        for direction, calls in (("forward", forward), ("backward", backward)):
            flops = case.flops(direction)
            times = in_turns(calls, "cuda")
            results.add(
                part="peers",
                case=case.name,
                direction=direction,
                ms=times,
                tflops={k: flops / v / 1e9 for k, v in times.items()},
            )
            results.say(
                f"{direction:9}{case.name:24}" + "  ".join(f"{k} {flops / v / 1e9:.0f}" for k, v in times.items())
            )


def _peer(contestant: peers.Contestant, x: cases.Inputs) -> tuple[Callable, Callable]:
    attention = contestant.prepare(x)
    wanted = (x.q, x.k, x.v)

    def forward():
        with torch.no_grad(), contestant.context():
            return attention()

    with contestant.context():
        o = attention()
    return forward, lambda: torch.autograd.grad(o, wanted, x.do, retain_graph=True)


FEATURES = ("full-n32768", "window1024-n32768", "documents-n32768", "sparse90-n16384", "softcap-30-n4096", "alibi-n4096",
            "bias-n4096", "gqa8-n4096-causal", "packed-16k", "one-head-n4096", "decode-32k")  # fmt: skip
WITH_FLEX = ("window1024-n32768", "sparse90-n16384", "softcap-30-n4096")


def features(results: Results) -> None:
    """What the grid of squares leaves out; TFLOP/s of the pairs that the mask keeps."""
    backend = Triton()
    for name in FEATURES:
        if results.late:
            return
        case = cases.named(f"cuda-{name}")
        try:
            x, c = _of_case(case, prepared=case.mask == "sparse-90")
            out = backend.forward(c.p, c.t)
            calls = {"forward": {"triton": lambda c=c: backend.forward(c.p, c.t)}, "backward": {}}
            if name == "one-head-n4096":
                whole = Triton(replace(choose(c.p), split=None))
                calls["forward"]["unsplit"] = lambda c=c, whole=whole: whole.forward(c.p, c.t)
            if case.backward:
                calls["backward"]["triton"] = lambda c=c, out=out: backend.backward(c.p, c.t, out, c.do, c.dlse)
            if name in WITH_FLEX:
                calls["forward"]["flex"], calls["backward"]["flex"] = _peer(peers.all_contestants()["flex"], x)
            for direction, contestants in calls.items():
                flops = case.flops(direction, DEVICE)
                times = in_turns(contestants, "cuda", rounds=3) if contestants else {}
                results.add(part="features", case=case.name, direction=direction, ms=times)
                results.say(
                    f"{direction:9}{case.name:28}"
                    + "  ".join(f"{k} {v:.3f} ms {flops / v / 1e9:.0f}" for k, v in times.items())
                )
        except Exception as error:
            results.say(f"features {case.name}: {_innermost(error)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--parts", default="contract,dropout,host,tiles,features,peers")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--worker", default=None, help="PART:INDEX/COUNT, used by the script itself")
    arguments = parser.parse_args()
    if arguments.worker:
        part, _, share = arguments.worker.partition(":")
        return {"contract": contract_share, "warm": warm_share}[part](*[int(x) for x in share.split("/")])
    results = Results(Path(arguments.out), arguments.minutes)
    results.add(
        part="machine",
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=__import__("triton").__version__,
    )
    masks = (None, "causal")
    grid = [(d, 4096, m) for d in (64, 128) for m in masks]
    rest = [(d, n, m) for d in (64, 128, 256) for n in (512, 2048, 16384) for m in masks] + [
        (256, 4096, m) for m in masks
    ]
    todo = {
        "contract": lambda: contract(results),
        "dropout": lambda: dropout(results),
        "host": lambda: host(results),
        "tiles": lambda: tiles(results),
        "features": lambda: features(results),
        "peers": lambda: (against(results, rest, ("fa2", "cudnn")), against(results, grid, ("fa2", "cudnn", "flex"))),
    }
    for part in arguments.parts.split(","):
        try:
            started = time.monotonic()
            todo[part]()
            results.say(f"{part}: {time.monotonic() - started:.0f} s")
        except Exception:
            results.say(f"{part} failed: {traceback.format_exc()[-1500:]}")
    return None


if __name__ == "__main__":
    main()
