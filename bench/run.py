"""Checks, then times: contestants of a case run interleaved in one process. Their results are lines of JSON.

    python -m bench.run --case demo-cpu-n1024 --contestant portable --contestant sdpa --out result.jsonl

Per case: inputs are drawn; every contestant runs once under a memory meter and is held to the error rule of
bench/check.py against float64; one that is red, or raises, is never timed. Then rounds: in each, every contestant is
timed forward (no gradients wanted) and backward (of a graph made outside the clock), the order turning from round to
round. The first contestant runs a second time: the difference of its two medians is the noise.
"""

import random
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch

from bench import check, measure, records
from bench.cases import Case, Inputs, draw, named
from bench.peers import Call, Contestant, all_contestants

PROCESS = uuid.uuid4().hex[:12]
"""The run that this process's records name: two results can be compared only where it is the same."""

LONG = 0.5
"""Seconds of a call on a CPU from which on its first one is taken at its word."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How to run: seconds of timing to spend on a case, bounds on rounds, and whether to run the first contestant twice."""

    device: str = "cpu"
    budget: float = 10.0
    min_rounds: int = 3
    max_rounds: int = 30
    again: bool = True


@dataclass(frozen=True)
class Lineup:
    """A case and who runs it; those of `untimed` are checked and their memory is measured, no more."""

    case: Case
    contestants: list[Contestant]
    untimed: frozenset[str] = frozenset()


@dataclass
class Entry:
    """One contestant on its way through a case."""

    contestant: Contestant
    x: Inputs
    call: Call | None = None
    refused: list[str] = field(default_factory=list)
    failed: str | None = None
    errors: list[check.Error] = field(default_factory=list)
    memory: dict = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "backward": [], "both": []})
    calls: dict[str, int] = field(default_factory=lambda: {"forward": 1, "backward": 1, "both": 1})

    @property
    def status(self) -> str:
        """refused, failed (it raised), limit (nothing to check), or the check's verdict: green, loose or red."""
        if self.refused:
            return "refused"
        if self.failed:
            return "failed"
        if self.contestant.limit:
            return "limit"
        return check.verdict(self.errors, self.contestant.ours)

    @property
    def timed(self) -> bool:
        return self.status in ("green", "loose", "limit")

    @property
    def why(self) -> list[str]:
        """What keeps it from being green, with the checkout's files named from its root on: a result says nothing of where that was."""
        found = self.refused or ([self.failed] if self.failed else [str(e) for e in self.errors if not e.ok])
        if self.contestant.limit:
            found = ["a limit of the machine: nothing is checked"]
        return [line.replace(f"{measure.ROOT}/", "") for line in found]


# ---- one case -----------------------------------------------------------------------------------------------------


def run_group(lineups: Sequence[Lineup], plan: Plan, say: Report = lambda _: None) -> list[dict]:
    """Results of cases whose times are compared: checked one after the other, then timed in the same rounds, since the
    pace of a machine changes from minute to minute."""
    heats = [heat(lineup, plan, say) for lineup in lineups]
    say(f"{', '.join(h.case.name for h in heats)}: timing")
    runners = [e for h in heats for e in (*h.runners, *h.again)]
    with measure.Clock(plan.device) as clock:
        time_rounds(runners, replace(plan, budget=plan.budget * len(lineups)))
    return [found for h in heats for found in heat_results(h, plan, clock.mhz)]


@dataclass(frozen=True)
class Heat:
    """A case whose contestants are checked: all of them, those who will be timed, and the first of these once more."""

    case: Case
    says: str
    entries: list[Entry]
    runners: list[Entry]
    again: list[Entry]


def heat(lineup: Lineup, plan: Plan, say: Report) -> Heat:
    x = draw(lineup.case, plan.device)
    want = check.expected(x)
    entries = []
    for contestant in lineup.contestants:
        say(f"{lineup.case.name}: checking {contestant.name}")
        entries.append(checked(contestant, x, want, plan))
    runners = [e for e in entries if e.timed and e.contestant.name not in lineup.untimed]
    again = [Entry(e.contestant, x, e.call) for e in runners[:1] if plan.again]
    return Heat(lineup.case, want.says, entries, runners, again)


