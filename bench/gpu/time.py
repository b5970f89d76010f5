"""How fast is a backend beside its peers? Whoever is compared is timed in the same rounds, each in an order of its own.

compile    compiles the goals' kernels, and FlexAttention beside them, into the caches of the disk, many at once
squares    the grid of full and causal squares: the backend, its kernels that are right, its peers, and a matrix product
structures split keys, packed sequences, windows, decoding: with and without what the backend does about them
features   masks, scores and dropout, one each, beside the same sizes without them
profile    microseconds of each launch
goals      the goals of bench/goals.toml for this backend, peers in the same process
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from bench import cases, check, compare, peers, records, run
from bench.gpu.jobs import Item, Job, Run, Worker
from bench.gpu.subject import Subject, Timed
from bench.measure import Clock, in_turns
from tilewise import dispatch
from tilewise.backends.base import Backend
from tilewise.testing import Call, call

PARTS = ("compile", "squares", "structures", "features", "profile", "goals")
PEERS = {"cuda": ("cudnn", "fa2"), "cpu": ("sdpa",)}
LIMITS = {"compile": 120, "squares": 300, "structures": 100, "features": 100, "profile": 100, "goals": 400}
PRODUCT = {"cuda": 8192, "cpu": 256}  # rows of the matrix product
STEPS = 5  # calls under the profiler
Timer = Callable[[], object]


def drawn(case: cases.Case, device: str) -> tuple[cases.Inputs, Call]:
    """A case's tensors, for peers, and the same as a checked call."""
    x = cases.draw(case, device)
    c = call(*(t.detach() for t in (x.q, x.k, x.v)), x.do, **x.options())
    return x, c if case.backward else c.forward_only()


def ours(backend: Backend, c: Call, direction: str) -> Timer:
    """One direction of a backend as a call."""
    if direction == "forward":
        return partial(backend.forward, c.p, c.t)
    return partial(backend.backward, c.p, c.t, backend.forward(c.p, c.t), c.do, c.dlse)


def theirs(who: peers.Contestant, x: cases.Inputs, direction: str) -> Timer:
    """One direction of a peer as a call."""
    attention = who.prepare(x)
    if direction == "backward":
        with who.context():
            o = attention()
        return lambda: torch.autograd.grad(o, list(x.wanted.values()), x.do, retain_graph=True)

    def forward() -> None:
        with torch.no_grad(), who.context():
            attention()

    return forward


def peers_timers(case: cases.Case, x: cases.Inputs, direction: str, device: str) -> dict[str, Timer]:
    """The peers that can run a case, by name; some say so only when they are called."""
    known, found = peers.all_contestants(), {}
    for who in (known[name] for name in PEERS[device]):
        if who.unsupported(case, device):
            continue
        try:
            timer = theirs(who, x, direction)
            timer()
            found[who.name] = timer
        except RuntimeError as error:
            print(f"{case.name}: {who.name} refused: {error}")
    return found


def timed(name: str, timers: dict[str, dict[str, Timer]], device: str, flops: dict[str, float]) -> dict:
    """The row of a case: milliseconds of everyone, by direction; ``flops`` of the case."""
    found = []
    for direction, by_name in timers.items():
        with Clock(device) as clock:
            times = in_turns(by_name, device)
        at = {"sm_clock_mhz": clock.mhz} if clock.mhz else {}
        for who, ms in times.items():
            work = 2 * PRODUCT[device] ** 3 if who == "product" else flops[direction]
            speed = {"tflops": round(work / ms / 1e9, 4)} if who != "plain" else {}
            found.append(records.result("", name, who, direction, "time", round(ms, 6), **speed, **at))
    return {"state": "ok", "results": found}


