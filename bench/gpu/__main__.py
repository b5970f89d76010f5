"""A backend on one GPU: is every kernel right there, how fast is it beside its peers, what does it cost the host, does it stand a load.

    python -m bench.gpu check --backend hopper --out OUT/check.jsonl [--parts contract,kernels] [--minutes 8.5] [--again]
    python -m bench.gpu time --backend hopper --out OUT/time.jsonl [--parts squares,goals] [--checked OUT/check.jsonl]
    python -m bench.gpu host --backend triton --out OUT/host.jsonl
    python -m bench.gpu stress --backend triton --out OUT/stress.jsonl
    python -m bench.gpu build --backend hopper        (on any machine with its compiler: what is checked and not shipped)
    python -m bench.gpu prove --backend hopper OUT/check.jsonl     (remembers the kernels whose every call was right)
    python -m bench.gpu release --backend hopper --minutes 240     (all of check, every kernel again; then prove, if all was right)

The docstrings of bench/gpu/check.py, time.py, host.py and stress.py name the parts. Results go to --out in the form of
bench/results, those of goals to goals.jsonl in the folder beside it, which `tilewise bench --check` reads; that folder also has a
line for every item (rows.jsonl) and what each process printed (logs). ``--device cpu`` rehearses everything on small calls.
"""

import argparse
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType

from bench import compare, records
from bench.gpu import check, host, stress
from bench.gpu import time as timing
from bench.gpu.jobs import Run, Worker, innermost
from bench.gpu.subject import Subject, subject

COMMANDS: dict[str, ModuleType] = {"check": check, "time": timing, "host": host, "stress": stress}
PEERS = {
    "cudnn": "SDPA's cuDNN backend",
    "fa2": "SDPA's flash backend",
    "sdpa": "F.scaled_dot_product_attention",
    "product": "a matrix product by torch",
    "plain": "the same sizes without the feature",
    "unsplit": "without split keys and shared tiles",
    "two-passes": "a pass of its own for dQ",
    "backend": "the backend below the public call",
    "outputs": "the allocation of its outputs",
    "tilewise": "the public call",
    "tilewise-grad": "the public call that records for gradients",
    "autograd": "the public call and its gradients",
    "kernels": "its kernels alone",
}


def main(words: list[str] | None = None) -> int:
    """Exit code 1: something is not right."""
    words = sys.argv[1:] if words is None else words
    options = parsed(words)
    made = subject(options.backend, options.device)
    if options.command == "build":
        return made.build()
    if options.command == "prove":
        print(check.prove(made, [r for file in options.files for r in records.read(file)]))
        return 0
    run = run_of(options, words, made)
    module = COMMANDS[options.command]
    if options.inline:
        run.inline = partial(work, run, made, module)
    if options.worker:
        work(run, made, module, options.worker)
        return 0
    for part in options.parts.split(",") if options.parts else module.PARTS:
        one_part(run, made, module, part)
    written = write_results(run, made, module, options)
    print("\n".join(summary(run, made, written)), flush=True)
    ends = [row["detail"] for row in run.rows() if row["part"] == "job" and row.get("detail")]
    wrong = any(row["state"] in ("wrong", "error", "begun") for row in run.items())
    if not options.release:
        return int(wrong or any(end.startswith("exit code") for end in ends))
    right = not wrong and not ends  # a part that ran out of time judges no release
    print(check.prove(made, written) if right else "not a release: see what is not right above")
    return int(not right)


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=[*COMMANDS, "build", "prove", "release"])
    parser.add_argument("files", type=Path, nargs="*", help="for prove: results of check")
    parser.add_argument("--backend", required=True, help="a backend of tilewise")
    parser.add_argument(
        "--out", type=Path, default=Path("out/gpu.jsonl"), help="results; its folder of rows is beside it"
    )
    parser.add_argument("--parts", default="", help="comma-separated; default: all of the command's")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal on small calls")
    parser.add_argument("--again", action="store_true", help="check kernels whose programs were right before, too")
    parser.add_argument("--checked", type=Path, nargs="*", default=[], help="results of check, of kernels to be timed")
    parser.add_argument("--inline", action="store_true", help="no processes: work in this one, for tests and debuggers")
    parser.add_argument("--worker", help="used by the command itself")
    options = parser.parse_intermixed_args(words)  # files may follow options
    options.release = options.command == "release"
    if options.release:
        options.command, options.again = "check", True
    if options.command in COMMANDS:
        unknown = set(filter(None, options.parts.split(","))) - set(COMMANDS[options.command].PARTS)
        if unknown:
            parser.error(
                f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(COMMANDS[options.command].PARTS)}"
            )
    return options


