"""The judge of a backend on one GPU: is every kernel right there, under load too. What it finds right is remembered.

    python -m tests.judge check --backend hopper --out OUT/check.jsonl [--parts contract,kernels] [--minutes 8.5] [--again]
    python -m tests.judge build --backend hopper        (on any machine with its compiler: what is checked and not shipped)
    python -m tests.judge prove --backend hopper OUT/check.jsonl     (remembers the kernels whose every call was right)
    python -m tests.judge release --backend hopper --minutes 240     (all of check, every kernel again; then prove, if all was right)

The docstring of tests/judge/check.py names the parts. Results go to --out in the form of bench/results; the folder beside it has a
line for every item (rows.jsonl) and what each process printed (logs). ``--device cpu`` rehearses everything on small calls.
"""

import argparse
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from bench import records
from tests.judge import check
from tests.judge.jobs import Run, Worker, innermost
from tests.judge.subject import Subject, subject


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
    run = Run(options.out.with_suffix(""), options.minutes, ("-m", "tests.judge", *words))
    run.again = options.again or options.command == "release"
    if options.inline:
        run.inline = partial(work, run, made)
    if options.worker:
        work(run, made, options.worker)
        return 0
    for part in options.parts.split(",") if options.parts else check.PARTS:
        one_part(run, made, part)
    written = write_results(run, made, options)
    print("\n".join(summary(run)), flush=True)
    ends = [row["detail"] for row in run.rows() if row["part"] == "job" and row.get("detail")]
    wrong = any(row["state"] in ("wrong", "error", "begun") for row in run.items())
    if options.command != "release":
        return int(wrong or any(end.startswith("exit code") for end in ends))
    right = not wrong and not ends  # a part that ran out of time judges no release
    print(check.prove(made, written) if right else "not a release: see what is not right above")
    return int(not right)


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.judge", description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["check", "build", "prove", "release"])
    parser.add_argument("files", type=Path, nargs="*", help="for prove: results of check")
    parser.add_argument("--backend", required=True, help="a backend of tilewise")
    parser.add_argument(
        "--out", type=Path, default=Path("out/gpu.jsonl"), help="results; its folder of rows is beside it"
    )
    parser.add_argument("--parts", default="", help="comma-separated; default: all of the command's")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal on small calls")
    parser.add_argument("--again", action="store_true", help="check kernels whose programs were right before, too")
    parser.add_argument("--inline", action="store_true", help="no processes: work in this one, for tests and debuggers")
    parser.add_argument("--worker", help="used by the command itself")
    options = parser.parse_intermixed_args(words)  # files may follow options
    unknown = set(filter(None, options.parts.split(","))) - set(check.PARTS)
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(check.PARTS)}")
    return options


def work(run: Run, made: Subject, job: str) -> None:
    """Does the work of one worker's process."""
    check.WORKERS[job.partition(":")[0]](Worker(run, job), made)


def one_part(run: Run, made: Subject, part: str) -> None:
    """A part; what goes wrong with it leaves the others their time."""
    began = time.monotonic()
    try:
        check.phase(run, made, part)
    except Exception as error:
        run.add(part="job", job=part, state="error", detail=innermost(error))
        print(f"{part}: {innermost(error)}", file=sys.stderr)
    print(f"{part}: {time.monotonic() - began:.0f} s, {run.left:.0f} left", flush=True)


def write_results(run: Run, made: Subject, options: argparse.Namespace) -> list[dict]:
    """Appends the run and its results to --out."""
    head = records.run(f"python -m tests.judge {options.command} --backend {made.name}", made.device, {})
    found = check.results_of(run, made, head["run"])
    head["peers"] = {r["contestant"]: "tilewise" for r in found}
    return records.append([head, *found], options.out)


def summary(run: Run) -> list[str]:
    """Counts of every part, and what is not right; an item that began and did not end crashed or ran out of time."""
    lines, rows = [], run.items()
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = [row for row in rows if row["part"] == part]
        seconds = sum(row.get("seconds", 0) for row in of_part)
        lines.append(f"{part}: {dict(Counter(row['state'] for row in of_part))}, {seconds:.0f} s")
        bad = [row for row in of_part if row["state"] not in ("ok", "refused", "skipped")]
        lines += [f"  {row['item']}: {row['state']} {row.get('detail', '')[-300:]}" for row in bad]
    ended = [row for row in run.rows() if row["part"] == "job" and row.get("detail")]
    return lines + [f"{row['job']}: {row['detail'][-300:]}" for row in ended]


if __name__ == "__main__":
    sys.exit(main())