def timed_case(
    subject: Subject,
    name: str,
    others: Callable[[Subject, cases.Case, Call], Timed],
    plain: bool = False,
    **extra: Timer,
) -> dict:
    """A case of the table: the backend, others that are bound for it, the peers that can run it, and forwards' ``extra``.

    plain: also the same sizes without the feature that the case is about, as the contestant of that name.
    """
    case, device = cases.named(name), subject.device
    x, c = drawn(case, device)
    c, timers, flops = subject.allowed(c), {}, {}
    bound, without = others(subject, case, c), drawn(stripped(case), device)[1] if plain else None
    for direction in ("forward", "backward") if c.p.spec.needs_grad else ("forward",):
        everyone = {subject.name: subject.backend(), **getattr(bound, direction)}
        timers[direction] = {who: ours(b, c, direction) for who, b in everyone.items() if not b.unsupported(c.p)}
        timers[direction] |= {"plain": ours(subject.backend(), without, direction)} if plain else {}
        timers[direction] |= peers_timers(case, x, direction, device)
        flops[direction] = case.flops(direction, device)
    timers["forward"] |= extra
    return timed(name, timers, device, flops)


def stripped(case: cases.Case) -> cases.Case:
    """A case without its feature; causal stays causal."""
    mask = "causal" if case.mask in ("causal", "documents") else None
    return replace(case, mask=mask, score=None, dropout_p=0.0, sink=False)


def other_backend(subject: Subject) -> dict[str, Backend]:
    """The backend that would run where this one refuses."""
    name = {"hopper": "triton", "cpu": "portable"}.get(subject.name)
    return {name: dispatch.backend(name)} if name else {}


def kernels_of(right: set[str], subject: Subject, case: cases.Case, c: Call) -> Timed:
    """The kernels that are right, and the other backend."""
    found, other = subject.timed(case, right), other_backend(subject)
    return Timed({**other, **found.forward}, {**other, **found.backward})


def variants_of(subject: Subject, case: cases.Case, c: Call) -> Timed:
    """The same backend with other decisions, and the other backend."""
    found, other = subject.variants(c), other_backend(subject)
    return Timed({**other, **found.forward}, {**other, **found.backward})


# ---- the items of each part -----------------------------------------------------------------------------------------


def squares_worker(worker: Worker, subject: Subject) -> None:
    n, device = PRODUCT[subject.device], subject.device
    rows = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    timed_one = partial(timed_case, subject, others=partial(kernels_of, worker.run.right), product=lambda: rows @ rows)
    worker.each(Item(name, partial(timed_one, name)) for name in subject.scale.squares)


def structures_worker(worker: Worker, subject: Subject) -> None:
    timed_one = partial(timed_case, subject, others=variants_of)
    worker.each(Item(name, partial(timed_one, name)) for name in subject.scale.structures)


def features_worker(worker: Worker, subject: Subject) -> None:
    """Each feature beside the same sizes without it."""
    timed_one = partial(timed_case, subject, others=variants_of, plain=True)
    worker.each(Item(name, partial(timed_one, name)) for name in subject.scale.features)


def profile_worker(worker: Worker, subject: Subject) -> None:
    """Microseconds of each launch, where nothing hides behind another."""
    cuda = subject.device == "cuda"

    def launches(name: str) -> dict:
        _, c = drawn(cases.named(name), subject.device)
        found = {}
        for direction in ("forward", "backward"):
            step = ours(subject.backend(), c, direction)
            step()
            with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
                for _ in range(STEPS):
                    step()
                if cuda:
                    torch.cuda.synchronize()
            spent = {e.key[:90]: (e.device_time_total if cuda else e.cpu_time_total) for e in seen.key_averages()}
            found[direction] = {key: round(us / STEPS, 1) for key, us in spent.items() if us > 0.5 * STEPS}
        return {"state": "ok", "us": found}

    worker.each(Item(name, partial(launches, name)) for name in subject.scale.squares[:6])


# ---- goals ----------------------------------------------------------------------------------------------------------


def goals_of(subject: Subject) -> list[compare.Goal]:
    """The goals of a backend on this device; for a rehearsal, one that takes no time."""
    if subject.device == "cpu":
        options = {"direction": "forward", "contestant": subject.name, "peer": "sdpa", "ratio": 0.0}
        return [compare.Goal(case="contract-n63-causal", **options)]
    return [g for g in compare.load_goals() if g.contestant == subject.name]