def run_of(options: argparse.Namespace, words: list[str], made: Subject) -> Run:
    """The run; only kernels whose programs were right before, or that --checked says were right, are timed by themselves."""
    run = Run(options.out.with_suffix(""), options.minutes, ("-m", "bench.gpu", *words))
    run.again = options.again
    if options.command == "time":
        found = [r for file in options.checked for r in records.read(file)]
        run.right = {r["contestant"] for r in records.select(found, metric="right") if r["value"] == r["of"]}
        run.right |= {k.name for k in made.kernels()} - {k.name for k in made.waiting()}
    return run


def work(run: Run, made: Subject, module: ModuleType, job: str) -> None:
    """Does the work of one worker's process."""
    module.WORKERS[job.partition(":")[0]](Worker(run, job), made)


def one_part(run: Run, made: Subject, module: ModuleType, part: str) -> None:
    """A part; what goes wrong with it leaves the others their time."""
    began = time.monotonic()
    try:
        module.phase(run, made, part)
    except Exception as error:
        run.add(part="job", job=part, state="error", detail=innermost(error))
        print(f"{part}: {innermost(error)}", file=sys.stderr)
    print(f"{part}: {time.monotonic() - began:.0f} s, {run.left:.0f} left", flush=True)


def write_results(run: Run, made: Subject, module: ModuleType, options: argparse.Namespace) -> list[dict]:
    """Appends the run and its results to --out."""
    head = records.run(f"python -m bench.gpu {options.command} --backend {made.name}", made.device, {})
    found = module.results_of(run, made, head["run"])
    head["peers"] = {r["contestant"]: PEERS.get(r["contestant"], "tilewise") for r in found}
    return records.append([head, *found], options.out)


def summary(run: Run, made: Subject, written: list[dict]) -> list[str]:
    """Counts of every part, what is not right, and the numbers; an item that began and did not end crashed or ran out of time."""
    lines, rows = [], run.items()
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = [row for row in rows if row["part"] == part]
        seconds = sum(row.get("seconds", 0) for row in of_part)
        lines.append(f"{part}: {dict(Counter(row['state'] for row in of_part))}, {seconds:.0f} s")
        bad = [row for row in of_part if row["state"] not in ("ok", "refused", "skipped")]
        lines += [f"  {row['item']}: {row['state']} {row.get('detail', '')[-300:]}" for row in bad]
    ended = [row for row in run.rows() if row["part"] == "job" and row.get("detail")]
    lines += [f"{row['job']}: {row['detail'][-300:]}" for row in ended]
    by_case: dict[tuple[str, str], list[str]] = {}
    for r in records.select(written):
        text = f"{r['contestant']} {r['value']:.4g}" + (f" ({r['tflops']:.0f})" if "tflops" in r else "")
        by_case.setdefault((r["case"], f"{r['pass']} {r['unit']}"), []).append(text)
    lines += [f"  {case:28} {what:16} {'  '.join(found)}" for (case, what), found in by_case.items()]
    return [*lines, *verdicts(run.folder / "goals.jsonl", timing.goals_of(made))]


def verdicts(path: Path, goals: list[compare.Goal]) -> list[str]:
    """The goals that this run measured."""
    if not path.exists():
        return []
    try:
        found = compare.judge(goals, compare.read_results(path))
    except compare.Refused as error:
        return [f"goals: {error}"]
    measured = [v for v in found if v.says != "not measured"]
    shown = [
        f"  {v.says:13}{v.goal.name} {v.measured or 0:.2f} of {v.goal.ratio} {v.goal.peer} {v.why}" for v in measured
    ]
    return [f"goals: {dict(Counter(v.says for v in found))}", *shown]


if __name__ == "__main__":
    sys.exit(main())
