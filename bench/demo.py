"""`tilewise demo`: exactness, time and memory against N, and a training run, on real input in a few minutes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import check, measure, peers, plots, records
from bench.cases import draw, named, tagged
from examples.gpt import model as gpt
from examples.gpt import train as loop
from tilewise import device as devices
from tilewise import dispatch, problem
from tilewise.backends.hopper import driver_reasons
from tilewise.cli import checkout, kernels
from tilewise.cli.page import console, heading, note, progress, status_text, table
from tilewise.spec import Options, assemble, parse_spec
from tilewise_papers import devices as paper_devices
from tilewise_papers import report, tables
from tilewise_papers.command import show

NAMES = {"tilewise": "tilewise", "eager": "standard", "sdpa": "PyTorch SDPA"}
TIGHT = 1e-3
"""The two training runs' losses may differ by this much at any step."""


@dataclass(frozen=True)
class DemoOptions:
    """Options: where the demo runs, and how much of it."""

    out: Annotated[Path, typer.Option(help="Folder for the figure and the JSON.")] = Path("out")
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60
    longest: Annotated[int, typer.Option(min=512, help="Longest sequence to measure.")] = 16384


def demo(options: DemoOptions) -> int:
    """Try it: errors against float64, time and memory over N, a small GPT trained twice. Takes under 4 minutes on 2 cores."""
    began = time.perf_counter()
    device = checkout.choose_device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    machine = measure.machine(device)
    if device != "cpu":  # gives autograd's thread its context, of whose lack the first product would warn
        torch.ones(1, device=device, requires_grad=True).square().backward()
    console().print(
        f"[bold]tilewise demo[/] on {machine['device']}, {machine['threads']} threads, torch {torch.__version__}",
        highlight=False,
    )
    if device == "cpu" and (hint := busy_hint(load(), machine["threads"], os.environ)):
        note(hint)
    console().print()
    if device != "cpu":
        hopper_kernels(device, options.longest)
    exact = exactness(device)
    counted(device)
    scaling = time_and_memory(device, options.longest)
    training = train_twice(device, options.steps)
    green = all(row["green"] for row in exact) and training["agrees"]
    record = {"machine": machine, "exactness": exact, "scaling": scaling, "training": training, "green": green}
    json_path, png_path = options.out / "demo.json", options.out / "demo.png"
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    plots.demo(record).savefig(png_path, dpi=160)
    seconds = time.perf_counter() - began
    console().print(f"Figure: {png_path}   Numbers: {json_path}   ({seconds:.0f} s)", highlight=False, soft_wrap=True)
    return 0 if green else 1


# ---- 1. exactness -------------------------------------------------------------------------------------------------


def load() -> float:
    """Return the mean number of running processes in the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def busy_hint(load: float, threads: int, environment: Mapping[str, str]) -> str:
    """Advice where other processes use the cores, or nothing; ``load`` is the mean number of running processes."""
    if load < threads / 2 or {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environment):
        return ""
    return f"This machine is busy (load {load:.1f} on {threads} threads). GOMP_SPINCOUNT=1000 tilewise demo loses less by it."


def hopper_kernels(device: str, longest: int) -> None:
    """Build the demo's missing kernels on a Hopper GPU, or say what keeps them from being built."""
    if devices.of(torch.device(device)).capability != (9, 0) or driver_reasons():
        return
    backend = dispatch.backend("hopper")
    configs = dict.fromkeys(config for p in problems(device, longest) for config in backend.configs(p))
    try:
        kernels.build(list(configs), os.cpu_count() or 1)
    except ValueError as error:  # there is no compiler
        note(f"Hopper's own kernels do not run: {error}")
    console().print()