def groups_of(goals: Iterable[compare.Goal]) -> list[list[compare.Asked]]:
    """Cases that goals ask for, in groups that are timed together; the groups of most goals first."""
    goals = list(goals)
    asked_for = [name for goal in goals for name in goal.cases]
    return sorted(compare.asked(goals), key=lambda group: -sum(asked_for.count(a.case) for a in group))


def lineup(subject: Subject, asked: compare.Asked) -> run.Lineup:
    """Who runs a case. One whose point is to split keys is timed as graphs: the host's time would hide its kernels."""
    case = cases.named(asked.case)
    known = peers.all_contestants() | {"unsplit": unsplit(subject)}
    who = [known[name] for name in asked.contestants]
    if "split" in case.tags and subject.device == "cuda":
        return run.Lineup(replace(case, backward=False), [peers.replayed(c) for c in who])
    return run.Lineup(case, who, asked.untimed)


def unsplit(subject: Subject) -> peers.Contestant:
    """The backend's forward without splitting keys."""

    def prepare(x: cases.Inputs) -> peers.Call:
        c = call(*(t.detach() for t in (x.q, x.k, x.v)), **x.options()).forward_only()
        backend = subject.unsplit(c)
        return lambda: backend.forward(c.p, c.t).o

    return peers.Contestant("unsplit", lambda case, device: [], prepare, "checkout", ours=True)


def goals_worker(worker: Worker, subject: Subject) -> None:
    """Writes into DIR/goals.jsonl as it goes, so that a run that is cut short has goals to judge."""
    plan = run.Plan(subject.device, budget=0.8, min_rounds=5, max_rounds=15)
    if subject.probes:  # every kernel has been checked by itself: fewer rows are enough, and take less time
        check.PAIRS_CHECKED["cuda"] = 1 << 24
    path, groups = worker.run.folder / "goals.jsonl", groups_of(goals_of(subject))
    lineups = [[lineup(subject, asked) for asked in group] for group in groups]
    records.append([run.run_record(plan, [c for group in lineups for entry in group for c in entry.contestants])], path)

    def measured(group: list[run.Lineup]) -> dict:
        found = records.append(run.run_group(group, plan), path)
        if subject.device == "cuda":
            torch.cuda.empty_cache()
        bad = [f"{e['case']} {e['contestant']}: {e['why']}" for e in found if e["status"] in ("red", "failed")]
        wrong = any(e["status"] != "green" for e in found if e["contestant"] == subject.name)
        return {"state": "wrong" if wrong else "ok", "detail": "; ".join(bad)[:600]}

    worker.each(Item(group[0].case.name, partial(measured, group)) for group in lineups)


def compile_worker(worker: Worker, subject: Subject) -> None:
    """Compiles a case's kernels, and its FlexAttention where a goal times that, into the disk's caches."""

    def compiled(asked: compare.Asked, name: str) -> dict:
        x = cases.draw(cases.named(asked.case), subject.device)
        o = peers.all_contestants()[name].prepare(x)()
        if x.case.backward:
            torch.autograd.grad(o, list(x.wanted.values()), x.do)
        return {"state": "ok"}

    pairs = [
        (a, n) for g in groups_of(goals_of(subject)) for a in g for n in a.contestants if n in (subject.name, "flex")
    ]
    worker.each(Item(f"{a.case} {n}", partial(compiled, a, n)) for a, n in worker.share(pairs))


WORKERS = {
    "compile": compile_worker,
    "squares": squares_worker,
    "structures": structures_worker,
    "features": features_worker,
    "profile": profile_worker,
    "goals": goals_worker,
}


def phase(run: Run, subject: Subject, part: str) -> None:
    """Runs the job of a part; compiling, which leaves the device idle, in many processes."""
    n = subject.scale.together if part == "compile" and subject.compiles else 1
    reserve = run.left / 2 if part == "compile" else min(45.0, run.left / 8)
    run.all([Job(f"{part}:{k}/{n}", LIMITS[part]) for k in range(n)], n, reserve)


def results_of(run: Run, subject: Subject, name: str) -> list[dict]:
    """The times as results of the run of that name."""
    return [r | {"run": name} for row in run.items() for r in row.get("results", ())]
