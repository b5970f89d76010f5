"""`tilewise bench`: measures cases of bench/cases.py, and judges results by bench/goals.toml."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bench import records, run
from bench.cases import CASES, named, tagged
from bench.compare import asked, judge, load_goals, read_results
from bench.peers import all_contestants
from bench.run import Lineup, pick
from tilewise.cli import checkout
from tilewise.cli.page import console, heading, note, progress, status_text, table


@dataclass(frozen=True)
class BenchOptions:
    """The options of `tilewise bench`: the cases and contestants to measure, or the file to judge."""

    tag: Annotated[list[str] | None, typer.Option(help="Measure the cases with this tag; repeat to narrow.")] = None
    case: Annotated[list[str] | None, typer.Option(help="Measure this case; repeat for more.")] = None
    contestant: Annotated[list[str] | None, typer.Option(help="Backends and peers to run; default: all.")] = None
    check: Annotated[Path | None, typer.Option(metavar="FILE", help="Only judge FILE by goals.toml.")] = None
    out: Annotated[Path | None, typer.Option(help="Append results here; default: a new file under ./out.")] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of timing a case; default: 10, or what --minutes leaves.")
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Leave out cases that would take longer; default: 3 with --tag on a CPU."),
    ] = None
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False


def bench(options: BenchOptions) -> int:
    """Measure attention beside its peers, and judge speed claims.

    Each case is checked against float64 first and never timed when wrong. Without --tag or --case, the cases of
    bench/goals.toml for this device are measured and judged. Exit code 1: a goal falls short, or a check is red.
    """
    if options.check:
        return _judge(options.check, options.as_json)
    if options.list_cases:
        return _list(options.tag or [], options.as_json)
    device = checkout.choose_device(options.device)
    chosen = options.tag or options.case
    groups = _groups(options, device)
    out = options.out or Path("out") / f"bench-{datetime.now(UTC):%Y%m%d-%H%M%S}.jsonl"
    head, *results = _measure(groups, out, device, options)
    entries = records.entries(results)
    if options.as_json:
        print(json.dumps([head, *entries]))
    else:
        bounds = list(records.select(results, contestant="bound"))
        for case in dict.fromkeys(entry["case"] for entry in entries):
            _print_case(case, *([r for r in found if r["case"] == case] for found in (entries, bounds)))
        console().print(f"Results: {out}", highlight=False, soft_wrap=True)
    if any(entry["status"] == "red" for entry in entries):
        return 1
    return (
        0
        if chosen or options.as_json
        else _judge(out, as_json=False, only={x.case.name for group in groups for x in group})
    )


def _groups(options: BenchOptions, device: str) -> list[list]:
    """Return the cases asked for with the contestants that can run some of them, or the goals' cases with theirs."""
    tags, chosen = options.tag or [], pick(options.contestant or [])
    if tags or options.case:
        found = [named(name) for name in options.case or []] + (_meant_for(device, tagged(*tags)) if tags else [])
        if not found:
            raise ValueError(
                f"no case for {device} carries all of the tags {', '.join(tags)}; `tilewise bench --list` shows them"
            )
        cases = list(dict.fromkeys(found))
        chosen = chosen or _who_can_run(cases, device)
        return [[Lineup(case, chosen)] for case in cases]
    groups = [group for group in asked(load_goals()) if device.split(":")[0] in named(group[0].case).tags]
    if not groups:
        raise ValueError(f"no case of bench/goals.toml is meant for {device}; name some with --tag or --case")
    if chosen:
        return [[Lineup(named(x.case), chosen) for x in group] for group in groups]
    return [[Lineup(named(x.case), pick(x.contestants), x.untimed) for x in group] for group in groups]


def _meant_for(device: str, cases: list) -> list:
    """Return the cases of a tag without those that are meant for another kind of device."""
    kind = device.split(":")[0]
    return [case for case in cases if kind in case.tags or not case.tags & {"cpu", "cuda"}]


def _measure(groups: list[list], out: Path, device: str, options: BenchOptions) -> list[dict]:
    seconds, cases = _limit(options, device), sum(map(len, groups))
    budget = 10.0 if seconds is None else min(10.0, seconds / (2 * cases))
    plan = run.Plan(device=device, budget=budget if options.budget is None else options.budget)
    if not options.as_json:
        said = f"about {plan.budget:.2g} s of timing each"
        console().print(f"{cases} cases, {said if seconds is None else f'as many as fit {seconds / 60:g} min'}.")
    done: set[str] = set()
    with progress(bar=True) as bar:
        task = bar.add_task("starting", total=cases)

        def results() -> Iterator[dict]:
            for record in run.run(groups, plan, lambda text: bar.update(task, description=text), seconds):
                done.update([record["case"]] if "case" in record else [])
                bar.update(task, completed=len(done))
                yield record

        found = records.append(results(), out)
    left_out = [lineup.case.name for group in groups for lineup in group if lineup.case.name not in done]
    if left_out and not options.as_json:
        note(f"Left out, to end in {seconds / 60:g} min (--minutes): {', '.join(left_out)}")
    return found