def problems(device: str, longest: int) -> list:
    """Return the demo's calls in 16 bits, all of them causal, as problems without tensors."""
    found = []
    for case in [*(c for c in tagged("demo", "cuda") if c.seqlen_q <= longest), named("exact-bf16")]:
        heads = (case.heads_q, case.heads_k, case.heads_k)
        make = {"dtype": case.torch_dtype, "device": device, "requires_grad": True}
        with FakeTensorMode(allow_non_fake_inputs=True):
            q, k, v = (torch.empty(case.batch, case.seqlen_q, h, case.head_dim, **make) for h in heads)
            extras, seed, text = assemble(q, k, v, Options(causal=True))
            found.append(problem.check(q, k, v, extras, seed, parse_spec(text)))
    return found


def exactness(device: str) -> list[dict]:
    """tilewise and eager attention against float64 on small cases: the forward and the worst gradient."""
    rows = []
    for case in tagged("exact"):
        x = draw(case, device)
        want = check.expected(x)
        errors = check.compare(check.results(peers.tilewise().prepare(x), x, want.do), want)
        gradient = max(errors[1:], key=check.share)
        rows.append(
            {
                "what": case.source,
                "case": case.name,
                "dtype": case.dtype,
                "o": {"tilewise": errors[0].rms, "standard": errors[0].rms_eager},
                "gradient": {"name": gradient.tensor, "tilewise": gradient.rms, "standard": gradient.rms_eager},
                "green": check.verdict(errors, ours=True) == "green",
            }
        )
    _print_exactness(rows)
    return rows


def _print_exactness(rows: list[dict]) -> None:
    columns = ("attention", "dtype", "o", "standard's", "worst gradient", "standard's", "verdict")
    page = table(columns, left=("attention", "dtype", "verdict"))
    for row in rows:
        o, gradient = row["o"], row["gradient"]
        worst = f"{gradient['name']} {gradient['tilewise']:.1e}"
        numbers = (f"{o['tilewise']:.1e}", f"{o['standard']:.1e}", worst, f"{gradient['standard']:.1e}")
        page.add_row(row["what"], row["dtype"], *numbers, status_text("agrees" if row["green"] else "red"))
    agrees = "agrees: every output and gradient errs at most twice as much as standard attention in the same dtype"
    _show("1. Exactness", "relative RMS error against float64, beside standard attention's", page, agrees)


# ---- 2. time and memory -------------------------------------------------------------------------------------------


def time_and_memory(device: str, longest: int) -> dict:
    """tilewise, standard attention and SDPA, forward and backward, each N in a process of its own."""
    cases = [c for c in tagged("demo", device.split(":")[0]) if c.seqlen_q <= longest]
    points = []
    with progress() as bar:
        task = bar.add_task("", total=None)
        for case in cases:
            bar.update(task, description=f"N = {case.seqlen_q}: time and memory")
            results = measured_apart(device, case.name)
            points.append({"seqlen": case.seqlen_q, "standard_bytes": peers.eager_bytes(case), "results": results})
    first = cases[0]
    shape = f"batch {first.batch}, {first.heads_q} heads, head_dim {first.head_dim}, {first.dtype}, causal"
    found = {"shape": shape, "points": points}
    _print_scaling(found)
    return found


def counted(device: str) -> None:
    """Count what the algorithms of the papers move at the demo's own shape (`tilewise io` for more)."""
    heading(
        "2. What attention moves, counted", "the papers' algorithms on this machine's memories: forward and backward"
    )
    case = next(c for c in tagged("demo", device.split(":")[0]) if c.seqlen_q == 4096)
    setting = report.Setting(
        case.seqlen_q,
        case.head_dim,
        case.heads_q,
        case.batch,
        paper_devices.device("h200" if "cuda" in device else "cpu"),
    )
    show(setting, [tables.sum_table(setting, report.table(setting))])