def checked(contestant: Contestant, x: Inputs, want: check.Expected, plan: Plan) -> Entry:
    """Runs a contestant once under the memory meter and compares; keeps its call if it may be timed."""
    entry = Entry(contestant, x, refused=contestant.unsupported(x.case, plan.device))
    if entry.refused:
        return entry
    if contestant.limit:
        entry.call = contestant.prepare(x)
        return entry
    try:
        warm_up(contestant, x.case, plan)
        with contestant.context():
            call = contestant.prepare(x)
            with measure.PeakMemory(plan.device) as peak:
                found = check.results(call, x, want.do)
        entry.errors = check.compare(found, want)
    except NotImplementedError as error:
        entry.refused = [line.strip() for line in str(error).splitlines() if line.strip()]
        return entry
    except (RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
        entry.failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return entry
    outputs = sum(t.numel() * t.element_size() for t in found.values())
    entry.memory = {"peak": peak.bytes, "extra": max(0, peak.bytes - outputs)}
    entry.call = call
    return entry


def warm_up(contestant: Contestant, case: Case, plan: Plan) -> None:
    """A small problem of the same kind first, so that thread pools, libraries and code are no part of the peak."""
    if case.lengths or plan.device.startswith("cuda"):
        return
    small = replace(case, batch=1, seqlen_q=min(case.seqlen_q, 128), seqlen_k=min(case.seqlen_k, 128))
    x = draw(small, plan.device)
    check.results(contestant.prepare(x), x, x.do)


def time_rounds(entries: list[Entry], plan: Plan) -> None:
    """Fills each entry's seconds; every round times all entries once, in an order of its own: a chip at its power limit
    runs slower behind whoever used much."""
    spent, chance = sum(first_sample(entry, plan) for entry in entries), random.Random(0)
    while entries and not _enough(min(len(e.seconds["forward"]) for e in entries), spent, plan):
        for entry in chance.sample(entries, len(entries)):
            for direction, seconds in one_sample(entry, plan.device).items():
                entry.seconds[direction].append(seconds)
                spent += seconds * entry.calls[direction]


def _enough(rounds: int, spent: float, plan: Plan) -> bool:
    """The budget is spent after the fewest rounds, or four times over after one: a very long case."""
    if rounds >= plan.max_rounds or (rounds >= plan.min_rounds and spent >= plan.budget):
        return True
    return rounds >= 1 and spent >= 4 * plan.budget


def first_sample(entry: Entry, plan: Plan) -> float:
    """Times one call to set how many make a sample. Returns the seconds spent.

    On a CPU a long call is a sample already. On a GPU the first call without gradients may compile or choose a kernel: it
    is thrown away.
    """
    times = one_sample(entry, plan.device)
    spent = times.get("both", times["forward"])
    is_sample = not plan.device.startswith("cuda") and spent > LONG
    if not is_sample:
        times = one_sample(entry, plan.device)
        spent += times.get("both", times["forward"])
    entry.calls = {name: measure.calls_for(seconds, plan.device) for name, seconds in times.items()} | {"both": 1}
    if set(entry.calls.values()) == {1}:
        for direction, seconds in times.items():
            entry.seconds[direction].append(seconds)
    return spent


def one_sample(entry: Entry, device: str) -> dict[str, float]:
    """Seconds a call: forward without gradients, backward alone, and their sum."""
    x = entry.x
    with entry.contestant.context():
        with torch.no_grad():
            forward = measure.seconds_per_call(entry.call, entry.calls["forward"], device)
        if not x.case.backward:
            return {"forward": forward}
        o, wanted = entry.call(), list(x.wanted.values())
        gradients = lambda: torch.autograd.grad(o, wanted, x.do, retain_graph=True)  # noqa: E731
        backward = measure.seconds_per_call(gradients, entry.calls["backward"], device)
    return {"forward": forward, "backward": backward, "both": forward + backward}


# ---- records ------------------------------------------------------------------------------------------------------


@cache
def machine_limits(device: str, dtype: torch.dtype) -> dict[str, float]:
    """The paces of a matrix product and of a copy, measured once per process and dtype."""
    return measure.limits(device, dtype)


def tensor_bytes(case: Case, direction: str) -> int:
    """Bytes that must cross memory once: q, k, v, o forward; backward also do and the gradients."""
    itemsize = torch.empty(0, dtype=case.torch_dtype).element_size()
    queries = sum(c.batch * c.seqlen_q for c in case.sequences) * case.heads_q
    keys = sum(c.batch * c.seqlen_k for c in case.sequences) * case.heads_k
    elements = (queries + keys) * (case.head_dim + case.head_dim_v)
    return itemsize * elements * (1 if direction == "forward" else 2)


def bounds_ms(case: Case, limits: dict[str, float], device: str) -> dict[str, float]:
    """The time below which the products (at torch's own matmul pace) or the tensors (at a copy's pace) do not let."""
    directions = ("forward", "backward") if case.backward else ("forward",)
    bounds = {}
    for direction in directions:
        products = case.flops(direction, device) / limits["matmul_flops"]
        bounds[direction] = 1e3 * max(products, tensor_bytes(case, direction) / limits["copy_bytes"])
    if case.backward:
        bounds["both"] = bounds["forward"] + bounds["backward"]
    return {name: round(ms, 6) for name, ms in bounds.items()}


def heat_results(h: Heat, plan: Plan, mhz: float | None = None) -> Iterator[dict]:
    """All that each contestant did on a case, and the times below which the machine's own paces do not let it."""
    for entry in h.entries:
        yield from results(entry, h, plan, mhz)
    limits = machine_limits(plan.device, h.case.torch_dtype)
    for name, ms in bounds_ms(h.case, limits, plan.device).items():
        yield records.result(PROCESS, h.case.name, "bound", name, "time", ms)


def results(entry: Entry, h: Heat, plan: Plan, mhz: float | None = None) -> Iterator[dict]:
    """How right a contestant was on a case, its memory, and each direction that was timed."""
    made = partial(records.result, PROCESS, h.case.name, entry.contestant.name)
    whole = "both" if h.case.backward else "forward"
    more = {"status": entry.status, "checked": h.says} | ({"why": why} if (why := entry.why) else {})
    yield made(whole, "error", max((check.share(e) for e in entry.errors), default=None), **more)
    if entry.memory:
        mib = {name: size / records.MIB for name, size in entry.memory.items()}
        yield made(whole, "memory", mib["extra"], peak=mib["peak"])
    for name, samples in entry.seconds.items():
        if not (entry.timed and samples):
            continue
        low, median, high = (round(1e3 * x, 6) for x in measure.summarize(samples))
        rate = 1e3 * h.case.flops(name, plan.device) / median if median else 0.0
        more = {"low": low, "high": high, "tflops": round(rate / 1e12, 4)}
        more |= {"rounds": len(samples), "calls": entry.calls[name]} | ({"sm_clock_mhz": mhz} if mhz else {})
        if h.again and entry is h.runners[0]:
            more["noise"] = round(abs(1e3 * measure.summarize(h.again[0].seconds[name]).median / median - 1.0), 4)
        yield made(name, "time", median, **more)


def run_record(plan: Plan, contestants: Iterable[Contestant]) -> dict:
    """The first line of a file: the machine, when, who runs, and how the run was made."""
    plan_record = {name: value for name, value in asdict(plan).items() if name != "device"}
    command = " ".join(Path(word).name for word in sys.argv)
    versions = {c.name: c.version for c in contestants}
    return records.run(command, plan.device, versions, plan=plan_record) | {"run": PROCESS}


def run(
    groups: Iterable[Sequence[Lineup]], plan: Plan, say: Report = lambda _: None, seconds: float | None = None
) -> Iterator[dict]:
    """The run's record, then the results of every group of cases as soon as it is measured; of those alone that fit so many seconds."""
    groups = list(groups)
    yield run_record(plan, [c for group in groups for lineup in group for c in lineup.contestants])
    for group in groups if seconds is None else timely(groups, seconds):
        yield from run_group(group, plan, say)
        if plan.device.startswith("cuda"):
            torch.cuda.empty_cache()


def timely(groups: Iterable[Sequence[Lineup]], seconds: float) -> Iterator[Sequence[Lineup]]:
    """The groups that will be done within so many seconds, short ones first.

    Each is expected to take as much longer than the one before as it has more work: so a machine that is busy with other work is
    known to be slow, by whatever factor.
    """
    began, pace = time.monotonic(), 0.0
    for group in sorted(groups, key=work):
        start = time.monotonic()
        if start - began + pace * work(group) >= seconds:
            return
        yield group
        pace = (time.monotonic() - start) / work(group)


def work(group: Sequence[Lineup]) -> float:
    """What all contestants of a group compute, in pairs of a query and a key; an element of K or V takes the time of two."""
    cases = [(c, len(lineup.contestants)) for lineup in group for c in lineup.case.sequences]
    pairs = [
        count * c.batch * c.heads_q * c.seqlen_k * (c.seqlen_q + 2 * c.head_dim + 2 * c.head_dim_v)
        for c, count in cases
    ]
    return max(1, sum(pairs))


def pick(names: list[str]) -> list[Contestant]:
    """Contestants by name. Raises ValueError with the known names."""
    known = all_contestants()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no contestant is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names]


def main(arguments: list[str] | None = None) -> int:
    """Measures named cases into a file; `tilewise bench` is the same with tables."""
    parser = records.parser(__doc__)
    parser.add_argument("--case", action="append", required=True, help="a name of bench/cases.py; repeatable")
    parser.add_argument("--contestant", action="append", required=True, help="a name of bench/peers.py; repeatable")
    parser.add_argument("--budget", type=float, default=Plan.budget, help="seconds of timing a case")
    parser.add_argument("--no-again", action="store_true", help="do not run the first contestant twice")
    options = parser.parse_args(arguments)
    plan = Plan(options.device, options.budget, again=not options.no_again)
    try:
        cases, contestants = [named(name) for name in options.case], pick(options.contestant)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        records.append(run([[Lineup(case, contestants)] for case in cases], plan), options.out)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