def _limit(options: BenchOptions, device: str) -> float | None:
    """Return the seconds within which the cases have to be done, None without an end. On a GPU it is not known how long a case takes."""
    if device.startswith("cuda"):
        return None
    minutes = 3.0 if options.minutes is None and options.tag else options.minutes
    return None if minutes is None else 60 * minutes


def _who_can_run(cases: list, device: str) -> list:
    """tilewise's backends by name, and every peer that does not refuse all of the cases."""
    elsewhere = {"tilewise"} if device.startswith("cuda") else {"tilewise", "hopper", "triton"}
    by_name = [c for c in all_contestants().values() if c.name not in elsewhere and not c.asked]
    return [c for c in by_name if any(not c.unsupported(case, device) for case in cases)]


WHO, TIMES = ("contestant", "check"), ("forward\nms", "\nspread", "backward\nms", "\nspread")
COLUMNS = (*WHO, *TIMES, "GFLOP/s", "extra\nMiB", "noise")


def _print_case(case: str, entries: list[dict], bounds: list[dict]) -> None:
    """Print milliseconds with their quartiles, GFLOP/s, memory beyond inputs and outputs, and the bound."""
    heading(case, "bound: " + "  ".join(f"{r['pass']} {r['value']:.3g} ms" for r in bounds))
    page = table(COLUMNS, left=WHO)
    for entry in entries:
        page.add_row(entry["contestant"], status_text(entry["status"]), *_numbers(entry))
    console().print(page)
    for entry in entries:
        if entry["status"] in ("refused", "failed"):
            note(f"{entry['contestant']} {entry['status']}: {'; '.join(entry['why'])}")
    note(f"checked: {entries[0]['checked']}")
    console().print()


def _numbers(entry: dict) -> list[str]:
    cells, timed = [], [entry[way] for way in ("forward", "backward") if way in entry]
    for way in ("forward", "backward"):
        t = entry.get(way)
        cells += [f"{t['median_ms']:.4g}", f"{t['low_ms']:.4g}–{t['high_ms']:.4g}"] if t else ["–", ""]
    rates = " / ".join(f"{1e3 * t['tflops']:.0f}" for t in timed)
    extra = f"{entry['memory']['extra_bytes'] / 2**20:.1f}" if "memory" in entry else "–"
    noise = [t["noise"] for t in timed if "noise" in t]
    return [*cells, rates or "–", extra, f"{max(noise):.1%}" if noise else ""]


def _judge(path: Path, as_json: bool, only: set[str] | None = None) -> int:
    """Print every goal's verdict; 1 if one falls short. Raises ValueError (Refused) for a file that cannot be judged."""
    goals = [g for g in load_goals() if only is None or only.issuperset(g.cases)]
    verdicts = judge(goals, read_results(path))
    if all(v.says == "not measured" for v in verdicts):
        raise ValueError(f"{path} holds no result that a goal of bench/goals.toml asks for")
    if as_json:
        print(json.dumps([_verdict_record(v) for v in verdicts]))
    else:
        _print_verdicts(verdicts)
    return 1 if any(v.says == "falls short" for v in verdicts) else 0


def _verdict_record(verdict) -> dict:
    fields = ("case", "tag", "direction", "contestant", "peer", "peer_case", "ratio", "mib")
    goal = {name: getattr(verdict.goal, name) for name in fields}
    judged = {"verdict": verdict.says, "measured": verdict.measured, "noise": verdict.noise, "why": verdict.why}
    return goal | judged


def _print_verdicts(verdicts: list) -> None:
    columns = ("verdict", "measured", "noise", "goal", "direction", "who", "case")
    page = table(columns, left=("verdict", "direction", "who", "case"), wrap=("who", "case"))
    for v in verdicts:
        g = v.goal
        if g.mib is not None:
            who, goal, measured = g.contestant, f"≤ {g.mib:g} MiB", f"{v.measured or 0:.1f} MiB"
        else:
            who = f"{g.contestant} : {g.peer}" + (f" on {g.peer_case}" if g.peer_case else "")
            goal, measured = f"≥ {g.ratio:g} ×", f"{v.measured or 0:.3f} ×"
        measured = "–" if v.measured is None else measured
        noise = "–" if v.noise is None else f"{v.noise:.1%}"
        page.add_row(status_text(v.says), measured, noise, goal, g.direction, who, g.case or f"{g.tag} (mean)")
    heading("Goals", "bench/goals.toml")
    console().print(page)
    for v in verdicts:
        if v.why:
            note(f"{v.goal.name}: {v.why}")


def _list(tags: list[str], as_json: bool) -> int:
    cases = tagged(*tags) if tags else list(CASES.values())
    if as_json:
        print(json.dumps([asdict(c) | {"tags": sorted(c.tags)} for c in cases]))
        return 0
    page = table(("name", "q", "k heads", "dtype", "what", "tags"), left=("name", "what", "tags"))
    for c in cases:
        what = " ".join(x for x in (c.mask, c.score, "sink" * c.sink, "dropout" * bool(c.dropout_p)) if x) or "full"
        q = f"{c.batch}×{c.seqlen_q}×{c.heads_q}×{c.head_dim}"
        page.add_row(c.name, q, f"{c.seqlen_k}×{c.heads_k}", c.dtype, what, " ".join(sorted(c.tags)))
    console().print(page)
    return 0