def measured_apart(device: str, case: str) -> dict[str, dict]:
    """Measure one case with bench in a fresh process: the results by contestant. Raises ValueError if the process dies."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(measure.ROOT), *sys.path])}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.jsonl"
        command = [sys.executable, "-m", "bench.run", "--case", case, "--out", str(file), "--device", device]
        command += ["--budget", "3", "--no-again"]
        for name in NAMES:
            command += ["--contestant", name]
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ValueError(f"measuring {case} stopped: {last}")
        return {entry["contestant"]: entry for entry in records.entries(records.read(file))}


def three_digits(number: float) -> str:
    """Return a positive number with three significant digits: 0.0416, 8.20, 1,230."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 99.95 else f"{number:#.3g}"


def _print_scaling(found: dict) -> None:
    page = table(["N"] + [f"{name}\n{unit}" for name in NAMES.values() for unit in ("ms", "MiB")])
    notes = []
    for point in found["points"]:
        cells = []
        for name in NAMES:
            result = point["results"][name]
            if "both" in result:
                cells += [three_digits(result["both"]["median_ms"]), f"{result['memory']['peak_bytes'] / 2**20:,.0f}"]
            else:
                reason = (result.get("why") or ["its check is red"])[0]
                cells += ["–", "–"]
                notes.append(f"{NAMES[name]} at N = {point['seqlen']:,} was not run: {reason}")
        page.add_row(f"{point['seqlen']:,}", *cells)
    notes.append("MiB: the peak above the inputs; the outputs and gradients are part of it")
    _show("3. Time and peak memory, forward and backward", found["shape"], page, *notes)


# ---- 3. training --------------------------------------------------------------------------------------------------


def train_twice(device: str, steps: int) -> dict:
    """Train two GPTs from the same weights on the same batches, step by step in turn; only their attention differs."""
    config = loop.TrainConfig(steps=steps)
    text = loop.load_text(None)
    runs = {}
    for name in ("standard", "tilewise"):
        model = gpt.GPT(gpt.GPTConfig(context=config.context), gpt.ATTENTIONS[name]).to(device)
        runs[name] = loop.train(model, text, config)
    weights = sum(p.numel() for p in model.parameters())
    losses, speeds = {name: [] for name in runs}, {name: [] for name in runs}
    with progress() as bar:
        task = bar.add_task("training", total=steps)
        for step in range(steps):
            for name, records in runs.items():
                record = next(records)
                losses[name].append(record.loss)
                speeds[name].append(record.tokens_per_s)
            bar.update(
                task, completed=step + 1, description=f"training: step {step + 1} of {steps}, loss {record.loss:.3f}"
            )
    gap = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    found = {"weights": weights, "text_bytes": len(text), "context": config.context, "batch_size": config.batch_size}
    found |= {"loss": losses, "tokens_per_s": speeds, "largest_gap": gap, "allowed_gap": TIGHT, "agrees": gap <= TIGHT}
    _print_training(found)
    return found


def _print_training(found: dict) -> None:
    loss, speed = found["loss"], found["tokens_per_s"]
    page = table(("step", "standard\nloss", "tilewise\nloss", "difference", "standard\ntokens/s", "tilewise\ntokens/s"))
    steps = len(loss["standard"])
    for step in sorted({*range(0, steps, 10), steps - 1}):
        a, b = loss["standard"][step], loss["tilewise"][step]
        until = slice(max(0, step - 9), step + 1)
        rates = [f"{median(speed[name][until]):,.0f}" for name in ("standard", "tilewise")]
        page.add_row(str(step), f"{a:.5f}", f"{b:.5f}", f"{abs(a - b):.1e}", *rates)
    size = f"{found['weights'] / 1e6:.1f} M weights, context {found['context']}, on Python's standard library"
    gap = f"largest difference over {steps} steps {found['largest_gap']:.1e}, allowed {found['allowed_gap']:g}"
    _show("4. A small GPT, trained twice", size, page, f"losses {'agree' if found['agrees'] else 'DISAGREE'}: {gap}")


def _show(title: str, said: str, page: object, *notes: str) -> None:
    """Print a table below its title, and notes on it."""
    heading(title, said)
    console().print(page)
    for each in notes:
        note(each)
    console().print()
