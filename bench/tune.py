"""`tilewise tune`: measures the Triton backend's candidate tiles on this machine and keeps the fastest that are right."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated

import typer

from bench import cases
from bench import measure as clock
from bench.testing import of_case
from tilewise import accuracy
from tilewise.backends import triton
from tilewise.backends.triton import Triton, config
from tilewise.backends.triton.host import tuned
from tilewise.cli import checkout
from tilewise.cli.page import console, heading, note, progress, status_text, table

CASES = ("h200-d64-n4096-causal", "h200-d128-n4096-causal", "h200-d256-n4096-causal")
WRITES = {"forward": ("o", "lse"), "dkdv": ("dk", "dv"), "dk": ("dk",), "dv": ("dv",), "dq": ("dq",)}


@dataclass(frozen=True)
class TuneOptions:
    """Options: where to measure, and what."""

    case: Annotated[list[str] | None, typer.Option(help="A case of bench/cases.py; repeat for more.")] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and print; keep nothing.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@dataclass(frozen=True)
class Trial:
    """One candidate of one pass: milliseconds of the whole forward or backward with it, or why it does not count."""

    case: str
    name: str
    tiles: object
    ms: float | None = None
    wrong: str = ""
    kept: bool = False


def tune(options: TuneOptions) -> int:
    """Measure the tiles of the Triton kernels and keep the fastest for this machine.

    Every candidate is checked against float64 first and never timed when wrong. What is found is written to the user's cache
    folder (TILEWISE_CACHE) and used from the next call on, for the same device, dtype and head dims. Exit code 1: a candidate
    is wrong.
    """
    device = _device(options.device)
    trials, rows = [], []
    with progress() as bar:
        task = bar.add_task("", total=None)
        for name in options.case or CASES:
            found, best = measure(cases.named(name), device, lambda text: bar.update(task, description=text))
            trials += found
            rows += best
    file = None if options.dry_run else tuned.store(rows)
    if options.as_json:
        print(json.dumps([asdict(t) for t in trials]))
    else:
        _print(trials, file)
    return 1 if any(t.wrong for t in trials) else 0


def _device(wanted: str) -> str:
    """Raise ValueError where there is no GPU, unless the interpreter takes CPU tensors."""
    device = checkout.choose_device(wanted)
    if device == "cpu" and not (triton.installed() and triton.interpreting()):
        raise ValueError(
            "tilewise tune measures the Triton backend's tiles on a GPU, and torch.cuda sees none on this machine; without "
            "measurements the tiles of backends/triton/config.py are used"
        )
    return device


def measure(case, device: str, say: Callable[[str], None] = lambda _: None) -> tuple[list[Trial], list]:
    """Return the trials of a case, and a tuned.Tuning for each of its passes."""
    full, small = (of_case(c, device) for c in (case, _shrunk(case)))
    expected = small.expected()
    chosen = config.choose(full.p).passes
    trials, best = [], {}
    for name, candidates in config.candidates(full.p).items():
        for tiles in candidates:
            say(f"{case.name}: {name} {tiles.describe()}")
            passes = config.Config.of(config.preceded(chosen, _with_partner(name, tiles, config.candidates(full.p))))
            backend = Triton(passes)
            trial = _try(Trial(case.name, name, tiles), backend, small, full, expected)
            trials.append(trial)
            if trial.ms is not None and (name not in best or trial.ms < best[name].ms):
                best[name] = trial
    kept = _kept(best)
    trials = [replace(t, kept=any(t is x for x in kept)) for t in trials]
    return trials, [tuned.Tuning.of(full.p, t.name, t.tiles, t.ms) for t in kept]


def _with_partner(name: str, tiles, candidates: dict) -> dict:
    """Return the first candidate: a pass for dK alone needs one for dV, and the other way round."""
    partner = {"dk": "dv", "dv": "dk"}.get(name)
    return {name: tiles} | ({partner: candidates[partner][0]} if partner else {})


def _kept(best: dict[str, Trial]) -> list[Trial]:
    """Return the fastest of each pass; dK and dV by one pass, or by two where the better of those two measurements is faster."""
    whole, parts = best.get("dkdv"), [best[name] for name in ("dk", "dv") if name in best]
    two = len(parts) == 2 and (whole is None or min(t.ms for t in parts) < whole.ms)
    over_keys = parts if two else [whole] if whole else []
    return [best[name] for name in ("forward", "dq") if name in best] + over_keys


def _try(trial: Trial, backend, small, full, expected) -> Trial:
    """Check a candidate on the small call, then time it on the full one."""
    try:
        out = backend.forward(small.p, small.t)
        results = accuracy.tensors(out, backend.backward(small.p, small.t, out, small.do, small.dlse))
        errors = expected.judge({name: results[name] for name in WRITES[trial.name]})
        if not all(e.ok for e in errors):
            return replace(trial, wrong="; ".join(str(e) for e in errors if not e.ok))
        out = backend.forward(full.p, full.t)
        run = partial(backend.backward, full.p, full.t, out, full.do, full.dlse)
        if trial.name == "forward":
            run = partial(backend.forward, full.p, full.t)
        device = str(full.t.q.device)
        return replace(trial, ms=1e3 * clock.best_of(run, device))
    except Exception as error:  # a candidate that does not fit the device is no failure of the command
        return replace(
            trial, wrong="" if "OutOfResources" in type(error).__name__ else f"{type(error).__name__}: {error}"[:200]
        )


def _shrunk(case):
    """Return the case at a size that float64 can follow: several tiles, a ragged end."""
    return replace(
        case, batch=1, seqlen_q=min(case.seqlen_q, 300), seqlen_k=min(case.seqlen_k, 300), heads_q=2, heads_k=1
    )


def _lines(trials: list[Trial]) -> Iterator[tuple[str, ...]]:
    fastest = {}
    for t in trials:
        if t.ms is not None:
            key = (t.case, "forward" if t.name == "forward" else "backward")
            fastest[key] = min(t.ms, fastest.get(key, t.ms))
    for t in trials:
        best = fastest.get((t.case, "forward" if t.name == "forward" else "backward"))
        time = ("", "") if t.ms is None else (f"{t.ms:.3f}", f"{t.ms / best:.2f}")
        verdict = (
            status_text("red") + f": {t.wrong}"
            if t.wrong
            else "does not fit"
            if t.ms is None
            else "kept"
            if t.kept
            else ""
        )
        yield t.case, t.name, t.tiles.describe(), *time, verdict


def _print(trials: list[Trial], file) -> None:
    columns = ("case", "pass", "tiles", "ms", "of the fastest", "verdict")
    page = table(columns, left=("case", "pass", "tiles", "verdict"), wrap=("verdict",))
    for line in _lines(trials):
        page.add_row(*line)
    heading("Tiles", "milliseconds of the whole forward or backward with them")
    console().print(page)
    note(f"Kept in {file}" if file else "Kept nowhere (--dry-run)")
